"""Restoring a snapshot to a directory of this host: written beside its place, checked, and only then moved into it.

The place that is written to is private to the harness until all of it is there. Sandboxed code has no part in it, and no link
exists in it before the last file is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from activities.store.blobs import BlobStore
from activities.store.port import ObjectDamaged, StoreUnavailable
from activities.threads import to_end
from activities.workspace.packs import Buffer, Wanted, read_frames, unpack_all
from activities.workspace.tree import FILE, HARD_LINK, Directory, Entry, Xattrs, walk

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD_FILE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WAITING, _WRITERS = 4, 2
"""Groups of pieces that may be on their way from the store to the disk."""
_LONG_PATH = 3000
"""Paths longer than this are reached step by step, since the kernel takes 4,096 bytes at once."""


@dataclass(frozen=True, slots=True)
class _Use:
    """Where the bytes of a piece go: a file of the tree, and the offset in it. `whole`: they are all of it."""

    path: bytes
    entry: Entry
    offset: int
    whole: bool


async def restore_tree(
    blobs: BlobStore,
    root: Directory,
    place: Path,
    *,
    owner: tuple[int, int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write a tree into the new directory `place`, every byte of it checked, and return how many files it has.

    `owner` is a user and group id that everything is given to. `progress` is told how many files are written, now and then.
    Raises StoreError; then `place` is removed again.
    """
    writer = _Writer(place, owner)
    # Checking waits for the interpreter's lock, so one thread does it; making files is the kernel's work, which two share.
    checking = ThreadPoolExecutor(1, thread_name_prefix="restore-check")
    writing = ThreadPoolExecutor(_WRITERS, thread_name_prefix="restore-write")
    running: deque[asyncio.Future[int]] = deque()
    try:
        wanted = await to_end(writer.lay_out, root)
        async for group in read_frames(blobs, wanted):
            checked = checking.submit(unpack_all, group)
            running.append(asyncio.wrap_future(writing.submit(writer.write, checked)))
            del group, checked
            if len(running) >= _WAITING:
                writer.written += await running.popleft()
            if progress is not None:
                progress(writer.written)
        while running:
            writer.written += await running.popleft()
        await to_end(writer.finish, root)
    except BaseException as error:
        await to_end(_give_up, checking, writing, place)
        # The first fault is the one that is told; of the others Python would complain that nobody asked.
        await asyncio.gather(*running, return_exceptions=True)
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise StoreUnavailable(f"{place}: {error.strerror}; nothing was restored, make room and try again") from error
        raise
    finally:
        checking.shutdown(wait=False)
        writing.shutdown(wait=False)
        writer.close()
    return writer.written


def _give_up(checking: Executor, writing: Executor, place: Path) -> None:
    writing.shutdown(wait=True, cancel_futures=True)
    checking.shutdown(wait=True, cancel_futures=True)
    remove(place)


def remove(place: Path) -> None:
    """Remove a directory that only the harness writes to, however deep and closed what lies in it is. Gone already is no error.

    Its directories are moved to the top one by one, so that neither a path nor the stack grows with their depth.
    """
    try:
        place.chmod(0o700)
        top = os.open(place, _FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        waiting, count = _empty(top, top, 0)
        while waiting:
            name = waiting.pop()
            folder = os.open(name, _FOLDER, dir_fd=top)
            try:
                below, count = _empty(folder, top, count)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)
            waiting += below
    finally:
        os.close(top)
    place.rmdir()


def _empty(folder: int, top: int, count: int) -> tuple[list[bytes], int]:
    """Remove all files of an open directory, and move its directories to the top under numbers from `count` on."""
    moved: list[bytes] = []
    with os.scandir(folder) as found:
        items = [(os.fsencode(item.name), item.is_dir(follow_symlinks=False)) for item in found]
    taken = {name for name, _ in items}
    for name, is_directory in items:
        if not is_directory:
            os.unlink(name, dir_fd=folder)
            continue
        os.chmod(name, 0o700, dir_fd=folder)
        if folder == top:
            moved.append(name)
            continue
        while True:
            count += 1
            new = b".removed-%d" % count
            if new not in taken:
                break
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
        moved.append(new)
    return moved, count


