"""Content on its way out of a sandbox: a bundle that a helper wrote, checked as it arrives and spooled to this host's disk.

A bundle of the helper in Python is "caisson-bundle-1\\n" and frames: a letter, a length (32 bits, big-endian),
and so many bytes:

    N  the time before which whatever was changed cannot change again without a later ctime
    F  "number offset inode mtime mode ctime attributes" of a file; the number is its place among what was asked for
    S  the offset that the next content belongs to: what lies between is a hole
    D  content, at most 1 MiB
    C  the same, compressed with zlib
    E  "end ctime": up to where the file was there, and its ctime after it was read
    X  "number reason" of a file that cannot be read; without a reason, one that is no regular file any more
    Z  the end

`remote_tar` describes that of the helper in shell. Nothing of either is believed: no file may have more content than was asked
for, so the spool is never larger than the listing said, which was compared with the limits and the room on the disk before
anything was asked for.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from activities.sandbox.port import SandboxUnavailable
from activities.workspace.ingest import WHOLE_BYTES, Content, Unreadable, Vanished
from activities.workspace.remote_listing import parse_attributes, refuse
from activities.workspace.remote_tree import Reading
from activities.workspace.tree import PERMISSIONS, Xattrs, kept_time

MAGIC = b"caisson-bundle-1\n"
FRAME = struct.Struct(">cI")
_CHUNK = 1 << 20
_MAX_FRAME = _CHUNK + (1 << 16)


@dataclass(slots=True)
class Received:
    """What came of one file. `extents` are where it has data; small files lie in the common spool from `at` on, others alone."""

    size: int = 0
    mtime: int = 0
    mode: int = 0
    inode: int = 0
    xattrs: Xattrs = ()
    extents: list[tuple[int, int]] = field(default_factory=list)
    at: int = -1
    reason: str = ""
    is_there: bool = False
    is_sure: bool = True
    own: Path | None = None


class Spool:
    """Holds what has arrived, in a directory of its own that goes with it."""

    def __init__(self, readings: Sequence[Reading], room: Path | None = None) -> None:
        self._readings = readings
        self._directory = tempfile.TemporaryDirectory(prefix="caisson-snapshot-", dir=room, ignore_cleanup_errors=True)
        self._small: IO[bytes] = (Path(self._directory.name) / "small").open("w+b")
        self._large: IO[bytes] | None = None
        self.received = [Received() for _ in readings]

    def close(self) -> None:
        """Remove all of it."""
        self._small.close()
        if self._large is not None:
            self._large.close()
        self._directory.cleanup()

    def begin(self, number: int) -> Received:
        """Return what is known of a file that more arrives of."""
        received = self.received[number]
        if self._readings[number].pending.size > WHOLE_BYTES:
            if self._large is not None:
                self._large.close()
            received.own = Path(self._directory.name) / f"file-{number}"
            self._large = received.own.open("r+b" if received.own.exists() else "x+b")
        elif received.at < 0:
            received.at = self._small.seek(0, os.SEEK_END)
        return received

    def write(self, number: int, offset: int, data: bytes) -> None:
        """Keep content of the file that was begun last. Raises SandboxUnavailable when it is more than was asked for."""
        received = self.received[number]
        if offset < 0 or offset + len(data) > self._readings[number].pending.size:
            raise refuse(f"more content of {self._readings[number].pending.path[:100]!r} than it was listed with")
        file, start = (self._small, received.at) if received.own is None else (self._large, 0)
        if file is None:
            raise refuse("content of no file")
        file.seek(start + offset)
        file.write(data)
        last = received.extents[-1] if received.extents else None
        if last is not None and offset < sum(last):
            raise refuse("content twice")
        if last is not None and sum(last) == offset:
            received.extents[-1] = (last[0], last[1] + len(data))
        else:
            received.extents.append((offset, len(data)))

    def end(self, number: int, size: int) -> None:
        """Note that a file is there up to `size`."""
        received = self.received[number]
        if size < received.size or size > self._readings[number].pending.size or size < sum((received.extents or [(0, 0)])[-1]):
            raise refuse("a file that ends elsewhere")
        received.size = size
        if received.own is None:
            # Whole, holes as zeros, before the next begins behind it.
            self._small.truncate(received.at + size)
        elif self._large is not None:
            self._large.truncate(size)

    def settle(self) -> None:
        """Let each pending file open what has arrived of it, and note which may have changed meanwhile."""
        self._small.flush()
        if self._large is not None:
            self._large.flush()
        for reading, received in zip(self._readings, self.received, strict=True):
            reading.pending.open = partial(self._open, received)
            if received.is_sure:
                reading.folder.unsure.discard(reading.name)
            else:
                reading.folder.unsure.add(reading.name)

    def missing(self) -> list[Reading]:
        """Return files of more names than one that are not there under the name that was asked for."""
        return [
            reading
            for reading, received in zip(self._readings, self.received, strict=True)
            if reading.pending.links and (not received.is_there or received.inode != reading.pending.inode)
        ]

    def _open(self, received: Received) -> Content:
        if received.reason:
            raise Unreadable(received.reason)
        if not received.is_there:
            raise Vanished
        if received.own is not None:
            fd = os.open(received.own, os.O_RDONLY | os.O_CLOEXEC)
        else:
            fd = os.memfd_create("content", os.MFD_CLOEXEC)
            if os.write(fd, os.pread(self._small.fileno(), received.size, received.at)) != received.size:
                raise SandboxUnavailable("what came from the sandbox cannot be read again on this host")
            os.lseek(fd, 0, os.SEEK_SET)
        is_whole = received.extents == [(0, received.size)] or not received.size
        extents = None if is_whole else received.extents
        return Content(fd, received.size, received.mtime, received.mode & PERMISSIONS, received.xattrs, extents, received.inode)


class FrameReader:
    """Takes a bundle of the helper in Python into a spool: of the files `numbers`, in that order, and of no other."""

    def __init__(self, spool: Spool, readings: Sequence[Reading], numbers: Sequence[int]) -> None:
        self._spool, self._readings = spool, readings
        self._expected = iter(enumerate(numbers))
        self._buffer = bytearray()
        self._has_begun = False
        self._now = 0
        self._number = -1
        self._offset = 0
        self._is_done = False

    def feed(self, data: bytes) -> None:
        """Take some bytes. Raises SandboxUnavailable for what no helper sends."""
        buffer = self._buffer
        buffer += data
        at = 0
        if not self._has_begun:
            if len(buffer) < len(MAGIC):
                return
            if buffer[: len(MAGIC)] != MAGIC:
                raise refuse("this is no bundle")
            self._has_begun, at = True, len(MAGIC)
        while len(buffer) - at >= FRAME.size:
            kind, length = FRAME.unpack_from(buffer, at)
            if length > _MAX_FRAME or self._is_done:
                raise refuse(f"a frame of {length} bytes")
            if len(buffer) - at < FRAME.size + length:
                break
            at += FRAME.size
            try:
                self._take(kind, bytes(buffer[at : at + length]))
            except (ValueError, StopIteration, zlib.error) as error:
                raise refuse(f"a frame that cannot be read: {error}") from error
            at += length
        del buffer[:at]

    def end(self) -> None:
        """See that all of it has come."""
        if not self._is_done or self._buffer or next(self._expected, None) is not None:
            raise refuse("a bundle that ends early")

    def _take(self, kind: bytes, data: bytes) -> None:
        if kind in (b"D", b"C"):
            self._content(data if kind == b"D" else _unpacked(data))
            return
        words = data.split(b" ")
        if (self._number >= 0) != (kind in (b"S", b"E")):
            raise ValueError(f"{kind!r} in a wrong place")
        match kind:
            case b"N":
                self._now = int(data)
            case b"F":
                self._begin(words)
            case b"S":
                self._offset = int(data)
            case b"E":
                self._spool.end(self._number, int(words[0]))
                received = self._spool.received[self._number]
                if int(words[1]) != self._readings[self._number].ctime or int(words[1]) >= self._now:
                    received.is_sure = False
                self._number = -1
            case b"X":
                received = self._spool.received[self._next(words[0])]
                received.is_there, received.is_sure = False, False
                received.reason = data.partition(b" ")[2][:200].decode("utf-8", "replace")
            case b"Z":
                self._is_done = True
            case _:
                raise ValueError(f"{kind!r}")

    def _next(self, word: bytes) -> int:
        place, number = next(self._expected)
        if int(word) != place:
            raise ValueError(f"file {word!r} instead of {place}")
        return number

    def _begin(self, words: list[bytes]) -> None:
        self._number = self._next(words[0])
        offset, inode, mtime, mode, ctime = map(int, words[1:6])
        received = self._spool.begin(self._number)
        if offset and not received.is_there:
            raise ValueError("the end of a file that has no beginning")
        received.is_there, received.mode = not received.reason, mode & PERMISSIONS
        received.mtime = kept_time(mtime)
        received.inode = inode
        received.xattrs = parse_attributes(words[6]) if len(words) > 6 else ()
        if ctime != self._readings[self._number].ctime:
            received.is_sure = False
        self._offset = offset

    def _content(self, data: bytes) -> None:
        if self._number < 0 or len(data) > _CHUNK:
            raise ValueError("content in a wrong place")
        self._spool.write(self._number, self._offset, data)
        self._offset += len(data)


def _unpacked(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    found = unpacker.decompress(data, _CHUNK + 1)
    if not unpacker.eof:
        raise ValueError("content that does not unpack to a piece")
    return found
