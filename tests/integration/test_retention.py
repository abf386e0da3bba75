"""A store that real runs have filled: measured, swept, and whole afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from pathlib import Path

from activities.model.transcript import TranscriptStore
from activities.store.blobs import BlobStore
from activities.store.checkpoints import CheckpointStore
from activities.store.local import LocalStore
from client.standings import TemporalStandings
from tests.integration.helpers import gate_of
from tests.integration.stack import Stack
from tests.integration.test_command import caisson, fresh

POLICY = """
rules:
  - label: {retention-test: drop}
    keep: {last: 1}
  - label: {retention-test: terminated}
    keep: {days: 1}
  - label: {retention-test: keep}
    keep: {days: 30}
    checkpoints: 1
"""


def age(stack: Stack, hours: float) -> None:
    """Make everything in the store older."""
    for path in (stack.state / "store").rglob("*"):
        if path.is_file():
            at = path.stat().st_mtime - hours * 3600
            os.utime(path, (at, at))


async def standings_are_told(stack: Stack, store: CheckpointStore, wanted: dict[str, str | None]) -> None:
    """Check what Temporal says of runs: open, a result's status, or nothing."""
    standings = TemporalStandings(stack.dev.client)
    for run_id, told in wanted.items():
        start = await store.start_of(run_id)
        is_open = await standings.is_open(start)
        result = None if is_open else await standings.result_of(start)
        assert ("open" if is_open else result and result.status.value) == told
        # Another run of the same id is not the one that is asked for; one that was never there is not open.
        assert not await standings.is_open(start.model_copy(update={"chain": str(uuid.uuid4())}))
        other = start.model_copy(update={"run_id": fresh("never"), "chain": str(uuid.uuid4())})
        assert (await standings.is_open(other), await standings.result_of(other)) == (False, None)


async def test_runs_are_forgotten_and_those_that_are_kept_still_work(stack: Stack, tmp_path: Path) -> None:
    """Two of three go, an open run keeps what it wrote, and a kept run can be read and gone on from."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    store = CheckpointStore(blobs := BlobStore(LocalStore(stack.state / "store")))

    async def run(label: str) -> str:
        handle = await stack.start("files", run_id=fresh("kept"), labels={"retention-test": label})
        assert (await stack.finish(handle))["status"] == "completed"
        return str(handle.id)

    dropped = await run("drop")
    last, kept = await asyncio.gather(run("drop"), run("keep"))
    code, out, err = await caisson(stack, "store", "usage", "--json")
    assert code == 0, err
    rows = {row["run_id"]: row for row in json.loads(out)["runs"]}
    assert all(rows[run_id]["own_bytes"] > 500 and rows[run_id]["status"] == "completed" for run_id in (dropped, last, kept))

    async with gate_of(stack) as gate:
        going_on = await stack.start("gate", gate.agent, run_id=fresh("open"), labels={"retention-test": "drop"})
        await gate.reached()
        dead = await stack.start("gate", gate.agent, run_id=fresh("dead"), labels={"retention-test": "terminated"})
        await stack.until(dead, state="running")
        await dead.terminate()
        await standings_are_told(stack, store, {kept: "completed", dead.id: None, going_on.id: "open"})
        garbage = await blobs.put(b"of nobody, and younger than the open run" * 10)
        age(stack, 49)
        sweep = ("store", "sweep", "--policy", str(policy))
        code, out, err = await caisson(stack, *sweep)
        assert code == 0, err
        assert f"would be forgotten: run '{dropped}'" in out or f"would be forgotten: run '{last}'" in out
        assert "still open" in out
        assert f"caisson store sweep --policy {policy} --grace 24 --apply" in out
        code, _, err = await caisson(stack, *sweep, "--apply")
        assert code == 0, err
        age(stack, 25)
        code, out, err = await caisson(stack, *sweep, "--json", "--apply")
        assert code == 0, err
        assert json.loads(out)["oldest_open_run"] is not None
        assert await blobs.get(garbage)
    assert (await stack.finish(going_on))["status"] == "completed"

    known = {start.run_id async for start in store.runs()}
    assert {kept, going_on.id} <= known
    assert len({dropped, last} & known) == 1
    assert dead.id not in known
    start = await store.start_of(kept)
    (step,) = await store.steps_of(start)
    checkpoint = await store.checkpoint(start, step)
    assert len(await TranscriptStore(blobs).load(checkpoint.transcript)) > 6
    code, _, err = await caisson(stack, "artifacts", kept, "get", str(tmp_path / "got"))
    assert (code, (tmp_path / "got/outputs/t.csv").read_bytes()) == (0, b"a,b\n3,4\n"), err
