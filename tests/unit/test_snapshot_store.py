"""What snapshots cost, in the store and in memory, and what faults of the store do to them."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from activities.store.local import LocalStore
from activities.store.port import StoreError
from activities.threads import to_end
from contracts.snapshot import SnapshotRef
from tests.snapshot_support import Faults, FaultyStore, Picture, Room, picture

MIB = 1 << 20


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """A store and places of its own."""
    return Room(tmp_path)


# --- cost


async def test_a_change_in_a_large_file_costs_what_changed(room: Room) -> None:
    """64 MiB that cannot be compressed: appending or inserting 100 KB stores a few pieces, not the file."""
    source = room.place()
    path = source.workspace / "big"
    data = random.Random(1).randbytes(64 * MIB)
    path.write_bytes(data)
    ref = await room.save(source)
    for changed in (data + bytes(range(256)) * 400, data[: 20 * MIB] + random.Random(2).randbytes(100_000) + data[20 * MIB :]):
        before = room.stored_bytes()
        path.write_bytes(changed)
        ref = await room.save(source, ref)
        assert room.stored_bytes() - before < 9 * MIB
        restored = await room.restore(ref)
        assert (restored.workspace / "big").read_bytes() == changed


async def test_an_unchanged_workspace_writes_nothing(room: Room) -> None:
    """Not even a record, and the reference is the same; also right after a restore, and for another worker."""
    source = room.place()
    for n in range(50):
        (source.workspace / f"f{n}").write_bytes(os.urandom(100))
    ref = await room.save(source)
    before = room.stored_bytes()
    assert await room.save(source, ref) == ref
    assert await room.save(await room.restore(ref), ref) == ref
    assert (await room.save(source, ref)) == ref
    assert room.stored_bytes() == before
    other = Room(room.root, room.objects)
    assert await other.save(source, ref) == ref
    assert room.stored_bytes() - before < 6_000, "another worker does not know where the content is, and stores it once more"


async def test_renaming_a_directory_stores_names_only(room: Room) -> None:
    """No content is stored again, however much moved."""
    source = room.place()
    (source.workspace / "old").mkdir()
    for n in range(200):
        (source.workspace / "old" / f"f{n}").write_bytes(os.urandom(10_000))
    ref = await room.save(source)
    before = room.stored_bytes()
    (source.workspace / "old").rename(source.workspace / "new")
    ref = await room.save(source, ref)
    assert room.stored_bytes() - before < 40_000
    assert picture((await room.restore(ref)).workspace) == picture(source.workspace)


# --- what is left out


async def test_what_is_left_out_is_not_stored_and_does_not_count(room: Room) -> None:
    """The workspace's own patterns and those given, both kept in the record; changes in what they match change nothing."""
    source = room.place()
    root = source.workspace
    (root / ".caissonignore").write_text("# caches\nnode_modules/\n*.tmp\n!keep.tmp\n/only-here\n")
    for path in ("node_modules/x", "sub/node_modules/y", "a.tmp", "keep.tmp", "only-here", "sub/only-here", "secret/z", "kept"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)
    ref = await room.save(source, None, "secret/")
    restored = await room.restore(ref)
    files = sorted(path.relative_to(restored.workspace).as_posix() for path in restored.workspace.rglob("*") if path.is_file())
    assert files == [".caissonignore", "keep.tmp", "kept", "sub/only-here"]
    assert (await room.keeper.store.load(ref)).excludes == ("secret/", "node_modules/", "*.tmp", "!keep.tmp", "/only-here")
    (root / "node_modules" / "x").write_text("changed")
    (root / "secret" / "new").write_text("more")
    assert await room.save(source, ref, "secret/") == ref
    (root / "node_modules" / "x").unlink()
    (root / "node_modules").joinpath("x").mkdir()
    assert await room.save(source, ref, "secret/") == ref


