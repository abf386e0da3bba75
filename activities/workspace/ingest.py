"""Reading content into packs: small files whole, large ones in content-defined pieces, holes kept as holes.

Runs in a thread. Reading, hashing and compressing go on in a few more, since all three leave the interpreter lock; packs are
filled by one, in order, so that the same content always makes the same packs.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from pyfastcdc import FastCDC

from activities.workspace.packs import Buffer, PackWriter, compress, compress_all
from activities.workspace.tree import FILE, Directory, Entry, Piece, Xattrs, kept_time

WHOLE_BYTES = 1 << 20
"""Files up to this size are one piece."""
AVERAGE_BYTES, LEAST_BYTES, MOST_BYTES = 1 << 20, 256 << 10, 4 << 20
"""Of the pieces of larger files (FastCDC, doi:10.1109/TPDS.2020.2984632): an insertion changes no piece but its own."""
_BATCH_BYTES, _BATCH_FILES = 1 << 20, 64
_WORKERS = 2
_IN_FLIGHT, _PIECES_IN_FLIGHT = 6, 3
"""Batches of small files, and pieces of a large one, that are in memory while they are worked on."""
_READ = 1 << 20


class Vanished(Exception):
    """The file is not there any more, or is no regular file now."""


class Unreadable(Exception):
    """The file may not be read; the text says why."""


@dataclass(slots=True)
class Content:
    """An open file and what is known of it: size and time when it was opened, attributes, and its extents of data, if sparse.

    `extents` is None for a file without holes; else the (offset, length) of its data. Whoever opened it closes `fd`.
    """

    fd: int
    size: int
    mtime: int
    mode: int
    xattrs: Xattrs = ()
    extents: Sequence[tuple[int, int]] | None = None
    inode: int = 0


@dataclass(slots=True, eq=False)
class Link:
    """A further name of a file that is to be read, which becomes the file should the name before it have gone."""

    path: bytes
    parent: Directory
    name: bytes
    entry: Entry
    open: Callable[[], Content]


@dataclass(slots=True, eq=False)
class Pending:
    """A file whose content is to be read into `entry`. `open` raises Vanished or Unreadable; `settle` is called when it has
    been read, and is still open."""

    path: bytes
    parent: Directory
    name: bytes
    entry: Entry
    size: int
    inode: int
    open: Callable[[], Content]
    settle: Callable[[Content], None] | None = None
    links: Sequence[Link] = ()


class Known(Protocol):
    """Content that is stored already."""

    def file(self, digest: bytes) -> tuple[Piece, ...] | None:
        """The pieces of a file's whole content."""

    def piece(self, digest: bytes) -> Piece | None:
        """A piece of a large file."""


@dataclass(slots=True)
class _Read:
    """A small file that is to be stored: its entry, which lacks its piece yet, and its content, if that is not coming already."""

    entry: Entry
    data: bytes
    size: int


class Ingest:
    """Reads pending files and fills in their entries. `lost` lists (path, reason) of those that could not be read."""

    def __init__(self, writer: PackWriter, known: Known) -> None:
        self._writer = writer
        self._known = known
        self._fresh: dict[bytes, Piece] = {}
        self._promoted: list[Pending] = []
        self.lost: list[tuple[Pending, Exception]] = []

    def take(self, pending: Sequence[Pending]) -> None:
        """Read all of them. Raises whatever the store raised."""
        with ThreadPoolExecutor(_WORKERS, thread_name_prefix="snapshot") as pool:
            while pending:
                large = self._take_small([item for item in pending if item.size <= WHOLE_BYTES], pool)
                for item in (*large, *(item for item in pending if item.size > WHOLE_BYTES)):
                    self._take_large(item, pool)
                pending, self._promoted = self._promoted, []

    def _open(self, item: Pending) -> Content | None:
        """Open a file, or note that it is lost. Links that its name is no longer a name of go on without it."""
        try:
            content = item.open()
        except (Vanished, Unreadable) as fault:
            self.lost.append((item, fault))
            content = None
        if item.links and (content is None or content.inode != item.inode):
            self._promoted.append(_next_of(item, item.links))
            item.links = ()
        return content

    def _take_small(self, pending: list[Pending], pool: ThreadPoolExecutor) -> list[Pending]:
        """Read and hash small files one by one, and compress them beside that. Return those that turn out large.

        Both in this one thread: every short call that leaves the interpreter lock waits to get it back, the longer the more
        threads there are that do so.
        """
        running: deque[tuple[list[_Read], Future[list[Buffer]]]] = deque()
        large: list[Pending] = []
        coming: set[bytes] = set()
        for batch in _batches(pending):
            fresh: list[_Read] = []
            for item in batch:
                content = self._open(item)
                if content is None:
                    continue
                data = _read_small(item, content)
                if len(data) > WHOLE_BYTES:
                    large.append(item)
                    continue
                digest = hashlib.sha256(data).digest()
                known = self._find(digest) if data else ()
                _fill(item.entry, content, digest, known or ())
                if known is None:
                    # The same content may be on its way already: then it is only looked up when its turn comes.
                    fresh.append(_Read(item.entry, b"" if digest in coming else data, len(data)))
                    coming.add(digest)
            running.append((fresh, pool.submit(compress_all, [read.data for read in fresh if read.data])))
            if len(running) >= _IN_FLIGHT:
                self._put_small(*running.popleft())
        while running:
            self._put_small(*running.popleft())
        return large

    def _put_small(self, reads: list[_Read], compressed: Future[list[Buffer]]) -> None:
        stored = iter(compressed.result())
        for read in reads:
            digest = read.entry.digest
            if read.data:
                self._fresh[digest] = Piece(digest, read.size, self._writer.add(next(stored)))
            read.entry.pieces = (self._fresh[digest],)

    def _find(self, digest: bytes) -> tuple[Piece, ...] | None:
        fresh = self._fresh.get(digest)
        return (fresh,) if fresh is not None else self._known.file(digest)

    def _take_large(self, item: Pending, pool: ThreadPoolExecutor) -> None:
        content = self._open(item)
        if content is None:
            return
        try:
            whole = hashlib.sha256()
            pieces: list[Piece] = []
            running: deque[Future[tuple[bytes, Buffer | None, int]]] = deque()
            hashing: Future[None] | None = None

            def drain(most: int) -> None:
                while len(running) > most:
                    digest, stored, size = running.popleft().result()
                    piece = self._fresh.get(digest) or self._known.piece(digest)
                    if piece is None:
                        piece = Piece(digest, size, self._writer.add(stored if stored is not None else b""))
                        self._fresh[digest] = piece
                    pieces.append(piece)

            with ThreadPoolExecutor(1) as hasher:
                for data in _pieces_of(content):
                    if isinstance(data, int):
                        drain(0)
                        pieces.append(Piece(b"", data, None))
                        hashing = hasher.submit(_hash_zeros, whole, data)
                        continue
                    running.append(pool.submit(self._work_piece, data))
                    hashing = hasher.submit(whole.update, data)
                    drain(_PIECES_IN_FLIGHT)
                    if len(running) >= _PIECES_IN_FLIGHT:
                        hashing.result()
                drain(0)
                if hashing is not None:
                    hashing.result()
            content.size = sum(piece.size for piece in pieces)
            if item.settle is not None:
                item.settle(content)
        finally:
            os.close(content.fd)
        _fill(item.entry, content, whole.digest(), tuple(pieces))

    def _work_piece(self, data: bytes) -> tuple[bytes, Buffer | None, int]:
        digest = hashlib.sha256(data).digest()
        is_known = digest in self._fresh or self._known.piece(digest) is not None
        return digest, None if is_known else compress(data), len(data)


