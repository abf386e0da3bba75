"""How a local sandbox looks from inside: the argument list of bubblewrap, and the fixed files it shows.

Everything is denied unless it is listed here. What a root worker adds is at the end of this file.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from activities.sandbox.port import BadSandboxSpec
from activities.sandbox.providers.local_seccomp import system_call_filter
from contracts.sandbox import WORKSPACE

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where the host's own tools are looked for; the worker's PATH is not asked."""
USER_ID = 1000
USER = "caisson"
HOME = f"{WORKSPACE}/.home"
"""Inside the workspace, so that what an agent installs for its user is in every snapshot. Caches are not: see ENVIRONMENT."""
CODE = "/run/caisson"
"""Where init finds its code."""
TMP_BYTES = 1 << 30
SMALL_TMP_BYTES = 64 << 20
"""At most; together they stay below the memory limit, since what lies in them cannot be freed by ending a process."""

ENVIRONMENT = {
    "PATH": f"{HOME}/.local/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    "HOME": HOME,
    "USER": USER,
    "LOGNAME": USER,
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
    "XDG_CACHE_HOME": "/tmp/.cache",  # noqa: S108
    "SHELL": "/bin/sh",
}

SYSTEM_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Beside /usr; on most systems these are links into it."""

ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives"),
    *("ssl/certs", "ssl/openssl.cnf", "ca-certificates", "pki/tls/certs", "pki/ca-trust/extracted", "crypto-policies"),
    *("localtime", "timezone", "os-release", "debian_version"),
    *("mime.types", "magic", "magic.mime", "protocols", "services", "terminfo", "inputrc", "fonts"),
)
"""What programs need of /etc. No passwd, shadow, hostname, resolv.conf, profile, or anything else that tells of the host."""
ETC_PATTERNS = ("java*-openjdk",)

ETC_FILES = {
    "passwd": (
        "root:x:0:0:root:/nonexistent:/usr/sbin/nologin\n"
        f"{USER}:x:{USER_ID}:{USER_ID}:{USER}:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": f"root:x:0:\n{USER}:x:{USER_ID}:\nnogroup:x:65534:\n",
    "hosts": f"127.0.0.1 localhost {USER}\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}

GUEST_MODULES = (
    "local_wire",
    "local_process",
    "local_stream",
    "local_guard",
    "local_job",
    "local_jobs",
    "local_files",
    "local_init",
)
PACKAGE = "activities.sandbox.providers"
BOOT = f"import sys; sys.path.insert(0, sys.argv[1]); from {PACKAGE}.local_init import main; main(int(sys.argv[2]))"

COMPILE = """
import importlib.util, ctypes, json, marshal, selectors, sys
if sys.version_info < (3, 9):
    sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}; 3.9 or newer is needed")
for name, source in json.load(sys.stdin).items():
    code = marshal.dumps(compile(source, "<" + name + ">", "exec", dont_inherit=True))
    print(name, (importlib.util.MAGIC_NUMBER + bytes(12) + code).hex())
"""
"""Compiles init's modules with the interpreter that will run them, which saves each start the time to do so."""


@dataclass(frozen=True)
class Interpreter:
    """The Python that runs init: its path, the directory to show if it is not below /usr, and init's modules compiled for it."""

    path: str
    prefix: Path | None
    modules: Mapping[str, bytes]


@cache
def find_interpreter() -> Interpreter:
    """Return the Python for init: the worker's own or the system's below /usr, else the worker's. Raises BadSandboxSpec."""
    here = Path(__file__).parent
    sources = {name: (here / f"{name}.py").read_text() for name in GUEST_MODULES}
    own = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    faults = []
    for path, prefix in ((own, None), (Path("/usr/bin/python3"), None), (own, Path(sys.base_prefix))):
        if prefix is None and not path.is_relative_to("/usr"):
            continue
        modules = compile_modules(path, sources)
        if isinstance(modules, str):
            faults.append(f"{path}: {modules}")
        else:
            return Interpreter(str(path), prefix, modules)
    raise BadSandboxSpec("provider: local found no Python for its sandboxes: " + "; ".join(faults))


def compile_modules(python: Path, sources: Mapping[str, str]) -> dict[str, bytes] | str:
    """Return the modules compiled by `python`, or why that cannot be."""
    command = [str(python), "-I", "-S", "-X", "utf8", "-c", COMPILE]
    try:
        done = subprocess.run(command, input=json.dumps(sources), capture_output=True, text=True, timeout=60, env={})
    except OSError as error:
        return str(error)
    if done.returncode != 0:
        return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
    return {name: bytes.fromhex(code) for name, code in (line.split() for line in done.stdout.splitlines())}


