"""What a workspace holds comes back as it was: every kind of file, name, mode, time, link and attribute."""

from __future__ import annotations

import os
import random
import socket
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from activities.workspace.scan import MAX_DEPTH
from tests.snapshot_support import Room, picture

CASES = Path(__file__).parent
MIB = 1 << 20


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """A store and places of its own."""
    return Room(tmp_path)


async def round_trip(room: Room, build: object) -> tuple[Path, Path]:
    """Build a tree in one place, restore it in another, compare the two, and return both workspaces."""
    source = room.place()
    build(source.workspace)  # type: ignore[operator]
    before = picture(source.workspace)
    ref = await room.save(source)
    target = await room.restore(ref)
    assert picture(target.workspace) == before
    assert (await room.save_anew(target)).id == ref.id
    assert (await room.save(target, ref)) == ref
    return source.workspace, target.workspace


async def test_symlinks_survive_whatever_they_point_to(room: Room) -> None:
    """Absolute, dangling, to themselves and out of the workspace: a link is its text and its time."""

    def build(root: Path) -> None:
        for n, target in enumerate(["/usr/bin/python3", "nowhere", "../../outside", "self", "a" * 4000]):
            os.symlink(target, root / f"l{n}")
            os.utime(root / f"l{n}", ns=(1, 1_234_567_890_123_456_789 + n), follow_symlinks=False)

    await round_trip(room, build)


async def test_hard_links_are_one_file_again(room: Room) -> None:
    """Also across directories: an edit through one name shows in the others."""

    def build(root: Path) -> None:
        (root / "d").mkdir()
        (root / "b.txt").write_text("shared\n")
        os.link(root / "b.txt", root / "a.txt")
        os.link(root / "b.txt", root / "d" / "c.txt")

    _, target = await round_trip(room, build)
    with (target / "d" / "c.txt").open("a") as file:
        file.write("more\n")
    assert (target / "a.txt").read_text() == "shared\nmore\n"


async def test_hard_link_groups_that_change_between_snapshots(room: Room) -> None:
    """The first name goes, another comes, and a name becomes a file of its own; each snapshot has what there was."""
    source = room.place()
    root = source.workspace
    (root / "b").write_text("one")
    os.link(root / "b", root / "c")
    os.link(root / "b", root / "d")
    ref = await room.save(source)

    async def is_right() -> None:
        nonlocal ref
        ref = await room.save(source, ref)
        assert ref.id == (await room.save_anew(source)).id
        restored = await room.restore(ref)
        assert picture(restored.workspace) == picture(root)

    (root / "b").unlink()
    await is_right()
    os.link(root / "d", root / "a")
    await is_right()
    (root / "c").unlink()
    (root / "c").write_text("one")
    await is_right()
    (root / "a").unlink()
    os.link(root / "c", root / "a")
    await is_right()


@pytest.mark.parametrize("mode", [0o600, 0o755, 0o444, 0o000, 0o4755, 0o2755, 0o1777])
async def test_modes_survive_without_set_uid_and_its_kin(room: Room, mode: int) -> None:
    """Of files and of directories (MF13, gominimal/minimal#1302)."""
    source = room.place()
    (source.workspace / "f").write_text("x")
    (source.workspace / "d").mkdir()
    (source.workspace / "d" / "inside").write_text("x")
    for path in ("f", "d"):
        (source.workspace / path).chmod(mode)
    target = (await room.restore(await room.save(source))).workspace
    assert [stat.S_IMODE((target / path).stat().st_mode) for path in ("f", "d")] == [mode & 0o777] * 2
    assert (target / "d" / "inside").read_text() == "x"


async def test_times_survive_to_the_nanosecond(room: Room) -> None:
    """Of files, directories, links and the workspace itself; also before 1970 and far ahead."""

    def build(root: Path) -> None:
        (root / "d").mkdir()
        (root / "d" / "f").write_text("x")
        os.symlink("d", root / "l")
        os.utime(root / "d" / "f", ns=(0, -1_000_000_001))
        os.utime(root / "l", ns=(0, 4_000_000_000_000_000_007), follow_symlinks=False)
        os.utime(root / "d", ns=(0, 1_600_000_000_000_000_001))
        os.utime(root, ns=(0, 1_500_000_000_123_456_789))

    _, target = await round_trip(room, build)
    assert target.stat().st_mtime_ns == 1_500_000_000_123_456_789


async def test_names_are_bytes(room: Room) -> None:
    """Newlines, leading dashes, 255 bytes, emoji, combining marks and what is not UTF-8 at all."""
    names = [b"a\nb", b"-rf", b"n" * 255, "\U0001f600".encode(), "e\u0301".encode(), b"\xff\xfe", b" ", b"a\\b", b"\x01", b".git"]

    def build(root: Path) -> None:
        for name in names:
            (Path(os.fsdecode(os.fsencode(root) + b"/" + name))).mkdir()
            for inner in names:
                Path(os.fsdecode(os.fsencode(root) + b"/" + name + b"/" + inner)).write_bytes(inner)

    await round_trip(room, build)