def move_into(place: Path, workspace: Path, trash: Path, *, keep: bool) -> None:
    """Put what lies in `place` into the workspace, in the place of what lies there.

    With `keep`, what the workspace has beside it stays. Nothing may work in the workspace meanwhile. Interrupted, it is done
    again from a `place` that was written again.
    """
    own = place.stat()
    xattrs = _xattrs_at(place)
    remove(trash)
    trash.mkdir(mode=0o700)
    workspace.chmod(0o700)
    coming = {path.name: path for path in place.iterdir()}
    for path in list(workspace.iterdir()):
        if not keep or path.name in coming:
            _move(path, trash / path.name)
    for name, path in coming.items():
        _move(path, workspace / name)
    if not keep:
        for gone in _xattrs_at(workspace).keys() - xattrs.keys():
            os.removexattr(workspace, gone)
        _set_xattrs(workspace, tuple(xattrs.items()))
        workspace.chmod(own.st_mode & 0o777)
        _set_time(workspace, own.st_mtime_ns)
    else:
        workspace.chmod(0o755)
    remove(place)
    remove(trash)


def _move(source: Path, target: Path) -> None:
    """Rename one entry. A directory that is closed for writing cannot be given another parent, so it is opened meanwhile."""
    mode = source.lstat().st_mode
    is_closed = stat.S_ISDIR(mode) and not mode & 0o200
    if is_closed:
        source.chmod(0o700)
    source.rename(target)
    if is_closed:
        target.chmod(stat.S_IMODE(mode))


