"""Changes that leave no trace because the clock has not moved on: kernels stamp files with the time of the last tick.

Newer kernels (6.13) stamp more finely, so a coarse one is put in front of the scanner here: every ctime is rounded down.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from activities.workspace import scan
from activities.workspace.host_files import coarse_now
from tests.snapshot_support import Place, Room

GRAIN = 150_000_000
ROUNDS = 4


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    """A store and places on a host whose clock ticks every 150 milliseconds."""
    exact = scan._key

    def key(status: os.stat_result) -> scan.Key:
        ctime, inode, size, mtime, mode, links = exact(status)
        # File systems give the number of a file that went to the next one, so a new link may well have the old one's.
        return ctime // GRAIN * GRAIN, 0 if stat.S_ISLNK(mode) else inode, size, mtime, mode, links

    monkeypatch.setattr(scan, "_key", key)
    monkeypatch.setattr(scan, "coarse_now", lambda: coarse_now() // GRAIN * GRAIN)
    monkeypatch.setattr(scan, "_TICK", 0.2)
    return Room(tmp_path)


def at_a_tick() -> None:
    """Return when the clock has just moved on."""
    before = time.time_ns() // GRAIN
    while time.time_ns() // GRAIN == before:
        time.sleep(0.0005)


def rewrite(path: Path, data: bytes) -> None:
    """Write a file in place, and give it the time back that it had."""
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


async def test_a_file_that_is_written_again_at_once(room: Room) -> None:
    """The same size, the same time, the same tick: still another snapshot."""
    place: Place = room.place()
    path = place.workspace / "f"
    path.write_bytes(b"0")
    ref = await room.save(place)
    for n in range(1, ROUNDS):
        at_a_tick()
        rewrite(path, b"a")
        ref = await room.save(place, ref)
        rewrite(path, b"%d" % n)
        ref = await room.save(place, ref)
        assert ref.id == (await room.save_anew(place)).id
        assert (await room.restore(ref)).workspace.joinpath("f").read_bytes() == b"%d" % n


async def test_a_file_that_is_written_right_after_a_restore(room: Room) -> None:
    """What the restore wrote is not mistaken for what came after it."""
    place = room.place()
    (place.workspace / "f").write_bytes(b"a")
    ref = await room.save(place)
    for n in range(ROUNDS):
        at_a_tick()
        await room.restore(ref, place)
        rewrite(place.workspace / "f", b"%d" % n)
        assert (await room.save(place, ref)).id == (await room.save_anew(place)).id


async def test_attributes_of_a_directory_that_change_at_once(room: Room) -> None:
    """A directory's own attributes show in nothing but its ctime."""
    place = room.place()
    (place.workspace / "d").mkdir()
    ref = await room.save(place)
    for n in range(ROUNDS):
        at_a_tick()
        os.setxattr(place.workspace / "d", "user.x", b"a")
        ref = await room.save(place, ref)
        os.setxattr(place.workspace / "d", "user.x", b"%d" % n)
        ref = await room.save(place, ref)
        assert ref.id == (await room.save_anew(place)).id


async def test_a_link_that_is_replaced_at_once(room: Room) -> None:
    """With the same inode, a text as long, and the same time."""
    place = room.place()
    path = place.workspace / "l"
    path.symlink_to("start")
    ref = await room.save(place)
    for n in range(ROUNDS):
        at_a_tick()
        for target in ("aaaaa", f"{n:05}"):
            path.unlink()
            path.symlink_to(target)
            os.utime(path, ns=(0, 1_000_000_000), follow_symlinks=False)
            os.utime(place.workspace, ns=(0, 1_000_000_000))
            ref = await room.save(place, ref)
        assert ref.id == (await room.save_anew(place)).id
