"""What stands behind an emulated sandbox: a bubblewrap sandbox on this host, and processes in it.

It takes root, as there are two users in it, `root` and `user` (1000), as in E2B's templates, which an unprivileged user namespace
cannot have. The root inside has few of root's capabilities.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import struct
import termios
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

USERS = {"root": 0, "user": 1000}
HOMES = {"root": "/root", "user": "/home/user"}
CHUNK = 32 << 10
_ETC = {
    "passwd": "root:x:0:0::/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_SHOWN = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/ssl/certs")
_START = 'echo $$ >&"$FD"; exec {FD}>&-; unset FD; cd "$DIR" && unset DIR && exec "$@"'
"""Tells the process's number in its sandbox before it becomes the process that was asked for."""


@dataclass
class Process:
    """A process in a sandbox, as envd keeps it. `subscribers` get its output and its end while they are there, no more."""

    pid: int
    config: Mapping[str, object]
    tag: str | None
    inner: asyncio.subprocess.Process
    terminal: int | None = None
    subscribers: list[asyncio.Queue[dict[str, object]]] = field(default_factory=list)
    stdin_open: bool = False

    def tell(self, event: dict[str, object]) -> None:
        """Send an event to all who listen."""
        for queue in self.subscribers:
            queue.put_nowait(event)

    def listen(self) -> asyncio.Queue[dict[str, object]]:
        """Return a queue of what comes from now on."""
        queue: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self.subscribers.append(queue)
        return queue

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal."""
        assert self.terminal is not None
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


class Backing:
    """One bubblewrap sandbox. `root` becomes its file system and goes with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: dict[int, Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._holder: asyncio.subprocess.Process | None = None
        self._pid = 0

    async def start(self) -> None:
        """Start it."""
        self._make_tree()
        read, write = os.pipe()
        shown = [word for path in _SHOWN if os.path.exists(path) for word in ("--ro-bind", path, path)]
        self._holder = await asyncio.create_subprocess_exec(
            *("bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent", "--new-session"),
            *("--bind", str(self.root), "/", "--ro-bind", "/usr", "/usr", *shown, "--proc", "/proc", "--dev", "/dev"),
            *("--info-fd", str(write), "--", "/bin/sh", "-c", "echo ready; exec sleep infinity"),
            pass_fds=(write,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        os.close(write)
        with os.fdopen(read) as told:
            self._pid = json.loads(await asyncio.to_thread(told.read))["child-pid"]
        # Entered before it has come to its command, a process would still see the host's file system.
        assert self._holder.stdout is not None
        assert await self._holder.stdout.readline() == b"ready\n", "bubblewrap did not start"

    def _make_tree(self) -> None:
        for name in ("usr", "proc", "dev", "tmp", "etc", "root", "run", "var/lib", "home/user"):
            (self.root / name).mkdir(parents=True)
        (self.root / "tmp").chmod(0o1777)
        for name in ("bin", "sbin", "lib", "lib64"):
            if os.path.lexists(f"/{name}"):
                (self.root / name).symlink_to(f"usr/{name}")
        for name, text in _ETC.items():
            (self.root / "etc" / name).write_text(text)
        os.chown(self.root / "home/user", 1000, 1000)

    def _enter(self, user: str) -> list[str]:
        kept = "-all" if user != "root" else "-all,+chown,+dac_override,+fowner,+kill,+setuid,+setgid"
        who = str(USERS[user])
        spaces = ["/usr/bin/nsenter", "-t", str(self._pid), "-m", "-p", "-n", "-i", "-u", "-r", "-w", "--"]
        rights = ["--clear-groups", "--inh-caps=-all", f"--bounding-set={kept}"]
        return [*spaces, "/usr/bin/setpriv", "--reuid", who, "--regid", who, *rights]

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        user: str,
        cwd: str,
        env: Mapping[str, str],
        stdin: bool,
        size: tuple[int, int] | None = None,
        config: Mapping[str, object] | None = None,
        tag: str | None = None,
    ) -> Process:
        """Start a process; with `size` (rows, columns) at a terminal. Raises FileNotFoundError when it cannot be started."""
        read, write = os.pipe()
        master = slave = None
        if size is not None:
            master, slave = os.openpty()
            argv = ["setsid", "-c", *argv]
        pipe = asyncio.subprocess.PIPE
        variables = [f"{name}={value}" for name, value in {**env, "FD": str(write), "DIR": cwd}.items()]
        try:
            inner = await asyncio.create_subprocess_exec(
                *self._enter(user),
                *("/usr/bin/env", "-i", *variables, "/bin/bash", "-c", _START, "start", *argv),
                stdin=slave if slave is not None else pipe if stdin else asyncio.subprocess.DEVNULL,
                stdout=slave if slave is not None else pipe,
                stderr=slave if slave is not None else pipe,
                pass_fds=(write,),
                start_new_session=True,
            )
        finally:
            os.close(write)
            if slave is not None:
                os.close(slave)
        with os.fdopen(read) as told:
            number = await asyncio.to_thread(told.readline)
        if not number:
            await inner.wait()
            raise FileNotFoundError(cwd)
        process = Process(int(number), config or {}, tag, inner, master, stdin_open=stdin)
        if size is not None:
            process.resize(*size)
        self.processes[process.pid] = process
        self.go(self._follow(process))
        return process

    async def _follow(self, process: Process) -> None:
        """Pass on a process's output, and then its end. What others have of its pipes does not hold that up."""
        readers = []
        if process.terminal is not None:
            readers.append(asyncio.create_task(self._read_terminal(process, process.terminal)))
        for name, stream in (("stdout", process.inner.stdout), ("stderr", process.inner.stderr)):
            if stream is not None:
                readers.append(asyncio.create_task(self._read(process, name, stream)))
        code = await process.inner.wait()
        _, late = await asyncio.wait(readers, timeout=0.3)
        for one in late:
            one.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        if process.terminal is not None:
            os.close(process.terminal)
        del self.processes[process.pid]
        # As Go's os.ProcessState has it: -1 for any signal.
        status = f"exit status {code}" if code >= 0 else f"signal: {_SIGNALS.get(-code, str(-code))}"
        end: dict[str, object] = {"exitCode": max(code, -1), "exited": code >= 0, "status": status}
        process.tell({"end": end if code == 0 else {**end, "error": status}})

    async def _read(self, process: Process, name: str, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(CHUNK):
            process.tell({"data": {name: data}})

    async def _read_terminal(self, process: Process, terminal: int) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        os.set_blocking(terminal, False)
        loop.add_reader(terminal, ready.set)
        try:
            while True:
                await ready.wait()
                ready.clear()
                with contextlib.suppress(BlockingIOError):
                    process.tell({"data": {"pty": os.read(terminal, CHUNK)}})
        except OSError:
            return  # EIO: nobody has its other end any more
        finally:
            loop.remove_reader(terminal)

    async def do(self, script: str, *arguments: str, user: str = "root", stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        """Run a script of the emulator's own inside, and return its exit code, output and error output."""
        done = await asyncio.create_subprocess_exec(
            *self._enter(user),
            *("/usr/bin/env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin", "/bin/bash", "-c", script, "do", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await done.communicate(stdin)
        return done.returncode or 0, out, err

    async def send_signal(self, pid: int, name: str) -> None:
        """Send a signal to one process, and to nothing that it has started."""
        await self.do('kill -s "$1" "$2"', name, str(pid))

    async def freeze(self, stopped: bool) -> None:
        """Stop all processes, or let them go on."""
        await self.do(f"kill -s {'STOP' if stopped else 'CONT'} -1")

    def go(self, work: Coroutine[None, None, None]) -> None:
        """Do something beside."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """End everything in it, and remove its files."""
        if self._holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            await self._holder.wait()
            self._holder = None
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)
        await asyncio.to_thread(shutil.rmtree, self.root, ignore_errors=True)


_SIGNALS = {1: "hangup", 2: "interrupt", 6: "aborted", 9: "killed", 11: "segmentation fault", 13: "broken pipe", 15: "terminated"}
