"""A sweep of the store removes what nothing needs, and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.converter import StorageDriverClaim, StorageDriverRetrieveContext, StorageDriverStoreContext

from activities.store import guard
from activities.store.blobs import BlobStore, blob_key
from activities.store.checkpoints import RunStart
from activities.store.external import BlobStorageDriver
from activities.store.mark import Marker
from activities.store.names import names_of
from activities.store.port import ObjectMissing
from activities.store.removal import SweepStopped, store_time
from activities.store.sweep import carry_out
from activities.store.usage import store_usage
from contracts.run import ArtifactList, CheckpointChoice, RunResult, RunStatus
from tests.snapshot_support import picture
from tests.sweep_support import DROP, FOREVER, HOUR, World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A store whose sweeps wait for no writer: none is there."""
    monkeypatch.setattr(guard, "ANNOUNCED_SECONDS", 0.0)
    return World(tmp_path)


async def forget(world: World, rules: list[dict[str, Any]] = DROP) -> None:
    """Sweep twice, a grace apart, so that what the policy drops is forgotten and then removed; then what became free with it."""
    for _ in range(2):
        world.age(2 * HOUR)
        await world.sweep(rules)


async def test_what_only_a_dropped_run_needs_goes_and_the_rest_stays(world: World) -> None:
    """Two sweeps, a grace apart: the run can be found no more after the first, and has left nothing after the second."""
    kept = await world.ended("kept", steps=3)
    await world.ended("dropped", {"keep": "no"}, days_ago=2, steps=3)
    world.age(2 * HOUR)
    plan = await world.sweep(DROP)
    assert await world.run_ids() == {"kept"}
    assert plan.remove["blobs"] == []
    assert await world.needed() < await world.keys("blobs/")
    world.age(2 * HOUR)
    await world.sweep(DROP)
    assert await world.keys("blobs/") == await world.needed()
    assert await world.keys("sweep/") == {"sweep/clock"}
    await world.is_whole(kept)


async def test_nothing_young_is_removed(world: World) -> None:
    """A blob is written before the record that names it."""
    blob = await world.blobs.put(b"of a run that begins now")
    record = await world.blobs.put_record("r", 1)
    await world.objects.put("staging/x", b"half an upload")
    before = await world.keys("")
    world.age(0.9 * HOUR)
    await world.sweep(FOREVER)
    assert await world.keys("") == before | {"sweep/clock"}
    world.age(0.2 * HOUR)
    await world.sweep(FOREVER)
    assert (await world.keys("blobs/"), await world.keys("records/"), await world.keys("staging/")) == (set(), set(), set())
    assert (blob.size, record) == (24, 1)


async def test_planning_changes_nothing(world: World) -> None:
    """Not one object, and none is written."""
    await world.ended("dropped", {"keep": "no"}, days_ago=2)
    await world.blobs.put(b"of nobody" * 50)
    await store_time(world.objects)
    world.age(2 * HOUR)
    before = [info async for info in world.objects.list("")]
    plan = await world.plan(DROP)
    (one,) = plan.condemned
    assert (one.run.name, one.freed > 400, [info.size for info in plan.remove["blobs"]]) == ("'dropped'", True, [450])
    after = [info async for info in world.objects.list("")]
    assert [info for info in after if info.key != "sweep/clock"] == [info for info in before if info.key != "sweep/clock"]


async def test_nothing_written_since_the_oldest_open_run_began_is_removed(world: World) -> None:
    """A run waits for a person for days, with an answer and a workspace that only its history names."""
    await world.blobs.put(b"garbage from before")
    world.age(10 * HOUR)
    run = await world.begin("waits")
    await world.step(run, {"f": b"1"})
    answer = await world.blobs.put(b"an answer that is in no checkpoint")
    (run.place.workspace / "f").write_bytes(b"2" * 500)
    snapshot = await world.room.save(run.place, run.checkpoints[1].snapshot)
    held = picture(run.place.workspace)
    world.age(20 * 24 * HOUR)
    plan = await world.sweep(FOREVER)
    assert (plan.oldest_open and plan.oldest_open.name, len(plan.remove["blobs"])) == ("'waits'", 1)
    assert await world.blobs.get(answer)
    assert picture((await world.room.restore(snapshot)).workspace) == held
    await world.is_whole(run)
    await world.end(run)
    await world.sweep(FOREVER)
    with pytest.raises(ObjectMissing):
        await world.blobs.get(answer)
    await world.is_whole(run)


