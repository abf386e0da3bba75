"""Budgets: checked before money is spent, everything made so far kept, and only null is without limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType

from tests.integration.helpers import events, gate_of, sandboxes_of
from tests.integration.stack import Stack


async def spent(stack: Stack, budget: dict[str, Any], **more: Any) -> tuple[dict[str, Any], list[int]]:
    """Let a run of eight paid steps work within a budget; return its result and the turns the model answered."""
    handle = await stack.start("spends", budget=budget, **more)
    return await stack.finish(handle), stack.answered(handle)


async def test_a_run_ends_before_the_model_call_that_its_steps_do_not_allow(stack: Stack) -> None:
    """Two steps are two model calls, and the reason names the limit."""
    result, answered = await spent(stack, {"steps": 2})
    assert (result["status"], result["reason"], result["steps"]) == ("budget_exceeded", "budget.steps: 2 used of 2", 2)
    assert answered == [1, 2]


async def test_a_run_ends_when_its_tokens_are_used_up(stack: Stack) -> None:
    """Input and output count together; the call that crosses the limit is the last one."""
    result, answered = await spent(stack, {"tokens": 2500})
    assert (result["status"], result["reason"]) == ("budget_exceeded", "budget.tokens: 3000 used of 2500")
    assert (result["usage"]["input_tokens"], result["usage"]["output_tokens"], answered) == (2700, 300, [1, 2, 3])


async def test_a_run_ends_when_its_money_is_used_up(stack: Stack) -> None:
    """The cost follows the price table, cached input at its own price."""
    result, answered = await spent(stack, {"cost_usd": 0.000001}, model="gpt-5.4-mini")
    assert (result["status"], answered) == ("budget_exceeded", [1])
    assert result["reason"].startswith("budget.cost_usd: ")
    # 500 fresh, 400 cached and 100 output tokens, at 0.75, 0.075 and 4.50 dollars a million.
    assert result["usage"]["cost_usd"] == pytest.approx(0.000855)


async def test_a_run_ends_when_its_time_is_over(stack: Stack) -> None:
    """Wall time counts from the start of the run, and is looked at before each call."""
    handle = await stack.start("slow-step", budget={"wall_seconds": 0.8})
    result = await stack.finish(handle)
    assert (result["status"], stack.answered(handle)) == ("budget_exceeded", [1])
    assert result["reason"].startswith("budget.wall_seconds: ")
    assert result["usage"]["wall_seconds"] >= 0.9


async def test_what_was_made_within_a_budget_is_kept(stack: Stack) -> None:
    """Artifacts, the last text and the checkpoint are in the result, and no sandbox is left."""
    handle = await stack.start("spends", budget={"steps": 2})
    result = await stack.finish(handle)
    assert [artifact["path"] for artifact in result["artifacts"]["first"]] == ["outputs/step-1.txt", "outputs/step-2.txt"]
    assert (result["output"], result["checkpoint"]["step"]) == ("step 2", 2)
    assert sandboxes_of(stack, handle.id) == []


async def test_null_is_no_limit(stack: Stack) -> None:
    """An agent's limit of seven steps is lifted by null, and by nothing else (opensearch-project/ml-commons#4820)."""
    (limited, seven), (free, all_nine) = await asyncio.gather(
        spent(stack, {"steps": 7}, agent="plain"), spent(stack, {"steps": None}, agent="plain")
    )
    assert (limited["status"], seven) == ("budget_exceeded", list(range(1, 8)))
    assert (free["status"], all_nine) == ("completed", list(range(1, 10)))


async def test_an_agents_own_budget_holds_for_a_run_that_names_none(stack: Stack) -> None:
    """The limit that stands in the agent's file is kept."""
    handle = await stack.start("spends", "plain")
    result = await stack.finish(handle)
    assert (result["status"], result["steps"]) == ("budget_exceeded", 7)


async def test_the_time_budget_ends_a_paused_run(stack: Stack) -> None:
    """A run that nobody resumes does not wait for ever when it has a wall-time limit."""
    async with gate_of(stack) as gate:
        handle = await stack.start("gate", gate.agent, budget={"wall_seconds": 2})
        await gate.reached()
        await handle.execute_update("pause", {})
        gate.released.set()
        result = await stack.finish(handle)
    assert (result["status"], result["steps"]) == ("budget_exceeded", 1)


async def test_a_paused_run_whose_time_was_extended_stays_paused(stack: Stack) -> None:
    """When the first limit has passed, the run is still held, and has not gone on by itself."""
    async with gate_of(stack) as gate:
        handle = await stack.start("gate", gate.agent, budget={"wall_seconds": 3})
        await gate.reached()
        await handle.execute_update("pause", {})
        gate.released.set()
        await stack.until(handle, state="paused")
        await handle.execute_update("extend_budget", {"wall_seconds": 3600})
        async with asyncio.timeout(30):
            while not any(event.event_type == EventType.EVENT_TYPE_TIMER_FIRED for event in await events(handle)):
                await asyncio.sleep(0.1)
        assert (await handle.query("status"))["state"] == "paused"
        assert stack.answered(handle) == [1]
        await handle.execute_update("resume", {})
        assert (await stack.finish(handle))["status"] == "completed"


@pytest.mark.parametrize("model", ["gpt-5.4-mini", "somebodys-own-model"])
async def test_the_cost_is_known_only_where_the_price_is(stack: Stack, model: str) -> None:
    """A model without a price has no cost, instead of one that is zero."""
    result = await stack.finish(await stack.start("hello", {"tools": []}, model=model))
    assert (result["usage"]["cost_usd"] is not None) == (model == "gpt-5.4-mini")


async def test_a_runs_budget_replaces_only_the_limits_it_names(stack: Stack) -> None:
    """The agent's other limits stay; an explicit null lifts one."""
    agent = {"tools": [], "budget": {"steps": 9, "tokens": 5000, "cost_usd": 1.5}}
    handle = await stack.start("hello", agent, budget={"tokens": 900, "cost_usd": None})
    await stack.finish(handle)
    budget = (await handle.query("status"))["budget"]
    assert (budget["steps"], budget["tokens"], budget["cost_usd"]) == (9, 900, None)