class _Writer:
    """Writes one tree into one new directory. Only `write` may run in several threads at a time."""

    def __init__(self, place: Path, owner: tuple[int, int] | None) -> None:
        remove(place)
        # Not the directories above: they went with their sandbox.
        place.parent.mkdir(mode=0o700, exist_ok=True)
        place.mkdir(mode=0o700)
        self._root = os.open(place, _FOLDER)
        self._owner = owner
        self._uses: dict[bytes, list[_Use]] = {}
        self._late: list[tuple[bytes, Entry]] = []
        self._masked = _umask()
        self.written = 0

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self._root)

    def lay_out(self, root: Directory) -> list[Wanted]:
        """Make the directories, and the files that are empty or in pieces; return what must be read for the rest."""
        wanted: dict[bytes, Wanted] = {}
        for path, entry in walk(root):
            if isinstance(entry, Directory):
                with self._at(path) as (folder, name):
                    os.mkdir(name, 0o700, dir_fd=folder)
                continue
            if entry.kind != FILE:
                continue
            whole = len(entry.pieces) == 1 and entry.pieces[0].frame is not None
            if not whole:
                self._late.append((path, entry))
                self._make_empty(path, entry.size)
            offset = 0
            for piece in entry.pieces:
                if piece.frame is not None:
                    wanted.setdefault(piece.digest, Wanted(piece.frame, piece.size, piece.digest))
                    self._uses.setdefault(piece.digest, []).append(_Use(path, entry, offset, whole))
                offset += piece.size
        return list(wanted.values())

    def write(self, checked: Future[list[tuple[Wanted, Buffer]]]) -> int:
        """Write some pieces that were checked to wherever each belongs, and return how many files are whole by that."""
        whole = 0
        for item, data in checked.result():
            for use in self._uses[item.digest]:
                whole += use.whole
                if use.whole and len(use.path) <= _LONG_PATH:
                    self._write_whole(use, data)
                    continue
                with self._at(use.path) as (folder, name):
                    fd = os.open(name, _NEW_FILE if use.whole else _OLD_FILE, 0o600, dir_fd=folder)
                try:
                    _write_all(fd, data, use.offset)
                    if use.whole:
                        self._dress(fd, use.entry)
                finally:
                    os.close(fd)
        return whole

    def _write_whole(self, use: _Use, data: Buffer) -> None:
        """Write a file as nearly all are, in as few system calls as that takes."""
        entry = use.entry
        is_open = not entry.mode & self._masked
        fd = os.open(use.path, _NEW_FILE, entry.mode if is_open else 0o600, dir_fd=self._root)
        try:
            if os.write(fd, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not is_open or entry.xattrs:
                self._dress(fd, entry)
                return
            if self._owner is not None:
                os.fchown(fd, *self._owner)
            _set_time(fd, entry.mtime)
        finally:
            os.close(fd)

    def finish(self, root: Directory) -> None:
        """Make the links, and set what could not be set while things were still written. Raises ObjectDamaged."""
        for path, late in self._late:
            self._dress_at(path, late, _OLD_FILE)
            self.written += 1
        everything = list(walk(root))
        files = {path for path, entry in everything if isinstance(entry, Entry) and entry.kind == FILE}
        for path, entry in everything:
            if not isinstance(entry, Entry) or entry.kind == FILE:
                continue
            with self._at(path) as (folder, name):
                if entry.kind == HARD_LINK:
                    if entry.target not in files:
                        raise ObjectDamaged(
                            f"{os.fsdecode(path)} is a link to {os.fsdecode(entry.target)}, which is no file here"
                        )
                    with self._at(entry.target) as (source, target):
                        os.link(target, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
                    continue
                os.symlink(entry.target, name, dir_fd=folder)
                if self._owner is not None:
                    os.chown(name, *self._owner, dir_fd=folder, follow_symlinks=False)
                with contextlib.suppress(OSError):
                    os.utime(name, ns=(entry.mtime, entry.mtime), dir_fd=folder, follow_symlinks=False)
        # Each after all that it holds: writing into a directory changes its time.
        for path, entry in reversed(everything):
            if isinstance(entry, Directory):
                self._dress_at(path, entry, _FOLDER)
        self._dress(self._root, root)
        if self.written != len(files):
            raise ObjectDamaged(f"{self.written} of {len(files)} files were restored")

    def _make_empty(self, path: bytes, size: int) -> None:
        with self._at(path) as (folder, name):
            fd = os.open(name, _NEW_FILE, 0o600, dir_fd=folder)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)

    def _dress_at(self, path: bytes, entry: Entry | Directory, flags: int) -> None:
        with self._at(path) as (folder, name):
            fd = os.open(name, flags, dir_fd=folder)
        try:
            self._dress(fd, entry)
        finally:
            os.close(fd)

    def _dress(self, fd: int, entry: Entry | Directory) -> None:
        """Give an open file or directory its owner, attributes, mode and time."""
        if self._owner is not None:
            os.fchown(fd, *self._owner)
        _set_xattrs(fd, entry.xattrs)
        os.fchmod(fd, entry.mode)
        _set_time(fd, entry.mtime)

    @contextlib.contextmanager
    def _at(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """Give an open directory and what reaches `path` from it."""
        if len(path) <= _LONG_PATH:
            yield self._root, path
            return
        *folders, name = path.split(b"/")
        here = os.dup(self._root)
        try:
            for folder in folders:
                below = os.open(folder, _FOLDER, dir_fd=here)
                os.close(here)
                here = below
            yield here, name
        finally:
            os.close(here)


def _umask() -> int:
    """Return the mode bits that new files of this process lack. Asking with umask(2) would change it for all threads."""
    with Path("/proc/self/status").open() as status:
        return next((int(line.split()[1], 8) for line in status if line.startswith("Umask:")), 0o777)


def _write_all(fd: int, data: Buffer, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _set_time(file: int | Path, time: int) -> None:
    # A file system that cannot hold the time still holds the files; many take the nearest that they can.
    with contextlib.suppress(OSError):
        os.utime(file, ns=(time, time))


def _xattrs_at(path: Path) -> dict[bytes, bytes]:
    with contextlib.suppress(OSError):
        return {os.fsencode(name): os.getxattr(path, name) for name in os.listxattr(path) if name.startswith("user.")}
    return {}


def _set_xattrs(fd: int | Path, xattrs: Xattrs) -> None:
    for name, value in xattrs:
        # A file system without attributes still holds the files.
        with contextlib.suppress(OSError):
            os.setxattr(fd, name, value)
