"""What people see of a run in Temporal's own tools: search attributes, and the current details in the Web UI."""

from __future__ import annotations

from typing import Any

from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributeUpdate

with workflow.unsafe.imports_passed_through():
    from contracts.carried import CarriedRun
    from contracts.run import RunState
    from contracts.usage import Usage

AGENT = SearchAttributeKey.for_keyword("CaissonAgent")
STATE = SearchAttributeKey.for_keyword("CaissonState")
STEP = SearchAttributeKey.for_int("CaissonStep")
TOKENS = SearchAttributeKey.for_int("CaissonTokens")
COST = SearchAttributeKey.for_float("CaissonCostUsd")
PROVIDER = SearchAttributeKey.for_keyword("CaissonProvider")
AWAITING = SearchAttributeKey.for_bool("CaissonAwaitingApproval")
PARENT = SearchAttributeKey.for_keyword("CaissonParent")


def show_start(agent: str, provider: str, parent: str | None) -> None:
    """Set what does not change while a run goes on."""
    updates: list[SearchAttributeUpdate[Any]] = [AGENT.value_set(agent), PROVIDER.value_set(provider)]
    if parent is not None:
        updates.append(PARENT.value_set(parent))
    workflow.upsert_search_attributes(updates)


def show_progress(state: RunState, step: int, usage: Usage) -> None:
    """Set what changes with each step; costs one event."""
    updates: list[SearchAttributeUpdate[Any]] = [
        STATE.value_set(state.value),
        STEP.value_set(step),
        TOKENS.value_set(usage.tokens),
        AWAITING.value_set(state is RunState.AWAITING_APPROVAL),
    ]
    if usage.cost_usd is not None:
        updates.append(COST.value_set(round(usage.cost_usd, 6)))
    workflow.upsert_search_attributes(updates)


def show_batch(agent: str, state: RunState, finished: int, usage: Usage, line: str) -> None:
    """Show how a batch stands: `CaissonStep` counts its finished runs."""
    workflow.upsert_search_attributes([AGENT.value_set(agent)])
    show_progress(state, finished, usage)
    workflow.set_current_details(line)


def details(state: RunState, run: CarriedRun, activity: str, recent: list[str]) -> str:
    """Return the run's current state as short Markdown for the Web UI."""
    usage, label = run.usage, f" ({run.model_label})" if run.model_label else ""
    limit = f" of {run.budget.steps}" if run.budget.steps is not None else ""
    cost = "cost unknown (no price for this model)" if not run.prepared.price_known else f"${usage.cost_usd or 0:.4f}"
    lines = [
        f"**{state.value}** · agent `{run.prepared.agent_name}` · model `{run.prepared.model}`{label}",
        "",
        f"step {run.step}{limit} · {usage.tokens:,} tokens · {cost} · {usage.tool_calls} tool calls",
        "",
        f"now: {_quoted(activity)}",
    ]
    if recent:
        lines += ["", "last actions:", "", *(f"- {_quoted(action)}" for action in recent)]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    # What a model wrote must not become Markdown (a link, an image) in the operator's browser.
    clean = " ".join(text.split()).replace("`", "'")
    return f"`{clean}`" if clean else "-"
