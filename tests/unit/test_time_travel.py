"""Reading snapshots without a sandbox: one file's content, texts compared, and a workspace written to a directory."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.store.port import ObjectDamaged, StoreError
from activities.workspace import restore
from activities.workspace.read import TreeReader, read_file
from activities.workspace.tree import Directory, Entry
from client.changes import tell_all
from client.checkout import check_out
from client.moments import Moment, stands_at
from client.textdiff import is_binary, unified
from client.trees import compare
from contracts.base import BadInput
from contracts.snapshot import SnapshotRef
from tests.snapshot_support import Place, Room, picture

_TEXT = st.lists(st.sampled_from(["a", "b", "c", "", "\r", "\x0c", "\u2028", "@@ -1 +1 @@", "--- x", "+++ y"]), max_size=24).map(
    lambda lines: "\n".join(lines).encode()
)


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path / "room")


def applied(before: bytes, diff: list[str]) -> bytes:
    """Apply a unified diff, as POSIX describes it; anything that does not fit fails."""
    old = before.decode().split("\n")
    old = [line + "\n" for line in old[:-1]] + ([old[-1]] if old[-1] else [])
    new: list[str] = []
    at, last = 0, ""
    for line in diff:
        if found := re.match(r"@@ -(\d+)(?:,(\d+))? \+", line):
            start = int(found[1]) - (found[2] != "0")
            new, at = new + old[at:start], start
        elif line.startswith("\\"):
            new[-1:] = [new[-1].removesuffix("\n")] if new and last == "+" else new[-1:]
        else:
            last, body = line[0], line[1:]
            if last in " -":
                assert old[at].removesuffix("\n") == body.removesuffix("\n")
                new, at = new + ([old[at]] if last == " " else []), at + 1
            else:
                new.append(body)
    return "".join(new + old[at:]).encode()


@given(_TEXT, _TEXT)
def test_a_diff_turns_one_text_into_the_other(before: bytes, after: bytes) -> None:
    """With or without a last newline, with line ends that are none, and lines that look like a diff's own."""
    diff = list(unified(before, after))
    assert applied(before, diff) == after
    assert (diff == []) == (before == after)
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in diff)


def test_a_diff_shows_the_lines_around_a_change_and_where_they_are() -> None:
    """The equal beginning and end of a text are left out, but counted."""
    lines = [b"%d" % number for number in range(1, 101)]
    before = b"\n".join(lines) + b"\n"
    diff = list(unified(before, before.replace(b"\n50\n", b"\nfifty\n")))
    assert diff == ["@@ -47,7 +47,7 @@\n", " 47\n", " 48\n", " 49\n", "-50\n", "+fifty\n", " 51\n", " 52\n", " 53\n"]


def test_texts_made_to_be_slow_are_compared_in_time() -> None:
    """Twenty thousand lines, no two alike and in another order: the diff is longer than it need be, but there at once."""
    before = b"".join(b"%d\n" % number for number in range(20_000))
    after = b"".join(b"%d\n" % (number * 7919 % 20_000) for number in range(20_000))
    began = time.perf_counter()
    assert applied(before, list(unified(before, after))) == after
    assert time.perf_counter() - began < 10


def test_what_holds_a_nul_is_binary() -> None:
    """As git has it; Latin-1 is text, with its bytes shown."""
    assert is_binary(b"a\0b")
    assert not is_binary("ü".encode("latin-1"))
    assert list(unified(b"", b"\xfc")) == ["@@ -0,0 +1 @@\n", "+\\xfc\n", "\\ No newline at end of file\n"]


async def saved(room: Room, place: Place) -> tuple[TreeReader, SnapshotRef]:
    return TreeReader(room.keeper.store.blobs), await room.save(place)


async def content(reader: TreeReader, root: Directory, path: bytes) -> bytes:
    found = await reader.find(root, path)
    assert isinstance(found, Entry)
    return b"".join([chunk async for chunk in read_file(reader.blobs, found)])


async def test_a_file_of_any_shape_is_read_as_it_was(room: Room) -> None:
    """Empty, small, in many pieces, repeated, and with holes, in order and whole."""
    place = room.place()
    big = os.urandom(11 << 20)
    whole = {"empty": b"", "small": b"x\n", "big": big, "twice": big[: 5 << 20] * 3}
    for name, data in whole.items():
        (place.workspace / name).write_bytes(data)
    with (place.workspace / "holes").open("wb") as file:
        file.truncate(3 << 20)
        file.seek(2 << 20)
        file.write(b"middle")
    whole["holes"] = (place.workspace / "holes").read_bytes()
    reader, ref = await saved(room, place)
    root = (await reader.open(ref)).root
    for name, data in whole.items():
        assert await content(reader, root, name.encode()) == data, name


