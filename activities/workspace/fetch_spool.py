"""Content on its way from a source into the store: downloads run ahead of the ingest, small ones into memory, large ones into
files that outlive the worker.

A spool file's name says the boot, the run and exactly what is being fetched, version included. A worker that takes over after a
kill goes on where the file ends. After a reboot nothing is taken up, since then its last bytes need not have reached the disk.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import aclosing, suppress
from pathlib import Path

from activities.store.port import StoreUnavailable
from activities.threads import to_end
from activities.workspace.ingest import WHOLE_BYTES, Content
from activities.workspace.sources.port import TIME_OF_NO_FILE, SourceChanged
from contracts.base import BadInput, sha256_hex

KEPT_SECONDS = 24 * 3600
"""After so long untouched, a spool file is of a run that nobody goes on with."""
_TRIES, _PAUSE = 4, 0.5
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Chunks = Callable[[int], AsyncIterator[bytes]]
"""Gives content from an offset."""


def identity_of(entry: str, item: str, version: str) -> str:
    """Return what tells one thing to fetch from all others of a run: by its entry, its name there, and its version."""
    return "\0".join((entry, item, version))


class Spool:
    """The directory of spool files, private to the worker's user."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory or Path(tempfile.gettempdir()) / f"caisson-spool-{os.geteuid()}"

    def of(self, owner: str) -> RunSpool:
        """Return one run's part of it, and sweep what is old. Raises BadInput when the directory is not private."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._directory.lstat()
        except OSError as error:
            raise BadInput(
                f"CAISSON_SPOOL: {self._directory} cannot be made ({error.strerror}); name another directory"
            ) from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise BadInput(
                f"CAISSON_SPOOL: {self._directory} is not a directory of this user's alone; chmod 700, or name another"
            )
        for path in self._directory.iterdir():
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > KEPT_SECONDS:
                    _remove(path)
        return RunSpool(self._directory, owner)


class RunSpool:
    """What one run fetches."""

    def __init__(self, directory: Path, owner: str) -> None:
        self._directory = directory
        self._owner = owner
        self._boot = _BOOT.read_text() if _BOOT.exists() else ""
        self._paths: dict[str, Path] = {}
        self.stopped = threading.Event()
        """Set when nobody waits for downloads any more: they end at their next piece."""

    def folder(self) -> Path:
        """Return the path of a directory for one source, which is not made yet and is not taken up by another attempt."""
        path = self._directory / secrets.token_hex(16)
        self._paths[str(path)] = path
        return path

    async def fill(self, identity: str, size: int, chunks: Chunks, what: str) -> Content:
        """Fetch `size` bytes into an open file, going on where an earlier attempt ended.

        A fault that may pass is tried again a few times, from where it came. Raises SourceChanged when there is more or less,
        and StoreUnavailable.
        """
        fd = os.memfd_create("source", os.MFD_CLOEXEC) if size <= WHOLE_BYTES else self._open(identity, size)
        try:
            at = os.fstat(fd).st_size
            for attempt in range(_TRIES):
                try:
                    at = await self._append(fd, at, size, chunks, what)
                    break
                except StoreUnavailable:
                    at = os.fstat(fd).st_size
                    if attempt + 1 == _TRIES or self.stopped.is_set():
                        raise
                await asyncio.sleep(_PAUSE * 2**attempt)
            if at > size:
                self.done(identity)
                raise SourceChanged(f"{what} has more than the {size} bytes that were listed; try again")
        except BaseException:
            os.close(fd)
            raise
        return Content(fd, size, TIME_OF_NO_FILE, 0o644)

    async def _append(self, fd: int, at: int, size: int, chunks: Chunks, what: str) -> int:
        if at < size:
            async with aclosing(_generator(chunks(at))) as pieces:
                async for piece in pieces:
                    if self.stopped.is_set():
                        raise asyncio.CancelledError
                    at += len(piece)
                    if at > size:
                        break
                    await to_end(_append, fd, piece)
        if at < size:
            raise StoreUnavailable(f"{what} ended after {at} of {size} bytes; try again")
        return at

    def done(self, identity: str) -> None:
        """Remove a spool file, if there is one."""
        path = self._paths.pop(identity, None)
        if path is not None:
            _remove(path)

    def clear(self) -> None:
        """Remove all that this run has opened here."""
        for identity in list(self._paths):
            self.done(identity)

    def _open(self, identity: str, size: int) -> int:
        path = self._directory / sha256_hex("\0".join((self._boot, self._owner, identity)).encode("utf-8", "surrogateescape"))
        fd = _locked(path)
        if fd is None:
            # Another attempt, which nobody waits for any more, still writes there.
            path = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
            fd = _locked(path)
        if fd is None:
            raise StoreUnavailable(f"CAISSON_SPOOL: {path} is in use; try again")
        self._paths[identity] = path
        there = os.fstat(fd).st_size
        if there > size:
            os.ftruncate(fd, 0)
            there = 0
        room = os.statvfs(self._directory)
        if room.f_bavail * room.f_frsize < size - there:
            os.close(fd)
            raise StoreUnavailable(
                f"CAISSON_SPOOL: {self._directory} has no room for {size} bytes; make room, or name another directory"
            )
        return fd


async def _generator(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    async for piece in chunks:
        yield piece


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _locked(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _append(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        # At the end: a spool file is opened to append, and one in memory has no other writer.
        view = view[os.pwrite(fd, view, os.fstat(fd).st_size) :]


class _Lane:
    """Downloads of one kind, in the order in which they will be taken, within bounds."""

    def __init__(self, threads: int, most_files: int, most_bytes: int, stopped: threading.Event) -> None:
        self._stopped = stopped
        self.waiting: deque[tuple[int, int, Callable[[], Content]]] = deque()
        self._running: dict[int, tuple[int, Future[Content]]] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fetch")
        self._most_files, self._most_bytes = most_files, most_bytes
        self._bytes = 0

    def top_up(self) -> None:
        while self.waiting and len(self._running) < self._most_files:
            number, size, opens = self.waiting[0]
            if self._running and self._bytes + size > self._most_bytes:
                return
            self.waiting.popleft()
            self._running[number] = size, self._pool.submit(opens)
            self._bytes += size

    def take(self, number: int) -> Content:
        size, future = self._running[number]
        while not wait([future], timeout=0.5).done:
            if self._stopped.is_set():
                raise asyncio.CancelledError
        del self._running[number]
        self._bytes -= size
        return future.result()

    def end(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for _, future in self._running.values():
            future.add_done_callback(_close)


class Ahead:
    """Opens content in threads before it is asked for. Everything is taken once, small files first, in the order given."""

    def __init__(self, items: Sequence[tuple[int, Callable[[], Content]]], stopped: threading.Event) -> None:
        # A large download holds two pieces of 8 MiB at a time; a small one is whole in memory until it is taken.
        small, large = _Lane(16, 128, 32 << 20, stopped), _Lane(4, 4, 4 << 30, stopped)
        self._lanes = small, large
        self._lane_of: list[_Lane] = []
        for number, (size, opens) in enumerate(items):
            lane = small if size <= WHOLE_BYTES else large
            lane.waiting.append((number, size, opens))
            self._lane_of.append(lane)

    def take(self, number: int) -> Content:
        """Return the open content of an item. Raises what its opening raised."""
        for lane in self._lanes:
            lane.top_up()
        return self._lane_of[number].take(number)

    def end(self) -> None:
        """Let go of everything that was not taken."""
        for lane in self._lanes:
            lane.end()


def _close(future: Future[Content]) -> None:
    if not future.cancelled() and future.exception() is None:
        os.close(future.result().fd)
