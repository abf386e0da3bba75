"""Batches: many runs of one agent, a bounded number at a time."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError

from tests.integration.stack import QUEUE, Handle, Stack


async def start(stack: Stack, request: Any) -> Handle:
    """Start a batch with any input."""
    return await stack.dev.client.start_workflow("AgentBatch", request, id=f"batch-{uuid.uuid4().hex[:8]}", task_queue=QUEUE)


def items(count: int, **more: Any) -> list[dict[str, Any]]:
    """Items with a file of their own each."""
    return [
        {"name": f"r{n}", "manifest": {"entries": {"inputs/name": {"type": "inline", "text": f"r{n}"}}}, **more}
        for n in range(count)
    ]


async def test_every_item_is_a_run_with_its_own_files(stack: Stack) -> None:
    """Each run gets its item's manifest; the outcomes come in the order of the items; usage adds up."""
    handle = await start(stack, {"task": "Play [batch-good].", "items": items(5), "concurrency": 2})
    most = 0
    result: dict[str, Any] | None = None
    waiting = asyncio.create_task(handle.result())
    while not waiting.done():
        most = max(most, len((await handle.query("status"))["running"]))
        await asyncio.sleep(0.1)
    result = await waiting
    assert [outcome["name"] for outcome in result["outcomes"]] == [f"r{n}" for n in range(5)]
    assert result["counts"] == {"completed": 5}
    assert result["usage"]["model_calls"] == 10
    assert all(outcome["artifacts"] == 1 for outcome in result["outcomes"])
    assert most == 2, "the bound on runs at a time, and no less"
    child = stack.dev.client.get_workflow_handle(f"{handle.id}/r3")
    attributes = (await child.describe()).typed_search_attributes
    assert [pair.value for pair in attributes.search_attributes if pair.key.name == "CaissonParent"] == [handle.id]


async def test_a_failed_run_does_not_end_the_others(stack: Stack) -> None:
    """Its outcome says why, beside the outcomes of the rest."""
    mixed = [*items(2), {"name": "bad", "task": "Play [batch-bad]."}]
    result = await stack.finish(await start(stack, {"task": "Play [batch-good].", "items": mixed}))
    assert result["counts"] == {"completed": 2, "failed": 1}
    bad = result["outcomes"][2]
    assert bad["name"] == "bad"
    assert "OPENAI_API_KEY" in bad["reason"]


async def test_a_stopped_batch_starts_no_more_runs(stack: Stack) -> None:
    """Those going on finish; the rest are reported as not started."""
    handle = await start(stack, {"task": "Play [batch-good].", "items": items(6), "concurrency": 1})
    async with asyncio.timeout(20):
        while not (await handle.query("status"))["running"]:
            await asyncio.sleep(0.05)
    await handle.execute_update("stop", {"by": "ann"})
    result = await stack.finish(handle)
    assert result["counts"]["completed"] >= 1
    assert result["counts"]["cancelled"] >= 4
    assert "stopped by ann" in result["outcomes"][5]["reason"]


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({}, "items"),
        ({"items": []}, "items"),
        ({"items": [{"name": "a"}]}, "'a' has no task"),
        ({"task": "t", "items": [{"name": "a"}, {"name": "a"}]}, "'a' is used more than once"),
        ({"task": "t", "items": [{"name": "a"}], "concurrency": 0}, "concurrency"),
        ({"task": "t", "items": [{"name": "../a"}]}, "items.0.name"),
    ],
)
async def test_bad_input_is_refused_at_once(stack: Stack, request_: Any, named: str) -> None:
    """The error names the field."""
    handle = await start(stack, request_)
    with pytest.raises(WorkflowFailureError) as failed:
        await asyncio.wait_for(handle.result(), 10)
    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.type == "BadInput"
    assert named in failed.value.cause.message
