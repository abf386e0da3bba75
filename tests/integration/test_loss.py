"""A lost sandbox ends the run in bounded time with a clear failure; the model never sees the engine's error as output."""

from __future__ import annotations

import json
import os
import signal

from activities.model.transcript import TranscriptStore
from contracts.blob import BlobRef
from tests.integration.stack import Stack
from tests.integration.test_durability import until, workspace_log


async def test_a_killed_sandbox_ends_the_run_with_its_transcript(own_stack: Stack) -> None:
    """The failure is typed and comes within seconds; what was done before is in the transcript, and the checkpoint names it.

    From temporalio/sdk-python#1548, UKGovernmentBEIS/inspect_ai#4709 and UKGovernmentBEIS/inspect_ai#4740.
    """
    handle = await own_stack.start("slow-command")
    await until(lambda: workspace_log(own_stack) is not None, "the command's first line")
    (sandbox,) = own_stack.sandboxes()
    os.kill(json.loads((sandbox / "state.json").read_text())["pid"], signal.SIGKILL)
    error = await own_stack.failure(handle, 15)
    assert error.type == "RunFailed"
    assert "sandbox" in error.message
    result = error.details[0]
    assert (result["status"], result["steps"]) == ("failed", 1)
    head = BlobRef.model_validate(result["checkpoint"]["transcript"])
    entries = await TranscriptStore(own_stack.dev.blobs).load(head)
    said = [entry.item["type"] for entry in entries]
    assert said.count("function_call") == 1
    assert "function_call_output" not in said, "a lost sandbox is no output of a command"
    assert own_stack.answered(handle) == [1]


async def test_workers_log_run_and_step_and_no_content(own_stack: Stack) -> None:
    """Each activity has a line with its run, step and attempt; neither arguments nor outputs nor the key are logged."""
    handle = await own_stack.start("files")
    await own_stack.finish(handle)
    lines = [json.loads(line) for line in (own_stack.dev.logs / "sandbox-worker.log").read_text().splitlines()]
    shell = [line for line in lines if line.get("activity") == "run_shell"]
    assert {line["run"] for line in shell} == {handle.id}
    assert {line["step"] for line in shell} == {1, 3}
    assert all({"attempt", "role", "timestamp", "level"} <= set(line) for line in shell)
    for log in own_stack.dev.logs.glob("*-worker.log"):
        text = log.read_text()
        assert "outputs/t.csv" not in text, log
        assert "Play [files]" not in text, log
