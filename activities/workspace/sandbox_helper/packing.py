"""Sends content: START COUNT [WANTED]. Writes `bundle`, as `activities.workspace.remote_content` describes it.

What is wanted is [offset and length, path] for each, in the argument or in the file `wanted`.
Runs inside the sandbox only: Python 3.6, standard library.
"""
# ruff: noqa: PTH118, PTH123 -- any bytes are a name here, and pathlib is slow to load

import errno
import os
import re
import stat
import zlib

from activities.workspace.sandbox_helper.common import CHUNK, FILE, FRAME, GONE, MAGIC, Folders, attributes, clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import IO

SAMPLE = 2048
"""Bytes of the beginning and the middle of a piece that are compressed to see whether it is worth it."""


class Packer:
    """Writes frames: contents that the harness asked for."""

    def __init__(self, out: "IO[bytes]") -> None:
        self.out = out

    def frame(self, kind: bytes, data: bytes) -> None:
        """Write one frame."""
        self.out.write(FRAME.pack(kind, len(data)))
        self.out.write(data)

    def data(self, data: bytes) -> None:
        """Write content, compressed if that makes it smaller: some of it is tried first, since much content is not."""
        half = len(data) // 2
        sample = data[:SAMPLE] + data[half : half + SAMPLE]
        if len(data) <= 2 * SAMPLE or len(zlib.compress(sample, 1)) < len(sample) * 9 // 10:
            packed = zlib.compress(data, 1)
            if len(packed) < len(data):
                self.frame(b"C", packed)
                return
        self.frame(b"D", data)

    def item(self, folders: Folders, number: int, start: int, length: int, path: bytes) -> None:
        """Write `length` bytes of a file, or what there is of them."""
        try:
            folder, name = folders.at(path)
            fd = os.open(name, FILE, dir_fd=folder)
        except OSError as error:
            why = b"" if error.errno in GONE else os.strerror(error.errno or errno.EIO).encode()
            self.frame(b"X", b"%d %s" % (number, why))
            return
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                self.frame(b"X", b"%d " % number)
                return
            own = (number, start, status.st_ino, status.st_mtime_ns, status.st_mode, status.st_ctime_ns)
            self.frame(b"F", b"%d %d %d %d %d %d " % own + attributes(fd))
            end = min(start + length, status.st_size)
            for at, count in extents(fd, start, end, status):
                self.frame(b"S", b"%d" % at)
                while count > 0:
                    data = os.pread(fd, min(CHUNK, count), at)
                    if not data:
                        break
                    self.data(data)
                    at, count = at + len(data), count - len(data)
            after = os.fstat(fd)
            self.frame(b"E", b"%d %d" % (min(end, after.st_size), after.st_ctime_ns))
        finally:
            os.close(fd)


def extents(fd: int, start: int, end: int, status: os.stat_result) -> "Iterator[tuple[int, int]]":
    """Yield where a file has data between two places, as (offset, length)."""
    if status.st_blocks * 512 >= status.st_size:
        yield start, end - start
        return
    at = start
    while at < end:
        try:
            begin = os.lseek(fd, at, os.SEEK_DATA)
            hole = os.lseek(fd, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no more data
                yield at, end - at
            return
        if begin >= end:
            return
        yield begin, min(hole, end) - begin
        at = hole


def pack(root: int, scratch: bytes, reserved: bytes, given: "Sequence[str]") -> None:
    """Write `count` of what is wanted, from number `start` on."""
    if len(given) == 2:
        with open(os.path.join(scratch, b"wanted"), "rb") as file:
            wanted = file.read()
    else:
        wanted = re.sub(rb"\\0([0-7]{3})", lambda found: bytes([int(found.group(1), 8)]), given[2].encode("ascii"))
    start, count = int(given[0]), int(given[1])
    fields = wanted.split(b"\0")
    now = clock()
    folders = Folders(root)
    with open(os.path.join(scratch, b"bundle"), "wb", CHUNK) as out:
        packer = Packer(out)
        out.write(MAGIC)
        packer.frame(b"N", b"%d" % now)
        for number in range(start, start + count):
            offset, length = fields[2 * number].split(b" ")
            packer.item(folders, number, int(offset), int(length), fields[2 * number + 1])
        packer.frame(b"Z", b"")
    folders.close()
