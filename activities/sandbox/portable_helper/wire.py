"""What the helper and the harness agree on. Runs inside the sandbox only: Python 3.6, standard library."""

import binascii
import contextlib
import errno
import json
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List

    Words = Dict[str, object]
    Request = Dict[str, Any]

HEAD = 8 << 20
"""Bytes of each stream that are kept from its beginning."""
RING = 1 << 20
"""Bytes that are kept from its end, in the same file after the head, the oldest overwritten."""
SIZE = struct.Struct("HH")
"""Rows and columns of a terminal, in an order for its supervisor."""
INLINE = 40000
"""Bytes of an answer that come back as the helper's output; a longer one is left in a file."""
RESERVE = 1 << 20
"""Bytes of a file that holds their place on the disk for the records of jobs."""
PIECE = 1 << 16
"""Bytes of it that are given up at a time."""
ROOM = 4096
"""Bytes that hold the place of how a job ended while it runs."""


class Refused(Exception):
    """A path cannot be used as asked; the text names it and says why."""


class Denied(Exception):
    """A session cannot do what was asked; the text is a word that the harness knows."""


def raw(text: str) -> bytes:
    """Return text of a request as the bytes that the system takes. Python 3.6 would choose by the locale. Raises ValueError."""
    return text.encode("utf-8", "surrogateescape")


def shown(path: bytes) -> str:
    """Return a path as it stands in a fault."""
    return path.decode("utf-8", "backslashreplace")


def answer(state: bytes, name: str, words: "Words", body: "List[bytes]") -> None:
    """Say how it went: a line of words, and bytes that they tell the lengths of. `name` is that of the file for a long answer."""
    parts = [json.dumps(words).encode("ascii") + b"\n"] + body
    size = sum(map(len, parts))
    out = sys.stdout.buffer
    if size <= INLINE:
        out.write(b"\ncaisson-1 inline\n" + binascii.b2a_base64(b"".join(parts)) + b"caisson-1 end\n")
        return
    path = os.path.join(state, b"out", raw(name))
    try:
        with open(path, "wb") as file:
            for part in parts:
                file.write(part)
    except OSError:
        os.unlink(path)
        raise
    out.write(b"\ncaisson-1 file %d\ncaisson-1 end\n" % size)


def is_full(error: OSError) -> bool:
    """Tell whether a fault is that of a full disk."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def keep_reserve(state: bytes) -> None:
    """Make the reserve whole again, where the disk has room for much more than that."""
    path = os.path.join(state, b"reserve")
    with contextlib.suppress(OSError):
        if os.path.exists(path) and os.stat(path).st_size >= RESERVE:
            return
        disk = os.statvfs(state)
        if disk.f_bavail * disk.f_frsize > 4 * RESERVE:
            with open(path, "wb") as file:
                file.write(os.urandom(RESERVE))  # zeros would take no place on some disks


def insist(state: bytes, write: "Callable[[], None]") -> None:
    """Write what must be written, giving up the reserve for it piece by piece when the disk is full. Raises OSError."""
    path = os.path.join(state, b"reserve")
    while True:
        try:
            return write()
        except OSError as error:
            left = os.stat(path).st_size if os.path.exists(path) else 0
            if not is_full(error) or not left:
                raise
            os.truncate(path, max(left - PIECE, 0))


def hold_room(state: bytes) -> None:
    """Hold the place of a record in the current directory, that of a new job."""

    def hold() -> None:
        with open("room", "wb") as file:
            file.write(b" " * ROOM)

    insist(state, hold)


def write_record(job: bytes, record: "Dict[str, object]") -> None:
    """Write how a job ended, all of it or nothing, unless that is written already. Its place was held for it."""
    path = os.path.join(job, b"exit")
    new = path + b".%d" % os.getpid()
    with contextlib.suppress(OSError):
        os.rename(os.path.join(job, b"room"), new)

    def write() -> None:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(json.dumps(record).encode("ascii"))
            file.truncate()

    insist(os.path.join(job, b"..", b".."), write)
    with contextlib.suppress(FileExistsError):
        os.link(new, path)
    os.unlink(new)
