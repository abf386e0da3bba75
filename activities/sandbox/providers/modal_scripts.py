"""What a sandbox at Modal is told to run, so as to run a script, read a file or write one."""

from __future__ import annotations

from contracts.sandbox import WORKSPACE

_SCRIPT_OUTPUT = 1 << 20
RUN = f"""
script=${{1-$(cat)}} dir=$(mktemp -d) || exit 125
cd {WORKSPACE} 2>/dev/null || cd /
sh -c "$script" </dev/null >"$dir/1" 2>"$dir/2"; code=$?
out=$(wc -c <"$dir/1") err=$(wc -c <"$dir/2")
[ "$out" -le {_SCRIPT_OUTPUT} ] || out={_SCRIPT_OUTPUT}
[ "$err" -le {_SCRIPT_OUTPUT} ] || err={_SCRIPT_OUTPUT}
printf '%s %s %s\\n' "$code" "$((out))" "$((err))"
head -c "$out" "$dir/1"; head -c "$err" "$dir/2"
rm -rf "$dir"
"""
"""Its output goes through files, so that what it leaves in the background holds nothing up, and comes back in one stream after
its lengths, so that one that was cut is not taken for the whole."""
GET = """
[ -f "$1" ] || { [ -e "$1" ] && echo 'not a regular file' || echo 'no such file'; exit; }
size=$(wc -c <"$1") || { echo 'cannot be read'; exit; }
printf '%s\\n' "$((size))"; exec head -c "$size" "$1"
"""
PUT = """
exec 2>&1
cat >"$1.$$" && chmod 644 "$1.$$" && [ "$(wc -c <"$1.$$")" -eq "$2" ] && mv -f "$1.$$" "$1" && echo done && exit
rm -f "$1.$$"; echo 'cannot be written'
"""
