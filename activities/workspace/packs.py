"""Packs: blobs that hold many frames, so that a thousand small files are one object; written and read in bounded memory."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import zstandard

from activities.store.blobs import BlobStore
from activities.store.port import ObjectDamaged
from activities.workspace.tree import Frame, Pack
from contracts.blob import BlobRef

PACK_BYTES = 8 << 20
"""A pack is closed when it has this many bytes; it may be larger by one frame."""
MOST_BYTES = 512 << 20
"""What a frame may unpack to: a directory of millions of files. A damaged or made-up size must not take the worker's memory."""
LEVEL = 1
"""Of zstd: snapshots are taken after every step, so speed counts for more than the last percent."""
_UNWRITTEN = 2
"""Packs that may be on their way to the store while the next is filled."""
_GAP = 64 << 10
"""Bytes that are read and thrown away rather than asking the store once more."""
_RANGE, _UNPACKED = 4 << 20, 8 << 20
"""The most that is read at once, and that what is read at once unpacks to, if it is more than one frame."""
_PARALLEL = 3

_SAMPLED, _SAMPLE = 8 << 10, 1 << 10
"""From this size on, two samples of this size tell whether compressing is of any use."""

Buffer = bytes | memoryview

_local = threading.local()


def compress(raw: bytes) -> Buffer:
    """Return `raw` compressed, or itself when that would not make it smaller."""
    (stored,) = compress_all([raw])
    return stored


def decompress(stored: Buffer, size: int) -> Buffer:
    """Return what was compressed. Raises ObjectDamaged when it is not `size` bytes; never unpacks more than that."""
    if len(stored) == size:
        return stored
    try:
        if size > MOST_BYTES or zstandard.frame_content_size(stored) != size:
            raise ObjectDamaged(f"{len(stored)} bytes of a pack do not unpack to {size}")
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor()
        raw: bytes = _local.decompressor.decompress(stored, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ObjectDamaged(f"{len(stored)} bytes of a pack cannot be unpacked: {error}") from error
    return raw


def compress_all(raw: list[bytes]) -> list[Buffer]:
    """Return each of many contents as `compress` does, with hardly a moment in the interpreter.

    Of those that are not quite small a sample is tried first: much of what takes room is packed already, or pictures.
    """
    large = [whole for whole in raw if len(whole) >= _SAMPLED]
    samples = [_slice(whole, 1) + _slice(whole, 2) for whole in large]
    dense = {id(whole) for whole, packed in zip(large, _pack(samples), strict=True) if len(packed) >= 2 * _SAMPLE}
    rest = iter(_pack([whole for whole in raw if id(whole) not in dense]))
    stored: list[Buffer] = []
    for whole in raw:
        packed = None if id(whole) in dense else next(rest)
        stored.append(whole if packed is None or len(packed) >= len(whole) else cast("Buffer", packed))
    return stored


def _slice(whole: bytes, third: int) -> bytes:
    at = len(whole) * third // 3
    return whole[at : at + _SAMPLE]


def _pack(raw: list[bytes]) -> Sequence[zstandard.BufferSegment]:
    if not raw:
        return ()
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL)
    packed: Sequence[zstandard.BufferSegment] = _local.compressor.multi_compress_to_buffer(raw, threads=1)
    return packed


