"""What stands behind an emulated sandbox: a bubblewrap sandbox on this host, and commands in it, all of them as root.

(When the tests do not run as root, root is the one user that an unprivileged user namespace can have.)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

_ETC = {
    "passwd": "root:x:0:0::/root:/bin/bash\n",
    "group": "root:x:0:\n",
    "hosts": "127.0.0.1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_SHOWN = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/ssl/certs")
_CAPABILITIES = "-all,+chown,+dac_override,+fowner,+kill,+setuid,+setgid"
_PATH = "/usr/local/bin:/usr/bin:/bin"


class Output:
    """All that one stream of a command has said. It is over when nobody holds its pipe any more, as with any pipe."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        self.data = bytearray()
        self.over = stream is None
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read(stream)) if stream is not None else None

    async def _read(self, stream: asyncio.StreamReader) -> None:
        try:
            while part := await stream.read(64 << 10):
                self.data += part
                self._tell()
        finally:
            self.over = True
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, offset: int) -> bytes:
        """Return some of what comes after `offset`, waiting for it, or nothing at the end."""
        while len(self.data) <= offset and not self.over:
            await self._changed.wait()
        return bytes(self.data[offset : offset + (256 << 10)])

    def drop(self) -> None:
        """Read no more of it."""
        if self._reading is not None:
            self._reading.cancel()


class Process:
    """A command in a sandbox."""

    def __init__(self, inner: asyncio.subprocess.Process) -> None:
        self.inner = inner
        self.stdout, self.stderr = Output(inner.stdout), Output(inner.stderr)
        self.written = 0
        self.closed = False

    async def write(self, offset: int, data: bytes, eof: bool) -> None:
        """Write to its input what it does not have yet. Raises BrokenPipeError when it reads no more."""
        assert self.inner.stdin is not None
        fresh = data[max(0, self.written - offset) :]
        if self.closed or self.inner.returncode is not None:
            if fresh:
                raise BrokenPipeError
            return
        try:
            self.inner.stdin.write(fresh)
            await self.inner.stdin.drain()
        except ConnectionError as error:
            raise BrokenPipeError from error
        self.written += len(fresh)
        if eof:
            self.closed = True
            self.inner.stdin.close()

    def end(self) -> None:
        """Kill it and what has not left its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.inner.pid, signal.SIGKILL)

    async def forget(self) -> None:
        """End it for good."""
        self.end()
        self.stdout.drop()
        self.stderr.drop()
        if self.inner.stdin is not None:
            self.inner.stdin.close()
        await self.inner.wait()


class Backing:
    """One bubblewrap sandbox. `root` becomes its file system and goes with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._holder: asyncio.subprocess.Process | None = None
        self._pid = 0

    async def copy(self, to: Path) -> None:
        """Copy its files."""
        await _copy(self.root, to)

    async def start(self, argv: Sequence[str], files: Path | None = None) -> None:
        """Start it with its first command; with `files`, on a copy of the files of another."""
        if files is None:
            self._make_tree()
        else:
            await _copy(files, self.root)
        await self._start(argv)

    def _make_tree(self) -> None:
        for name in ("usr", "proc", "dev", "tmp", "etc", "root", "run", "var/lib"):
            (self.root / name).mkdir(parents=True)
        (self.root / "tmp").chmod(0o1777)
        for name in ("bin", "sbin", "lib", "lib64"):
            if os.path.lexists(f"/{name}"):
                (self.root / name).symlink_to(f"usr/{name}")
        for name, text in _ETC.items():
            (self.root / "etc" / name).write_text(text)

    async def _start(self, argv: Sequence[str]) -> None:
        read, write = os.pipe()
        shown = [word for path in _SHOWN if os.path.exists(path) for word in ("--ro-bind", path, path)]
        self._holder = await asyncio.create_subprocess_exec(
            *(
                "bwrap",
                "--unshare-pid",
                "--unshare-net",
                "--unshare-ipc",
                "--unshare-uts",
                "--die-with-parent",
                "--new-session",
                "--as-pid-1",
            ),
            *(() if os.geteuid() == 0 else ("--unshare-user", "--uid", "0", "--gid", "0")),
            *("--bind", str(self.root), "/", "--ro-bind", "/usr", "/usr", *shown, "--proc", "/proc", "--dev", "/dev"),
            *("--info-fd", str(write), "--", "/bin/sh", "-c", 'echo ready; exec "$@" >/dev/null', "sh", *argv),
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

    async def wait(self) -> int:
        """Return the exit code of its first command, once that has ended by itself."""
        assert self._holder is not None
        return await self._holder.wait()

    async def spawn(
        self, argv: Sequence[str], *, cwd: str, env: Mapping[str, str], stdout: bool = True, stderr: bool = True
    ) -> Process:
        """Start a command. Raises OSError when its arguments are too long."""
        pipe, drop = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        enter = ["/usr/bin/nsenter", "-t", str(self._pid), "-m", "-p", "-n", "-i", "-u", "-r", "-w"]
        if os.geteuid() == 0:
            enter += ["--", "/usr/bin/setpriv", "--inh-caps=-all", f"--bounding-set={_CAPABILITIES}"]
        else:
            enter += ["-U", "--preserve-credentials", "--"]
        variables = {"PATH": _PATH, "HOME": "/root", **env}
        return Process(
            await asyncio.create_subprocess_exec(
                *enter,
                *("/usr/bin/env", "-i", "-C", cwd, *(f"{name}={value}" for name, value in variables.items()), *argv),
                stdin=pipe,
                stdout=pipe if stdout else drop,
                stderr=pipe if stderr else drop,
                start_new_session=True,
            )
        )

    async def end(self) -> None:
        """End everything in it, and remove its files."""
        if self._holder is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            await self._holder.wait()
            self._holder = None
        await asyncio.to_thread(shutil.rmtree, self.root, ignore_errors=True)


async def _copy(files: Path, to: Path) -> None:
    copying = await asyncio.create_subprocess_exec("cp", "-a", str(files), str(to))
    assert await copying.wait() == 0, "the files of a sandbox could not be copied"
