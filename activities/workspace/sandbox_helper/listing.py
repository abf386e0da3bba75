"""Lists a workspace: DEPTH ENTRIES HASHES. Writes `listing`, as `activities.workspace.remote_listing` describes it.

Runs inside the sandbox only: Python 3.6, standard library.
"""
# ruff: noqa: PTH118, PTH123 -- any bytes are a name here, and pathlib is slow to load

import contextlib
import errno
import os
import stat
import zlib

from activities.workspace.sandbox_helper.common import FILE, FOLDER, GONE, Fault, attributes, clock, sha256

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


class Lister:
    """Lists a tree. Each list is one section of the listing."""

    def __init__(self, reserved: bytes, depth: int, most: int, hashes: bool) -> None:
        self.reserved, self.depth, self.most, self.hashes = reserved, depth, most, hashes
        self.rows: list[bytes] = []
        self.links: list[bytes] = []
        self.faults: list[bytes] = []
        self.attributes: list[bytes] = []
        self.digests: list[bytes] = []
        self.known: dict[int, bytes] = {}
        self.device = 0

    def add(self, path: bytes, status: os.stat_result) -> None:
        """Write down one path."""
        if len(self.rows) > self.most:
            raise Fault(f"more than {self.most} files, directories and links")
        numbers = (status.st_mode, status.st_nlink, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        self.rows.append(b".%s//%x %d %d %d %d %d %d\n" % ((b"/" + path if path else b"", *numbers, status.st_dev)))

    def attribute(self, path: bytes, found: bytes) -> None:
        """Write down the attributes of a path, if it has any."""
        if found:
            self.attributes.append(b"./%s\0%s\0" % (path, found))

    def folder(self, fd: int, path: bytes, level: int) -> None:
        """List an open directory and what is below it."""
        status = os.fstat(fd)
        self.device = self.device or status.st_dev
        self.add(path, status)
        if status.st_dev != self.device or level >= self.depth:
            return
        self.attribute(path, attributes(fd))
        for text in os.listdir(fd):
            name = os.fsencode(text)
            if level or name != self.reserved:
                self.one(fd, name, path + b"/" + name if path else name, level)

    def one(self, fd: int, name: bytes, path: bytes, level: int) -> None:
        """List one name of an open directory."""
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                self.links.append(b"./%s\0%s\0" % (path, os.readlink(name, dir_fd=fd)))
        except OSError as error:
            if error.errno not in (*GONE, errno.EINVAL):
                self.faults.append(b"./%s\0%s\0" % (path, os.strerror(error.errno or errno.EIO).encode()))
            return
        if not stat.S_ISDIR(status.st_mode):
            self.add(path, status)
            if self.hashes and stat.S_ISREG(status.st_mode):
                with contextlib.suppress(OSError):
                    self.digest(fd, name, path, status)
            return
        try:
            below = os.open(name, FOLDER, dir_fd=fd)
        except OSError as error:
            if error.errno not in GONE:
                self.add(path, status)
                self.faults.append(b"./%s\0%s\0" % (path, os.strerror(error.errno or errno.EIO).encode()))
            return
        try:
            self.folder(below, path, level + 1)
        finally:
            os.close(below)

    def digest(self, folder: int, name: bytes, path: bytes, status: os.stat_result) -> None:
        """Write down the SHA-256 of a file that stays as it was listed."""
        fd = os.open(name, FILE, dir_fd=folder)
        try:
            self.attribute(path, attributes(fd))
            found = self.known.get(status.st_ino)
            if found is None:
                found = sha256(fd)
            if os.fstat(fd).st_ctime_ns == status.st_ctime_ns and os.fstat(fd).st_ino == status.st_ino:
                self.known[status.st_ino] = found
                self.digests.append(b"%s  ./%s\n" % (found, path))
        finally:
            os.close(fd)


def write_listing(root: int, place: bytes, lister: Lister) -> None:
    """List a workspace into a file."""
    now = clock()
    lister.folder(root, b"", 0)
    ignored = b""
    with contextlib.suppress(OSError):
        fd = os.open(b".caissonignore", FILE, dir_fd=root)
        with os.fdopen(fd, "rb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                ignored = file.read((64 << 10) + 1)
    sections = [
        (b"now", [b"%d" % now]),
        (b"ignore", [ignored]),
        (b"rows", lister.rows),
        (b"links", lister.links),
        (b"faults", lister.faults),
        (b"attributes", lister.attributes),
        (b"digests", lister.digests),
        (b"end", []),
    ]
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    with open(place, "wb") as out:
        for name, parts in sections:
            out.write(packer.compress(b"%s %d\n" % (name, sum(map(len, parts)))))
            for start in range(0, len(parts), 1000):
                out.write(packer.compress(b"".join(parts[start : start + 1000])))
        out.write(packer.flush())


def list_workspace(root: int, scratch: bytes, reserved: bytes, given: "Sequence[str]") -> None:
    """Write down what the workspace holds, and with HASHES the digest of every file."""
    depth, entries, hashes = given
    write_listing(root, os.path.join(scratch, b"listing"), Lister(reserved, int(depth), int(entries), hashes == "1"))
