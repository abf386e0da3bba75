"""Snapshot entries: files of another run's workspace, as they were after one of its steps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.store.checkpoints import CheckpointStore, RunStart
from contracts.blob import BlobRef, Text
from contracts.run import Checkpoint
from contracts.snapshot import SnapshotRef
from tests.manifest_support import Desk, files_of
from tests.snapshot_support import Room


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """Where another run works."""
    return Room(tmp_path / "room")


@pytest.fixture
def desk(tmp_path: Path, room: Room) -> Desk:
    """A tools worker with the same store."""
    (tmp_path / "desk").mkdir()
    return Desk(tmp_path / "desk", objects=room.objects)


async def record(desk: Desk, run_id: str, *snapshots: SnapshotRef | None) -> None:
    """Write down a run with a checkpoint for each snapshot, from step 1 on."""
    store = CheckpointStore(desk.blobs)
    nothing = BlobRef(digest="0" * 64, size=0)
    start = RunStart(
        run_id=run_id, chain="c", started_at=1.0, agent=nothing, agent_digest="", agent_name="", task=Text(inline="x")
    )
    await store.begin(start)
    for step, snapshot in enumerate(snapshots, 1):
        await store.put(run_id, "c", Checkpoint(step=step, snapshot=snapshot))


def entry(**fields: Any) -> dict[str, Any]:
    """An entry of run `first`."""
    return {"type": "snapshot", "run_id": "first", **fields}


async def refusal(desk: Desk, **fields: Any) -> str:
    """How an entry is refused."""
    with pytest.raises(ApplicationError) as caught:
        await desk.fetch({"entries": {"old": entry(**fields)}})
    assert caught.value.type == "BadInput"
    return caught.value.message


async def test_files_of_a_step_come_with_links_and_modes(desk: Desk, room: Room) -> None:
    """Of the last step, or the one asked for; small and large, executable, sparse, hard and symbolic links."""
    place = room.place()
    big = os.urandom(3 << 20)
    (place.workspace / "out").mkdir()
    (place.workspace / "out" / "empty").mkdir()
    (place.workspace / "out" / "a.txt").write_text("one")
    (place.workspace / "out" / "big").write_bytes(big)
    (place.workspace / "out" / "run.sh").write_text("x")
    (place.workspace / "out" / "run.sh").chmod(0o711)
    os.link(place.workspace / "out" / "a.txt", place.workspace / "out" / "twin.txt")
    (place.workspace / "out" / "to").symlink_to("/etc/passwd")
    with (place.workspace / "out" / "sparse").open("wb") as file:
        file.truncate(2 << 20)
    first = await room.save(place)
    (place.workspace / "out" / "a.txt").write_text("two")
    second = await room.save(place, first)
    await record(desk, "first", first, second)
    result = await desk.fetch({"entries": {"old": entry(path="out", step=1), "new": entry(path="out/a.txt")}})
    tree = await desk.tree(result)
    assert tree == {
        "new": b"two",
        "old": None,
        "old/a.txt": b"one",
        "old/big": big,
        "old/empty": None,
        "old/run.sh": b"x",
        "old/sparse": bytes(2 << 20),
        "old/to": b"-> /etc/passwd",
        "old/twin.txt": b"one",
    }
    assert (await desk.modes(result))["old/run.sh"] == 0o755
    sources = await desk.sources(result)
    assert (sources["old"].pin, sources["old"].source) == (first.id, "first@1:out")
    files = [file for file in sources["old"].files if file.path != "to"]
    assert len(files) == 5
    assert all(file.version == file.sha256 for file in files)


async def test_the_files_outlive_the_other_run_s_blobs(desk: Desk, room: Room) -> None:
    """What is fetched is stored for this run, whatever is swept of the other, once it is no longer young."""
    place = room.place()
    (place.workspace / "a").write_bytes(b"kept")
    other = await room.save(place)
    await record(desk, "first", other)
    old = {path for path in (room.root / "store" / "blobs").rglob("*") if path.is_file()}
    for path in old:
        os.utime(path, (1, 1))
    result = await desk.fetch({"entries": {"old": entry()}})
    for path in old:
        if path.stat().st_mtime < 2:
            path.unlink()
    assert files_of(await desk.tree(result)) == {"old/a": b"kept"}


async def test_what_is_not_there_says_what_there_is(desk: Desk, room: Room) -> None:
    """The run, the step, the path, the workspace."""
    assert "manifest.entries.old.run_id: no run 'first' is known to this store" in await refusal(desk)
    place = room.place()
    (place.workspace / "a").write_text("x")
    snapshot = await room.save(place)
    await record(desk, "first", None, snapshot)
    assert "manifest.entries.old.run_id: run 'first' has no checkpoint of step 7; it has steps 1 to 2" in await refusal(
        desk, step=7
    )
    assert "had no workspace at step 1; name a later step" in await refusal(desk, step=1)
    assert "manifest.entries.old.path: 'b' was not in the workspace" in await refusal(desk, path="b")
    assert "include and exclude leave no file" in await refusal(desk, include=["*.pdf"])
    room.blob(snapshot.record.digest).write_bytes(b"damaged")
    assert "the snapshot of run 'first' cannot be read" in await refusal(desk)


async def test_patterns_and_limits_hold(desk: Desk, room: Room) -> None:
    """As for every other entry; what is left out is not even listed."""
    place = room.place()
    for name in ("a.pdf", "b.txt", "node_modules/c.pdf"):
        (place.workspace / name).parent.mkdir(exist_ok=True)
        (place.workspace / name).write_text(name)
    await record(desk, "first", await room.save(place))
    tree = await desk.entries(old=entry(include=["*.pdf"], exclude=["node_modules/"]))
    assert tree == {"old": None, "old/a.pdf": b"a.pdf"}
    assert "3 files, more than its max_files of 2" in await refusal(desk, max_files=2)
    assert "include and exclude leave no file" in await refusal(desk, path="b.txt", exclude=["*.txt"])
    assert await desk.entries(old=entry(path="a.pdf", include=["*.pdf"])) == {"old": b"a.pdf"}


async def test_any_bytes_are_a_name(desk: Desk, room: Room) -> None:
    """Also what is not UTF-8, which the record of the sources shows in a way that JSON can hold."""
    place = room.place()
    for name in (b"caf\xe9", b"back\\slash"):
        Path(os.fsdecode(os.fsencode(place.workspace) + b"/" + name)).write_bytes(name)
    await record(desk, "first", await room.save(place))
    result = await desk.fetch({"entries": {"old": entry()}})
    assert files_of(await desk.tree(result)) == {"old/caf\udce9": b"caf\xe9", "old/back\\slash": b"back\\slash"}
    assert [file.path for file in (await desk.sources(result))["old"].files] == ["back\\slash", "caf\\xe9"]
    assert "caf" in result.listing
    result.model_dump_json()
    await desk.fetch({"entries": {"old": entry()}, "pins": result.sources})


async def test_directories_are_no_files(desk: Desk, room: Room) -> None:
    """They do not count against the limit of files."""
    place = room.place()
    for number in range(6):
        (place.workspace / f"d{number}").mkdir()
    (place.workspace / "d0" / "a").write_text("x")
    await record(desk, "first", await room.save(place))
    result = await desk.fetch({"entries": {"old": entry()}, "limits": {"max_files": 1}})
    assert files_of(await desk.tree(result)) == {"old/d0/a": b"x"}
