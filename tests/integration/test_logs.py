"""What workers log of runs."""

from __future__ import annotations

import json

from tests.integration.stack import Stack


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
