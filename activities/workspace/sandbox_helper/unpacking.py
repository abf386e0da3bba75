"""Restores a workspace: PARTS DIGEST KEEP DEPTH ENTRIES. Reads `part-N`, as `activities.workspace.remote_restore` describes
them, and writes `listing` of what the workspace holds then.

Runs inside the sandbox only: Python 3.6, standard library.
"""
# ruff: noqa: PTH101, PTH108, PTH118, PTH123, PTH208 -- any bytes are a name here, and pathlib is slow to load

import contextlib
import hashlib
import os
import shutil
import stat
import time
import zlib

from activities.workspace.sandbox_helper.common import CHUNK, FOLDER, FRAME, MAGIC, TICK, Fault, Folders, sha256
from activities.workspace.sandbox_helper.listing import Lister, write_listing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import IO

    Row = tuple[bytes, int, int, int, bytes, bytes, bytes, bytes]


class Parts:
    """Reads frames from the parts of a bundle, one after the other."""

    def __init__(self, scratch: bytes, count: int) -> None:
        self.files = [os.path.join(scratch, b"part-%d" % number) for number in range(count)]
        self.file: IO[bytes] | None = None

    def read(self, length: int) -> bytes:
        """Return exactly `length` bytes."""
        data = b""
        while len(data) < length:
            if self.file is None:
                if not self.files:
                    raise Fault("the bundle ends early")
                self.file = open(self.files.pop(0), "rb")  # noqa: SIM115
            more = self.file.read(length - len(data))
            if not more:
                self.file.close()
                self.file = None
            data += more
        return data

    def frames(self) -> "Iterator[tuple[bytes, bytes]]":
        """Yield (kind, data) up to the end mark, content unpacked."""
        if self.read(len(MAGIC)) != MAGIC:
            raise Fault("this is no bundle")
        while True:
            kind, length = FRAME.unpack(self.read(FRAME.size))
            data = self.read(length)
            try:
                yield (b"D", zlib.decompress(data)) if kind == b"C" else (kind, data)
            except zlib.error as error:
                raise Fault(f"the bundle is damaged: {error}") from error
            if kind == b"Z":
                return


def check(scratch: bytes, count: int, digest: str) -> None:
    """See whether all parts together are what the harness sent. Raises Fault."""
    found = hashlib.sha256()
    for number in range(count):
        with open(os.path.join(scratch, b"part-%d" % number), "rb") as file:
            for data in iter(lambda: file.read(CHUNK), b""):
                found.update(data)
    if found.hexdigest() != digest:
        raise Fault("what arrived is not what was sent")


