"""History stays small: a constant few kilobytes a step, however long the run, and a long run continues as new."""

from __future__ import annotations

import pytest

from tests.integration.stack import Stack
from tests.integration.test_durability import artifact

PER_STEP = 6 * 1024
"""Bytes of history that a step with 8 KB of output may cost."""


async def test_a_step_costs_the_same_history_however_long_the_run(stack: Stack) -> None:
    """Over 300 steps with 8 KB outputs each costs under 6 KB of history, and the last hundred no more than the first.

    From temporalio/sdk-python#1890.
    """
    handle = await stack.start("eight-kilobytes", budget={"steps": 400}, run_id="eight-kilobytes")
    result = await stack.finish(handle, 110)
    assert (result["status"], result["steps"]) == ("completed", 301)
    costs: list[int] = []
    run_ids = [handle.first_execution_run_id]
    for run_id in run_ids:
        assert run_id is not None
        whole = stack.dev.client.get_workflow_handle(handle.id, run_id=run_id)
        async for event in whole.fetch_history_events():
            scheduled = event.activity_task_scheduled_event_attributes
            if scheduled.activity_type.name == "call_model":
                costs.append(0)
            if costs:
                costs[-1] += event.ByteSize()
            if event.HasField("workflow_execution_continued_as_new_event_attributes"):
                run_ids.append(event.workflow_execution_continued_as_new_event_attributes.new_execution_run_id)
    assert len(costs) == 301
    first, last = costs[:100], costs[200:300]
    assert max(costs[:300]) < 2 * PER_STEP, "one step, with the events of a continue-as-new beside it"
    assert sum(first) / 100 < PER_STEP
    assert sum(last) / 100 < PER_STEP
    assert sum(last) < 1.1 * sum(first)


@pytest.mark.soak
async def test_a_very_long_run_finishes_through_continue_as_new(stack: Stack) -> None:
    """Each of many steps happens once, in order, across several continue-as-new; and its skills can still be loaded."""
    skill = {"type": "inline", "text": "---\nname: last\ndescription: For the end.\n---\nEnd.\n"}
    agent = {"skills": ["skills"], "manifest": {"entries": {"skills/last/SKILL.md": skill}}}
    handle = await stack.start("two-thousand", agent, budget={"steps": None})
    result = await stack.finish(handle, 1500)
    assert (result["status"], result["steps"], result["usage"]["model_calls"]) == ("completed", 2003, 2003)
    expected = b"".join(b"%d\n" % n for n in range(1, 2001))
    assert await artifact(stack, result, "outputs/count") == expected
    description = await stack.dev.client.get_workflow_handle(handle.id).describe()
    assert description.run_id != handle.first_execution_run_id
    assert stack.answered(handle) == list(range(1, 2004))
