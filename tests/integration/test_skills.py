"""AGENTS.md and skills through whole runs: told, loaded, the same after a continue-as-new, and for subagents and forks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError

from tests.integration.helpers import last_request, outputs_of
from tests.integration.stack import Stack
from tests.integration.test_durability import artifact

SKILL = "---\nname: totals\ndescription: Sum a column of a CSV file.\n---\nRun `sh skills/totals/sum.sh FILE`.\n"
ENTRIES = {
    "AGENTS.md": {"type": "inline", "text": "Write totals in euros."},
    "data.csv": {"type": "inline", "text": "1\n2\n39\n"},
    "skills/totals/SKILL.md": {"type": "inline", "text": SKILL},
    "skills/totals/sum.sh": {"type": "inline", "text": 'n=0; while read -r x; do n=$((n + x)); done < "$1"; echo "$n euros"\n'},
    "skills/odd/SKILL.md": {"type": "inline", "text": "---\nname: odd\n---\n"},
}
AGENT: dict[str, Any] = {
    "skills": ["skills"],
    "manifest": {"entries": ENTRIES},
    "subagents": [{"name": "helper", "description": "helps", "workspace": "fork", "agent": {"skills": ["skills"]}}],
}


async def test_a_skill_is_told_of_and_loaded(stack: Stack) -> None:
    """As it was when the run began, whatever becomes of its file; a subagent's fork has what is there by then."""
    handle = await stack.start("uses-a-skill", AGENT)
    result = await stack.finish(handle, 60)
    assert (result["status"], result["output"]) == ("completed", "done"), result["reason"]
    assert await artifact(stack, result, "outputs/total") == b"42 euros\n"
    items = await last_request(stack, handle)
    texts = {
        role: "\n".join(one["content"][0]["text"] for one in items if one.get("role") == role) for role in ("user", "developer")
    }
    assert "euros" not in texts["developer"], "they are not the harness's words"
    notes = texts["user"]
    assert "skills/odd/SKILL.md: has no description" in notes
    assert notes.count("Write totals in euros.") == 1
    loaded = [output for _, output in outputs_of(await last_request(stack, handle)) if "The skill totals" in output]
    assert len(loaded) == 2 and loaded[0] == loaded[1]


async def test_a_fork_of_a_run_has_its_skills(stack: Stack) -> None:
    """They are those of the workspace at the checkpoint; what the transcript has already is not told again."""
    first = await stack.start("uses-a-skill", AGENT)
    await stack.finish(first, 60)
    for step in (0, 2):
        handle = await stack.start("goes-on-with-skills", from_checkpoint={"run_id": first.id, "step": step})
        result = await stack.finish(handle, 60)
        assert (result["status"], result["output"]) == ("completed", "went on"), result["reason"]
        assert json.dumps(await last_request(stack, handle)).count("Write totals in euros.") == 1


async def test_loading_a_skill_may_need_approval(stack: Stack) -> None:
    """It is a tool as any other to the policy."""
    handle = await stack.start("uses-a-skill", {**AGENT, "approvals": {"tools": {"load_skill": "prompt"}}})
    status = await stack.until(handle, state="awaiting_approval")
    assert status["pending_approvals"][0]["tool"] == "load_skill"
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await asyncio.wait_for(handle.result(), 20)
