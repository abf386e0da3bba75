"""The system call filter: what it refuses, that nothing gets past it or out of it, and that real programs work under it."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from activities.sandbox.port import BadSandboxSpec
from activities.sandbox.providers import local_seccomp
from activities.sandbox.providers.local import LocalProvider
from activities.sandbox.providers.local_seccomp import NO_PERMISSION, NOT_THERE, system_call_filter
from tests.sandbox.local_support import Local, make

REPOSITORY = Path(__file__).parents[2]
STATUS = "grep -E '^(Seccomp|NoNewPrivs):' /proc/self/status"
FILTERED = "NoNewPrivs:\t1\nSeccomp:\t2\n"

CALL = """
import ctypes, json, sys
libc, seccomp = ctypes.CDLL(None, use_errno=True), ctypes.CDLL("libseccomp.so.2")
def call(name, *arguments):
    number = name if isinstance(name, int) else seccomp.seccomp_syscall_resolve_name(name.encode())
    if number < 0:
        return None
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_ulong(one & (1 << 64) - 1) for one in arguments])
    return ctypes.get_errno() if result == -1 else 0
print(json.dumps([call(*one) for one in json.loads(sys.argv[1])]))
"""
"""Makes system calls by name, with whole 64-bit arguments, and prints their errors; null for one this architecture has not."""


async def errors(local: Local, calls: list[tuple[str | int, *tuple[int, ...]]]) -> list[int | None]:
    """Make system calls in the sandbox and return the error of each, 0 for success."""
    result = await local.run("python3", "-c", CALL, json.dumps(calls))
    assert result.exit_code == 0, result.stderr
    found: list[int | None] = json.loads(result.stdout)
    return found


async def test_what_programs_never_need_is_refused(local: Local) -> None:
    """Mounts, keys, bpf, perf, kexec, modules, clocks, io_uring, and looking into processes all end in the same refusal."""
    names = [*NO_PERMISSION, *NOT_THERE]
    found = dict(zip(names, await errors(local, [(name,) for name in names]), strict=True))
    assert {name for name in NO_PERMISSION if found[name] not in (errno.EPERM, None)} == set()
    assert {name for name in NOT_THERE if found[name] not in (errno.ENOSYS, None)} == set()
    assert {name for name in ("mount", "ptrace", "bpf", "keyctl", "io_uring_setup") if found[name] is None} == set()


ABOVE = 1 << 32
"""A bit that the kernel does not look at where it takes an int."""
SIGCHLD, NEW_USER, NEW_NET = 17, 0x10000000, 0x40000000
REFUSED: dict[str, tuple[str | int, int, tuple[int, ...]]] = {
    "a user namespace": ("unshare", errno.EPERM, (NEW_USER,)),
    "a network namespace": ("unshare", errno.EPERM, (NEW_NET,)),
    "a time namespace": ("unshare", errno.EPERM, (0x80,)),
    "a child in a user namespace": ("clone", errno.EPERM, (NEW_USER | SIGCHLD,)),
    "a child in a namespace among other flags": ("clone", errno.EPERM, (NEW_USER | 0x100 | ABOVE | SIGCHLD,)),
    "clone3, whose flags cannot be seen": ("clone3", errno.ENOSYS, (0, 0)),
    "typing into a terminal": ("ioctl", errno.EPERM, (0, 0x5412, 0)),
    "typing into a terminal with a bit above": ("ioctl", errno.EPERM, (0, ABOVE | 0x5412, 0)),
    "the console's selection": ("ioctl", errno.EPERM, (0, ABOVE | 0x541C, 0)),
    "a packet socket": ("socket", errno.EAFNOSUPPORT, (17, 3, 0)),
    "a socket to the hypervisor": ("socket", errno.EAFNOSUPPORT, (40, 1, 0)),
    "a socket to the hypervisor with a bit above": ("socket", errno.EAFNOSUPPORT, (40 | ABOVE, 1, 0)),
    "the kernel's ciphers": ("socket", errno.EAFNOSUPPORT, (38, 5, 0)),
    "a family of the future": ("socket", errno.EAFNOSUPPORT, (60, 1, 0)),
    "a pair of another family": ("socketpair", errno.EAFNOSUPPORT, (30, 1, 0, 0)),
    "netlink for auditing": ("socket", errno.EPROTONOSUPPORT, (16, 3, 9)),
    "a character device": ("mknodat", errno.EPERM, (-100, 0, 0o020666, 0x103)),
    "a block device": ("mknodat", errno.EPERM, (-100, 0, 0o060666, 0xFE00)),
    "another process's limits": ("prlimit64", errno.EPERM, (1, 7, 1, 0)),
    "executable data": ("personality", errno.EPERM, (0x0400000,)),
    "executable data, disguised as a question": ("personality", errno.EPERM, (0x80400000,)),
    "page zero": ("personality", errno.EPERM, (0x0100000 | ABOVE,)),
    "room that is not written": ("fallocate", errno.EOPNOTSUPP, (0, 0, 0, 4096)),
    "a call that is newer than the filter": (463, errno.ENOSYS, ()),
    "the last number there is": (0x3FFFFFFF, errno.ENOSYS, ()),
}


async def test_arguments_are_looked_at_as_the_kernel_looks_at_them(local: Local) -> None:
    """Calls that programs need are refused only for what is dangerous in them, also with bits set that the kernel ignores."""
    found = await errors(local, [(name, *arguments) for name, _, arguments in REFUSED.values()])
    expected = {what: code for what, (_, code, _) in REFUSED.items()}
    assert dict(zip(REFUSED, found, strict=True)) == expected


async def test_the_harmless_kinds_of_these_calls_go_on(local: Local) -> None:
    """Sockets, limits of one's own, questions and FIFOs are no victims of the rules beside them."""
    harmless: list[tuple[str | int, *tuple[int, ...]]] = [
        *[("socket", family, 1, 0) for family in (1, 2, 10)],
        ("socket", 16, 3, 0),
        ("unshare", 0x200),
        ("personality", 0xFFFFFFFF),
        ("personality", 0x0040000),
        ("prlimit64", 0, 7, 0, 0),
        ("prlimit64", 1, 7, 0, 0),
    ]
    found = await errors(local, harmless)
    assert found[:-1] == [0] * (len(harmless) - 1)
    assert await local.text("mkfifo pipe && test -p pipe && echo ok") == "ok\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86_64 has them")