async def test_small_files_with_holes_are_whole(room: Room) -> None:
    """Whatever lies before, between and behind the holes; looking for them moves a file's offset."""

    def build(root: Path) -> None:
        files = [(MIB, (0,)), (MIB, (500_000,)), (MIB, (0, MIB - 4)), (70_000, (0, 40_000)), (9000, ())]
        for n, (size, places) in enumerate(files):
            with (root / f"holes-{n}").open("wb") as file:
                file.truncate(size)
                for place in places:
                    file.seek(place)
                    file.write(b"data")

    await round_trip(room, build)


async def test_a_sparse_file_stays_sparse(room: Room) -> None:
    """MF16: 64 MiB with three small extents take little room in the store and on the disk, and are equal."""

    def build(root: Path) -> None:
        with (root / "sparse.bin").open("wb") as file:
            for offset, letter in ((0, b"A"), (32 * MIB, b"B"), (64 * MIB - 4096, b"C")):
                file.seek(offset)
                file.write(letter * 4096)
        with (root / "all hole").open("wb") as file:
            file.truncate(8 * MIB)

    _, target = await round_trip(room, build)
    assert (target / "sparse.bin").stat().st_blocks * 512 < MIB
    assert (target / "all hole").stat().st_blocks * 512 < MIB
    assert room.stored_bytes() < MIB


async def test_closed_directories_come_back_closed_and_full(room: Room) -> None:
    """A directory that nobody may write to keeps what it holds; one that only the owner may enter stays so."""

    def build(root: Path) -> None:
        (root / "ro" / "below").mkdir(parents=True)
        (root / "ro" / "below" / "f").write_text("x")
        (root / "own").mkdir()
        (root / "ro" / "below").chmod(0o555)
        (root / "ro").chmod(0o555)
        (root / "own").chmod(0o700)

    await round_trip(room, build)


async def test_user_attributes_survive(room: Room) -> None:
    """On files, directories and the workspace itself; what was there before a restore goes."""

    def build(root: Path) -> None:
        (root / "f").write_text("x")
        (root / "d").mkdir()
        for path in (root / "f", root / "d", root):
            os.setxattr(path, "user.tag", b"v\0\xff")
            os.setxattr(path, "user.a", b"")

    source, _ = await round_trip(room, build)
    other = room.place()
    os.setxattr(other.workspace, "user.old", b"1")
    place = room.place()
    (place.workspace / "f").write_text("y")
    await room.restore(await room.save(place), other)
    assert os.listxattr(other.workspace) == []
    assert os.getxattr(source, "user.tag") == b"v\0\xff"


async def test_empty_files_and_directories_and_large_files(room: Room) -> None:
    """MF14 (TanStack/ai#1108), and files on both sides of the size from which they are stored in pieces."""

    def build(root: Path) -> None:
        dice = random.Random(1)
        (root / "logs").mkdir()
        (root / "a" / "b" / "c").mkdir(parents=True)
        for n, size in enumerate([0, 1, MIB - 1, MIB, MIB + 1, 9 * MIB + 13]):
            (root / f"f{n}").write_bytes(dice.randbytes(size))
        (root / "zeros").write_bytes(bytes(3 * MIB))

    await round_trip(room, build)


async def test_the_same_content_is_stored_once(room: Room) -> None:
    """Twenty copies of one file, small and large, cost hardly more than one."""
    source = room.place()
    small, large = random.Random(2).randbytes(200_000), random.Random(3).randbytes(3 * MIB)
    for n in range(20):
        (source.workspace / f"small{n}").write_bytes(small)
        (source.workspace / f"large{n}").write_bytes(large)
    ref = await room.save(source)
    assert len(small) + len(large) < room.stored_bytes() < (len(small) + len(large)) * 1.05
    assert picture((await room.restore(ref)).workspace) == picture(source.workspace)


async def test_what_is_no_file_is_listed_and_left_out(room: Room) -> None:
    """SN06: a FIFO nobody writes to and a socket hold nothing up (1Panel-dev/1Panel#2702)."""
    source = room.place()
    (source.workspace / "keep.txt").write_text("keep\n")
    os.mkfifo(source.workspace / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(source.workspace / "sock"))
        started = time.monotonic()
        ref = await room.save(source)
    assert time.monotonic() - started < 10
    snapshot = await room.keeper.store.load(ref)
    assert [(path, reason) for path, reason in snapshot.skipped] == [(b"pipe", "a FIFO"), (b"sock", "a socket")]
    assert ref.skipped == 2
    assert os.listdir((await room.restore(ref)).workspace) == ["keep.txt"]


