"""What people say to a run: delivered, acted on, or refused without a trace; through the SDK and the plain `temporal` command."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from temporalio.client import WorkflowUpdateFailedError

from tests.integration.helpers import Gate, events, gate_of, last_request, outputs_of, sandboxes_of, temporal
from tests.integration.stack import QUEUE, Handle, Stack

PROMPT = {"default": "prompt"}


@pytest.fixture
async def gate(stack: Stack) -> AsyncIterator[Gate]:
    """A tool that holds a run until the test releases it."""
    async with gate_of(stack) as made:
        yield made


async def waiting(stack: Stack, gate: Gate, scenario: str = "asks-first") -> tuple[Handle, list[dict[str, Any]]]:
    """Start a run whose calls need an approval, and return it with what it asks."""
    handle = await stack.start(scenario, gate.agent, approvals=PROMPT)
    status = await stack.until(handle, state="awaiting_approval")
    return handle, status["pending_approvals"]


def decision(asked: dict[str, Any], allow: bool, **more: Any) -> dict[str, Any]:
    """A decision on what was asked."""
    return {
        "approval_id": asked["approval_id"],
        "arguments_digest": asked["arguments_digest"],
        "allow": allow,
        "by": "dr.lee",
        **more,
    }


async def refused(handle: Handle, update: str, given: Any) -> str:
    """Send an update that must be refused, and return why it was."""
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await handle.execute_update(update, given)
    return str(caught.value.cause)


async def test_a_message_reaches_the_model_before_its_next_call(stack: Stack, gate: Gate) -> None:
    """What is said during a step stands in the next request, after the outputs of that step."""
    handle = await stack.start("told-at-the-gate", gate.agent)
    await gate.reached()
    assert "queued as message 1" in await handle.execute_update("send_message", {"text": "Answer in French."})
    assert (await handle.query("status"))["queued_messages"] == 1
    gate.released.set()
    assert (await stack.finish(handle))["output"] == "bien"
    assert (await handle.query("status"))["queued_messages"] == 0


async def test_a_message_during_the_last_call_keeps_the_run_going(stack: Stack) -> None:
    """An answer that was given before the message was read does not end the run."""
    handle = await stack.start("told-in-the-last-call", {"tools": []})
    await stack.until(handle, state="running")
    await handle.execute_update("send_message", {"text": "and in French"})
    result = await stack.finish(handle)
    assert (result["output"], result["steps"]) == ("bien", 2)


async def test_messages_that_nobody_reads_are_bounded(stack: Stack, gate: Gate) -> None:
    """The seventeenth waiting message is refused, saying what to do; the sixteen arrive in their order."""
    handle = await stack.start("gate", gate.agent)
    await gate.reached()
    for n in range(16):
        await handle.execute_update("send_message", {"text": f"number {n}"})
    assert "wait until the model has read them" in await refused(handle, "send_message", {"text": "one more"})
    gate.released.set()
    await stack.finish(handle)
    said = [item["content"][0]["text"] for item in await last_request(stack, handle) if item["type"] == "message"]
    assert said[1:] == [f"number {n}" for n in range(16)]


async def test_stop_ends_the_run_after_its_step_with_what_there_is(stack: Stack, gate: Gate) -> None:
    """The step in flight is finished, the model is not asked again, and the artifacts are there."""
    agent = {"tools": ["shell", *gate.agent["tools"]]}
    handle = await stack.start("work-at-the-gate", agent)
    await gate.reached()
    await handle.execute_update("stop", {"by": "dr.lee", "reason": "enough"})
    assert (await handle.query("status"))["state"] == "stopping"
    gate.released.set()
    result = await stack.finish(handle)
    assert (result["status"], result["reason"], result["steps"]) == ("cancelled", "stopped by dr.lee: enough", 1)
    assert [artifact["path"] for artifact in result["artifacts"]["first"]] == ["outputs/kept.txt"]
    assert stack.answered(handle) == [1]
    assert sandboxes_of(stack, handle.id) == []


async def test_pause_holds_the_run_before_its_next_call_and_resume_lets_it_go_on(stack: Stack, gate: Gate) -> None:
    """While a run is paused the model is not asked."""
    handle = await stack.start("gate", gate.agent)
    await gate.reached()
    await handle.execute_update("pause", {"by": "dr.lee"})
    gate.released.set()
    status = await stack.until(handle, state="paused")
    assert (status["activity"], status["step"], stack.answered(handle)) == ("paused by dr.lee", 1, [1])
    await handle.execute_update("resume")
    assert (await stack.finish(handle))["output"] == "went through"


async def test_a_paused_run_can_be_stopped(stack: Stack, gate: Gate) -> None:
    """Nobody has to resume a run to end it."""
    handle = await stack.start("gate", gate.agent)
    await gate.reached()
    await handle.execute_update("pause", {})
    gate.released.set()
    await stack.until(handle, state="paused")
    await handle.execute_update("stop", {})
    assert (await stack.finish(handle))["status"] == "cancelled"
    assert stack.answered(handle) == [1]


async def test_an_extended_budget_lets_the_run_go_on(stack: Stack, gate: Gate) -> None:
    """What a person adds is shown at once and counts at the next check."""
    handle = await stack.start("gate", gate.agent, budget={"steps": 1})
    await gate.reached()
    await handle.execute_update("extend_budget", {"steps": 1, "tokens": 5})
    budget = (await handle.query("status"))["budget"]
    assert (budget["steps"], budget["tokens"]) == (2, None)
    gate.released.set()
    result = await stack.finish(handle)
    assert (result["status"], result["steps"]) == ("completed", 2)


async def test_an_allowed_call_runs(stack: Stack, gate: Gate) -> None:
    """The status shows the exact arguments and their digest; the decision lets this one call run."""
    gate.released.set()
    handle, (asked,) = await waiting(stack, gate)
    assert (asked["tool"], asked["call_id"], json.loads(asked["arguments"])) == ("gate", "call_1_1", {"claim": 7})
    assert not gate.entered.is_set()
    await handle.execute_update("decide_approval", decision(asked, True))
    assert (await stack.finish(handle))["output"] == "heard: open"


async def test_a_denied_call_does_not_run_and_the_model_is_told_by_whom_and_why(stack: Stack, gate: Gate) -> None:
    """A denial is an output for the model."""
    handle, (asked,) = await waiting(stack, gate)
    await handle.execute_update("decide_approval", decision(asked, False, reason="Not this claim."))
    assert (await stack.finish(handle))["output"] == "heard: denied by dr.lee"
    assert outputs_of(await last_request(stack, handle))[0][1].endswith("it was not run. Not this claim.")
    assert not gate.entered.is_set()


async def test_a_decision_is_taken_once(stack: Stack, gate: Gate) -> None:
    """A second decision on a call that waits no more is refused, and changes nothing."""
    handle, (asked,) = await waiting(stack, gate)
    await handle.execute_update("decide_approval", decision(asked, True))
    assert f"approval_id '{asked['approval_id']}' is not open" in await refused(handle, "decide_approval", decision(asked, False))
    gate.released.set()
    assert (await stack.finish(handle))["output"] == "heard: open"


async def test_each_of_two_calls_has_its_own_decision(stack: Stack, gate: Gate) -> None:
    """Allowing one call says nothing about the other."""
    gate.released.set()
    handle, (first, second) = await waiting(stack, gate, "asks-twice")
    await handle.execute_update("decide_approval", decision(second, True))
    await handle.execute_update("decide_approval", decision(first, False))
    await stack.finish(handle)
    outputs = dict(outputs_of(await last_request(stack, handle)))
    assert ("denied" in outputs["call_1_1"], outputs["call_1_2"]) == (True, "the gate is open")


async def test_a_run_that_waits_for_an_approval_can_be_stopped(stack: Stack, gate: Gate) -> None:
    """The call does not run, and the run ends."""
    handle, _ = await waiting(stack, gate)
    await handle.execute_update("stop", {"by": "dr.lee"})
    result = await stack.finish(handle)
    assert (result["status"], result["steps"]) == ("cancelled", 1)
    assert not gate.entered.is_set()


async def test_a_run_that_waits_is_found_by_its_search_attribute(stack: Stack, gate: Gate) -> None:
    """`CaissonAwaitingApproval` is true while a person is asked, and false afterwards."""
    gate.released.set()
    handle, (asked,) = await waiting(stack, gate)
    description = await handle.describe()
    assert description.search_attributes["CaissonAwaitingApproval"] == [True]
    await handle.execute_update("decide_approval", decision(asked, True))
    await stack.finish(handle)
    assert (await handle.describe()).search_attributes["CaissonAwaitingApproval"] == [False]


async def test_forbidden_calls_never_run_and_ask_nobody(stack: Stack, gate: Gate) -> None:
    """Policy alone answers the model."""
    handle = await stack.start("asks-twice", gate.agent, approvals={"tools": {"gate": "forbid"}})
    await stack.finish(handle)
    assert all("forbidden by policy" in output for _, output in outputs_of(await last_request(stack, handle)))
    assert not gate.entered.is_set()


@pytest.fixture(scope="module")
async def held(stack: Stack) -> AsyncIterator[tuple[Handle, dict[str, Any]]]:
    """A run that waits for an approval while everything said to it is refused, and what it asks."""
    async with gate_of(stack) as gate:
        handle, (asked,) = await waiting(stack, gate)
        yield handle, asked
        await handle.execute_update("stop", {})
        await stack.finish(handle)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "message without text": ("send_message", {}, "text: required, but missing"),
    "nothing": ("send_message", None, "text: required, but missing"),
    "blank message": ("send_message", {"text": "  "}, "text: "),
    "long message": ("send_message", {"text": "x" * 65_537}, "text: "),
    "message that is a string": ("send_message", "hello", "send_message cannot be used"),
    "unknown field of a message": ("send_message", {"text": "x", "to": "y"}, "to: unknown field"),
    "pause by a number": ("pause", {"by": 7}, "by: "),
    "resume of what is not paused": ("resume", {}, "resume: the run is not paused"),
    "unknown field of stop": ("stop", {"why": "x"}, "why: unknown field"),
    "long reason": ("stop", {"reason": "x" * 2001}, "reason: "),
    "empty extension": ("extend_budget", {}, "name at least one of steps, tokens, cost_usd, wall_seconds"),
    "extension by zero": ("extend_budget", {"steps": 0}, "steps: "),
    "negative extension": ("extend_budget", {"tokens": -5}, "tokens: "),
    "extension of an unknown limit": ("extend_budget", {"hours": 1}, "hours: unknown field"),
    "decision on nothing": ("decide_approval", {}, "approval_id: required, but missing"),
    "decision by nobody": ("decide_approval", {"approval_id": "1.0", "arguments_digest": "", "allow": True, "by": " "}, "by: "),
    "decision on an unknown id": (
        "decide_approval",
        {"approval_id": "9.9", "arguments_digest": "", "allow": True, "by": "x"},
        "approval_id '9.9' is not open (open: 1.0)",
    ),
    "decision on other arguments": (
        "decide_approval",
        {"approval_id": "1.0", "arguments_digest": "0" * 64, "allow": True, "by": "x"},
        "arguments_digest is not that of approval 1.0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_wrong_update_is_refused_and_leaves_no_trace(held: tuple[Handle, dict[str, Any]], case: str) -> None:
    """The reason names the field; history and status are what they were."""
    handle, _ = held
    update, given, told = REFUSED[case]
    before, status = len(await events(handle)), await handle.query("status")
    assert told in await refused(handle, update, given)
    assert len(await events(handle)) == before
    assert await handle.query("status") == status


async def test_an_unknown_update_is_refused(held: tuple[Handle, dict[str, Any]]) -> None:
    """A misspelt update names those there are."""
    assert "send_message" in await refused(held[0], "send_mesage", {"text": "x"})


async def test_nothing_can_be_said_to_a_run_that_is_stopping(stack: Stack, gate: Gate) -> None:
    """A message that the model would never read is refused instead of lost."""
    handle = await stack.start("gate", gate.agent)
    await gate.reached()
    await handle.execute_update("stop", {"by": "dr.lee"})
    for update, given in (("send_message", {"text": "x"}), ("pause", {}), ("stop", {}), ("extend_budget", {"steps": 1})):
        assert f"{update}: the run is stopping (by dr.lee)" in await refused(handle, update, given)
    gate.released.set()
    await stack.finish(handle)


async def test_the_temporal_command_alone_starts_watches_and_steers_a_run(stack: Stack, gate: Gate) -> None:
    """Start, status, message, pause, resume, extension and approval with nothing but Temporal's own CLI."""
    run_id = f"cli-{uuid.uuid4().hex[:8]}"
    given = {"task": "Play [told-at-the-gate].", "agent": gate.agent, "approvals": PROMPT, "budget": {"steps": 1}}

    async def say(update: str, argument: dict[str, Any]) -> str:
        words = ("workflow", "update", "execute", "--workflow-id", run_id, "--name", update, "--input", json.dumps(argument))
        return await temporal(stack, *words)

    start = ("workflow", "start", "--type", "AgentRun", "--task-queue", QUEUE, "--workflow-id", run_id)
    await temporal(stack, *start, "--input", json.dumps(given))
    handle: Handle = stack.dev.client.get_workflow_handle(run_id)
    await stack.until(handle, state="awaiting_approval")
    shown = await temporal(stack, "workflow", "query", "--workflow-id", run_id, "--type", "status", "--output", "json")
    (asked,) = json.loads(shown)["queryResult"][0]["pending_approvals"]
    assert "queued as message 1" in await say("send_message", {"text": "Answer in French."})
    assert "the run pauses" in await say("pause", {"by": "dr.lee"})
    assert "the run goes on" in await say("resume", {})
    assert "the budget is extended" in await say("extend_budget", {"steps": 1})
    assert "is granted" in await say("decide_approval", decision(asked, True))
    gate.released.set()
    assert (await stack.finish(handle))["output"] == "bien"
    steps = ("workflow", "query", "--workflow-id", run_id, "--type", "steps", "--input", '{"after": 1, "limit": 5}')
    assert "bien" in await temporal(stack, *steps)


async def test_the_temporal_command_stops_a_run(stack: Stack, gate: Gate) -> None:
    """`stop` from the CLI ends the run after its step."""
    handle = await stack.start("gate", gate.agent)
    await gate.reached()
    await temporal(
        stack, "workflow", "update", "execute", "--workflow-id", handle.id, "--name", "stop", "--input", '{"reason": "enough"}'
    )
    gate.released.set()
    assert (await stack.finish(handle))["reason"] == "stopped by request: enough"


async def test_a_wrong_update_from_the_temporal_command_fails_with_the_field(stack: Stack, gate: Gate) -> None:
    """The CLI shows the same reason, and ends with an error."""
    handle = await stack.start("gate", gate.agent)
    await gate.reached()
    with pytest.raises(AssertionError, match="text: required, but missing"):
        await temporal(
            stack, "workflow", "update", "execute", "--workflow-id", handle.id, "--name", "send_message", "--input", '{"txt": 1}'
        )
    gate.released.set()
    await asyncio.wait_for(handle.result(), 30)