async def test_a_run_without_an_end_is_only_dropped_when_temporal_knows_it_is_closed(world: World) -> None:
    """A terminated workflow writes no end. Its age counts from the last that was written down of it."""
    run = await world.begin("terminated", {"keep": "no"})
    await world.step(run, {"f": b"1"})
    world.age(48 * HOUR)
    await world.sweep(DROP)
    await world.is_whole(run)
    world.close(run)
    await world.sweep(DROP)
    assert await world.run_ids() == set()


async def test_a_closed_run_that_could_not_write_its_end_keeps_what_its_result_names(world: World) -> None:
    """Temporal has the result, with artifacts that no record of the store names."""
    run = await world.begin("unwritten")
    last = await world.step(run, {"f": b"1"})
    world.close(run)
    artifact, output = await world.blobs.put(b"made"), await world.blobs.put(b"said")
    index = await world.blobs.put_json([{"path": "a", "blob": artifact.model_dump(), "media_type": "text/plain", "mode": 420}])
    world.temporal.results["unwritten"] = RunResult(
        status=RunStatus.COMPLETED, artifacts=ArtifactList(count=1, index=index), output_blob=output, checkpoint=last
    )
    world.age(48 * HOUR)
    await world.sweep(FOREVER)
    assert [await world.blobs.get(ref) for ref in (artifact, output)] == [b"made", b"said"]


async def test_what_a_run_writes_down_between_a_look_and_its_end_is_kept(world: World) -> None:
    """The records are read once more after Temporal has said that a run is closed."""
    run = await world.begin("ends meanwhile")
    await world.step(run, {"f": b"1"})
    late = await world.step(run, {"f": b"2" * 300})
    await world.objects.delete(f"{(await world.plan(FOREVER)).oldest_open.start.info.key[:-5]}steps/00000002")  # type: ignore[union-attr]
    ask = world.temporal.is_open

    async def ends(start: RunStart) -> bool:
        if ("ends meanwhile", "c") in world.temporal.open:
            await world.checkpoints.put("ends meanwhile", "c", late)
            await world.end(run)
        return await ask(start)

    world.age(2 * HOUR)
    world.temporal.is_open = ends  # type: ignore[method-assign]
    await world.sweep(FOREVER)
    await world.is_whole(run)


async def test_a_run_that_was_reset_after_its_end_goes_on(world: World) -> None:
    """Its end is written down, but Temporal says that it is open: it is kept whole, and what it writes is not removed."""
    for labels in ({"keep": "no"}, {}):
        run = await world.ended(f"reset {labels}", labels, days_ago=9, steps=3)
        world.temporal.open.add((run.start.run_id, run.start.chain))
        answer = await world.blobs.put(f"named by the history of {labels} alone".encode())
        world.age(2 * HOUR)
        await world.sweep(DROP if labels else FOREVER)
        await world.is_whole(run)
        assert await world.blobs.get(answer)
        await world.objects.delete(blob_key(answer.digest))
        world.close(run)


async def test_a_run_id_that_was_used_again_is_two_runs(world: World) -> None:
    """The old chain goes, the new one stays, though they have one id."""
    old = await world.ended("twice", {"keep": "no"}, days_ago=5)
    new = await world.begin("twice", {"keep": "no"}, chain="second")
    await world.step(new, {"g": b"1"})
    await forget(world)
    assert [start.chain async for start in world.checkpoints.runs()] == ["second"]
    await world.is_whole(new)
    assert old.start.chain == "c"


async def test_the_last_checkpoints_stay(world: World) -> None:
    """Those that were dropped leave nothing behind but the heads of the transcript's hash chain."""
    run = await world.ended("trimmed", steps=6)
    await forget(world, [{"keep": "forever", "checkpoints": 2}])
    await world.is_whole(run, {5, 6})
    assert await world.keys("blobs/") == await world.needed()
    first = run.checkpoints[1].transcript
    assert first is not None
    assert json.loads(await world.blobs.get(first))["previous"] is None