UNPRIVILEGED = """
import asyncio, os, sys, time
from pathlib import Path
from tests.snapshot_support import Room
os.setgroups([]); os.setgid(65534); os.setuid(65534)
async def main():
    room = Room(Path(sys.argv[1]))
    place = room.place()
    root = place.workspace
    (root / "keep.txt").write_text("keep")
    (root / "locked.bin").write_text("x")
    os.link(root / "locked.bin", root / "locked.too")
    (root / "closed").mkdir()
    (root / "closed" / "f").write_text("x")
    for name in ("locked.bin", "closed"):
        (root / name).chmod(0)
    time.sleep(0.05)  # so that nothing is looked at again for its time alone
    ref = await room.save(place)
    names = {path: reason for path, reason in (await room.keeper.store.load(ref)).skipped}
    assert set(names) == {b"locked.bin", b"locked.too", b"closed"}, names
    # Nothing moved, and they are still listed; also by one who looks for the first time.
    again = await room.save(place, ref)
    assert again == ref, (again, ref)
    assert (await room.save_anew(place)).skipped == 3
    other = await room.restore(ref)
    assert sorted(os.listdir(other.workspace)) == ["closed", "keep.txt"]
    # A directory that its own owner has closed can be replaced, twice.
    await room.restore(ref, place)
    await room.restore(ref, place)
    assert not (place.scratch / "replaced").exists()
    (root / "closed").chmod(0o700)
    (other.workspace / "closed").chmod(0o700)
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="starts as root to become nobody")
def test_files_that_may_not_be_read_are_listed_each_time(tmp_path: Path) -> None:
    """SN06 as an ordinary user: unreadable files, their links, and closed directories stop nothing and stay reported."""
    home = Path("/tmp") / f"caisson-unprivileged-{os.getpid()}"
    home.mkdir(mode=0o777)
    home.chmod(0o777)
    try:
        done = subprocess.run(
            [sys.executable, "-c", UNPRIVILEGED, str(home)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=Path.cwd(),
        )
        assert done.returncode == 0, done.stderr[-3000:]
    finally:
        subprocess.run(["rm", "-rf", str(home)], check=True)


async def test_trees_deeper_than_any_path_may_be(room: Room) -> None:
    """Names of 200 bytes, 60 deep, are 12,000 bytes of path; all of it is stored, restored, and can be replaced."""
    source = room.place()
    here = os.open(source.workspace, os.O_RDONLY)
    for level in range(60):
        name = f"{level:03}" + "x" * 197
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    fd = os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=here)
    os.write(fd, b"deep")
    os.close(fd)
    os.link("leaf", "second", src_dir_fd=here, dst_dir_fd=here)
    os.symlink("leaf", "link", dir_fd=here)
    os.close(here)
    ref = await room.save(source)
    target = await room.restore(ref)
    assert picture(target.workspace) == picture(source.workspace)
    assert (await room.save_anew(target)).id == ref.id
    await room.restore(ref, target)
    assert not (target.scratch / "replaced").exists()


async def test_levels_beyond_the_limit_are_listed_and_can_be_replaced(room: Room) -> None:
    """A tree of 3,000 levels, which sandboxed code makes in a moment, neither stops a snapshot nor a restore."""
    source = room.place()
    here = os.open(source.workspace, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    ref = await room.save(source)
    (skipped,) = (await room.keeper.store.load(ref)).skipped
    assert skipped == (b"/".join([b"d"] * MAX_DEPTH), f"deeper than {MAX_DEPTH} directories")
    started = time.monotonic()
    await room.restore(ref, source)
    assert time.monotonic() - started < 10
    assert not (source.scratch / "replaced").exists()


@pytest.mark.parametrize("case", ["modes", "empty", "links"])
async def test_what_a_tar_holds_survives(room: Room, tmp_path: Path, case: str) -> None:
    """MF13, MF14, MF17 in one: a tree as tar unpacks it (openai/codex#21819, anthropics/claude-code#60778)."""
    archive = tmp_path / "in.tar"
    with tarfile.open(archive, "w") as tar:
        for name, kind, mode in {
            "modes": [("bin/run.sh", "f", 0o755), ("key.pem", "f", 0o600), ("priv", "d", 0o700), ("priv/f", "f", 0o640)],
            "empty": [("logs", "d", 0o755), ("a/b/c", "d", 0o755)],
            "links": [("a.txt", "f", 0o644), ("b.txt", "a.txt", 0o644)],
        }[case]:
            member = tarfile.TarInfo(name)
            member.mode = mode
            member.type = {"f": tarfile.REGTYPE, "d": tarfile.DIRTYPE}.get(kind, tarfile.LNKTYPE)
            member.linkname = "" if kind in "fd" else kind
            tar.addfile(member)

    def build(root: Path) -> None:
        subprocess.run(["tar", "-xf", str(archive), "-C", str(root)], check=True)

    _, target = await round_trip(room, build)
    if case == "links":
        assert (target / "a.txt").stat().st_ino == (target / "b.txt").stat().st_ino
