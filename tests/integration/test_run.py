"""A run from its task to its result, on a real Temporal server, in a real sandbox."""

from __future__ import annotations

import asyncio
import hashlib

from tests.integration.helpers import sandboxes_of
from tests.integration.stack import Stack


async def test_a_task_alone_is_enough(stack: Stack) -> None:
    """Only `task` is required; the answer, the usage and the model's label come back."""
    result = await stack.finish(await stack.start("hello"))
    assert (result["status"], result["reason"], result["output"], result["steps"]) == ("completed", None, "hello back", 1)
    assert result["usage"]["model_calls"] == 1
    assert result["usage"]["input_tokens"] > 0
    assert result["model_label"] == "scripted, not a language model"


async def test_tools_work_on_files_and_outputs_become_artifacts(stack: Stack) -> None:
    """Shell and apply_patch share one workspace, and what lies in outputs/ is stored with its digest."""
    handle = await stack.start("files")
    result = await stack.finish(handle)
    assert result["status"] == "completed", result
    artifacts = {artifact["path"]: artifact for artifact in result["artifacts"]["first"]}
    assert set(artifacts) == {"outputs/t.csv", "outputs/notes.md"}
    assert artifacts["outputs/t.csv"]["blob"]["digest"] == hashlib.sha256(b"a,b\n3,4\n").hexdigest()
    assert artifacts["outputs/notes.md"]["media_type"] == "text/markdown"
    assert result["usage"]["tool_calls"] == 3
    assert stack.answered(handle) == [1, 2, 3, 4]


async def test_a_finished_run_leaves_no_sandbox(stack: Stack) -> None:
    """The sandbox is ended with the run."""
    handle = await stack.start("files")
    await stack.finish(handle)
    status = await handle.query("status")
    assert status["state"] == "finished"
    assert status["sandbox"] is None
    assert sandboxes_of(stack, handle.id) == []


async def test_a_change_of_state_shows_at_once(stack: Stack) -> None:
    """Whoever lists running runs finds one in its first model call, which may take minutes."""
    handle = await stack.start("slow-model")
    async with asyncio.timeout(10):
        while True:
            attributes = (await handle.describe()).typed_search_attributes
            states = [pair.value for pair in attributes.search_attributes if pair.key.name == "CaissonState"]
            if states == ["running"]:
                break
            await asyncio.sleep(0.05)
    assert (await handle.query("status"))["step"] == 0
    await stack.finish(handle)
