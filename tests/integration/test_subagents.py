"""Subagents: child runs with sandboxes of their own, whose ends, good or bad, are outputs for their parent."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError
from temporalio.service import RPCError

from tests.integration.helpers import failed_tasks, kill, sandboxes_of
from tests.integration.stack import QUEUE, Handle, Stack
from tests.integration.test_durability import artifact, until


def role(name: str, **more: Any) -> dict[str, Any]:
    """A role that needs no agent directory."""
    return {"name": name, "description": f"The {name}.", **more}


def agent(*roles: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An agent with these roles."""
    return {"name": "lead", "subagents": list(roles), **more}


async def child(stack: Stack, parent: Handle, name: str) -> Handle:
    """A subagent, once it has been started."""
    handle: Handle = stack.dev.client.get_workflow_handle(f"{parent.id}/{name}")
    for _ in range(400):
        with contextlib.suppress(RPCError):
            await handle.describe()
            return handle
        await asyncio.sleep(0.05)
    raise AssertionError(f"{name} was never started")


async def test_subagents_work_side_by_side_on_what_they_are_given(stack: Stack) -> None:
    """Each has its own sandbox and sees its own inputs only; outputs land in the parent's workspace, usage adds up."""
    handle = await stack.start("fan-out", agent(role("reader", workspace="inputs")))
    result = await stack.finish(handle)
    assert (result["status"], result["output"]) == ("completed", "both read")
    assert await artifact(stack, result, "outputs/all") == b"alpha\nbeta\n"
    assert result["steps"] == 4
    assert result["usage"]["model_calls"] == 4 + 2 * 2
    assert await failed_tasks(handle) == []
    for name in "ab":
        one = await child(stack, handle, name)
        described = await one.describe()
        assert described.parent_id == handle.id
        assert described.typed_search_attributes is not None
        assert sandboxes_of(stack, one.id) == []


async def test_a_subagent_told_to_delegate_the_same_stops_at_the_depth_limit(stack: Stack) -> None:
    """The limit is named, and the model goes on without. From anthropics/claude-code#69578."""
    nested = agent(role("again"), subagent_limits={"depth": 1})
    handle = await stack.start("delegates", agent(role("again", agent=nested)))
    result = await stack.finish(handle)
    assert result["status"] == "completed"


async def test_every_bad_end_is_told_as_one(stack: Stack) -> None:
    """A failure, an exhausted budget and an agent unknown to the role's own workers are typed as incomplete, never as an answer.

    From OpenHands/software-agent-sdk#3703.
    """
    tight = {"name": "tight", "budget": {"steps": 2}}
    handle = await stack.start(
        "all-kinds-of-ends", agent(role("plain"), role("tight", agent=tight), role("nobody", agent="nobody", task_queue=QUEUE))
    )
    result = await stack.finish(handle, 90)
    assert (result["status"], result["output"]) == ("completed", "told of all")
    assert result["usage"]["model_calls"] >= 2 + 2


async def test_a_subagent_can_be_talked_to_and_stopped(stack: Stack) -> None:
    """Started without waiting; told something; stopped after its step, with what it has."""
    handle = await stack.start("in-the-background", agent(role("plain")))
    result = await stack.finish(handle)
    assert (result["status"], result["output"]) == ("completed", "it was stopped")


async def test_a_subagent_that_is_named_twice_is_told_of_once(stack: Stack) -> None:
    """What else a model may say that makes no sense, such as a blank task, is a fault for it to read, and nothing hangs."""
    handle = await stack.start("named-twice", agent(role("plain")))
    result = await stack.finish(handle)
    assert (result["status"], result["output"]) == ("completed", "told once")
    assert await failed_tasks(handle) == []


async def test_no_subagent_outlives_its_parent(stack: Stack) -> None:
    """Neither one that answers first, nor one that is cancelled or terminated."""
    for end in ("answers", "cancel", "terminate"):
        scenario = "leaves-one-behind" if end == "answers" else "waits-for-one"
        handle = await stack.start(scenario, agent(role("plain")))
        one = await child(stack, handle, "long")
        if end == "cancel":
            await handle.cancel()
        elif end == "terminate":
            await handle.terminate()
        with contextlib.suppress(WorkflowFailureError):
            await handle.result()
        with contextlib.suppress(WorkflowFailureError):
            await asyncio.wait_for(one.result(), 20)
        assert (await one.describe()).status is WorkflowExecutionStatus.CANCELED, end
        await until(lambda one=one: sandboxes_of(stack, one.id) == [], "its sandbox is gone")


async def test_stopping_a_parent_stops_what_it_waits_for(stack: Stack) -> None:
    """The subagent ends after its step, and the parent with what there is."""
    handle = await stack.start("waits-for-one", agent(role("plain")))
    one = await child(stack, handle, "long")
    await stack.until(one, state="running")
    await handle.execute_update("stop", {"by": "ann"})
    result = await stack.finish(handle, 30)
    assert (result["status"], result["reason"]) == ("cancelled", "stopped by ann")
    ended = await one.result()
    assert ended["status"] == "cancelled"


async def test_changes_of_forks_are_merged_or_left_whole(stack: Stack) -> None:
    """Other lines, other files, removals: merged; the same lines: nothing of that subagent's, and the model is told where."""
    handle = await stack.start("merges", agent(role("worker", workspace="fork")))
    result = await stack.finish(handle, 90)
    assert (result["status"], result["output"]) == ("completed", "merged")
    assert await artifact(stack, result, "outputs/text") == b"one\n2\n3\n4\nfive\n"


async def test_zero_allows_no_subagents(stack: Stack) -> None:
    """Neither in number nor in depth is zero without end. From opensearch-project/ml-commons#4820."""
    for limits in ({"total": 0}, {"depth": 0}):
        handle = await stack.start("delegates", agent(role("again"), subagent_limits=limits), budget={"steps": 1})
        result = await stack.finish(handle)
        assert result["usage"]["model_calls"] == 1


async def test_a_lost_sandbox_of_a_subagent_is_its_own_affair(stack: Stack) -> None:
    """It goes on in another, and its parent does not notice."""
    short = {"name": "short", "budget": {"steps": 8}}
    handle = await stack.start("waits-for-one", agent(role("plain", agent=short)))
    one = await child(stack, handle, "long")
    await stack.until(one, step=2)
    kill(sandboxes_of(stack, one.id)[0])
    result = await stack.finish(handle)
    assert result["status"] == "completed"
    assert (await one.result())["recoveries"] == 1


async def test_a_cancellation_is_heard_whatever_the_run_does(stack: Stack) -> None:
    """Also when it comes while an activity is about to return anyway."""
    for seconds in (0.0, 0.15, 0.3, 0.45, 0.6):
        handle = await stack.start("long-run")
        await asyncio.sleep(seconds)
        await handle.cancel()
        with contextlib.suppress(WorkflowFailureError):
            await asyncio.wait_for(handle.result(), 20)
        assert await stack.closed_as(handle) is WorkflowExecutionStatus.CANCELED
        await until(lambda handle=handle: sandboxes_of(stack, handle.id) == [], "its sandbox is gone")
