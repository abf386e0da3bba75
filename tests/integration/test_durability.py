"""Whatever is killed, the run finishes with the same result: no answered call is asked again, no finished command runs twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import CancelledError

from activities.store.blobs import BlobStore
from contracts.blob import BlobRef
from tests.integration.stack import Handle, Stack, make_stack


@pytest.fixture(scope="module")
async def mortal(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """A stack whose processes are killed one after the other."""
    made = make_stack(tmp_path_factory.mktemp("mortal"))
    async with made.dev:
        yield made
    await made.sweep()


async def started(stack: Stack, handle: Handle, activity: str) -> None:
    """Wait until a worker works on an activity."""
    for _ in range(400):
        pending = (await handle.describe()).raw_description.pending_activities
        if any(
            p.activity_type.name == activity and p.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED for p in pending
        ):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{activity} never started")


async def until(condition: Any, what: str, seconds: float = 20) -> None:
    """Wait until `condition()` is true."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.02)


def workspace_log(stack: Stack) -> Path | None:
    """The file that the command of the one living sandbox appends to."""
    found = list((stack.state / "sandboxes").glob("*/workspace/outputs/log"))
    return found[0] if found else None


async def artifact(stack: Stack, result: dict[str, Any], path: str) -> bytes:
    """The bytes of a run's artifact."""
    refs = {one["path"]: BlobRef.model_validate(one["blob"]) for one in result["artifacts"]["first"]}
    blobs: BlobStore = stack.dev.blobs
    return await blobs.get(refs[path])


async def test_the_model_worker_killed_in_mid_call(mortal: Stack) -> None:
    """The call in flight is asked again, because it was never answered; its answer then counts once."""
    handle = await mortal.start("slow-model")
    await started(mortal, handle, "call_model")
    await asyncio.sleep(0.5)
    mortal.kill("model-worker")
    result = await mortal.finish(handle)
    assert (result["status"], result["usage"]["model_calls"]) == ("completed", 2)
    assert await artifact(mortal, result, "outputs/log") == b"once\n"
    assert mortal.answered(handle) == [1, 2]


async def test_the_model_worker_killed_after_the_answer(mortal: Stack) -> None:
    """An answer that was stored but never reported to Temporal is found again and not paid for twice."""
    handle = await mortal.start("slow-model")
    await started(mortal, handle, "call_model")
    with frozen(mortal, "temporal"):
        await until(lambda: mortal.answered(handle) == [1], "the first answer")
        await until(lambda: any_record(mortal, handle), "the record of the answer")
        mortal.kill("model-worker")
    result = await mortal.finish(handle)
    assert result["status"] == "completed"
    assert mortal.answered(handle) == [1, 2]
    assert await artifact(mortal, result, "outputs/log") == b"once\n"


async def test_the_sandbox_worker_killed_in_mid_command(mortal: Stack) -> None:
    """The command goes on without its worker; the next worker waits for it and returns its one result."""
    handle = await mortal.start("slow-command")
    await until(lambda: workspace_log(mortal) is not None, "the command's first line")
    mortal.kill("sandbox-worker")
    result = await mortal.finish(handle)
    assert result["status"] == "completed"
    assert await artifact(mortal, result, "outputs/log") == b"start\nend\n"
    assert mortal.answered(handle) == [1, 2]


async def test_the_sandbox_worker_killed_after_the_command(mortal: Stack) -> None:
    """A command that finished but was never reported is not run again."""
    handle = await mortal.start("slow-command")
    await until(lambda: workspace_log(mortal) is not None, "the command's first line")
    with frozen(mortal, "temporal"):
        await until(lambda: b"end" in (workspace_log(mortal) or Path("/dev/null")).read_bytes(), "the command's end")
        await asyncio.sleep(0.5)
        mortal.kill("sandbox-worker")
    result = await mortal.finish(handle)
    assert await artifact(mortal, result, "outputs/log") == b"start\nend\n"
    assert mortal.answered(handle) == [1, 2]