async def test_foreign_architectures_are_no_way_around(local: Local) -> None:
    """The numbers of x32 are refused, and a call in the way of 32-bit x86 ends its process."""
    assert await errors(local, [(0x40000000 | 101, 0)]) == [errno.ENOSYS]
    script = (
        "import ctypes, mmap\n"
        "code = mmap.mmap(-1, 4096, prot=7)\n"
        "code.write(bytes.fromhex('b814000000cd80c3'))\n"  # mov eax, 20 (getpid); int 0x80; ret
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()\n"
        "print('came back')\n"
    )
    result = await local.run("python3", "-c", script)
    assert (result.signal, result.stdout) == (31, b"")


async def test_every_command_has_the_filter(local: Local) -> None:
    """The first command, a later one, and a background process all run under it."""
    assert await local.text(STATUS) == FILTERED
    await local.sh(f"(sleep 0.2; {STATUS} > later) &")
    await asyncio.sleep(0.5)
    assert await local.text(f"{STATUS}; cat later") == FILTERED * 2


async def test_a_command_started_by_another_worker_has_the_same_filter(local: Local) -> None:
    """A worker that reattaches starts commands inside, under init, and not by entering the sandbox from outside."""
    first = await local.text(f"{STATUS}; grep -E '^(Cap|Seccomp_filters)' /proc/self/status")
    code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from activities.sandbox.port import Command\n"
        "from activities.sandbox.providers.local import LocalProvider\n"
        "from contracts.sandbox import SandboxRef\n"
        "async def main():\n"
        "    sandbox = await LocalProvider(Path(sys.argv[1])).attach(SandboxRef.model_validate_json(sys.argv[2]))\n"
        "    result = await sandbox.exec(Command('second', ['bash', '-c', sys.argv[3]]))\n"
        "    print(result.stdout.decode(), end='')\n"
        "asyncio.run(main())\n"
    )
    script = f"{STATUS}; grep -E '^(Cap|Seccomp_filters)' /proc/self/status"
    command = [sys.executable, "-c", code, str(local.directory.parent), local.sandbox.ref.model_dump_json(), script]
    done = await asyncio.to_thread(subprocess.run, command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == first
    assert first.startswith(FILTERED)


async def test_init_and_supervisors_have_the_filter_too(local: Local) -> None:
    """What could be made to act for a command can do no more than the command."""
    assert FILTERED in Path(f"/proc/{local.init_pid()}/status").read_text()
    assert await local.text("grep -E '^(NoNewPrivs|Seccomp):' /proc/$PPID/status") == FILTERED


PROGRAMS = {
    "git": (
        "git",
        "git init -q . && git config user.email a@b.c && git config user.name A && echo 1 > f && git add f && git commit -qm 1 &&"
        " git clone -q . copy && git -C copy log --oneline | wc -l && git gc -q && git worktree add -q /tmp/w",
    ),
    "python": (
        "python3",
        "python3 -c 'import multiprocessing as m, asyncio, subprocess, tempfile, threading, sqlite3, ssl\n"
        'if __name__ == "__main__":\n'
        '    print(sum(m.get_context("fork").Pool(3).map(abs, range(-9, 0))))\n'
        '    t = threading.Thread(target=print, args=("thread",)); t.start(); t.join()\n'
        "    async def main():\n"
        '        p = await asyncio.create_subprocess_exec("echo", "child"); await p.wait()\n'
        '        s = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0); s.close()\n'
        "    asyncio.run(main())\n"
        '    print(subprocess.run(["cat"], input=b"x", capture_output=True).stdout)\'',
    ),
    "venv": ("python3", "python3 -m venv --without-pip v && v/bin/python -c 'import sys; print(sys.prefix)'"),
    "node": (
        "node",
        "node -e '\n"
        'const {Worker} = require("worker_threads"), cp = require("child_process"), fs = require("fs"), os = require("os");\n'
        'os.networkInterfaces(); fs.writeFileSync("n", "1"); fs.copyFileSync("n", "m");\n'
        'console.log(cp.execSync("echo child").toString());\n'
        'require("http").createServer((q, s) => s.end()).listen(0, function () { this.close() });\n'
        'new Worker("console.log(1)", {eval: true}); fs.watch(".").close();\'',
    ),
    "gcc and make": (
        "gcc make",
        "printf 'int main(void) { return 0; }' > a.c && printf 'a: a.c\\n\\tgcc -O2 -fsanitize=address -o a a.c\\n' > Makefile &&"
        " make -s -j4 && ASAN_OPTIONS=detect_leaks=0 ./a",
    ),
    "cmake": (
        "cmake gcc",
        "printf 'int main(void) { return 0; }' > a.c && printf 'cmake_minimum_required(VERSION 3.5)\\nproject(a C)\\n"
        "add_executable(a a.c)\\n' > CMakeLists.txt && cmake -S . -B b >/dev/null && cmake --build b -j4 >/dev/null && b/a",
    ),
    "java": (
        "javac",
        "printf 'public class A { public static void main(String[] a) throws Exception { var t = new Thread(() ->"
        ' System.out.println(1)); t.start(); t.join(); new ProcessBuilder("true").start().waitFor(); } }\' > A.java &&'
        " javac A.java && java -Xmx256m A",
    ),
    "sqlite": ("sqlite3", "sqlite3 d 'pragma journal_mode=wal; create table t(x); insert into t values (1); select * from t'"),
    "tar": (
        "tar",
        "mkdir d && echo 1 > d/f && ln d/f d/g && ln -s f d/h && (setfattr -n user.a -v b d/f || true) &&"
        " tar --xattrs -cf d.tar d && mkdir e && tar --xattrs -C e -xf d.tar && cmp d/f e/d/g",
    ),
    "setarch": ("setarch", "setarch -R true"),
    "perl": ("perl", "perl -e 'use IO::Socket::INET; my $p = fork; if (!$p) { exit 0 } waitpid $p, 0; print $?'"),
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_real_programs_work(local: Local, name: str) -> None:
    """What agents run works under the filter."""
    programs, script = PROGRAMS[name]
    missing = [program for program in programs.split() if shutil.which(program, path="/usr/bin:/bin:/usr/local/bin") is None]
    if missing:
        pytest.skip(f"{missing[0]} is not on this host")
    result = await local.sh(script, timeout=60)
    assert (result.exit_code, result.signal, result.note) == (0, None, ""), result.stdout + result.stderr


async def test_pip_installs_a_local_package(local: Local) -> None:
    """A wheel is built into a virtual environment's site-packages without a network."""
    if (await local.sh("python3 -m pip --version && python3 -m ensurepip --version")).exit_code != 0:
        pytest.skip("the system's Python has no pip")
    script = (
        "mkdir p && printf 'x = 1\\n' > p/mod.py && python3 - <<'END'\n"
        "import zipfile\n"
        "with zipfile.ZipFile('mod-1-py3-none-any.whl', 'w') as w:\n"
        "    w.writestr('mod.py', 'x = 1\\n')\n"
        "    w.writestr('mod-1.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: mod\\nVersion: 1\\n')\n"
        "    w.writestr('mod-1.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')\n"
        "    w.writestr('mod-1.dist-info/RECORD', '')\n"
        "END\n"
        "python3 -m venv v && v/bin/pip install -q --no-index ./mod-1-py3-none-any.whl && v/bin/python -c 'import mod'"
    )
    result = await local.sh(script, timeout=60)
    assert result.exit_code == 0, result.stderr


async def test_without_libseccomp_there_is_no_sandbox(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that cannot filter system calls is told what to install, and gets no sandbox with less."""

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    system_call_filter.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(BadSandboxSpec, match="apt-get install libseccomp2"):
        await make(LocalProvider(root))
    monkeypatch.undo()
    assert system_call_filter()


def test_an_architecture_without_a_tested_filter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `clone` takes its arguments in another order the rules would be wrong, so there are none."""
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    with pytest.raises(BadSandboxSpec, match="s390x"):
        local_seccomp.library()
