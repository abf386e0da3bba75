"""Snapshots in the store: written packs first and their record last, read back checked.

The record is a blob: msgpack of [version, mode, mtime, xattrs, digest, packs, where, excludes, skipped], the root directory as
`activities.workspace.tree` describes any other, the patterns that were left out, and [path, reason] of what was skipped.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from activities.store.blobs import BlobStore
from activities.store.port import ObjectDamaged
from activities.workspace.ingest import Ingest, Pending, Unreadable
from activities.workspace.packs import PackWriter, Wanted, compress, read_frames, unpack
from activities.workspace.tree import (
    FILE,
    Directory,
    Entry,
    Frame,
    Pack,
    Piece,
    decode_node,
    encode_node,
    node_digest,
    pack_of,
    snapshot_id,
    totals,
    walk,
)
from contracts.blob import BlobRef
from contracts.snapshot import SnapshotRef

VERSION = 1
MAX_DIRECTORIES = 1_000_000
MAX_SKIPPED = 1000
"""Paths of skipped files that a snapshot lists; it counts all of them."""

Skipped = tuple[bytes, str]


@dataclass(slots=True)
class Scan:
    """What a workspace holds now: a tree whose pending files still lack their content. Directories that did not change are
    the very objects of the tree before."""

    root: Directory
    pending: Sequence[Pending] = ()
    skipped: list[Skipped] = field(default_factory=list)
    excludes: tuple[str, ...] = ()


@dataclass(slots=True)
class Contents:
    """Content that a run's snapshots have stored, by digest, so that it is not stored again."""

    files: dict[bytes, tuple[Piece, ...]] = field(default_factory=dict)
    pieces: dict[bytes, Piece] = field(default_factory=dict)

    def add(self, entries: Iterable[Entry]) -> None:
        """Remember where the content of files is."""
        for entry in entries:
            if entry.kind == FILE and entry.pieces:
                self.files.setdefault(entry.digest, entry.pieces)
                for piece in entry.pieces:
                    if piece.frame is not None:
                        self.pieces.setdefault(piece.digest, piece)

    def file(self, digest: bytes) -> tuple[Piece, ...] | None:
        """See Known."""
        return self.files.get(digest)

    def piece(self, digest: bytes) -> Piece | None:
        """See Known."""
        return self.pieces.get(digest)


@dataclass(slots=True)
class Snapshot:
    """A snapshot as it was read: its whole tree, without content."""

    ref: SnapshotRef
    root: Directory
    excludes: tuple[str, ...]
    skipped: tuple[Skipped, ...]


class SnapshotStore:
    """Writes and reads snapshots."""

    def __init__(self, blobs: BlobStore) -> None:
        self.blobs = blobs

    async def save(self, scan: Scan, contents: Contents, base: SnapshotRef | None) -> SnapshotRef:
        """Store what is new in `scan` and return the snapshot; that of `base`, with nothing written, if it is the same.

        The reference is returned only when everything it needs is stored. `scan.root` is complete then, and may be the base of
        the next. Raises StoreError; then nothing refers to what was written, and `scan` is of no further use.
        """
        if base is not None and not scan.pending and _is_same(scan, base):
            return base
        writer = PackWriter(self.blobs, asyncio.get_running_loop())
        # A thread of its own: it waits for the store, which works in threads of the loop's pool, and must not take one of those.
        alone = ThreadPoolExecutor(1, thread_name_prefix="snapshot-save")
        work = asyncio.get_running_loop().run_in_executor(alone, _build, scan, contents, writer)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            writer.stop()
            await asyncio.gather(work, return_exceptions=True)
            raise
        finally:
            alone.shutdown(wait=False)
        if base is not None and not writer.written and _is_same(scan, base):
            return base
        identity = snapshot_id(scan.root).hex()
        files, total_bytes = await asyncio.to_thread(totals, scan.root)
        data = _encode_record(scan)
        record = BlobRef(digest=hashlib.sha256(data).hexdigest(), size=len(data))
        await self.blobs.put_surely(record, data)
        return SnapshotRef(id=identity, record=record, files=files, total_bytes=total_bytes, skipped=len(scan.skipped))

    async def load(self, ref: SnapshotRef) -> Snapshot:
        """Read a snapshot's tree. Raises ObjectMissing, or ObjectDamaged naming what is not as it was written."""
        snapshot, packs = _decode_record(ref, await self.blobs.get(ref.record))
        level, directories = [snapshot.root], 1
        while level:
            level = await self._load_children(level, packs, MAX_DIRECTORIES - directories)
            directories += len(level)
        if await asyncio.to_thread(totals, snapshot.root) != (ref.files, ref.total_bytes):
            raise ObjectDamaged(f"snapshot {ref.id} does not have {ref.files} files of {ref.total_bytes} bytes")
        return snapshot

    async def _load_children(self, level: list[Directory], packs: dict[bytes, Pack], most: int) -> list[Directory]:
        waiting: dict[tuple[bytes, int], list[Directory]] = {}
        wanted: list[Wanted] = []
        for directory in level:
            frame = directory.frame
            if frame is None:
                raise ObjectDamaged("a directory of the snapshot has no place in the store")
            key = frame.pack.digest, frame.offset
            if key not in waiting:
                wanted.append(Wanted(frame, directory.node_size, directory.node_sha))
            waiting.setdefault(key, []).append(directory)
        below: list[Directory] = []
        async for group in read_frames(self.blobs, wanted):
            for item, stored in group:
                for directory in waiting[item.frame.pack.digest, item.frame.offset]:
                    directory.children = decode_node(unpack(item, stored), item.frame.pack, packs, directory.digest)
                    below += [child for child in directory.children.values() if isinstance(child, Directory)]
                    if len(below) > most:
                        # Directories in directories, each many times, make of a few bytes more than memory can hold.
                        raise ObjectDamaged(f"the snapshot has more than {MAX_DIRECTORIES} directories")
            await asyncio.sleep(0)
        return below


