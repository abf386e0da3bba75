"""The tree of a snapshot: directories, files, links, where their content is, and the bytes that all of it is stored as.

A tree is a Merkle tree. A directory's digest covers everything below it that a restore brings back, and nothing of where
the store keeps it; so equal workspaces have equal digests, and a directory that did not change is not written again.

Two encodings of a directory, both msgpack (https://github.com/msgpack/msgpack/blob/master/spec.md), entries in the order
of their names' bytes:

    logical   [[name, kind, mode, mtime, size, digest, target, xattrs], ...]            what the digest is taken of
    stored    [packs, [[name, kind, mode, mtime, size, digest, target, xattrs, where], ...]]

`packs` is a list of [digest, size], or [] for the pack that the directory itself lies in. `where` of a file in one piece is
[pack number, offset, stored size]; of a file in pieces a list of [digest, size, pack number, offset, stored size], or [size]
for a hole; of a directory [pack number, offset, stored size, size, SHA-256 of its stored form]. So every byte that is read back
is covered by a digest, up to that of the snapshot's record. Times are nanoseconds since 1970, in 64 bits with a sign.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from activities.store.port import ObjectDamaged

FILE: Final = 0
DIRECTORY: Final = 1
SYMLINK: Final = 2
HARD_LINK: Final = 3
"""Kinds of entries. A hard link is a further name of the file that `target` names, by its path from the root."""

NODE_MARK: Final = b"caisson-tree-1\n"
ROOT_MARK: Final = b"caisson-snapshot-1\n"
PERMISSIONS: Final = 0o777
"""The bits of a mode that are kept: set-uid and its kin have no place in a workspace."""
FARTHEST_TIME: Final = 9_223_372_036 * 10**9
"""The latest time that is kept, in April 2262, and as far before 1970 the earliest, in September 1677: what 64 bits hold, in
whole seconds, so that it stays the same where nothing below a second is kept."""

Xattrs = tuple[tuple[bytes, bytes], ...]


@dataclass(slots=True, eq=False)
class Pack:
    """A blob that holds frames. Digest and size are filled in when it is written; until then it is still being filled."""

    digest: bytes = b""
    size: int = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """Where some bytes are: `stored` bytes at `offset` of a pack. They are zstd-compressed if fewer than what they unpack to."""

    pack: Pack
    offset: int
    stored: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a file's content, or a hole of `size` zero bytes when there is no frame."""

    digest: bytes
    size: int
    frame: Frame | None


@dataclass(slots=True, eq=False)
class Entry:
    """A file, symlink or hard link. `digest` is the SHA-256 of a file's whole content, holes as zeros."""

    kind: int
    mode: int = 0
    mtime: int = 0
    size: int = 0
    digest: bytes = b""
    pieces: tuple[Piece, ...] = ()
    target: bytes = b""
    xattrs: Xattrs = ()


@dataclass(slots=True, eq=False)
class Directory:
    """A directory. `digest` and what follows are there once it is stored."""

    mode: int = 0o755
    mtime: int = 0
    xattrs: Xattrs = ()
    children: dict[bytes, Entry | Directory] = field(default_factory=dict)
    digest: bytes = b""
    frame: Frame | None = None
    node_size: int = 0
    node_sha: bytes = b""
    """SHA-256 of the stored form, by which it is checked when it is read."""
    before: Directory | None = None
    """What stood here in the snapshot before, while a new one is made: if it is the same after all, it is not stored again."""


def walk(root: Directory) -> Iterator[tuple[bytes, Entry | Directory]]:
    """Yield everything below `root` as (path, entry), each directory before what it holds, names in order."""
    waiting: list[tuple[bytes, Directory]] = [(b"", root)]
    while waiting:
        path, directory = waiting.pop()
        below: list[tuple[bytes, Directory]] = []
        for name, entry in sorted(directory.children.items()):
            full = path + b"/" + name if path else name
            yield full, entry
            if isinstance(entry, Directory):
                below.append((full, entry))
        waiting += reversed(below)


def find(root: Directory, path: bytes) -> Entry | Directory | None:
    """Return what stands at a path, no link followed, or None."""
    here: Entry | Directory = root
    for part in path.split(b"/") if path else ():
        found = here.children.get(part) if isinstance(here, Directory) else None
        if found is None:
            return None
        here = found
    return here


def kept_time(time: int) -> int:
    """Return the time that a tree keeps of a file's: any file can be given one that no tree can hold."""
    return max(-FARTHEST_TIME, min(time, FARTHEST_TIME))


def totals(root: Directory) -> tuple[int, int]:
    """Return how many regular files there are, and their bytes together."""
    files = [entry for _, entry in walk(root) if isinstance(entry, Entry) and entry.kind == FILE]
    return len(files), sum(entry.size for entry in files)


def node_digest(directory: Directory) -> bytes:
    """Return the digest of what a directory holds. Those of its own directories must be known."""
    return hashlib.sha256(
        NODE_MARK + msgspec.msgpack.encode([_logical(*item) for item in sorted(directory.children.items())])
    ).digest()