async def test_a_fork_that_has_no_checkpoint_yet_holds_the_one_it_goes_on_from(world: World) -> None:
    """However long it waits for a sandbox; then the run that it came from may go."""
    origin = await world.ended("origin", {"keep": "no"}, days_ago=9, steps=2)
    world.age(48 * HOUR)
    fork = await world.begin("fork", origin=CheckpointChoice(run_id="origin", step=1))
    for _ in range(3):
        await forget(world)
        await world.comes_back(origin, 1, origin.checkpoints[1])
    await world.write_down(fork, origin.checkpoints[1])
    fork.pictures[1], fork.said[1] = origin.pictures[1], origin.said[1]
    await forget(world)
    assert await world.run_ids() == {"fork"}
    await world.is_whole(fork)


@pytest.mark.parametrize("rules", [DROP, [{"keep": "forever", "checkpoints": 1}]])
async def test_a_fork_that_begins_while_its_origin_is_forgotten_gets_what_it_found(
    world: World, rules: list[dict[str, Any]]
) -> None:
    """It has read the checkpoint; then the sweep moves it; then the fork's start is written down."""
    origin = await world.ended("origin", {"keep": "no"}, days_ago=9, steps=3)
    world.age(48 * HOUR)
    choice = CheckpointChoice(run_id="origin", step=1)
    _, found = await world.checkpoints.find(choice)
    plan = await world.plan(rules)
    await carry_out(world.objects, plan, world.temporal)
    await world.sweep(rules)
    fork = await world.begin("fork", origin=choice)
    for _ in range(3):
        await forget(world, rules)
    await world.comes_back(origin, 1, found)
    await world.end(fork)
    await forget(world, rules)
    await forget(world, rules)
    assert await world.keys("blobs/") == await world.needed()


async def test_a_fork_of_nothing_stops_the_sweep(world: World) -> None:
    """Nobody knows what it needs."""
    await world.begin("fork", origin=CheckpointChoice(run_id="origin", step=1))
    garbage = await world.blobs.put(b"garbage")
    world.age(99 * HOUR)
    with pytest.raises(SweepStopped, match="run 'fork' goes on from a checkpoint of 'origin' that is not there"):
        await world.sweep(FOREVER)
    assert await world.blobs.get(garbage)


@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("what", ["record", "pack", "head", "segment", "agent", "index", "output"])
async def test_what_cannot_be_read_stops_the_sweep_unless_its_run_is_dropped(world: World, what: str, how: str) -> None:
    """Run and blob are named, and nothing is removed. What is only listed and never read while marking must at least be there."""
    run = await world.ended("broken", {"keep": "no"}, days_ago=2, steps=2)
    other = await world.ended("good", steps=1)
    last = run.checkpoints[2]
    end = await world.checkpoints.end_of(run.start)
    assert end and end.artifacts.index and end.output and last.snapshot and last.transcript
    names = Marker(world.blobs)
    await names.read([names_of(last)])
    packs = await world.packs_of(last) - await world.packs_of(other.checkpoints[1])
    segment = json.loads(await world.blobs.get(last.transcript))["segments"][-1]["digest"]
    digest = {
        "record": last.snapshot.record.digest,
        "pack": sorted(packs)[0],
        "head": last.transcript.digest,
        "segment": segment,
        "agent": run.start.agent.digest,
        "index": end.artifacts.index.digest,
        "output": end.output.digest,
    }[what]
    if what == "agent":
        other = run
    path = world.room.blob(digest)
    whole = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(len(whole)))
    garbage = await world.blobs.put(b"garbage")
    world.age(2 * HOUR)
    before = await world.keys("blobs/")
    is_noticed = how == "gone" or what not in ("segment", "output")
    if is_noticed:
        with pytest.raises(
            SweepStopped, match=rf"run '(broken|good)' is kept, and .*{digest}.*restore it from a copy"
        ) as stopped:
            await world.sweep(FOREVER)
        assert what == "agent" or "'broken'" in str(stopped.value)
        assert await world.keys("blobs/") == before
    if what != "agent":
        await forget(world)
        with pytest.raises(ObjectMissing):
            await world.blobs.get(garbage)
        await world.is_whole(other)


