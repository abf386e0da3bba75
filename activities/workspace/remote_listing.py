"""What a helper lists of a workspace: `listing`, compressed with gzip if there is one, in sections: "name length\\n" and bytes.

    now         the time, in ns, before which whatever was changed cannot change again without a later ctime
    ignore      the content of the workspace's .caissonignore
    rows        PATH//mode links inode size mtime ctime device\\n      mode in hexadecimal, times in ns, or the shell's in s
    links       PATH NUL target NUL
    faults      PATH NUL why it, or what it holds, cannot be looked at NUL
    attributes  PATH NUL name=value,... in hexadecimal NUL
    digests     SHA-256 in hexadecimal, two spaces, PATH\\n            only when asked for
    end

A PATH is "." or begins with "./", so that "//" is in none. A directory comes before what it holds. All of it is hostile: it is
bounded before it is looked at, and what does not have this form is refused.
"""

from __future__ import annotations

import os
import re
import zlib
from dataclasses import dataclass, field

from activities.sandbox.port import SandboxUnavailable
from activities.workspace.ignore import pattern_lines
from activities.workspace.scan import MAX_IGNORE_BYTES, Key
from activities.workspace.tree import Xattrs, is_good_name, kept_time

_ROW = re.compile(
    rb"\.(?:/(?!/)([^\0]*?))?//([0-9a-f]{1,8}) (\d{1,10}) (\d{1,20}) (\d{1,19}) "
    rb"(-?\d{1,29}(?:\.\d{1,9})?) (-?\d{1,29}(?:\.\d{1,9})?) (\d{1,20})\n"
)
_DIGEST = re.compile(rb"^([0-9a-f]{64})  \./([^\n\\]+)$", re.MULTILINE)
_SECTIONS = ("now", "ignore", "rows", "links", "faults", "attributes", "digests", "end")
_MAX_REASON = 200
_MAX_TARGET = 4096


@dataclass(slots=True)
class Row:
    """One path as it was listed."""

    path: bytes
    key: Key
    device: int


@dataclass(slots=True)
class Listing:
    """A whole listing, checked for its form. The first row is the workspace itself, whose path is b""."""

    now: int
    ignore: tuple[str, ...]
    rows: list[Row]
    links: dict[bytes, bytes] = field(default_factory=dict)
    faults: dict[bytes, str] = field(default_factory=dict)
    attributes: dict[bytes, Xattrs] = field(default_factory=dict)
    digests: dict[bytes, bytes] = field(default_factory=dict)


def refuse(why: str) -> SandboxUnavailable:
    """Return the error for something that no helper sends."""
    return SandboxUnavailable(f"the sandbox sent no proper answer about its workspace: {why}")


def parse_listing(packed: bytes, most: int, entries: int, *, in_seconds: bool = False) -> Listing:
    """Return what `packed` lists: at most `most` bytes when unpacked, and at most `entries` paths. Raises SandboxUnavailable.

    `in_seconds`: times without a fraction are seconds, and not nanoseconds.
    """
    sections = _sections(_unpacked(packed, most))
    try:
        rows = _rows(sections["rows"], entries, in_seconds)
        return Listing(
            now=int(sections["now"][:20]),
            ignore=_ignore(sections["ignore"]),
            rows=rows,
            links={path: target[:_MAX_TARGET] for path, target in _pairs(sections["links"])},
            faults={path: _reason(text) for path, text in _pairs(sections["faults"])},
            attributes={path: parse_attributes(text) for path, text in _pairs(sections["attributes"])},
            digests={path: bytes.fromhex(digest.decode()) for digest, path in _DIGEST.findall(sections["digests"])},
        )
    except (ValueError, OverflowError) as error:
        raise refuse(str(error)[:200]) from error


def parse_attributes(text: bytes) -> Xattrs:
    """Return user attributes from name=value,... in hexadecimal. Raises ValueError."""
    pairs = [pair.decode("ascii").partition("=") for pair in text.split(b",")] if text else []
    found = sorted((bytes.fromhex(name), bytes.fromhex(value)) for name, _, value in pairs)
    return tuple((name, value) for name, value in found if name.startswith(b"user.") and 5 < len(name) <= 255)


def _nanoseconds(text: bytes, in_seconds: bool) -> int:
    whole, dot, fraction = text.partition(b".")
    if not dot:
        return kept_time(int(whole) * (10**9 if in_seconds else 1))
    parts = int(fraction.ljust(9, b"0"))
    return kept_time(int(whole) * 10**9 + (-parts if whole.startswith(b"-") else parts))


def unsqueezed(head: bytes) -> zlib._Decompress | None:
    """Return what unpacks a stream that begins with `head`, or None if it is not compressed."""
    return zlib.decompressobj(31) if head[:2] == b"\x1f\x8b" else None


def _unpacked(packed: bytes, most: int) -> bytes:
    unpacker = unsqueezed(packed)
    if unpacker is None:
        return packed
    try:
        data = unpacker.decompress(packed, most + 1)
    except zlib.error as error:
        raise refuse(f"a listing that cannot be unpacked: {error}") from error
    if len(data) > most or unpacker.unconsumed_tail:
        raise refuse(f"a listing of more than {most} bytes; leave directories out in .caissonignore, or remove them")
    return data


def _sections(data: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    at = 0
    for name in _SECTIONS:
        end = data.find(b"\n", at, at + 64)
        head = data[at:end].split(b" ") if end >= 0 else []
        if len(head) != 2 or head[0] != name.encode() or not head[1].isdigit():
            raise refuse(f"a listing without its section {name!r}")
        size = int(head[1])
        at = end + 1 + size
        if at > len(data):
            raise refuse(f"a listing that ends in its section {name!r}")
        found[name] = data[end + 1 : at]
    return found


def _rows(data: bytes, entries: int, in_seconds: bool) -> list[Row]:
    rows: list[Row] = []
    at = 0
    while at < len(data):
        match = _ROW.match(data, at)
        if match is None:
            raise ValueError(f"a row of the listing: {data[at : at + 100]!r}")
        path, mode, links, inode, size, mtime, ctime, device = match.groups()
        if (path is None) != (at == 0):
            raise ValueError("a listing that does not begin with the workspace")
        changed, modified = _nanoseconds(ctime, in_seconds), _nanoseconds(mtime, in_seconds)
        key = (changed, int(inode), int(size), modified, int(mode, 16), int(links))
        rows.append(Row(path or b"", key, int(device)))
        if len(rows) > entries:
            raise ValueError(f"more than {entries} files, directories and links; leave some out in .caissonignore")
        at = match.end()
    if not rows:
        raise ValueError("an empty listing")
    return rows


def good_path(path: bytes) -> bool:
    """Whether a path leads to a place below the workspace, and nowhere else."""
    return len(path) <= 1 << 16 and all(is_good_name(part) for part in path.split(b"/"))


def _pairs(data: bytes) -> list[tuple[bytes, bytes]]:
    fields = data.split(b"\0")
    return [(path[2:], value) for path, value in zip(fields[0:-1:2], fields[1:-1:2], strict=False)]


def _reason(text: bytes) -> str:
    return text[:_MAX_REASON].decode("utf-8", "replace")


def _ignore(text: bytes) -> tuple[str, ...]:
    """Return patterns as HostScanner reads them: none from a file that is too long."""
    if len(text) > MAX_IGNORE_BYTES:
        return ()
    return tuple(pattern_lines(os.fsdecode(text)))
