"""Losing a sandbox never loses the run: it goes on in a new one, from the last snapshot, with one call repeated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from activities.store.checkpoints import CheckpointStore
from activities.workspace.snapshots import SnapshotStore
from activities.workspace.tree import Entry, find
from contracts.run import CheckpointChoice
from tests.integration.helpers import failed_tasks, kill, last_request, outputs_of, sandboxes_of, scheduled
from tests.integration.stack import Stack, make_stack
from tests.integration.test_durability import artifact, until


@pytest.fixture(scope="module")
async def mortal(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A stack whose sandboxes are killed one after the other."""
    made = make_stack(tmp_path_factory.mktemp("mortal-sandboxes"))
    async with made.dev:
        yield made
    await made.sweep()


async def kill_once_a_step(stack: Stack, run_id: str, killed: set[int]) -> None:
    """Kill the run's sandbox in the middle of every step's command, once each."""
    while True:
        for sandbox in sandboxes_of(stack, run_id):
            with contextlib.suppress(OSError):
                step = (sandbox / "workspace/outputs/log").read_text().count("\n")
                if step and step not in killed:
                    killed.add(step)
                    kill(sandbox)
        await asyncio.sleep(0.02)


async def notes_of(stack: Stack, handle: Any) -> list[str]:
    """What the harness has told the model, in its last request."""
    items = await last_request(stack, handle)
    return [item["content"][0]["text"] for item in items if item.get("role") == "developer"]


async def test_a_sandbox_killed_at_every_step_costs_no_model_call(mortal: Stack) -> None:
    """Twenty model calls, nineteen commands, nineteen killed sandboxes: the same artifacts as without, and every call once.

    From e2b-dev/E2B#884, agentuity/sdk#1161 and UKGovernmentBEIS/inspect_ai#4709.
    """
    handle = await mortal.start("twenty-steps")
    killed: set[int] = set()
    killer = asyncio.create_task(kill_once_a_step(mortal, handle.id, killed))
    try:
        result = await mortal.finish(handle, 150)
    finally:
        killer.cancel()
    assert killed == set(range(1, 20))
    assert result["status"] == "completed"
    assert await artifact(mortal, result, "outputs/log") == "".join(f"{n}\n" for n in range(1, 20)).encode()
    assert mortal.answered(handle) == list(range(1, 21))
    assert result["usage"]["model_calls"] == 20
    assert result["recoveries"] == 19
    assert await failed_tasks(handle) == []
    await until(lambda: sandboxes_of(mortal, handle.id) == [], "no sandbox is left")


async def test_the_model_is_told_what_was_lost(mortal: Stack) -> None:
    """Files are there, processes and /tmp are not, and the model hears of it once; the engine's error is no command's output.

    From UKGovernmentBEIS/inspect_ai#4740.
    """
    handle = await mortal.start("told-of-a-loss")
    await until(lambda: any((s / "workspace/begun").exists() for s in sandboxes_of(mortal, handle.id)), "the second command")
    (sandbox,) = sandboxes_of(mortal, handle.id)
    kill(sandbox)
    result = await mortal.finish(handle)
    assert result["status"] == "completed"
    (note,) = await notes_of(mortal, handle)
    assert "The sandbox was lost" in note
    assert "Processes and sessions" in note
    outputs = [output for _, output in outputs_of(await last_request(mortal, handle))]
    assert "kept" in outputs[1]
    assert "gone" not in outputs[1], "/tmp is a new one"
    assert "sandbox" not in "".join(outputs)