def in_memory(name: str, data: bytes) -> int:
    """Return an open file that holds `data`, at its beginning. The caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Arguments:
    """An argument list for bubblewrap together with the open files that it names."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.fds: list[int] = []

    def add(self, *words: str | Path | int) -> None:
        """Append words."""
        self.words += [str(word) for word in words]

    def file(self, path: str, data: bytes) -> None:
        """Show a read-only file with the given content."""
        fd = in_memory("caisson", data)
        self.fds.append(fd)
        self.add("--perms", "0444", "--ro-bind-data", fd, path)

    def filter(self, program: bytes) -> None:
        """Install a system call filter before anything runs inside."""
        self.fds.append(in_memory("seccomp", program))
        self.add("--seccomp", self.fds[-1])

    def tmpfs(self, path: str, size: int, mode: int = 0o1777) -> None:
        """Show an empty directory in memory."""
        self.add("--perms", f"{mode:04o}", "--size", size, "--tmpfs", path)

    def close(self) -> None:
        """Close the open files."""
        while self.fds:
            os.close(self.fds.pop())


def sandbox_arguments(
    arguments: Arguments,
    *,
    workspace: str,
    python: Interpreter,
    prefix: str | None,
    disable_userns: bool,
    memory_mb: int,
    listener: int,
) -> None:
    """Fill in the whole sandbox. `workspace` and `prefix` are where bubblewrap finds the workspace and the interpreter.

    The order counts: bubblewrap mounts in the order of its arguments.
    """
    add = arguments.add
    add("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    if disable_userns:
        add("--disable-userns")  # the largest piece of kernel that an unprivileged process can otherwise reach
    add("--uid", USER_ID, "--gid", USER_ID, "--hostname", USER, "--clearenv", "--cap-drop", "ALL")
    arguments.filter(system_call_filter())
    add("--ro-bind", "/usr", "/usr")
    for name in SYSTEM_DIRECTORIES:
        system = Path("/", name)
        if system.is_symlink():
            add("--symlink", system.readlink(), system)
        elif system.is_dir():
            add("--ro-bind", system, system)
    if python.prefix is not None and prefix is not None:
        add("--ro-bind", prefix, python.prefix)
    etc = Path("/etc")
    for directory in ("/etc", "/etc/ssl", "/etc/pki"):
        add("--perms", "0755", "--dir", directory)  # bubblewrap would make them private to the user
    for name in [*ETC, *(str(found.relative_to(etc)) for pattern in ETC_PATTERNS for found in etc.glob(pattern))]:
        if (etc / name).exists():
            add("--ro-bind", etc / name, etc / name)
    for name, text in ETC_FILES.items():
        arguments.file(f"/etc/{name}", text.encode())
    add("--proc", "/proc", "--dev", "/dev")
    small = min(SMALL_TMP_BYTES, memory_mb << 16)  # a sixteenth of the memory, and half of it for /tmp
    arguments.tmpfs("/dev/shm", small)  # noqa: S108 - the sandbox's own, as below
    arguments.tmpfs("/tmp", min(TMP_BYTES, memory_mb << 19))  # noqa: S108
    arguments.tmpfs("/var/tmp", small)  # noqa: S108
    arguments.tmpfs("/run", small, 0o755)
    for module, code in python.modules.items():
        arguments.file(f"{CODE}/{PACKAGE.replace('.', '/')}/{module}.pyc", code)
    add("--bind", workspace, WORKSPACE)
    # Last, since nothing can be mounted below a read-only root: what is left are the mounts above.
    add("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKSPACE, "--new-session", "--as-pid-1", "--")
    add(python.path, "-I", "-S", "-X", "utf8", "-c", BOOT, CODE, listener)


# --- When the worker is root ---------------------------------------------------------------------------------------------
#
# A sandbox whose user is mapped to the host's root owns, for the kernel, everything that root owns: it could change the mode
# of the host's /dev/null, or read root's files in /proc. So a root worker gives each sandbox a user id of its own, one that
# exists for nothing else. That user cannot reach the workspace through the private directories above it, so the workspace
# is first mounted at a place everybody can reach, in a mount namespace that only this bubblewrap lives in.

OWN_USERS_FROM = 1_900_000_000
"""Above what distributions, systemd and subordinate ids give out (https://systemd.io/UIDS-GIDS/)."""
OWN_USERS = 100_000_000
STAGES = ("/mnt", "/media")
"""Empty directories that every Linux system has (FHS 3.0): for the workspace, and for the interpreter where needed."""
AS_OWN_USER = 'mount --bind "$1" "$2" && mount --bind "$3" "$4" && shift 4 && { "$@" </dev/null & }'
AS_SAME_USER = '"$@" </dev/null &'


def own_user(sandbox_id: str) -> int:
    """Return the user and group id of a root worker's sandbox. Raises BadSandboxSpec where root may not choose one."""
    number = int.from_bytes(hashlib.sha256(sandbox_id.encode()).digest()[:8])
    spans = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    if any(start <= OWN_USERS_FROM and start + count >= OWN_USERS_FROM + OWN_USERS for start, _, count in spans):
        return OWN_USERS_FROM + number % OWN_USERS
    start, _, count = max(
        spans, key=lambda span: span[2]
    )  # inside a container that has fewer: the upper half of its largest span
    if count < 4096:
        raise BadSandboxSpec(
            "provider: local cannot run as root here, since this user namespace has no spare user ids; "
            "run the worker as an ordinary user"
        )
    return start + count // 2 + number % (count - count // 2)