class PackWriter:
    """Fills packs one after the other, and hands each to the store while the next is filled.

    Used in a thread beside the event loop `loop`. What the store raises for one pack is raised by a later call here.
    """

    def __init__(self, blobs: BlobStore, loop: asyncio.AbstractEventLoop) -> None:
        self._blobs = blobs
        self._loop = loop
        self._pack = Pack()
        self._parts: list[Buffer] = []
        self._length = 0
        self._pool = ThreadPoolExecutor(_UNWRITTEN, thread_name_prefix="pack")
        self._waiting: list[Future[None]] = []
        self._is_stopped = False
        self.written = 0
        """Bytes given to the store."""

    @property
    def pack(self) -> Pack:
        """The pack that the next frame goes into."""
        return self._pack

    def stop(self) -> None:
        """Let the thread that fills packs end at its next call: nobody waits for it any more."""
        self._is_stopped = True

    def is_full(self) -> bool:
        """Whether the next frame goes into a new pack."""
        return self._length >= PACK_BYTES

    def add(self, stored: Buffer) -> Frame:
        """Put bytes, as `compress` returns them, into the current pack, or a new one when it is full."""
        if self._is_stopped:
            raise asyncio.CancelledError
        if self.is_full():
            self.close()
        frame = Frame(self._pack, self._length, len(stored))
        self._parts.append(stored)
        self._length += len(stored)
        return frame

    def close(self) -> None:
        """Finish the current pack, if anything is in it. Its digest is known once `settle` has returned."""
        if not self._parts:
            return
        self.written += self._length
        self._waiting.append(self._pool.submit(self._put, self._pack, self._parts))
        self._pack, self._parts, self._length = Pack(), [], 0
        while len(self._waiting) > _UNWRITTEN:
            self._waiting.pop(0).result()

    def settle(self) -> None:
        """Return when every closed pack is in the store."""
        while self._waiting:
            self._waiting.pop(0).result()

    def end(self) -> None:
        """Let go of the threads, whatever became of the packs."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _put(self, pack: Pack, parts: list[Buffer]) -> None:
        data = b"".join(parts)
        parts.clear()
        pack.digest, pack.size = hashlib.sha256(data).digest(), len(data)
        ref = BlobRef(digest=pack.digest.hex(), size=pack.size)
        asyncio.run_coroutine_threadsafe(self._blobs.put_surely(ref, data), self._loop).result()


@dataclass(frozen=True, slots=True)
class Wanted:
    """Bytes to read: a frame, and the size and SHA-256 of what it unpacks to."""

    frame: Frame
    size: int
    digest: bytes


def unpack(wanted: Wanted, stored: Buffer) -> Buffer:
    """Return the bytes of a frame, checked. Raises ObjectDamaged naming its pack."""
    try:
        raw = decompress(stored, wanted.size)
        if hashlib.sha256(raw).digest() != wanted.digest:
            raise ObjectDamaged(f"{len(raw)} bytes are not those named {wanted.digest.hex()}")
    except ObjectDamaged as error:
        frame = wanted.frame
        raise ObjectDamaged(f"blob {frame.pack.digest.hex()} at {frame.offset}: {error}; restore it from a copy") from error
    return raw


def unpack_all(group: list[tuple[Wanted, Buffer]]) -> list[tuple[Wanted, Buffer]]:
    """Return the bytes of many frames as `unpack` does."""
    return [(wanted, unpack(wanted, stored)) for wanted, stored in group]


async def read_frames(blobs: BlobStore, wanted: Iterable[Wanted]) -> AsyncIterator[list[tuple[Wanted, Buffer]]]:
    """Read frames pack by pack, neighbours together, a few ranges at a time. Yields what each range gave, still packed."""
    ranges = _ranges(wanted)
    running: list[asyncio.Task[list[tuple[Wanted, Buffer]]]] = []
    try:
        for one in ranges:
            running.append(asyncio.create_task(_read(blobs, one)))
            if len(running) >= _PARALLEL:
                yield await running.pop(0)
        while running:
            yield await running.pop(0)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _read(blobs: BlobStore, wanted: list[Wanted]) -> list[tuple[Wanted, Buffer]]:
    pack, start = wanted[0].frame.pack, wanted[0].frame.offset
    length = max(item.frame.offset + item.frame.stored for item in wanted) - start
    data = memoryview(await blobs.get_part(BlobRef(digest=pack.digest.hex(), size=pack.size), start, length))
    if len(data) != length:
        raise ObjectDamaged(f"blob {pack.digest.hex()} ends before byte {start + length}; restore it from a copy")
    return [(item, data[item.frame.offset - start : item.frame.offset - start + item.frame.stored]) for item in wanted]


def _ranges(wanted: Iterable[Wanted]) -> list[list[Wanted]]:
    packs: dict[bytes, list[Wanted]] = {}
    for item in wanted:
        frame = item.frame
        if not 0 <= frame.stored <= item.size <= MOST_BYTES or not 0 <= frame.offset <= frame.pack.size - frame.stored:
            raise ObjectDamaged(f"blob {frame.pack.digest.hex()}: {frame.stored} bytes at {frame.offset} cannot be {item.size}")
        packs.setdefault(frame.pack.digest, []).append(item)
    ranges: list[list[Wanted]] = []
    for items in packs.values():
        items.sort(key=lambda item: item.frame.offset)
        start = end = -1
        unpacked = 0
        for item in items:
            is_near = end >= 0 and item.frame.offset <= end + _GAP and item.frame.offset + item.frame.stored - start <= _RANGE
            if is_near and unpacked + item.size <= _UNPACKED:
                ranges[-1].append(item)
                end, unpacked = max(end, item.frame.offset + item.frame.stored), unpacked + item.size
            else:
                ranges.append([item])
                start, end, unpacked = item.frame.offset, item.frame.offset + item.frame.stored, item.size
    return ranges