async def test_a_sandbox_that_never_lasts_ends_the_run_with_a_checkpoint_to_go_on_from(mortal: Stack) -> None:
    """Bounded attempts, a clear reason; and another run starts from the last checkpoint and has the files."""
    handle = await mortal.start("never-lasts")
    seen: set[str] = set()

    async def kill_each() -> None:
        while True:
            for sandbox in sandboxes_of(mortal, handle.id):
                if (sandbox / "workspace/begun").exists():
                    seen.add(sandbox.name)
                    kill(sandbox)
            await asyncio.sleep(0.02)

    killer = asyncio.create_task(kill_each())
    try:
        error = await mortal.failure(handle, 90)
    finally:
        killer.cancel()
    assert error.type == "RunFailed"
    assert "sandbox" in error.message
    assert len(seen) == 4, "the first, and three more"
    result = error.details[0]
    assert result["steps"] == 2
    assert mortal.answered(handle) == [1, 2]

    # Before step 2 asked for the command that no sandbox survived.
    forked = await mortal.start("on-from-there", from_checkpoint={"run_id": handle.id, "step": 1})
    outcome = await mortal.finish(forked)
    assert (outcome["status"], outcome["output"]) == ("completed", "forked")
    assert await artifact(mortal, outcome, "outputs/one") == b"one\n"
    assert await artifact(mortal, outcome, "outputs/other") == b"other\n"
    assert outcome["usage"]["model_calls"] == 2, "its own"
    assert outcome["steps"] == 3
    (note,) = await notes_of(mortal, forked)
    assert "goes on from a checkpoint" in note


async def test_a_lifetime_shorter_than_the_run_is_no_loss(mortal: Stack) -> None:
    """The run moves to a new sandbox before the end of the old one, or is taken up again after it.

    From ColeMurray/background-agents#1935, rllm-org/rllm#860, rllm-org/rllm#677 and rllm-org/rllm#679.
    """
    agent = {"sandbox": {"limits": {"lifetime_seconds": 10}}}
    handle = await mortal.start("longer-than-a-lifetime", agent)
    result = await mortal.finish(handle, 90)
    assert result["status"] == "completed"
    assert await artifact(mortal, result, "outputs/log") == b"1\n2\n3\n4\n5\n6\n7\n8\n"
    assert mortal.answered(handle) == list(range(1, 10))
    assert (await scheduled(handle)).count("open_sandbox") >= 2


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_lifetime_that_ends_at_every_step_costs_no_model_call(mortal: Stack) -> None:
    """Twenty model calls, nineteen commands, each after the end of the sandbox before it: the same artifacts, every call once."""
    handle = await mortal.start("twenty-lifetimes", {"sandbox": {"limits": {"lifetime_seconds": 10}}})
    result = await mortal.finish(handle, 400)
    assert result["status"] == "completed"
    assert await artifact(mortal, result, "outputs/log") == "".join(f"{n}\n" for n in range(1, 20)).encode()
    assert mortal.answered(handle) == list(range(1, 21))
    assert result["usage"]["model_calls"] == 20
    assert (await scheduled(handle)).count("open_sandbox") == 20, "one for each command, and one to collect what they made"
    assert await failed_tasks(handle) == []


@pytest.mark.parametrize("wait", ["approval", "pause"])
async def test_a_sandbox_is_put_away_while_people_think(mortal: Stack, wait: str) -> None:
    """A run that waits long holds no sandbox; the workspace comes back with the next call. From e2b-dev/E2B#736 and #1104."""
    agent: dict[str, Any] = {"sandbox": {"idle_seconds": 1}}
    if wait == "approval":
        agent["approvals"] = {"tools": {"shell": "prompt"}}
    handle = await mortal.start("before-and-after", agent)

    async def allow() -> None:
        status = await mortal.until(handle, state="awaiting_approval")
        pending = status["pending_approvals"][0]
        decision = {name: pending[name] for name in ("approval_id", "arguments_digest")}
        await handle.execute_update("decide_approval", {**decision, "allow": True, "by": "ann"})

    if wait == "approval":
        await allow()
        await mortal.until(handle, step=2, state="awaiting_approval")
    else:
        await handle.execute_update("pause", {"by": "ann"})
        await mortal.until(handle, state="paused")
    await until(lambda: sandboxes_of(mortal, handle.id) == [], "the sandbox is put away")
    async with asyncio.timeout(10):  # the run hears of it a moment later
        while (status := await handle.query("status"))["sandbox"] is not None or "put away" not in status["activity"]:
            await asyncio.sleep(0.05)
    assert status["activity"].startswith("waiting for approval" if wait == "approval" else "paused by ann")
    if wait == "approval":
        await allow()
    else:
        await handle.execute_update("resume", {})
    result = await mortal.finish(handle)
    assert result["status"] == "completed"
    assert await artifact(mortal, result, "outputs/one") == b"one\n"
    assert await artifact(mortal, result, "outputs/two") == b"two\n"
    assert await failed_tasks(handle) == []
    if wait == "approval":
        assert "put away" in (await notes_of(mortal, handle))[0]
        assert result["usage"]["sandbox_seconds"] < result["usage"]["wall_seconds"]