async def test_only_the_way_to_a_file_is_read(room: Room) -> None:
    """Of a workspace of many directories, one for each part of the path."""
    place = room.place()
    for number in range(50):
        (place.workspace / f"d{number}/e").mkdir(parents=True)
        (place.workspace / f"d{number}/e/f").write_text(str(number))
    reader, ref = await saved(room, place)
    snapshot = await reader.open(ref)
    assert await content(reader, snapshot.root, b"d7/e/f") == b"7"
    assert reader.directories == 3


async def test_a_damaged_file_is_never_read_to_its_end(room: Room) -> None:
    """Bytes that are not those that were named are an error, not content."""
    place = room.place()
    (place.workspace / "f").write_bytes(os.urandom(1 << 20))
    reader, ref = await saved(room, place)
    found = await reader.find((await reader.open(ref)).root, b"f")
    assert isinstance(found, Entry)
    frame = found.pieces[0].frame
    assert frame is not None
    damage(room, frame.pack.digest, frame.offset)
    with pytest.raises(ObjectDamaged, match="restore it from a copy"):
        _ = [chunk async for chunk in read_file(reader.blobs, found)]


def damage(room: Room, digest: bytes, offset: int) -> None:
    """Change one byte of a blob."""
    blob = room.blob(digest.hex())
    data = bytearray(blob.read_bytes())
    data[offset] ^= 1
    blob.chmod(0o600)
    blob.write_bytes(data)


async def whole_tree(room: Room, place: Place) -> tuple[TreeReader, Directory]:
    reader, ref = await saved(room, place)
    return reader, (await reader.load(ref)).root


@pytest.mark.parametrize("made", [True, False])
async def test_a_checkout_is_the_workspace(room: Room, tmp_path: Path, made: bool) -> None:
    """Modes, times, links, closed directories and odd names, in a new directory or an empty one; set-uid is not kept."""
    place = room.place()
    (place.workspace / "closed/inner").mkdir(parents=True)
    (place.workspace / "closed/inner/f").write_text("x")
    (place.workspace / "closed").chmod(0o500)
    (place.workspace / os.fsdecode(b"\xff\n")).write_text("odd")
    (place.workspace / "out").symlink_to("/etc/passwd")
    os.link(place.workspace / "closed/inner/f", place.workspace / "same")
    (place.workspace / "su").write_text("#!")
    (place.workspace / "su").chmod(0o4755)
    place.workspace.chmod(0o500)
    reader, root = await whole_tree(room, place)
    target = tmp_path / "there" if made else tmp_path / "not/yet/there"
    if made:
        target.mkdir(mode=0o700)
    assert await check_out(reader.blobs, root, target) == 3
    got, want = picture(target), picture(place.workspace)
    assert stat.S_IMODE(target.stat().st_mode) == (0o700 if made else 0o777 & ~_umask())
    assert want.pop(b"su")[:2] == ("file", 0o4755)
    assert got.pop(b"su")[:2] == ("file", 0o755)
    for own in (got, want):
        del own[b"."]
    assert got == want
    (place.workspace / "closed").chmod(0o700)
    (target / "closed").chmod(0o700)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("what", ["file", "directory", "link", "is a file", "dangling"])
async def test_a_checkout_overwrites_nothing(room: Room, tmp_path: Path, what: str) -> None:
    """A directory that has anything in it is refused by name, and stays as it was."""
    target = tmp_path / "target"
    if what == "is a file":
        target.write_text("mine")
    elif what == "dangling":
        target.symlink_to("nowhere")
    else:
        target.mkdir()
        made = target / "x"
        made.touch() if what == "file" else made.mkdir() if what == "directory" else made.symlink_to("/")
    reader, root = await whole_tree(room, room.place())
    before = picture(tmp_path)
    with pytest.raises(BadInput, match=re.escape(str(target))):
        await check_out(reader.blobs, root, target)
    assert picture(tmp_path) == before


@pytest.mark.parametrize("made", [True, False])
async def test_a_checkout_that_fails_leaves_nothing(room: Room, tmp_path: Path, made: bool) -> None:
    """Also not the directories that it made."""
    place = room.place()
    (place.workspace / "d").mkdir()
    for number in range(20):
        (place.workspace / f"d/{number}").write_bytes(os.urandom(1000))
    reader, root = await whole_tree(room, place)
    found = await reader.find(root, b"d/13")
    assert isinstance(found, Entry)
    frame = found.pieces[0].frame
    assert frame is not None
    damage(room, frame.pack.digest, frame.offset)
    target = tmp_path / ("there" if made else "not/yet/there")
    if made:
        target.mkdir()
    with pytest.raises(StoreError):
        await check_out(reader.blobs, root, target)
    assert list(target.iterdir()) == [] if made else not (tmp_path / "not").exists()


