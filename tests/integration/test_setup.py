"""The manifest's setup: commands that run in the workspace before the model is asked."""

from __future__ import annotations

from tests.integration.stack import Stack


def manifest(*commands: str) -> dict[str, object]:
    """A manifest with these setup commands and a file for them."""
    return {"entries": {"given": {"type": "inline", "text": "by setup\n"}}, "setup": list(commands)}


async def test_setup_runs_before_the_model_is_asked(stack: Stack) -> None:
    """In order, on the manifest's files; what it makes is in the workspace, and no model call was spent on it."""
    handle = await stack.start("after-setup", manifest=manifest("cp given first", "cp first made"))
    result = await stack.finish(handle)
    assert (result["status"], result["usage"]["model_calls"], result["usage"]["tool_calls"]) == ("completed", 2, 1)


async def test_setup_that_does_not_do_well_ends_the_run_before_the_model(stack: Stack) -> None:
    """The command, how it ended, what it said and what to do; and nothing was spent."""
    before = set(stack.sandboxes())
    handle = await stack.start("after-setup", manifest=manifest("echo trouble >&2; exit 3", "echo never > never"))
    error = await stack.failure(handle)
    assert error.type == "BadInput"
    assert "manifest.setup[0]: 'echo trouble >&2; exit 3' did not do well" in error.message
    assert "exit code 3" in error.message
    assert "trouble" in error.message
    assert stack.journal(handle) == []
    assert set(stack.sandboxes()) <= before
