"""What the helper and the harness agree on. Runs inside the sandbox only: Python 3.6, standard library."""

import binascii
import contextlib
import json
import os
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List

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
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
    out.write(b"\ncaisson-1 file %d\ncaisson-1 end\n" % size)


def write_record(job: bytes, record: "Dict[str, object]") -> None:
    """Write how a job ended, all of it or nothing, unless that is written already."""
    path = os.path.join(job, b"exit")
    new = path + b".%d" % os.getpid()
    with open(new, "w") as file:
        json.dump(record, file)
    with contextlib.suppress(FileExistsError):
        os.link(new, path)
    os.unlink(new)