def snapshot_id(root: Directory) -> bytes:
    """Return the digest of a whole workspace, its root's own mode, time and attributes included."""
    own = [root.mode, root.mtime, [list(pair) for pair in root.xattrs], root.digest]
    return hashlib.sha256(ROOT_MARK + msgspec.msgpack.encode(own)).digest()


def _logical(name: bytes, entry: Entry | Directory) -> list[Any]:
    xattrs = [list(pair) for pair in entry.xattrs]
    if isinstance(entry, Directory):
        return [name, DIRECTORY, entry.mode, entry.mtime, 0, entry.digest, b"", xattrs]
    return [name, entry.kind, entry.mode, entry.mtime, entry.size, entry.digest, entry.target, xattrs]


class _PackTable:
    """Packs by number, in the order in which a node first names them."""

    def __init__(self, here: Pack) -> None:
        self._here = here
        self._numbers: dict[int, int] = {}
        self.rows: list[list[Any]] = []

    def place(self, frame: Frame) -> list[int]:
        number = self._numbers.get(id(frame.pack))
        if number is None:
            number = self._numbers[id(frame.pack)] = len(self.rows)
            self.rows.append([] if frame.pack is self._here else [frame.pack.digest, frame.pack.size])
        return [number, frame.offset, frame.stored]


def encode_node(directory: Directory, here: Pack) -> bytes:
    """Return the stored form of a directory that will lie in the pack `here`."""
    table = _PackTable(here)
    entries = [[*_logical(name, entry), _where(entry, table)] for name, entry in sorted(directory.children.items())]
    return msgspec.msgpack.encode([table.rows, entries])


def _where(entry: Entry | Directory, table: _PackTable) -> list[Any]:
    if isinstance(entry, Directory):
        if entry.frame is None:
            raise ValueError("a directory is encoded after those in it")
        return [*table.place(entry.frame), entry.node_size, entry.node_sha]
    if len(entry.pieces) == 1 and entry.pieces[0].frame is not None:
        return table.place(entry.pieces[0].frame)
    # A list of lists even when it is one hole, so that the two forms are told apart by their first item.
    return [
        [piece.size] if piece.frame is None else [piece.digest, piece.size, *table.place(piece.frame)] for piece in entry.pieces
    ]


def pack_of(digest: bytes, size: int) -> Pack:
    """Return a pack that is in the store. Raises ValueError for what names none."""
    if not isinstance(digest, bytes) or len(digest) != 32 or not isinstance(size, int) or size < 0:
        raise ValueError("a pack that no store has")
    return Pack(digest, size)


def decode_node(
    data: bytes | memoryview, here: Pack, packs: dict[bytes, Pack], expected: bytes
) -> dict[bytes, Entry | Directory]:
    """Return what a directory holds. Its own directories come without children. Raises ObjectDamaged.

    `packs` holds every pack seen so far by its digest, so that each is one object.
    """
    try:
        rows, entries = msgspec.msgpack.decode(data)
        table = [packs.setdefault(row[0], pack_of(*row)) if row else here for row in rows]
        children = {item[0]: _decoded(item, table) for item in entries}
        names_are_good = all(is_good_name(name) for name in children)
    except (ValueError, TypeError, IndexError, msgspec.MsgspecError) as error:
        raise ObjectDamaged(f"a directory of the snapshot cannot be read: {error}") from error
    if not names_are_good or node_digest(Directory(children=children)) != expected:
        raise ObjectDamaged(f"a directory of the snapshot is not the one named {expected.hex()}")
    return children


def is_good_name(name: bytes) -> bool:
    """Whether a name can be that of a file in a directory, and lead nowhere else."""
    return isinstance(name, bytes) and 0 < len(name) <= 255 and name not in (b".", b"..") and not {0, 47} & set(name)


def _decoded(item: list[Any], table: list[Pack]) -> Entry | Directory:
    _, kind, mode, mtime, size, digest, target, xattrs, where = item
    if (
        mode & ~PERMISSIONS
        or not -(1 << 63) <= mtime < 1 << 63
        or not 0 <= size < 1 << 63
        or not {type(digest), type(target)} == {bytes}
    ):
        raise ValueError("a mode, time, size, digest or target that no file has")
    pairs = tuple((name, value) for name, value in xattrs)
    if kind == DIRECTORY:
        number, offset, stored, node_size, sha = where
        return Directory(mode, mtime, pairs, {}, digest, Frame(table[number], offset, stored), node_size, sha)
    if kind not in (FILE, SYMLINK, HARD_LINK):
        raise ValueError(f"kind {kind!r}")
    return Entry(kind, mode, mtime, size, digest, _pieces(where, size, digest, table), target, pairs)


def _pieces(where: list[Any], size: int, digest: bytes, table: list[Pack]) -> tuple[Piece, ...]:
    if not where and not size:
        return ()
    if isinstance(where[0], int):
        number, offset, stored = where
        return (Piece(digest, size, Frame(table[number], offset, stored)),)
    pieces = tuple(
        Piece(b"", row[0], None) if len(row) == 1 else Piece(row[0], row[1], Frame(table[row[2]], row[3], row[4]))
        for row in where
    )
    if min(piece.size for piece in pieces) < 0 or sum(piece.size for piece in pieces) != size:
        raise ValueError("the pieces of a file are not its size")
    return pieces