async def test_the_sandbox_worker_drained_in_mid_command(mortal: Stack) -> None:
    """SIGTERM hands the running command on at once, without waiting for a heartbeat to be missed."""
    handle = await mortal.start("slow-command")
    await until(lambda: workspace_log(mortal) is not None, "the command's first line")
    pid = mortal.dev.running["sandbox-worker"].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    result = await mortal.finish(handle, 14)
    assert await artifact(mortal, result, "outputs/log") == b"start\nend\n"


async def test_every_process_killed_during_one_run(mortal: Stack) -> None:
    """Server, workflow, model, sandbox and tools worker die one after the other; each step happened once, in order."""
    handle = await mortal.start("long-run")
    for count, service in enumerate(("temporal", "workflow-worker", "model-worker", "sandbox-worker", "tools-worker"), start=1):
        await until(lambda n=count: lines(mortal) > n, f"step {count} (before killing {service})", 60)
        mortal.kill(service)
    result = await mortal.finish(handle, 110)
    assert (result["status"], result["steps"]) == ("completed", 13)
    assert await artifact(mortal, result, "outputs/log") == b"".join(b"%d\n" % n for n in range(1, 13))
    assert mortal.answered(handle) == list(range(1, 14))
    assert mortal.sandboxes() == []


async def test_cancelling_kills_the_command_and_cleans_up(mortal: Stack) -> None:
    """A cancelled run's command, with a child in a session of its own, is dead within 10 s, and the sandbox is gone.

    From temporalio/sdk-python#700 and temporalio/samples-python#42.
    """
    handle = await mortal.start("endless-command")
    await until(lambda: list((mortal.state / "sandboxes").glob("*/workspace/marker")), "the command's start")
    await until(lambda: alive(b"613.5") > 0, "the command itself")
    await handle.cancel()
    await until(lambda: alive(b"613.5") == 0, "the death of the command", 10)
    with pytest.raises(WorkflowFailureError) as failed:
        await asyncio.wait_for(handle.result(), 20)
    assert isinstance(failed.value.cause, CancelledError)
    assert mortal.sandboxes() == []
    kinds = [event.WhichOneof("attributes") async for event in handle.fetch_history_events()]
    assert "activity_task_canceled_event_attributes" in kinds
    assert "workflow_execution_canceled_event_attributes" in kinds
    assert (await handle.query("status"))["result"]["status"] == "cancelled"


async def test_a_refused_model_call_repeats_nothing(mortal: Stack) -> None:
    """After a 400 the run fails with its result so far; no step and no workflow is tried again.

    From agentarea/agentarea PR#320.
    """
    handle = await mortal.start("bad-request-after-a-command")
    error = await mortal.failure(handle)
    assert error.type == "RunFailed"
    assert "answered 400" in error.message
    result = error.details[0]
    assert result["status"] == "failed"
    assert await artifact(mortal, result, "outputs/log") == b"x\n"
    assert [entry["outcome"] for entry in mortal.journal(handle)] == ["answered", "http"]
    assert (await handle.describe()).raw_description.workflow_execution_info.execution.run_id == handle.first_execution_run_id


def lines(stack: Stack) -> int:
    """How many steps have written their line."""
    log = workspace_log(stack)
    return len(log.read_bytes().splitlines()) if log else 0


def alive(argument: bytes) -> int:
    """How many processes of this machine have an argument."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += argument in path.read_bytes().split(b"\0")
        except OSError:
            continue
    return count


def any_record(stack: Stack, handle: Handle) -> bool:
    """Whether the store holds the record of a model call of this run's endpoint answer."""
    answered = {entry["response_id"] for entry in stack.journal(handle) if entry["outcome"] == "answered"}
    for path in (stack.state / "store" / "records").glob("*/*"):
        if not path.name.startswith("."):
            value = json.loads(path.read_bytes())
            if isinstance(value, dict) and value.get("response_id") in answered:
                return True
    return False


class frozen:  # noqa: N801 - reads as a statement
    """Stops a service's process (SIGSTOP) for the length of a block, so that nothing can be reported to it."""

    def __init__(self, stack: Stack, service: str) -> None:
        pid = stack.dev.running[service].pid
        assert pid is not None
        self._pid = pid

    def __enter__(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGCONT)