def _fill(entry: Entry, content: Content, digest: bytes, pieces: tuple[Piece, ...]) -> None:
    entry.size, entry.mtime, entry.mode = content.size, kept_time(content.mtime), content.mode
    entry.digest, entry.pieces, entry.xattrs = digest, pieces, content.xattrs


def _batches(pending: list[Pending]) -> Iterator[list[Pending]]:
    batch: list[Pending] = []
    size = 0
    for item in pending:
        if batch and (size + item.size > _BATCH_BYTES or len(batch) >= _BATCH_FILES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.size
    if batch:
        yield batch


def _read_small(item: Pending, content: Content) -> bytes:
    """Read a whole file, or a little more than the most that counts as small, and close it."""
    try:
        # By offset, as looking for holes moves the file's own. One byte more than it has shows whether it grew meanwhile.
        data = os.pread(content.fd, content.size + 1, 0)
        while len(data) != content.size and len(data) <= WHOLE_BYTES:
            more = os.pread(content.fd, WHOLE_BYTES + 1 - len(data), len(data))
            if not more:
                break
            data += more
        content.size = len(data)
        if item.settle is not None:
            item.settle(content)
    finally:
        os.close(content.fd)
    return data


def _next_of(item: Pending, links: Sequence[Link]) -> Pending:
    """Make the first of the links of a file the file that the others are links of."""
    first, *others = links
    first.entry.kind, first.entry.target = FILE, b""
    for link in others:
        link.entry.target = first.path
    return Pending(first.path, first.parent, first.name, first.entry, item.size, item.inode, first.open, None, others)


def _pieces_of(content: Content) -> Iterator[bytes | int]:
    """Yield a file's pieces in order: bytes, or the length of a hole."""
    if content.extents is None:
        yield from _cut(content.fd, 0, None)
        return
    at = 0
    for offset, length in content.extents:
        if offset > at:
            yield offset - at
        at = offset
        for data in _cut(content.fd, offset, length):
            at += len(data)
            yield data
    if content.size > at:
        yield content.size - at


class _Bounded:
    """Reads a file from `offset`, at most `left` bytes if that is not None, for the chunker."""

    def __init__(self, fd: int, offset: int, left: int | None) -> None:
        self._fd, self._offset, self._left = fd, offset, left

    def readinto(self, buffer: bytearray | memoryview, /) -> int:
        """Fill as much of `buffer` as there is."""
        view = memoryview(buffer) if self._left is None else memoryview(buffer)[: self._left]
        count = os.preadv(self._fd, [view], self._offset) if view else 0
        self._offset += count
        if self._left is not None:
            self._left -= count
        return count


def _cut(fd: int, offset: int, length: int | None) -> Iterator[bytes]:
    chunker = FastCDC(avg_size=AVERAGE_BYTES, min_size=LEAST_BYTES, max_size=MOST_BYTES)
    for chunk in chunker.cut_stream(_Bounded(fd, offset, length)):
        yield bytes(chunk.data)


def _hash_zeros(digest: hashlib._Hash, count: int) -> None:
    zeros = bytes(_READ)
    while count > 0:
        digest.update(zeros[: min(count, _READ)])
        count -= _READ
