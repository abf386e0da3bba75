"""What a machine is given once: its workspace, the environment of its commands, its nonce."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from activities.sandbox.machine import STATE
from activities.sandbox.port import BadSandboxSpec, check_lengths
from contracts.sandbox import WORKSPACE

HOME = f"{WORKSPACE}/.home"
"""Inside the workspace, so that what an agent installs for its user is in every snapshot."""
READ_ONLY = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "OPTIND", "PPID", "SHELLOPTS", "UID"})
"""What a shell does not let anybody set, or not to anything."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def settings(environment: Mapping[str, str]) -> str:
    """Return the commands that set the variables of a spec. Raises BadSandboxSpec."""
    check_lengths(environment)
    lines = []
    for name, value in environment.items():
        if not _NAME.fullmatch(name) or "\0" in value or not _is_text(value):
            raise BadSandboxSpec(
                f"environment: {name!r} cannot be set; a name is letters, digits and '_', and a value has no NUL byte"
            )
        if name in READ_ONLY:
            raise BadSandboxSpec(f"environment: {name}: a shell sets this itself and takes no other value; leave it out")
        lines.append(f"export {name}={shlex.quote(value)}")
    return "\n".join(lines)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def setup_script(variables: str, nonce: str) -> str:
    """Return the commands that make a machine a sandbox. What the image sets holds where nothing here says otherwise."""
    fixed = f"""export HOME={HOME}
export PATH="$HOME/.local/bin:${{PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}}"
export LANG="${{LANG:-C.UTF-8}}"
export TERM=dumb TMPDIR=/tmp XDG_CACHE_HOME=/tmp/.cache SHELL=/bin/sh
unset OLDPWD"""
    return f"""mkdir -p {WORKSPACE} 2>/dev/null || sudo -n mkdir -p {WORKSPACE} 2>/dev/null || true
[ -w {WORKSPACE} ] || sudo -n chown "$(id -u):$(id -g)" {WORKSPACE} 2>/dev/null || true
if [ ! -w {WORKSPACE} ] || [ ! -x {WORKSPACE} ]; then echo no-workspace >&2; exit 1; fi
mkdir -p {HOME}
user=$(id -un 2>/dev/null) || user=caisson
{{
cat <<'CAISSON-ENVIRONMENT'
{fixed}
CAISSON-ENVIRONMENT
printf "export USER='%s' LOGNAME='%s'\\n" "$user" "$user"
cat <<'CAISSON-VARIABLES'
{variables}
CAISSON-VARIABLES
}} >{STATE}/environment.$$
mv -f {STATE}/environment.$$ {STATE}/environment
printf %s {shlex.quote(nonce)} >{STATE}/nonce.$$
mv -f {STATE}/nonce.$$ {STATE}/nonce
"""
