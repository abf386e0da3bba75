"""A store that real runs have filled: measured, swept, and whole afterwards."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from activities.model.transcript import TranscriptStore
from activities.store.blobs import BlobStore
from activities.store.checkpoints import CheckpointStore
from activities.store.local import LocalStore
from tests.integration.helpers import gate_of
from tests.integration.stack import Stack
from tests.integration.test_command import caisson, fresh

POLICY = """
rules:
  - label: {retention-test: drop}
    keep: {last: 1}
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
    start = await store.start_of(kept)
    (step,) = await store.steps_of(start)
    checkpoint = await store.checkpoint(start, step)
    assert len(await TranscriptStore(blobs).load(checkpoint.transcript)) > 6
    code, _, err = await caisson(stack, "artifacts", kept, "get", str(tmp_path / "got"))
    assert (code, (tmp_path / "got/outputs/t.csv").read_bytes()) == (0, b"a,b\n3,4\n"), err
