"""Restoring a snapshot to a directory of this host: written beside its place, checked, and only then moved into it.

The place that is written to is private to the harness until all of it is there. Sandboxed code has no part in it, and no link
exists in it before the last file is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from activities.store.blobs import BlobStore
from activities.store.port import ObjectDamaged, StoreUnavailable
from activities.workspace.packs import Wanted, read_frames, unpack
from activities.workspace.tree import FILE, HARD_LINK, Directory, Entry, Xattrs, walk

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD_FILE = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WORKERS = 2
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
    try:
        wanted = await asyncio.to_thread(writer.lay_out, root)
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="restore") as pool:
            loop = asyncio.get_running_loop()
            running: list[asyncio.Future[None]] = []
            async for group in read_frames(blobs, wanted):
                running.append(loop.run_in_executor(pool, writer.write, group))
                if len(running) > _WORKERS:
                    await running.pop(0)
                if progress is not None:
                    progress(writer.written)
            await asyncio.gather(*running)
        await asyncio.to_thread(writer.finish, root)
    except BaseException as error:
        await asyncio.shield(asyncio.to_thread(remove, place))
        if isinstance(error, OSError):
            raise StoreUnavailable(f"{place}: {error.strerror}; nothing was restored, make room and try again") from error
        raise
    finally:
        writer.close()
    return writer.written


def remove(place: Path) -> None:
    """Remove a directory that only the harness writes to. Gone already is no error."""
    for folder, _, _ in os.walk(place):
        with contextlib.suppress(OSError):
            Path(folder).chmod(0o700)
    shutil.rmtree(place, ignore_errors=True)


def move_into(place: Path, workspace: Path, trash: Path, *, keep: bool) -> None:
    """Put what lies in `place` into the workspace, in the place of what lies there.

    With `keep`, what the workspace has beside it stays. Nothing may work in the workspace meanwhile. Interrupted, it is done
    again from a `place` that was written again.
    """
    own = place.stat()
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
        workspace.chmod(own.st_mode & 0o777)
        os.utime(workspace, ns=(own.st_mtime_ns, own.st_mtime_ns))
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
    """Writes one tree into one new directory. `write` may run in several threads at once, each with other pieces."""

    def __init__(self, place: Path, owner: tuple[int, int] | None) -> None:
        remove(place)
        place.mkdir(mode=0o700, parents=True)
        self._root = os.open(place, _FOLDER)
        self._owner = owner
        self._uses: dict[bytes, list[_Use]] = {}
        self._late: list[tuple[bytes, Entry]] = []
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

    def write(self, group: list[tuple[Wanted, bytes]]) -> None:
        """Check some pieces and write each to wherever it belongs."""
        for item, stored in group:
            data = unpack(item, stored)
            for use in self._uses[item.digest]:
                with self._at(use.path) as (folder, name):
                    fd = os.open(name, _NEW_FILE if use.whole else _OLD_FILE, 0o600, dir_fd=folder)
                try:
                    _write_all(fd, data, use.offset)
                    if use.whole:
                        self._dress(fd, use.entry)
                finally:
                    os.close(fd)

    def finish(self, root: Directory) -> None:
        """Make the links, and set what could not be set while things were still written. Raises ObjectDamaged."""
        for path, late in self._late:
            self._dress_at(path, late, _OLD_FILE)
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
        os.utime(fd, ns=(entry.mtime, entry.mtime))
        if isinstance(entry, Entry):
            self.written += 1

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


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _set_xattrs(fd: int, xattrs: Xattrs) -> None:
    for name, value in xattrs:
        # A file system without attributes still holds the files.
        with contextlib.suppress(OSError):
            os.setxattr(fd, name, value)
