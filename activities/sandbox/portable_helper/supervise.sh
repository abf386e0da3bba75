# The supervisor of one job where there is no Python: starts the command, keeps its output, enforces its end, whatever becomes of the
# caller. Usage: sh supervise.sh STATE JOB CENTISECONDS STDIN|- CWD NOTE|-
# COUNT NAME=VALUE... COMMAND..., with COUNT variables.

helper=${0%/*} state=$1 job=$2 timeout=$3 stdin=$4 cwd=$5 say=$6 count=$7
shift 7
dir="$state/jobs/$job"
umask 077
. "$helper/common.sh"
until mkdir "$dir" 2>/dev/null; do { [ ! -d "$dir" ] && give_way; } || exit 0; done
# For the one who waits for the job to be there: its command may remove the directory at once.
: >"$state/in/started-$job"
clock
began=$now
save "$dir/pid" "$$ $(started $$) $began"
# Holds the place of how it ends.
until (printf '%4096s' "" >"$dir/room") 2>/dev/null; do give_way || break; done
trap '' TERM HUP INT QUIT USR1 USR2 ALRM PIPE
cd "$dir" || exit 1
# Closed, or the call that started this would wait for it.
exec 3<&- 4<&- 5<&- 6<&- 7<&- 8<&- 9<&-

# Takes a stream from its pipe. What comes after the end is dropped.
pump() {
    had=0
    : >"$1"
    while [ "$had" -lt "$HEAD" ] && [ ! -e exit ]; do
        take "$1" "$1" 64 || { cat >/dev/null; return; }
    done
    new=b gone=0
    while [ ! -e exit ]; do
        if [ "$new" = a ]; then new=b; else new=a; fi
        gone=$((gone + $(size_of "$1.$new")))
        : >"$1.$new"
        save "$1.last" "$new $gone"
        had=0
        while [ "$had" -lt "$RING" ] && [ ! -e exit ]; do
            take "$1" "$1.$new" 16 || { cat >/dev/null; return; }
        done
    done
    cat >/dev/null
}

# Takes at most $3 pieces of the stream $1 into the file $2, of which there are $had bytes. Fails at its end, and when the disk is
# full: then what comes is counted only.
take() {
    came=$(($(dd bs=65536 count="$3" 2>/dev/null | tee -a "$2" 2>/dev/null | wc -c)))
    has=$(size_of "$2")
    lost=$((had + came - has)) had=$has
    [ "$lost" -gt 0 ] || [ "$came" = 0 ] || return 0
    [ "$lost" -gt 0 ] || return 1
    : >"$1.full"
    while [ "$came" != 0 ] && [ ! -e exit ]; do
        save "$1.lost" "$lost"
        came=$(($(dd bs=65536 count=16 2>/dev/null | wc -c)))
        lost=$((lost + came))
    done
    return 1
}

mkfifo out err
: >stdout
: >stderr
pump stdout <out &
out_pump=$!
pump stderr <err &
err_pump=$!
note=""
# Said once in a sandbox.
[ "$say" = - ] || { (set -C; : >"$state/said-$say") 2>/dev/null && note=$say; }
if [ "$stdin" = - ]; then input=/dev/null; else input=$stdin; fi
exec 3<"$input"
[ "$stdin" = - ] || rm -f "$stdin"
(
    trap - TERM HUP INT QUIT USR1 USR2 ALRM PIPE
    umask 022
    cd "$cwd" 2>/dev/null || {
        reason="No such file or directory"
        [ ! -e "$cwd" ] || reason="Permission denied"
        [ ! -f "$cwd" ] || reason="Not a directory"
        printf 'caisson: cannot start in %s: %s\n' "$cwd" "$reason" >&2
        exit 126
    }
    # From here on only names that nobody else has: what is exported now is the command's.
    caisson_count=$count caisson_setsid=$(command -v setsid) caisson_env=$(command -v env) caisson_job=$job
    . "$state/environment"
    for caisson_word; do
        [ "$caisson_count" -gt 0 ] || break
        case "$caisson_word" in PATH=*) PATH=${caisson_word#PATH=} ;; esac
        caisson_count=$((caisson_count - 1))
    done
    case "$caisson_word" in
        */*)
            [ -e "$caisson_word" ] || { printf 'caisson: %s: No such file or directory\n' "$caisson_word" >&2; exit 127; }
            [ -x "$caisson_word" ] && [ ! -d "$caisson_word" ] || { printf 'caisson: %s: Permission denied\n' "$caisson_word" >&2; exit 126; }
            ;;
        *) command -v "$caisson_word" >/dev/null 2>&1 || { printf 'caisson: %s: command not found\n' "$caisson_word" >&2; exit 127; } ;;
    esac
    exec "$caisson_setsid" "$caisson_env" "CAISSON_JOB=$caisson_job" "$@"
) <&3 3<&- >out 2>err &
main=$!
exec 3<&-
save "$dir/main" "$main"

(
    while [ ! -e ended ]; do
        clock
        if [ -e kill ]; then verdict=killed; elif [ "$((now - began))" -ge "$timeout" ]; then verdict=timed_out; else verdict=""; fi
        if [ -n "$verdict" ]; then
            save verdict "$verdict"
            sweep 20
            : >swept
            break
        fi
        pause
    done
) &

wait "$main"
code=$?
clock
took=$((now - began))
: >ended
verdict=""
if [ -s verdict ]; then
    read -r verdict <verdict
    n=0
    while [ ! -e swept ] && [ "$n" -lt 150 ]; do pause; n=$((n + 1)); done
    clock
    took=$((now - began))
fi
# Late output, while a background child keeps the pipe open.
n=0
while [ "$n" -lt 2 ] && { kill -0 "$out_pump" || kill -0 "$err_pump"; } 2>/dev/null; do
    case "$(cut -d ' ' -f 3 "/proc/$out_pump/stat" "/proc/$err_pump/stat" 2>/dev/null | tr -d '\n')" in ZZ | Z | "") break ;; esac
    pause
    n=$((n + 1))
done
for stream in stdout stderr; do
    case "$note" in *full) continue ;; esac
    [ ! -e "$stream.full" ] || note="${note:+$note,}full"
done
mv -f room exit.new 2>/dev/null || : >exit.new
record=$(
    if [ -n "$verdict" ]; then
        printf 'state=%s\n' "$verdict"
    else
        printf 'state=exited\nexit_code=%s\n' "$code"
    fi
    printf 'seconds=%s\nnote=%s\n' "$(seconds "$took")" "$note"
    for stream in stdout stderr; do
        measure "$stream"
        printf '%s=%s %s %s %s %s %s %s\n' "$stream" "$h" "$g" "$x" "$y" "$old" "$new" "$lost"
    done
)
until printf '%s\n' "$record" | dd of=exit.new conv=notrunc 2>/dev/null; do give_way || break; done
ln exit.new exit 2>/dev/null
rm -f exit.new
wait
