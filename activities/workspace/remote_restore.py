"""Content on its way into a sandbox: a bundle in parts of bounded size, each written by one call.

A bundle of the helper in Python is as `remote_content` describes, with these frames:

    M  rows of the tree: "kind mode mtime size digest" NUL path NUL target NUL attributes NUL; kind one of d, f, l, h; the first
       row is the workspace itself, a directory comes before what it holds
    P  "row:offset,..." where the content that follows belongs
    D  content, C the same compressed
    Z  the number of rows
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import Callable, Iterator

from activities.store.blobs import BlobStore
from activities.workspace.packs import Buffer, Wanted, read_frames, unpack
from activities.workspace.remote_call import Helper, Keeps
from activities.workspace.remote_content import FRAME, MAGIC
from activities.workspace.tree import DIRECTORY, FILE, HARD_LINK, SYMLINK, Directory, Entry, walk

_ROWS = 1 << 19
"""Bytes of rows in one frame."""
_SAMPLE = 2048
"""Bytes of the beginning and the middle of a piece that are compressed to see whether it is worth it."""
_KINDS = {FILE: b"f", SYMLINK: b"l", HARD_LINK: b"h", DIRECTORY: b"d"}


class PartWriter:
    """Cuts a stream into parts and writes each as `part-N`."""

    def __init__(self, helper: Helper, most: int) -> None:
        self._helper, self._most = helper, most
        self._parts: list[bytes] = []
        self._size = 0
        self._digest = hashlib.sha256()
        self.count = 0

    async def add(self, data: bytes) -> None:
        """Append bytes, and write a part when there are enough."""
        self._digest.update(data)
        view = memoryview(data)
        while view:
            room = self._most - self._size
            self._parts.append(bytes(view[:room]))
            self._size += len(view[:room])
            view = view[room:]
            if self._size >= self._most:
                await self._flush()

    async def end(self) -> tuple[int, str]:
        """Write the rest; return how many parts there are, and the digest of all of them."""
        if self._parts:
            await self._flush()
        return self.count, self._digest.hexdigest()

    async def _flush(self) -> None:
        data = b"".join(self._parts)
        self._parts, self._size = [], 0
        await self._helper.write(f"part-{self.count}", data)
        self.count += 1


class Sender:
    """Sends a tree for the helper in Python. Content goes as the store gives it, each piece once."""

    def __init__(self, blobs: BlobStore, root: Directory, helper: Helper, part_bytes: int, keeps: Keeps) -> None:
        self._blobs, self._root = blobs, root
        self._out = PartWriter(helper, part_bytes)
        self._wanted: dict[bytes, Wanted] = {}
        self._uses: dict[bytes, list[bytes]] = {}

    async def send(self, progress: Callable[[int], None] | None) -> tuple[int, str]:
        """Send all of it, and return how many parts it took and their digest. Raises StoreError or SandboxError."""
        rows = await asyncio.to_thread(lambda: list(self._rows()))
        await self._out.add(MAGIC)
        for data in _batches(rows):
            await self._out.add(_frame(b"M", data))
        written = 0
        async for group in read_frames(self._blobs, list(self._wanted.values())):
            await self._out.add(await asyncio.to_thread(self._content, group))
            written += len(group)
            if progress is not None:
                progress(written)
        await self._out.add(_frame(b"Z", b"%d" % len(rows)))
        return await self._out.end()

    def _rows(self) -> Iterator[bytes]:
        yield _row(self._root, b"")
        for number, (path, entry) in enumerate(walk(self._root), 1):
            yield _row(entry, path)
            offset = 0
            for piece in entry.pieces if isinstance(entry, Entry) else ():
                if piece.frame is not None:
                    self._wanted.setdefault(piece.digest, Wanted(piece.frame, piece.size, piece.digest))
                    self._uses.setdefault(piece.digest, []).append(b"%d:%d" % (number, offset))
                offset += piece.size

    def _content(self, group: list[tuple[Wanted, Buffer]]) -> bytes:
        frames: list[bytes] = []
        for item, stored in group:
            data = bytes(unpack(item, stored))
            uses = self._uses[item.digest]
            for start in range(0, len(uses), 10_000):
                frames.append(_frame(b"P", b",".join(uses[start : start + 10_000])))
                frames.append(_content_frame(data))
        return b"".join(frames)


def _row(entry: Entry | Directory, path: bytes) -> bytes:
    attributes = b",".join(name.hex().encode() + b"=" + value.hex().encode() for name, value in entry.xattrs)
    if isinstance(entry, Directory):
        return b"d %d %d 0 -\0%s\0\0%s\0" % (entry.mode, entry.mtime, path, attributes)
    digest = entry.digest.hex().encode() or b"-"
    head = (_KINDS[entry.kind], entry.mode, entry.mtime, entry.size, digest)
    return b"%s %d %d %d %s\0%s\0%s\0%s\0" % (*head, path, entry.target, attributes)


def _batches(rows: list[bytes]) -> Iterator[bytes]:
    batch: list[bytes] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row)
        if size > _ROWS:
            yield b"".join(batch)
            batch, size = [], 0
    if batch:
        yield b"".join(batch)


def _content_frame(data: bytes) -> bytes:
    """Return content as a frame, compressed if that makes it smaller."""
    half = len(data) // 2
    sample = data[:_SAMPLE] + data[half : half + _SAMPLE]
    if len(data) <= 2 * _SAMPLE or len(zlib.compress(sample, 1)) < len(sample) * 9 // 10:
        packed = zlib.compress(data, 1)
        if len(packed) < len(data):
            return _frame(b"C", packed)
    return _frame(b"D", data)


def _frame(kind: bytes, data: bytes) -> bytes:
    return FRAME.pack(kind, len(data)) + data
