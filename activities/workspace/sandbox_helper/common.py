"""What the helpers for sandboxes that have Python share.

They run inside the sandbox only: Python 3.6, standard library. `activities.workspace.remote_call` sends this module and the one
that is needed as one text, without the imports between them, and calls `run` with that module's function.
"""

import contextlib
import errno
import hashlib
import os
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ESTALE)
CHUNK = 1 << 20
TICK = 0.015
FRAME = struct.Struct(">cI")
"""A frame is a letter, a length, and so many bytes."""
MAGIC = b"caisson-bundle-1\n"


class Fault(Exception):
    """What was asked cannot be done; the text says why."""


def clock() -> int:
    """Return a time that every later write has a later ctime than, once a tick has passed. A float is off by less than 1 us."""
    now = int(time.clock_gettime(5) * 1e9) - 1000
    time.sleep(TICK)
    return now


def attributes(fd: int) -> bytes:
    """Return the user attributes of an open file or directory as name=value in hexadecimal, separated by commas."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listxattr(fd):
            if name.startswith("user."):
                found.append(os.fsencode(name).hex() + "=" + os.getxattr(fd, name).hex())
    return ",".join(found).encode()


class Folders:
    """Reaches paths of any length below an open directory, no link followed. The last directory stays open for the next path."""

    def __init__(self, root: int) -> None:
        self.root, self.path, self.fd = root, b"", root

    def at(self, path: bytes) -> "tuple[int, bytes]":
        """Return an open directory and the name in it."""
        folder, _, name = path.rpartition(b"/")
        if folder != self.path:
            self.close()
            here = os.dup(self.root)
            for part in folder.split(b"/") if folder else ():
                try:
                    below = os.open(part, FOLDER, dir_fd=here)
                finally:
                    os.close(here)
                here = below
            self.path, self.fd = folder, here
        return self.fd, name

    def close(self) -> None:
        """Let go of the last directory."""
        if self.fd != self.root:
            os.close(self.fd)
        self.path, self.fd = b"", self.root


def sha256(fd: int) -> bytes:
    """Return the digest of an open file, in hexadecimal."""
    digest, at = hashlib.sha256(), 0
    while True:
        data = os.pread(fd, CHUNK, at)
        if not data:
            return digest.hexdigest().encode()
        digest.update(data)
        at += len(data)


def run(operation: "Callable[[int, bytes, bytes, Sequence[str]], None]", given: "Sequence[str]") -> None:
    """Do one operation of a workspace, a directory for the files between sandbox and harness, and a name in the workspace that is
    no part of it; and say how it went in one line."""
    try:
        operation(os.open(given[0], FOLDER), os.fsencode(given[1]), os.fsencode(given[2]), given[3:])
    except (Fault, OSError) as error:
        sys.stdout.write("\ncaisson-1 fault " + ascii(str(error))[1:-1][:500] + "\n")
        sys.exit(1)
    sys.stdout.write("\ncaisson-1 done python ns linktimes xattrs holes\n")


def look(root: int, scratch: bytes, reserved: bytes, given: "Sequence[str]") -> None:
    """Do nothing: that it runs is what is asked."""