class Unpacker:
    """Restores a tree from a bundle beside the content of the workspace, checks it, and puts it in the place of that."""

    def __init__(self, root: int, reserved: bytes) -> None:
        self.root, self.reserved = root, reserved
        self.remove()
        os.mkdir(reserved, 0o700, dir_fd=root)
        self.place = os.open(reserved, FOLDER, dir_fd=root)
        for name in (b"new", b"old"):
            os.mkdir(name, 0o700, dir_fd=self.place)
        self.new = os.open(b"new", FOLDER, dir_fd=self.place)
        self.old = os.open(b"old", FOLDER, dir_fd=self.place)
        self.folders = Folders(self.new)
        self.rows: list[Row] = []

    def remove(self) -> None:
        """Remove what restores have left."""
        top = b"/proc/self/fd/%d/%s" % (self.root, self.reserved)
        for folder, _, _ in os.walk(top):
            with contextlib.suppress(OSError):
                os.chmod(folder, 0o700)
        shutil.rmtree(top, ignore_errors=True)

    def fill(self, parts: Parts) -> None:
        """Write all of the tree, then dress and check it."""
        uses: list[bytes] = []
        complete = False
        for kind, data in parts.frames():
            if kind == b"M":
                fields = data.split(b"\0")
                for at in range(0, len(fields) - 4, 4):
                    first = fields[at].split(b" ")
                    mode, mtime, size = map(int, first[1:4])
                    self.rows.append((first[0], mode, mtime, size, first[4], fields[at + 1], fields[at + 2], fields[at + 3]))
                    if first[0] == b"d" and fields[at + 1]:
                        folder, name = self.folders.at(fields[at + 1])
                        os.mkdir(name, 0o700, dir_fd=folder)
            elif kind == b"P":
                uses = data.split(b",")
            elif kind == b"D":
                for use in uses:
                    number, offset = use.split(b":")
                    self.write(self.rows[int(number)][5], data, int(offset))
            complete = kind == b"Z" and int(data) == len(self.rows)
        if not complete:
            raise Fault("the bundle ends early")
        # Links first, and each directory after all that it holds: writing into a directory changes its time.
        for row in sorted(self.rows, key=lambda row: b"flhd".index(row[0])):
            if row[0] != b"d":
                self.finish(row)
        for row in reversed([row for row in self.rows if row[0] == b"d" and row[5]]):
            folder, name = self.folders.at(row[5])
            fd = os.open(name, FOLDER, dir_fd=folder)
            dress(fd, row)
            os.close(fd)
        self.folders.close()

    def write(self, path: bytes, data: bytes, offset: int) -> None:
        """Write a piece of a file."""
        folder, name = self.folders.at(path)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            while data:
                count = os.pwrite(fd, data, offset)
                data, offset = data[count:], offset + count
        finally:
            os.close(fd)

    def finish(self, row: "Row") -> None:
        """Complete a file and check it, or make a link."""
        kind, _, mtime, size, digest, path, target, _ = row
        folder, name = self.folders.at(path)
        if kind == b"l":
            os.symlink(target, name, dir_fd=folder)
            with contextlib.suppress(OSError):
                os.utime(name, ns=(mtime, mtime), dir_fd=folder, follow_symlinks=False)
            return
        if kind == b"h":
            folders = Folders(self.new)
            source, leader = folders.at(target)
            os.link(leader, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
            folders.close()
            return
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)
            if os.fstat(fd).st_size != size or sha256(fd) != digest:
                raise Fault(f"{os.fsdecode(path)} is not what was to be restored")
            dress(fd, row)
        finally:
            os.close(fd)

    def switch(self, keep: bool) -> None:
        """Move the old content away and the new in; a fault undoes every move."""
        moves: list[tuple[int, int, bytes]] = []
        coming = [os.fsencode(name) for name in os.listdir(self.new)]
        here = [os.fsencode(name) for name in os.listdir(self.root)]
        leaving = [name for name in here if name != self.reserved and (not keep or name in coming)]
        plan = [(self.root, self.old, name) for name in leaving] + [(self.new, self.root, name) for name in coming]
        try:
            for move in plan:
                shift(*move)
                moves.append(move)
        except OSError as error:
            for source, target, name in reversed(moves):
                shift(target, source, name)
            raise Fault(f"{os.fsdecode(move[2])} cannot be moved: {error.strerror}") from error


def shift(source: int, target: int, name: bytes) -> None:
    """Rename one entry. A directory that is closed for writing cannot be given another parent, so it is opened meanwhile."""
    mode = os.stat(name, dir_fd=source, follow_symlinks=False).st_mode
    is_closed = stat.S_ISDIR(mode) and not mode & 0o200
    if is_closed:
        os.chmod(name, 0o700, dir_fd=source)
    place = source
    try:
        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
        place = target
    finally:
        if is_closed:
            os.chmod(name, stat.S_IMODE(mode), dir_fd=place)


def dress(fd: int, row: "Row") -> None:
    """Give an open file or directory its attributes, mode and time."""
    for pair in row[7].split(b",") if row[7] else ():
        name, _, value = pair.decode().partition("=")
        # A file system without attributes still holds the files.
        with contextlib.suppress(OSError):
            os.setxattr(fd, bytes.fromhex(name), bytes.fromhex(value))
    os.fchmod(fd, row[1])
    # Nor does it have to hold every time.
    with contextlib.suppress(OSError):
        os.utime(fd, ns=(row[2], row[2]))


def unpack(root: int, scratch: bytes, reserved: bytes, given: "Sequence[str]") -> None:
    """Restore a workspace and list it; on a fault it is what it was. With KEEP, what is not in the snapshot stays at its top."""
    parts, keep = int(given[0]), given[2] == "1"
    check(scratch, parts, given[1])
    before = os.fstat(root)
    unpacker = None
    own: Row = (b"d", stat.S_IMODE(before.st_mode), before.st_mtime_ns, 0, b"", b"", b"", b"")
    try:
        # Only the owner can, and whoever is not may be allowed to write into it all the same.
        with contextlib.suppress(OSError):
            os.fchmod(root, stat.S_IMODE(before.st_mode) | 0o700)
        unpacker = Unpacker(root, reserved)
        unpacker.fill(Parts(scratch, parts))
        unpacker.switch(keep)
        own = (b"d", 0o755, int(time.time() * 1e9), 0, b"", b"", b"", b"") if keep else unpacker.rows[0]
    finally:
        if unpacker is not None:
            unpacker.remove()
        with contextlib.suppress(OSError):
            dress(root, own)
        for number in range(parts):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(scratch, b"part-%d" % number))
    time.sleep(TICK)  # so that a later change of what has just been written shows
    write_listing(root, os.path.join(scratch, b"listing"), Lister(reserved, int(given[3]), int(given[4]), False))