def _is_same(scan: Scan, base: SnapshotRef) -> bool:
    """Whether a tree that is stored already is that of the snapshot before."""
    is_stored = scan.root.frame is not None
    return is_stored and base.id == snapshot_id(scan.root).hex() and base.skipped == len(scan.skipped)


def _build(scan: Scan, contents: Contents, writer: PackWriter) -> None:
    try:
        _fill(scan, contents, writer)
    finally:
        writer.end()


def _fill(scan: Scan, contents: Contents, writer: PackWriter) -> None:
    ingest = Ingest(writer, contents)
    ingest.take(scan.pending)
    writer.settle()
    for pending, fault in ingest.lost:
        del pending.parent.children[pending.name]
        if isinstance(fault, Unreadable):
            scan.skipped.append((pending.path, str(fault)))
    scan.skipped.sort()
    _store_directory(scan.root, writer)
    writer.close()
    writer.settle()
    # Only now: what the store refused must be stored by the next snapshot.
    contents.add(pending.entry for pending in scan.pending)


def _store_directory(directory: Directory, writer: PackWriter) -> None:
    """Store a directory and those in it, deepest first. The depth is bounded by whoever scanned."""
    if directory.frame is not None:
        return
    for child in directory.children.values():
        if isinstance(child, Directory):
            _store_directory(child, writer)
    directory.digest = node_digest(directory)
    before, directory.before = directory.before, None
    if before is not None and before.digest == directory.digest:
        directory.frame, directory.node_size, directory.node_sha = before.frame, before.node_size, before.node_sha
        return
    if writer.is_full():
        writer.close()
        writer.settle()
    encoded = encode_node(directory, writer.pack)
    directory.frame = writer.add(compress(encoded))
    directory.node_size, directory.node_sha = len(encoded), hashlib.sha256(encoded).digest()


def _encode_record(scan: Scan) -> bytes:
    root = scan.root
    if root.frame is None:
        raise ValueError("the root is stored before its record")
    pack = root.frame.pack
    skipped = [[path, reason] for path, reason in scan.skipped[:MAX_SKIPPED]]
    xattrs = [list(pair) for pair in root.xattrs]
    where = [root.frame.offset, root.frame.stored, root.node_size, root.node_sha]
    own = [VERSION, root.mode, root.mtime, xattrs, root.digest, [pack.digest, pack.size], where]
    # Bytes, since sandboxed code chose them: they need not be text.
    return msgspec.msgpack.encode([*own, [os.fsencode(line) for line in scan.excludes], skipped])


def _decode_record(ref: SnapshotRef, data: bytes) -> tuple[Snapshot, dict[bytes, Pack]]:
    try:
        record: list[Any] = msgspec.msgpack.decode(data)
        version, mode, mtime, xattrs, digest, (pack_digest, pack_size), (offset, stored, size, sha), excludes, skipped = record
        pack = pack_of(pack_digest, pack_size)
        root = Directory(
            mode, mtime, tuple((name, value) for name, value in xattrs), {}, digest, Frame(pack, offset, stored), size, sha
        )
        found = Snapshot(ref, root, tuple(map(os.fsdecode, excludes)), tuple((path, reason) for path, reason in skipped))
        is_right = snapshot_id(root).hex() == ref.id
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise ObjectDamaged(f"blob {ref.record.digest} is no record of a snapshot: {error}") from error
    if version != VERSION:
        raise ObjectDamaged(f"blob {ref.record.digest} is a snapshot of format {version}; this version reads {VERSION}")
    if not is_right:
        raise ObjectDamaged(f"blob {ref.record.digest} is not the record of snapshot {ref.id}")
    return found, {pack_digest: pack}


def entries_of(root: Directory) -> Iterable[Entry]:
    """Yield every file and link of a tree."""
    return (entry for _, entry in walk(root) if isinstance(entry, Entry))
