"""Runs that talk to a command while it runs: several steps, one session."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError

from tests.integration.helpers import last_request, outputs_of, sandboxes_of, scheduled
from tests.integration.stack import Handle, Stack
from tests.integration.test_durability import alive, artifact, started, until, workspace_log


async def played(stack: Stack, scenario: str) -> tuple[Handle, dict[str, Any]]:
    """Do a run to its end."""
    handle = await stack.start(scenario)
    result = await stack.finish(handle)
    assert result["status"] == "completed", result
    return handle, result


async def test_a_model_works_in_a_python_console(stack: Stack) -> None:
    """It starts a console, types, resizes the terminal, interrupts a loop, and is told the exit code in the end."""
    handle, result = await played(stack, "console")
    assert result["steps"] == 8
    actions = [action for step in (await handle.query("steps"))["steps"] for action in step["actions"]]
    assert any('type "x = 6 * 7\\n"' in action for action in actions), actions


async def test_a_long_command_costs_two_steps(stack: Stack) -> None:
    """It is left running, and one wait on the side of the sandbox gives the rest of its output and its end."""
    handle, result = await played(stack, "long-build")
    assert (result["steps"], result["usage"]["model_calls"]) == (3, 3)
    assert (await scheduled(handle)).count("run_shell") == 2
    assert await artifact(stack, result, "outputs/log") == b"built\n"


async def test_a_command_that_ends_within_its_wait_is_no_session(stack: Stack) -> None:
    """Its result looks like that of any command."""
    await played(stack, "short-session")


async def test_a_session_is_killed_with_its_children(stack: Stack) -> None:
    """A server that the model started is ended by it."""
    handle, _ = await played(stack, "server")
    outputs = dict(outputs_of(await last_request(stack, handle)))
    assert outputs["call_2_1"].startswith("killed after")


async def test_faults_of_sessions_teach(stack: Stack) -> None:
    """A wrong id names no job, not even by its path; input to the ended and to those without a terminal is explained."""
    handle, _ = await played(stack, "session-faults")
    outputs = dict(outputs_of(await last_request(stack, handle)))
    assert "session 9-9-ffff: there is no such session in this sandbox" in outputs["call_1_1"]
    assert "session ../1/0: there is no such session in this sandbox" in outputs["call_1_2"]
    assert "input: not with command; start the command with tty: true" in outputs["call_1_3"]
    assert "nothing was typed: it has no terminal" in outputs["call_4_1"]
    assert "still running" in outputs["call_4_1"]


async def test_the_sandbox_worker_killed_in_mid_wait(own_stack: Stack) -> None:
    """The next worker types nothing again, waits on, and gives the one output."""
    handle = await own_stack.start("worker-killed-in-a-wait")
    await until(lambda: workspace_log(own_stack) is not None, "the typed line")
    own_stack.kill("sandbox-worker")
    result = await own_stack.finish(handle)
    assert result["status"] == "completed", result
    assert await artifact(own_stack, result, "outputs/log") == b"once\n"
    assert own_stack.answered(handle) == [1, 2, 3]


async def test_cancelling_a_run_that_waits_for_a_session(stack: Stack) -> None:
    """The wait ends at once, and the session with all its children is dead when the run is."""
    handle = await stack.start("endless-session")
    await until(lambda: alive(b"615.5") >= 2, "the session's start")
    await stack.until(handle, step=2)
    await started(stack, handle, "run_shell")
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await asyncio.wait_for(handle.result(), 20)
    assert alive(b"615.5") == 0


async def test_cancelling_a_run_whose_worker_is_lost(own_stack: Stack) -> None:
    """The lost call is not tried again; the run is cancelled all the same, and its sandbox ended with all that runs in it."""
    handle = await own_stack.start("session-of-a-lost-worker")
    await own_stack.until(handle, step=2)
    await started(own_stack, handle, "run_shell")
    assert alive(b"617.5") >= 1
    own_stack.kill("sandbox-worker")
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await asyncio.wait_for(handle.result(), 40)
    assert (await handle.query("status"))["result"]["status"] == "cancelled"
    await until(lambda: alive(b"617.5") == 0 and sandboxes_of(own_stack, handle.id) == [], "the end of the sandbox", 10)
