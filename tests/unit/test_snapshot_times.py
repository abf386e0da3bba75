"""Times of files that no tree can hold, and that no file system can: they become the nearest, and nothing fails for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from activities.workspace import restore
from activities.workspace.remote_listing import parse_listing
from activities.workspace.remote_tar import _header, _number
from activities.workspace.tree import FARTHEST_TIME, kept_time
from tests.sandbox.remote_support import forged
from tests.snapshot_support import Room, picture

SECOND = 10**9
YEAR = 31_556_952 * SECOND


def fill(root: Path, time: int) -> None:
    """Give a file, a link and a directory this time."""
    (root / "f").write_text("x")
    (root / "d").mkdir()
    (root / "l").symlink_to("f")
    for name in ("f", "d", "l", "."):
        os.utime(root / name, ns=(time, time), follow_symlinks=False)


@pytest.mark.parametrize("year", [-400, -295, -60, 150, 293, 330, 700])
@pytest.mark.parametrize("place", ["disk", "memory"])
async def test_any_time_is_stored_and_restored(tmp_path: Path, place: str, year: int) -> None:
    """On file systems that hold few years (ext4) and many (tmpfs): what is restored is what the next snapshot finds."""
    top = tmp_path if place == "disk" else Path("/dev/shm") / f"caisson-{os.getpid()}-{year}"
    room = Room(top)
    try:
        source = room.place()
        fill(source.workspace, year * YEAR)
        held = (source.workspace / "f").stat().st_mtime_ns
        ref = await room.save(source)
        assert await room.save_anew(source) == ref
        restored = await room.restore(ref)
        assert {what[2] for what in picture(restored.workspace).values()} == {kept_time(held)}
        assert await room.save(restored, ref) == ref
        assert (await room.save_anew(restored)).id == ref.id
    finally:
        restore.remove(top / "gone") if place == "disk" else restore.remove(top)


async def test_a_time_that_cannot_be_set_fails_no_restore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are there all the same, and the next snapshot says which times they have."""
    room = Room(tmp_path)
    source = room.place()
    fill(source.workspace, 5 * YEAR)
    ref = await room.save(source)

    def refused(*_: object, **__: object) -> None:
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", refused)
        restored = await room.restore(ref)
    assert (restored.workspace / "f").read_text() == "x"
    again = await room.save(restored, ref)
    assert again.id != ref.id
    assert await room.save(restored, again) == again


def test_times_of_a_listing_are_what_they_are() -> None:
    """Those of the helper in Python are nanoseconds, however few; those of the shell are seconds, however many."""
    for text, in_seconds, expected in (
        (b"900000000000", False, 900 * SECOND),
        (b"1", False, 1),
        (b"-1", False, -1),
        (b"9" * 28, False, FARTHEST_TIME),
        (b"-" + b"9" * 28, False, -FARTHEST_TIME),
        (b"900", True, 900 * SECOND),
        (b"9000000000000", True, FARTHEST_TIME),
        (b"10413792000.500000000", True, FARTHEST_TIME),
        (b"1.5", True, 3 * SECOND // 2),
        (b"-1.5", True, -3 * SECOND // 2),
        (b"-0.000000001", True, -1),
    ):
        row = b"./f//81a4 1 2 3 %s 1 1\n" % text
        assert parse_listing(forged(rows=row), 10_000, 10, in_seconds=in_seconds).rows[1].key[3] == expected, text


@pytest.mark.parametrize("time", [0, 1, -1, 5 * SECOND, -5 * SECOND, FARTHEST_TIME, -FARTHEST_TIME, -3 * SECOND // 2])
def test_a_tar_header_holds_any_time(time: int) -> None:
    """Before 1970 and after 2242 as well, with a fraction that tar reads as it was meant."""
    header = _header(b"./f", 0, 0o644, time)
    assert _number(header[-512:][136:148]) == time // SECOND
    if time % SECOND:
        fraction = header[512:1024].partition(b"mtime=")[2].partition(b"\n")[0]
        assert round(float(fraction) * SECOND) == time
