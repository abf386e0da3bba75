"""Reading snapshots for people: only the directories and files that are asked for, without any sandbox."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Iterable, Iterator

from activities.store.blobs import BlobStore
from activities.store.port import ObjectDamaged
from activities.workspace.packs import Wanted, read_frames, unpack_all
from activities.workspace.snapshots import MAX_DIRECTORIES, Snapshot, SnapshotStore, _decode_record
from activities.workspace.tree import Directory, Entry, Pack, Piece
from contracts.snapshot import SnapshotRef

_WINDOW = 8 << 20
"""Bytes of a file that are held at once, if it is more than one piece."""
_ZEROS = 1 << 20


class TreeReader(SnapshotStore):
    """Reads trees a part at a time: a directory has its children only after `fill`."""

    def __init__(self, blobs: BlobStore) -> None:
        super().__init__(blobs)
        self._packs: dict[bytes, Pack] = {}
        self.directories = 0
        """How many directories were read."""

    async def open(self, ref: SnapshotRef) -> Snapshot:
        """Return a snapshot whose root is not filled yet. Raises ObjectMissing or ObjectDamaged."""
        snapshot, packs = _decode_record(ref, await self.blobs.get(ref.record))
        self._packs |= {digest: pack for digest, pack in packs.items() if digest not in self._packs}
        return snapshot

    async def fill(self, directories: Iterable[Directory]) -> None:
        """Read what directories hold, one level of it. One that was read before is not read again. Raises StoreError."""
        waiting = [directory for directory in directories if not directory.children]
        await self._load_children(waiting, self._packs, MAX_DIRECTORIES)
        self.directories += len(waiting)
        if self.directories > MAX_DIRECTORIES:
            raise ObjectDamaged(f"more than {MAX_DIRECTORIES} directories were to be read")

    async def fill_all(self, root: Directory) -> None:
        """Read everything below a directory. Raises StoreError."""
        level = [root]
        while level:
            await self.fill(level)
            level = [child for directory in level for child in directory.children.values() if isinstance(child, Directory)]

    async def find(self, root: Directory, path: bytes) -> Entry | Directory | None:
        """Return what stands at a path, no link followed, or None; nothing beside the way there is read."""
        here: Entry | Directory | None = root
        for part in path.split(b"/") if path else ():
            if not isinstance(here, Directory):
                return None
            await self.fill([here])
            here = here.children.get(part)
        return here


async def read_file(blobs: BlobStore, entry: Entry) -> AsyncGenerator[bytes, None]:
    """Yield the content of a regular file from its beginning, each piece checked, in bounded memory.

    Raises ObjectMissing, or ObjectDamaged for bytes that are not those that were named; what was yielded before is right.
    """
    whole = hashlib.sha256()
    for window in _windows(entry.pieces):
        wanted = {piece.digest: Wanted(piece.frame, piece.size, piece.digest) for piece in window if piece.frame is not None}
        found: dict[bytes, bytes] = {}
        async for group in read_frames(blobs, wanted.values()):
            found |= {item.digest: bytes(data) for item, data in await asyncio.to_thread(unpack_all, group)}
        for piece in window:
            for data in _hole(piece.size) if piece.frame is None else (found[piece.digest],):
                whole.update(data)
                yield data
    if whole.digest() != entry.digest:
        raise ObjectDamaged(f"a file of {entry.size} bytes is not the one named {entry.digest.hex()}; restore it from a copy")


def _windows(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    window: list[Piece] = []
    held = 0
    for piece in pieces:
        size = 0 if piece.frame is None else piece.size
        if window and held + size > _WINDOW:
            yield window
            window, held = [], 0
        window.append(piece)
        held += size
    if window:
        yield window


def _hole(size: int) -> Iterator[bytes]:
    while size > 0:
        yield bytes(min(size, _ZEROS))
        size -= _ZEROS
