"""Workspaces that change while they are scanned to have the host's files stored, and records that lie."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from activities.store.port import ObjectDamaged
from activities.workspace.tree import Directory, Entry, Frame, Pack, Piece, encode_node, node_digest, snapshot_id
from contracts.blob import BlobRef
from contracts.snapshot import SnapshotRef
from tests.snapshot_support import Place, Room, picture

MIB = 1 << 20


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """A store and places of its own."""
    return Room(tmp_path)


# --- hostile workspaces


async def test_nothing_of_the_host_is_stored_while_links_are_swapped_in(room: Room, tmp_path: Path) -> None:
    """A file and a directory that become links to the host's, and back, thousands of times while it is scanned."""
    secret = tmp_path / "host"
    secret.mkdir()
    marker = b"the host's own " + os.urandom(8).hex().encode()
    (secret / "f").write_bytes(marker * 20)
    source = room.place()
    root = source.workspace
    for name in ("file", "folder"):
        (root / f"{name}.link").symlink_to(secret / "f" if name == "file" else secret)
    (root / "file").write_bytes(b"mine")
    (root / "folder").mkdir()
    for n in range(30):
        (root / "folder" / f"x{n}").write_bytes(b"mine")
    (root / "folder" / "f").write_bytes(b"mine")
    done = threading.Event()

    def swap() -> None:
        while not done.is_set():
            for name in ("file", "folder"):
                os.rename(root / name, root / f"{name}.away")
                os.rename(root / f"{name}.link", root / name)
                os.rename(root / name, root / f"{name}.link")
                os.rename(root / f"{name}.away", root / name)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        refs, ref = [], None
        until = time.monotonic() + 4
        while time.monotonic() < until:
            refs.append(ref := await room.save(source, ref))
            refs.append(await room.save_anew(source))
    finally:
        done.set()
        thread.join()
    assert len(refs) > 20
    for blob in (room.root / "store").rglob("*"):
        if blob.is_file():
            assert marker not in blob.read_bytes()
    for ref in dict.fromkeys(refs):
        restored = await room.restore(ref)
        for path in restored.workspace.rglob("*"):
            if path.is_file() and not path.is_symlink() and not any(parent.is_symlink() for parent in path.parents):
                assert path.read_bytes() == b"mine"


async def test_links_to_a_file_that_goes_while_it_is_read_are_kept(room: Room) -> None:
    """The first name of a file is replaced again and again by another file: its other names never lose their content."""
    source = room.place()
    root = source.workspace
    (root / "z").write_bytes(b"linked")
    (root / "zz").write_bytes(b"linked")
    (root / "zz").unlink()
    os.link(root / "z", root / "zz")
    done = threading.Event()

    def relink() -> None:
        n = 0
        while not done.is_set():
            n += 1
            os.link(root / "z", root / "a")
            (root / "tmp").write_bytes(b"%09d" % n)
            os.rename(root / "tmp", root / "a")
            os.unlink(root / "a")

    thread = threading.Thread(target=relink)
    thread.start()
    try:
        ref, refs = None, set()
        until = time.monotonic() + 3
        while time.monotonic() < until:
            refs.add(ref := await room.save(source, ref))
            refs.add(await room.save_anew(source))
    finally:
        done.set()
        thread.join()
    assert len(refs) > 5
    for ref in refs:
        restored = (await room.restore(ref)).workspace
        assert ((restored / "z").read_bytes(), (restored / "zz").read_bytes()) == (b"linked", b"linked")


# --- hostile records


class Forger:
    """Makes snapshots that are consistent in themselves, and lie."""

    def __init__(self, room: Room) -> None:
        self.room = room

    async def snapshot(
        self,
        children: dict[bytes, Entry | Directory],
        content: bytes = b"",
        lie: Callable[[list[Any]], None] = lambda record: None,
    ) -> SnapshotRef:
        """Store a root that holds `children`, whose frames may refer to `content`, the first bytes of the pack."""
        blobs = self.room.keeper.store.blobs
        here = Pack()
        root = Directory(children=children)
        root.digest = node_digest(root)
        node = encode_node(root, here)
        pack = content + node
        here.digest, here.size = hashlib.sha256(pack).digest(), len(pack)
        await blobs.put(pack)
        record: list[Any] = [1, root.mode, root.mtime, [], root.digest, [here.digest, here.size]]
        record += [[len(content), len(node), len(node), hashlib.sha256(node).digest()], [], []]
        lie(record)
        files = [entry for entry in children.values() if isinstance(entry, Entry) and entry.kind == 0]
        return SnapshotRef(
            id=snapshot_id(root).hex(),
            record=await blobs.put(msgspec.msgpack.encode(record)),
            files=len(files),
            total_bytes=sum(entry.size for entry in files),
        )


def _file(content: bytes, size: int | None = None, stored: int | None = None, pack: Pack | None = None, **rest: Any) -> Entry:
    """An entry whose content lies in another pack."""
    digest = hashlib.sha256(content).digest()
    size = len(content) if size is None else size
    frame = Frame(pack or Pack(digest, len(content)), 0, len(content) if stored is None else stored)
    return Entry(0, **{"mode": 0o644, "size": size, "digest": digest, "pieces": (Piece(digest, size, frame),), **rest})


def _claiming(size: int) -> bytes:
    """A zstd frame whose header says that it unpacks to `size` bytes."""
    return bytes.fromhex("28b52ffd") + b"\xe0" + size.to_bytes(8, "little") + b"\x01\x00\x00"