async def test_every_step_has_a_checkpoint_with_its_files(mortal: Stack) -> None:
    """A checkpoint names the workspace as it was after its step, from before the first to the last."""
    handle = await mortal.start("before-and-after")
    result = await mortal.finish(handle)
    store, snapshots = CheckpointStore(mortal.dev.blobs), SnapshotStore(mortal.dev.blobs)
    start = await store.start_of(handle.id)
    assert await store.steps_of(start) == [0, 1, 2, 3]
    held = []
    for step in range(1, 4):
        checkpoint = await store.checkpoint(start, step)
        assert checkpoint.snapshot is not None
        tree = await snapshots.load(checkpoint.snapshot)
        held.append([name for name in ("one", "two") if isinstance(find(tree.root, f"outputs/{name}".encode()), Entry)])
    assert held == [["one"], ["one", "two"], ["one", "two"]]
    _, last = await store.find(CheckpointChoice(run_id=handle.id))
    assert last.model_dump(mode="json") == result["checkpoint"]
    end = await store.end_of(start)
    assert end is not None and (end.status, end.artifacts.count) == ("completed", 2)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"run_id": "no-such-run"}, "from_checkpoint: no run 'no-such-run' is known to this store"),
        ({"run_id": "{run}", "step": 7}, "has no checkpoint of step 7; it has steps 0 to 3"),
        ({"run_id": "{run}", "step": -1}, "from_checkpoint.step"),
        ({"run_id": ""}, "from_checkpoint.run_id"),
    ],
)
async def test_a_checkpoint_that_is_not_there_is_said_at_once(mortal: Stack, choice: dict[str, Any], reason: str) -> None:
    """Bad input, named, and what there is instead."""
    origin = await mortal.start("before-and-after")
    await mortal.finish(origin)
    wanted = {name: origin.id if value == "{run}" else value for name, value in choice.items()}
    error = await mortal.failure(await mortal.start("on-from-there", from_checkpoint=wanted))
    assert error.type == "BadInput"
    assert reason in error.message


async def test_a_fork_may_have_another_model_and_no_other_manifest(mortal: Stack) -> None:
    """What is not given is the first run's."""
    origin = await mortal.start("before-and-after", {"name": "first", "budget": {"steps": 9}})
    await mortal.finish(origin)
    choice = {"run_id": origin.id, "step": 1}
    fork = await mortal.start("on-from-there", from_checkpoint=choice, model="gpt-5.4-mini")
    result = await mortal.finish(fork)
    assert (result["status"], result["model"]) == ("completed", "gpt-5.4-mini")
    status = await fork.query("status")
    assert (status["agent"], status["budget"]["steps"]) == ("first", 9)
    manifest = {"entries": {"a": {"type": "inline", "text": "x"}}}
    error = await mortal.failure(await mortal.start("on-from-there", from_checkpoint=choice, manifest=manifest))
    assert "manifest: a run from a checkpoint has the workspace of that checkpoint" in error.message