async def test_directories_are_read_once_however_many_steps_share_them(world: World) -> None:
    """Marking costs the distinct directories, not steps times directories; and finds what a whole walk finds."""
    reads: Counter[str] = Counter()
    run = await world.begin("long")
    tree = {f"d{n}/e{m}/f": f"{n} {m}".encode() for n in range(6) for m in range(5)}
    await world.step(run, dict(tree))
    for number in range(30):
        await world.step(run, {"d0/e0/f": f"step {number}".encode()})
    get_range = world.objects.get_range

    async def counted(key: str, offset: int, length: int) -> bytes:
        reads[key] += length
        return await get_range(key, offset, length)

    world.objects.get_range = counted  # type: ignore[method-assign]
    marker = Marker(world.blobs)
    records = [names_of(checkpoint) for checkpoint in run.checkpoints.values()]
    await marker.read(records)
    distinct = 1 + 6 + 30 + 30 * 3
    assert sum(reads.values()) < distinct * 500
    assert max(reads.values()) < 37 * 500
    needs = marker.needs(records)
    assert needs.faults == []
    assert {blob_key(digest) for digest in needs.blobs} == {
        key for checkpoint in run.checkpoints.values() for key in [blob_key(d) for d in await world._of_checkpoint(checkpoint)]
    } | await _segments(world, run.checkpoints.values())


async def _segments(world: World, checkpoints: Any) -> set[str]:
    heads = [json.loads(await world.blobs.get(checkpoint.transcript)) for checkpoint in checkpoints]
    return {blob_key(segment["digest"]) for head in heads for segment in head["segments"]}


async def test_payloads_of_histories_stay_unless_they_are_asked_for(world: World) -> None:
    """Those of now lie apart; those of before lie among the blobs, and are known by their first bytes."""
    driver, context = BlobStorageDriver(world.blobs), StorageDriverStoreContext(target=None)
    payload = Payload(metadata={"encoding": b"json/plain"}, data=b'"' + b"x" * 200_000 + b'"')
    old = await world.blobs.put(payload.SerializeToString())
    old_claim = StorageDriverClaim(claim_data={"digest": old.digest, "size": str(old.size)})
    (claim,) = await driver.store(context, [payload])
    garbage = await world.blobs.put(b"\x0a large, and none" + b"x" * 200_000)
    world.age(40 * 24 * HOUR)
    await world.sweep(FOREVER)
    read = StorageDriverRetrieveContext()
    assert await driver.retrieve(read, [claim, old_claim]) == [payload, payload]
    with pytest.raises(ObjectMissing):
        await world.blobs.get(garbage)
    await world.sweep(FOREVER, payload_days=41)
    assert len(await driver.retrieve(read, [claim, old_claim])) == 2
    await world.sweep(FOREVER, payload_days=30)
    assert await world.keys("payloads/") | await world.keys("blobs/") == set()


async def test_the_store_is_measured_by_run(world: World) -> None:
    """What only one run needs, what others need too, and what nobody needs, all adding up."""
    await world.ended("one", {"team": "a"}, steps=2)
    await world.ended("two", steps=1)
    going_on = await world.begin("three")
    await world.blobs.put(b"of nobody")
    usage = await store_usage(world.blobs)
    assert [(run.run_id, run.status, run.checkpoints, run.labels) for run in usage.runs] == [
        ("three", "no end", 0, {}),
        ("two", "completed", 1, {}),
        ("one", "completed", 2, {"team": "a"}),
    ]
    sizes = {info.key: info.size async for info in world.objects.list("blobs/")}
    assert usage.unreferenced_bytes == len(b"of nobody")
    assert usage.areas["blobs"] == sum(sizes.values())
    assert usage.total_bytes == sum([info.size async for info in world.objects.list("")])
    agent = going_on.start.agent.size
    assert usage.runs[0].shared_bytes == agent
    shared = sum(sizes.values()) - usage.unreferenced_bytes - sum(run.own_bytes for run in usage.runs)
    assert shared >= agent
    world.room.blob(going_on.start.agent.digest).unlink()
    broken = await store_usage(BlobStore(world.objects))
    assert [len(run.faults) for run in broken.runs] == [2, 2, 2]
