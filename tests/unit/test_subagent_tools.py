"""What a model may say of subagents that makes no sense: a fault for it to read, and nothing that a workflow stumbles over."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import JsonValue

from activities.tools.subagents import define_subagents
from contracts.agent import AgentSpec
from contracts.run import Reason
from workflows.children import Child, Children

SPEC = AgentSpec.model_validate({"subagents": [{"name": "plain", "description": "The plain."}]})


def children(run_id: str) -> Children:
    """The subagents of a run, of which there are none yet."""
    nothing = cast("Any", None)
    return Children(run_id, nothing, nothing, None, nothing, nothing)


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("spawn_agents", {"agents": [{"role": "plain", "name": "a", "task": " \n"}]}, "agents: 'a': task is empty"),
        ("spawn_agents", {"agents": [{"role": "plain", "name": "a\n", "task": "x"}]}, "a name has no line breaks"),
        ("spawn_agents", {"agents": [{"role": "plain", "name": "a", "task": "x"}]}, None),
        ("subagents", {"message": {"name": "a", "text": "\t"}}, "message: text is empty"),
        ("subagents", {"message": {"name": "a", "text": "hurry"}, "wait_for": ["a", "a"]}, None),
        ("subagents", {"message": "x"}, None),
    ],
)
def test_what_a_subagent_could_not_take_is_told_before_it_is_tried(
    tool: str, arguments: dict[str, Any], told: str | None
) -> None:
    """In words of the tool; what the schema says better is left to it."""
    definition = next(one for one in define_subagents(SPEC) if one.name == tool)
    fault = definition.check(arguments)
    assert fault is None if told is None else fault is not None and told in fault


def test_a_subagent_whose_id_would_be_too_long_is_not_started() -> None:
    """Temporal would refuse it for ever."""
    prepared = cast("Any", SimpleNamespace(plan=SimpleNamespace(subagents_left=5, depth_left=0)))
    fault = children("\u00e9" * 495)._fault_of(
        [{"name": "kid", "role": "plain"}, {"name": "a-long-name", "role": "plain"}], prepared
    )
    assert fault is not None and "over 1000 bytes; take shorter names" in fault
    fault = children("\u00e9" * 495)._fault_of([{"name": "kid", "role": "plain"}], prepared)
    assert fault is not None and fault.startswith("subagent_limits.depth")


async def test_a_long_reason_to_stop_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cut to what a run takes: with more, the subagent would go on, and its parent would wait for it."""
    said: list[Any] = []

    async def signal(_: Children, child: Child, what: JsonValue) -> None:
        said.append(what)

    monkeypatch.setattr(Children, "_signal", signal)
    monkeypatch.setattr("workflows.children.workflow.logger", logging.getLogger())
    children("r")._signal_stop(cast("Any", SimpleNamespace(name="kid", is_stopping=False)), "because " * 500)
    await asyncio.sleep(0)
    Reason.model_validate(said[0]["stop"])