async def test_a_checkout_that_cannot_be_finished_is_taken_back(
    room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a fault of the last moment, when files are moved to their place already."""
    place = room.place()
    for name in "abc":
        (place.workspace / name).mkdir()
        (place.workspace / name / "f").write_text("x")
    reader, root = await whole_tree(room, place)
    whole, moves = Path.rename, []

    def rename(self: Path, target: Path) -> Path:
        moves.append(target)
        if len(moves) == 3:
            raise OSError(errno.EIO, "a fault")
        return whole(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="a fault"):
        await check_out(reader.blobs, root, tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_a_checkout_that_is_interrupted_leaves_nothing(room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, while files are read."""
    place = room.place()
    (place.workspace / "d").mkdir()
    (place.workspace / "d/f").write_text("x")
    reader, root = await whole_tree(room, place)
    reading = asyncio.Event()

    async def never(*_: object) -> bytes:
        reading.set()
        await asyncio.Event().wait()
        return b""

    monkeypatch.setattr(reader.blobs, "get_part", never)
    task = asyncio.create_task(check_out(reader.blobs, root, tmp_path / "out"))
    await reading.wait()
    assert (tmp_path / "out").exists()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not (tmp_path / "out").exists()


async def test_no_attribute_that_the_kernel_heeds_is_written(room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up snapshot could name file capabilities, which root would set."""
    place = room.place()
    (place.workspace / "f").write_text("x")
    reader, root = await whole_tree(room, place)
    found = await reader.find(root, b"f")
    assert found is not None
    found.xattrs = ((b"security.capability", b"x"), (b"user.kept", b"y"))
    asked: list[object] = []
    monkeypatch.setattr(restore, "_set_xattrs", lambda _, xattrs: asked.extend(xattrs))
    await check_out(reader.blobs, root, tmp_path / "out")
    assert asked == [(b"user.kept", b"y")]


def moment(ref: SnapshotRef, root: Directory) -> Moment:
    return Moment("r", "c", 1, ref, root)


@pytest.mark.parametrize("path", ["", ".", "d", "./d/", "/workspace/d", "d/../d"])
async def test_a_path_may_be_written_as_people_do(room: Room, path: str) -> None:
    """From the workspace on, or as the model sees it."""
    place = room.place()
    (place.workspace / "d").mkdir()
    reader, ref = await saved(room, place)
    at, found = await stands_at(reader, moment(ref, (await reader.open(ref)).root), path)
    assert isinstance(found, Directory)
    assert at == (b"d" if "d" in path else b"")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("../x", "is not in the workspace; give"),
        ("/etc", "is not in the workspace; give"),
        ("d/y", "d/ has x"),
        ("d/x/z", "d/ has x"),
    ],
)
async def test_a_path_that_is_not_there_is_told_with_what_is(room: Room, path: str, told: str) -> None:
    """The nearest directory is looked into for the person."""
    place = room.place()
    (place.workspace / "d").mkdir()
    (place.workspace / "d/x").touch()
    reader, ref = await saved(room, place)
    with pytest.raises(BadInput, match=re.escape(told)):
        await stands_at(reader, moment(ref, (await reader.open(ref)).root), path)


async def test_only_content_that_differs_is_read_and_long_ones_are_cut(room: Room) -> None:
    """Of each change the lines, or why there are none."""
    place = room.place()
    work = place.workspace
    (work / "equal").write_text("same")
    (work / "text").write_text("one\n")
    (work / "long").write_text("x\n" * 50)
    (work / "huge").write_bytes(b"x" * (1 << 21))
    (work / "bin").write_bytes(b"\0")
    (work / "turned").write_text("file")
    (work / "named").write_text("n\n")
    _, first = await saved(room, place)
    (work / "text").write_text("two\n")
    (work / "long").write_text("y\n" * 50)
    (work / "huge").write_bytes(b"y" * (1 << 21))
    (work / "bin").write_bytes(b"\0\0")
    (work / "turned").unlink()
    (work / "turned").mkdir()
    os.link(work / "named", work / "another")
    reader, second = await saved(room, place)
    moments = moment(first, (await reader.open(first)).root), moment(second, (await reader.open(second)).root)
    changes = await compare(moments[0].root, moments[1].root, reader.fill)
    told = {one.change.path: one async for one in tell_all(reader, moments, changes, lines=10)}
    assert b"equal" not in told
    assert told[b"text"].lines == ("--- a/text\n", "+++ b/text\n", "@@ -1 +1 @@\n", "-one\n", "+two\n")
    assert (len(told[b"long"].lines), told[b"long"].note) == (12, "91 more lines; --lines 0 shows all")
    assert (told[b"huge"].lines, told[b"huge"].note) == ((), "larger than 1.05 MB, so its lines are not compared")
    assert (told[b"bin"].note, told[b"bin"].detail) == ("binary", "1 B → 2 B")
    assert (told[b"turned"].lines, told[b"turned"].detail) == ((), "was a file, is a directory")
    # The first of the names is the file, and the other one now names it; the content is the same.
    assert {path: one.lines for path, one in told.items() if path in (b"named", b"another")}[b"named"] == ()
    names = [one.detail async for one in tell_all(reader, moments, changes, lines=None)]
    assert len(names) == len(told)