async def test_a_pattern_for_directories_does_not_match_a_file_that_takes_its_place(room: Room) -> None:
    """What was left out as a directory is stored once it is a file."""
    source = room.place()
    (source.workspace / ".caissonignore").write_text("build/\n")
    (source.workspace / "build").mkdir()
    ref = await room.save(source)
    (source.workspace / "build").rmdir()
    (source.workspace / "build").write_text("a file")
    ref = await room.save(source, ref)
    assert (await room.restore(ref)).workspace.joinpath("build").read_text() == "a file"


async def test_patterns_behind_a_byte_order_mark_count_too(room: Room) -> None:
    """As editors of Windows write it."""
    source = room.place()
    (source.workspace / ".caissonignore").write_bytes(b"\xef\xbb\xbfbuild/\r\nother/\r\n")
    (source.workspace / "build").mkdir()
    assert not (await room.restore(await room.save(source))).workspace.joinpath("build").exists()


@pytest.mark.parametrize("kind", ["a link", "a directory", "of more than 65536 bytes"])
async def test_patterns_that_are_not_followed_are_told(room: Room, kind: str) -> None:
    """Somebody counts on them, and would find everything stored."""
    source = room.place()
    file = source.workspace / ".caissonignore"
    if kind == "a link":
        file.symlink_to("patterns")
    elif kind == "a directory":
        file.mkdir()
    else:
        file.write_bytes(b"build/\n" * 10_000)
    ref = await room.save(source)
    why = f"its patterns are not followed: it is {kind}, and not a file of at most 64 KiB"
    assert (await room.keeper.store.load(ref)).skipped == ((b".caissonignore", why),)
    assert await room.save(source, ref) == ref


@pytest.mark.parametrize(
    "text", [b"!\n\\\n[z-a]\n[\n", b"\xff\xfe*\n", b"*a" * 2000 + b"*b\n", b"**/a/" * 2000 + b"b\n", bytes(200_000)]
)
async def test_hostile_patterns_cost_no_time_and_stop_nothing(room: Room, text: bytes) -> None:
    """Lines that are no patterns, that are no text, or that a regular expression would take years to match."""
    source = room.place()
    (source.workspace / ".caissonignore").write_bytes(text)
    folder = source.workspace / "/".join(["a" * 200] * 15)
    folder.mkdir(parents=True)
    (folder / ("a" * 255)).write_text("x")
    started = time.monotonic()
    ref = await room.save(source)
    assert time.monotonic() - started < 5
    assert picture((await room.restore(ref)).workspace) == picture(source.workspace)


# --- faults of the store