@pytest.mark.parametrize(
    "children",
    [
        {b"../evil": _file(b"x")},
        {b"..": _file(b"x")},
        {b".": _file(b"x")},
        {b"a/b": _file(b"x")},
        {b"/tmp/evil": _file(b"x")},
        {b"a\0b": _file(b"x")},
        {b"": _file(b"x")},
        {b"n" * 256: _file(b"x")},
        {b"link": Entry(3, target=b"../../outside")},
        {b"link": Entry(3, target=b"/etc/passwd")},
        {b"link": Entry(3, target=b"sym/passwd"), b"sym": Entry(2, 0o777, target=b"/etc")},
        {b"link": Entry(3, target=b"other"), b"other": Entry(3, target=b"link")},
        {b"f": _file(b"x", mode=0o4755)},
        {b"f": _file(b"x", mtime=1 << 63)},
        {b"f": _file(b"xyz", size=2)},
        {b"f": _file(b"xyz", size=4)},
        {b"f": _file(b"xyz", size=1 << 50)},
        {b"f": _file(b"xyz", stored=1 << 40, size=1 << 40)},
        {b"f": _file(_claiming(1 << 40), size=1 << 40)},
        {b"f": _file(_claiming(1 << 29), size=1 << 29)},
        {b"f": _file(_claiming(1000), size=1000)},
        {b"f": Entry(0, 0o644, 0, 9, b"", (Piece(b"", 4, None),))},
        {b"f": Entry(0, 0o644, 0, 3, b"", (Piece(b"", 4, None), Piece(b"", -1, None)))},
        {b"f": Entry(7, 0o644)},
    ],
)
async def test_a_record_that_lies_restores_nothing(room: Room, children: dict[bytes, Entry | Directory]) -> None:
    """Names that lead elsewhere, links to the outside, and sizes that are not true, in a snapshot whose digests all fit."""
    for content in (b"x", b"xyz", _claiming(1 << 40), _claiming(1 << 29), _claiming(1000)):
        await room.keeper.store.blobs.put(content)
    target = room.place()
    (target.workspace / "old").write_text("old")
    before = picture(target.workspace)
    ref = await Forger(room).snapshot(children)
    around = {path for path in room.root.rglob("*") if "store" not in path.parts}
    with pytest.raises(ObjectDamaged):
        await room.restore(ref, target)
    assert picture(target.workspace) == before
    assert {path for path in room.root.rglob("*") if "store" not in path.parts} <= {*around, target.scratch}


async def test_an_honest_forgery_restores(room: Room) -> None:
    """What the refusals above are made of is a snapshot as any other when it does not lie."""
    await room.keeper.store.blobs.put(b"xyz")
    ref = await Forger(room).snapshot({b"f": _file(b"xyz"), b"l": Entry(3, target=b"f"), b"s": Entry(2, 0o777, target=b"/etc")})
    assert (await room.restore(ref)).workspace.joinpath("l").read_bytes() == b"xyz"


@pytest.mark.parametrize(
    "lie",
    [
        lambda record: record.__setitem__(0, 2),
        lambda record: record.__setitem__(1, 0o700),
        lambda record: record.__setitem__(4, b"\0" * 32),
        lambda record: record.__setitem__(5, [b"short", 1]),
        lambda record: record[6].__setitem__(0, 1 << 50),
        lambda record: record[6].__setitem__(2, 1 << 50),
        lambda record: record[6].__setitem__(3, b"\0" * 32),
        lambda record: record.pop(),
    ],
)
async def test_a_record_that_is_wrong_itself_is_refused(room: Room, lie: Callable[[list[Any]], None]) -> None:
    """Of another format, of another tree, or pointing to where the root is not."""
    await room.keeper.store.blobs.put(b"xyz")
    ref = await Forger(room).snapshot({b"f": _file(b"xyz")}, lie=lie)
    with pytest.raises(ObjectDamaged):
        await room.keeper.store.load(ref)


async def test_directories_that_hold_each_other_many_times_are_refused(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes that would unfold to a hundred million directories."""
    monkeypatch.setattr("activities.workspace.snapshots.MAX_DIRECTORIES", 20_000)
    blobs = room.keeper.store.blobs
    below = Directory(children={})
    packs = []
    for _ in range(5):
        here = Pack()
        below.digest = node_digest(below)
        node = encode_node(below, here)
        here.digest, here.size = hashlib.sha256(node).digest(), len(node)
        packs.append(here)
        await blobs.put(node)
        below.frame, below.node_size, below.node_sha = Frame(here, 0, len(node)), len(node), here.digest
        below = Directory(children={b"%d" % n: below for n in range(100)})
    with pytest.raises(ObjectDamaged, match="more than"):
        await room.keeper.store.load(await Forger(room).snapshot(dict(below.children)))


async def test_a_reference_to_another_tree_is_refused(room: Room) -> None:
    """The id, the number of files and the bytes in a reference are checked against the record."""
    source: Place = room.place()
    (source.workspace / "f").write_text("x")
    ref = await room.save(source)
    for lie in ({"id": "0" * 64}, {"files": 2}, {"total_bytes": 5}):
        with pytest.raises(ObjectDamaged):
            await room.keeper.store.load(ref.model_copy(update=lie))
    with pytest.raises(ObjectDamaged):
        await room.keeper.store.load(ref.model_copy(update={"record": BlobRef(digest=ref.record.digest, size=1)}))
