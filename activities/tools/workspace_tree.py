"""Looking at files by their paths as a program in the sandbox does: through links, but never outside of the workspace.

The files are those of a snapshot, or of a directory of this host that is to become a workspace.
"""

from __future__ import annotations

import asyncio
import os
import stat
from abc import ABC, abstractmethod
from collections import deque
from pathlib import Path

from activities.store.blobs import BlobStore
from activities.workspace.read import TreeReader, read_file
from activities.workspace.tree import FILE, HARD_LINK, SYMLINK, Directory, Entry
from contracts.sandbox import WORKSPACE
from contracts.snapshot import SnapshotRef

MAX_LINKS = 40
"""Links on the way to one file, as Linux has it."""

Place = tuple[bytes, ...]
"""The names from the workspace's root to something, without links on the way: it has one such place, however it was reached."""


class LeadsOut(ValueError):
    """A link on the way leads out of the workspace, or in a circle."""


class WorkspaceTree(ABC):
    """Files below a root. Only the directories on the way to what is asked for are read."""

    def __init__(self, root: Directory) -> None:
        self._root = root

    @abstractmethod
    async def fill(self, directory: Directory) -> None:
        """Read what a directory holds, if that is not known yet."""

    @abstractmethod
    async def read(self, entry: Entry, most: int) -> bytes:
        """Return the first `most` bytes of a regular file."""

    @abstractmethod
    async def leader(self, entry: Entry) -> Entry:
        """Return the file that a further name of it means."""

    async def find(self, *parts: bytes) -> tuple[Place, Entry | Directory] | None:
        """Return what a path leads to, and where that is; None when there is nothing. Raises LeadsOut."""
        way: list[tuple[bytes, Directory]] = []
        waiting, links = deque(parts), 0
        while waiting:
            part = waiting.popleft()
            here = way[-1][1] if way else self._root
            if part in (b"", b"."):
                continue
            if part == b"..":
                if not way:
                    raise LeadsOut("a link leads out of the workspace")
                way.pop()
                continue
            await self.fill(here)
            found = here.children.get(part)
            if isinstance(found, Directory):
                way.append((part, found))
            elif found is None:
                return None
            elif found.kind == SYMLINK:
                links += 1
                if links > MAX_LINKS:
                    raise LeadsOut("links lead in a circle")
                target = found.target
                if target.startswith(b"/"):
                    inside = WORKSPACE.encode()
                    if target != inside and not target.startswith(inside + b"/"):
                        raise LeadsOut("a link leads out of the workspace")
                    way, target = [], target[len(inside) :]
                waiting.extendleft(reversed(target.split(b"/")))
            elif waiting:
                return None
            else:
                return (*(name for name, _ in way), part), await self.leader(found)
        return tuple(name for name, _ in way), way[-1][1] if way else self._root

    async def names(self, directory: Directory) -> list[bytes]:
        """Return what a directory holds, in the order of its bytes."""
        await self.fill(directory)
        return sorted(directory.children)


class SnapshotFiles(WorkspaceTree):
    """A snapshot's files. Everything raises StoreError when the store has not what it should have."""

    def __init__(self, blobs: BlobStore, reader: TreeReader, root: Directory) -> None:
        super().__init__(root)
        self._blobs = blobs
        self._reader = reader

    @classmethod
    async def open(cls, blobs: BlobStore, ref: SnapshotRef) -> SnapshotFiles:
        """Open a snapshot."""
        reader = TreeReader(blobs)
        return cls(blobs, reader, (await reader.open(ref)).root)

    async def fill(self, directory: Directory) -> None:
        """See WorkspaceTree."""
        await self._reader.fill([directory])

    async def read(self, entry: Entry, most: int) -> bytes:
        """See WorkspaceTree."""
        data = bytearray()
        async for piece in read_file(self._blobs, entry):
            data += piece
            if len(data) >= most:
                break
        return bytes(data[:most])

    async def leader(self, entry: Entry) -> Entry:
        """See WorkspaceTree."""
        if entry.kind != HARD_LINK:
            return entry
        leader = await self._reader.find(self._root, entry.target)
        return leader if isinstance(leader, Entry) and leader.kind == FILE else entry


class HostFiles(WorkspaceTree):
    """The files of a directory of this host. Everything raises OSError."""

    def __init__(self, root: Path) -> None:
        super().__init__(Directory())
        self._paths: dict[Directory | Entry, Path] = {self._root: root}
        self._read: set[Directory] = set()

    async def fill(self, directory: Directory) -> None:
        """See WorkspaceTree. What is neither file, directory nor link is passed over."""
        if directory not in self._read:
            await asyncio.to_thread(self._fill, directory)
            self._read.add(directory)

    def _fill(self, directory: Directory) -> None:
        with os.scandir(self._paths[directory]) as entries:
            for entry in entries:
                below: Directory | Entry
                if entry.is_symlink():
                    below = Entry(SYMLINK, target=os.fsencode(Path(entry).readlink()))
                elif entry.is_dir():
                    below = Directory()
                elif entry.is_file():
                    below = Entry(FILE, size=entry.stat().st_size)
                else:
                    continue
                directory.children[os.fsencode(entry.name)] = below
                self._paths[below] = Path(entry)

    async def read(self, entry: Entry, most: int) -> bytes:
        """See WorkspaceTree."""
        return await asyncio.to_thread(_content, self._paths[entry], most)

    async def leader(self, entry: Entry) -> Entry:
        """See WorkspaceTree: here every name of a file is a file."""
        return entry


def _content(path: Path, most: int) -> bytes:
    # It may have become a pipe meanwhile, which is not waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)