@pytest.mark.parametrize("rounds", [250, pytest.param(1000, marks=pytest.mark.soak)])
async def test_rounds_with_a_store_that_fails(tmp_path: Path, rounds: int) -> None:
    """Saved or restored whatever the store does: the right tree or a StoreError, and what was saved before stays."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        await _rounds(FaultyStore(LocalStore(Path(memory)), random.Random(7)), tmp_path, rounds)


async def _rounds(store: FaultyStore, root: Path, rounds: int) -> None:
    room, dice = Room(root, store), store.dice
    source, target = room.place(), room.place()
    ref: SnapshotRef | None = None
    pictures: dict[SnapshotRef, Picture] = {}
    seen: set[str] = set()
    for number in range(rounds):
        if number % 100 == 99:
            room = Room(root / f"worker-{number}", store)  # a worker that remembers nothing
        _edit(source.workspace, dice)
        now = picture(source.workspace)
        store.faults = Faults.random(dice)
        try:
            ref = await _maybe_cancelled(room.save(source, ref), dice)
            pictures[ref] = now
        except (StoreError, asyncio.CancelledError):
            pass
        wanted = dice.choice(list(pictures)) if pictures else None
        if wanted is not None:
            before = picture(target.workspace)
            try:
                await _maybe_cancelled(room.restore(wanted, target), dice)
                assert picture(target.workspace) == pictures[wanted]
            except StoreError:
                assert picture(target.workspace) == before
            except asyncio.CancelledError:
                assert picture(target.workspace) in (before, pictures[wanted])
        seen |= {line.split()[0] for line in store.faults.log}
        store.faults = Faults()
        if number % 50 == 49:
            for old in dice.sample(list(pictures), min(5, len(pictures))):
                await room.restore(old, target)
                assert picture(target.workspace) == pictures[old]
    assert seen == {"error", "torn", "slow", "flip", "missing", "range"}
    assert len(pictures) > rounds // 10


async def _maybe_cancelled(work: Any, dice: random.Random) -> Any:
    task = asyncio.ensure_future(work)
    if dice.random() < 0.1:
        await asyncio.sleep(dice.random() * 0.01)
        task.cancel()
    return await task


def _edit(root: Path, dice: random.Random) -> None:
    for _ in range(dice.randint(1, 4)):
        path = root / f"d{dice.randrange(3)}" / f"f{dice.randrange(6)}"
        path.parent.mkdir(exist_ok=True)
        if dice.random() < 0.2 and path.exists():
            path.unlink()
        else:
            path.write_bytes(dice.randbytes(dice.choice([0, 10, 1000, 30_000])))


async def test_damage_names_the_blob_and_changes_nothing(room: Room) -> None:
    """Every blob of a snapshot, cut short, with one bit changed, or gone: the error has its digest, the workspace stays."""
    source = room.place()
    (source.workspace / "d").mkdir()
    for n in range(3):
        (source.workspace / "d" / f"f{n}").write_bytes(os.urandom(5000))
    ref = await room.save(source)
    target = room.place()
    (target.workspace / "old.txt").write_text("old")
    before = picture(target.workspace)
    blobs = [path for path in (room.root / "store").rglob("*") if path.is_file()]
    assert len(blobs) == 2
    for blob in blobs:
        whole = blob.read_bytes()
        for damaged in (whole[: len(whole) * 6 // 10], whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], None):
            blob.unlink() if damaged is None else blob.write_bytes(damaged)
            with pytest.raises(StoreError, match=blob.name):
                await room.restore(ref, target)
            assert picture(target.workspace) == before
            assert not (target.scratch / "restored").exists()
            blob.write_bytes(whole)
    await room.restore(ref, target)
    assert picture(target.workspace) == picture(source.workspace)


async def test_of_much_damage_the_first_is_told(room: Room) -> None:
    """What fails beside it, in other threads, leaves no complaint that nobody asked for it."""
    source = room.place()
    for n in range(60):
        (source.workspace / f"f{n}").write_bytes(random.Random(n).randbytes(400_000))
    ref = await room.save(source)
    for blob in [path for path in (room.root / "store").rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]:
        data = bytearray(blob.read_bytes())
        for at in range(0, len(data) - 400_000, 50_000):
            data[at] ^= 1
        blob.write_bytes(data)
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    for _ in range(5):
        with pytest.raises(StoreError):
            await room.restore(ref)
    gc.collect()
    assert complaints == []


async def test_a_damaged_blob_of_the_right_size_is_written_again(room: Room) -> None:
    """A later snapshot of the same content does not lean on what an earlier writer left behind damaged."""
    source = room.place()
    (source.workspace / "f").write_bytes(os.urandom(5000))
    ref = await room.save(source)
    for blob in (path for path in (room.root / "store").rglob("*") if path.is_file()):
        data = blob.read_bytes()
        blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert await room.save_anew(source) == ref
    assert picture((await room.restore(ref)).workspace) == picture(source.workspace)


async def test_a_torn_object_never_becomes_the_last_snapshot(tmp_path: Path) -> None:
    """SN02 (assembledhq/143#657): the upload of the second breaks half way; the first restores, and a second try is whole."""
    store = FaultyStore(LocalStore(tmp_path / "store"), random.Random(1))
    room = Room(tmp_path, store)
    source = room.place()
    (source.workspace / "f").write_bytes(os.urandom(100_000))
    good = await room.save(source)
    first = picture(source.workspace)
    (source.workspace / "g").write_bytes(os.urandom(100_000))
    store.faults = Faults(torn_put=1)
    with pytest.raises(StoreError):
        await room.save(source, good)
    store.faults = Faults()
    assert picture((await room.restore(good)).workspace) == first
    later = await room.save(source, good)
    assert picture((await room.restore(later)).workspace) == picture(source.workspace)


async def test_a_restore_that_fails_half_way_leaves_the_workspace(tmp_path: Path) -> None:
    """SN01 (NVIDIA/NemoClaw#1902): both files still there; the second try works, and keeps what is newer where that is asked."""
    store = FaultyStore(LocalStore(tmp_path / "store"), random.Random(1))
    room = Room(tmp_path, store)
    place = room.place()
    (place.workspace / "old.txt").write_text("old")
    for n in range(4):
        (place.workspace / f"big{n}").write_bytes(os.urandom(5 * MIB))
    ref = await room.save(place)
    (place.workspace / "new.txt").write_text("new")
    (place.workspace / "old.txt").write_text("changed")
    before = picture(place.workspace)
    store.faults = Faults(range_error=0.4)
    with pytest.raises(StoreError):
        while True:
            await room.restore(ref, room.place())
    store.faults = Faults(range_error=0.4)
    store.dice.seed(3)
    with pytest.raises(StoreError):
        await room.restore(ref, place)
    assert picture(place.workspace) == before
    store.faults = Faults()
    await room.restore(ref, place, keep=True)
    assert ((place.workspace / "old.txt").read_text(), (place.workspace / "new.txt").read_text()) == ("old", "new")
    await room.restore(ref, place)
    assert not (place.workspace / "new.txt").exists()


# --- memory

MEMORY = """
import asyncio, os, random, sys
from pathlib import Path
from activities.store.port import StoreUnavailable
from tests.snapshot_support import Room
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) >> 10
async def main():
    room = Room(Path(sys.argv[1]))
    place = room.place()
    (place.workspace / "early").write_text("early")
    first = await room.save(place)
    dice = random.Random(1)
    with (place.workspace / "big").open("wb") as file:
        for _ in range(250):
            file.write(dice.randbytes(1 << 20))
    for n in range(3000):
        folder = place.workspace / f"d{n % 50}"
        folder.mkdir(exist_ok=True)
        (folder / str(n)).write_bytes(dice.randbytes(50_000))
    # The store fails at the end of the first try (SN10).
    put = room.objects.put
    puts = 0
    async def failing(key, data, **rest):
        nonlocal puts
        puts += 1
        if puts == 40:
            raise StoreUnavailable("the last part failed")
        await put(key, data, **rest)
    room.objects.put = failing
    try:
        await room.save(place, first)
        raise SystemExit("it was to fail")
    except StoreUnavailable:
        pass
    del room.objects.put
    early = await room.restore(first)
    assert (early.workspace / "early").read_text() == "early"
    ref = await room.save(place, first)
    saved = peak()
    target = await room.restore(ref)
    print(saved, peak())
asyncio.run(main())
"""


def test_memory_does_not_follow_the_workspace(tmp_path: Path) -> None:
    """SN10 (yc-software/qm#1323): 400 MB, an upload that fails, a second one and a restore stay below 256 MB in all."""
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    saved, restored = map(int, done.stdout.split())
    shutil.rmtree(tmp_path)
    assert max(saved, restored) < 256, done.stdout


async def test_a_cancelled_caller_waits_for_its_thread() -> None:
    """What works on open files in a thread has ended before they are closed, however often it is asked to stop."""
    ended = threading.Event()

    def work() -> None:
        time.sleep(0.2)
        ended.set()

    task = asyncio.ensure_future(to_end(work))
    for _ in range(3):
        await asyncio.sleep(0.02)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
