"""Making a list of items one that the Responses API accepts, whatever was interrupted before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.model.repair import INTERRUPTED, repair
from workers.scripted_model.conversation import InputItem, check_input

Item = dict[str, Any]


def user(text: str = "hi") -> Item:
    """A message of a person."""
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def said(text: str = "done") -> Item:
    """A message of the model."""
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(n: int) -> Item:
    """A reasoning item."""
    return {"type": "reasoning", "id": f"rs_{n}", "summary": []}


def call(n: int) -> Item:
    """A tool call."""
    return {"type": "function_call", "id": f"fc_{n}", "call_id": f"call_{n}", "name": "shell", "arguments": "{}"}


def output(n: int, text: str = "ok") -> Item:
    """A tool output."""
    return {"type": "function_call_output", "call_id": f"call_{n}", "output": text}


def interrupted(n: int) -> Item:
    """What stands for an output that never came."""
    return output(n, INTERRUPTED)


# The first five come from openai/openai-agents-python#1660 and #1611, pydantic/pydantic-ai#2861 and VRSEN/agency-swarm#367.
CASES: dict[str, tuple[list[Item], list[Item]]] = {
    "reasoning at the end": ([user(), thought(1)], [user()]),
    "reasoning before a person's message": ([user(), thought(1), user("again")], [user(), user("again")]),
    "call whose reasoning was never recorded": ([user(), call(1), output(1)], [user(), call(1), output(1)]),
    "calls removed from behind their reasoning": ([user(), thought(1), thought(2), user("x")], [user(), user("x")]),
    "good pairs": (
        [user(), thought(1), call(1), output(1), thought(2), said()],
        [user(), thought(1), call(1), output(1), thought(2), said()],
    ),
    # anthropics/claude-code#21041, livekit/agents#5092
    "call that was interrupted by a message": (
        [user(), thought(9), call(9), user("stop, do something else")],
        [user(), thought(9), call(9), interrupted(9), user("stop, do something else")],
    ),
    "call at the end": ([user(), call(1)], [user(), call(1), interrupted(1)]),
    "one of two calls unanswered": (
        [user(), call(1), call(2), output(2), user()],
        [user(), call(1), call(2), interrupted(1), output(2), user()],
    ),
    "output after a message": ([user(), call(1), user("x"), output(1)], [user(), call(1), output(1), user("x")]),
    "output without a call": ([user(), output(7), said()], [user(), said()]),
    "two outputs of one call": ([user(), call(1), output(1), output(1, "again")], [user(), call(1), output(1)]),
    "output before its call": ([user(), output(1), call(1)], [user(), call(1), output(1)]),
    "output of a custom tool": (
        [user(), {"type": "custom_tool_call", "call_id": "call_1", "name": "p", "input": "x"}, output(1, "what it gave")],
        [
            user(),
            {"type": "custom_tool_call", "call_id": "call_1", "name": "p", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "call_1", "output": "what it gave"},
        ],
    ),
    "reasoning before something of the service's own": (
        [user(), thought(1), {"type": "web_search_call", "id": "ws_1"}, thought(2), call(1), user()],
        [user(), thought(1), {"type": "web_search_call", "id": "ws_1"}, thought(2), call(1), interrupted(1), user()],
    ),
    "custom tool": (
        [user(), {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x"}],
        [
            user(),
            {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": INTERRUPTED},
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_was_interrupted_becomes_a_valid_request(case: str) -> None:
    """Calls and outputs stay together, and so do reasoning and what it led to."""
    given_items, wanted = CASES[case]
    assert repair(given_items) == wanted


def test_the_output_of_an_interrupted_call_says_that_it_may_have_had_an_effect() -> None:
    """The model must not take it for a call that was never made."""
    assert "interrupted" in INTERRUPTED
    assert "may have had an effect" in INTERRUPTED


@st.composite
def histories(draw: st.DrawFn) -> list[Item]:
    """Any list of items in which no two calls share an id, as the transcript has it; all else is out of order or missing."""
    kinds = draw(st.lists(st.sampled_from(["user", "note", "said", "thought", "call", "output"]), max_size=25))
    items: list[Item] = []
    for n, kind in enumerate(kinds):
        match kind:
            case "user":
                items.append(user(str(n)))
            case "note":
                items.append({**user(str(n)), "role": "developer"})
            case "said":
                items.append(said(str(n)))
            case "thought":
                items.append(thought(n))
            case "call":
                items.append(call(n))
            case _:
                items.append(output(draw(st.integers(0, len(kinds))), str(n)))
    return items


@given(histories())
def test_every_repaired_history_satisfies_the_rules_of_the_api(items: list[Item]) -> None:
    """Each call has exactly one output, after it and before what comes next; reasoning is followed by its answer."""
    repaired = repair(items)
    check_input([InputItem.model_validate(item) for item in repaired])
    places = {item["call_id"]: n for n, item in enumerate(repaired) if item["type"] == "function_call"}
    answers = [item["call_id"] for item in repaired if item["type"] == "function_call_output"]
    assert sorted(answers) == sorted(places)
    for n, item in enumerate(repaired):
        if item["type"] == "function_call_output":
            assert not any(other.get("role") in ("user", "developer") for other in repaired[places[item["call_id"]] : n])


@given(histories())
def test_repairing_twice_changes_nothing_more(items: list[Item]) -> None:
    """A repaired history is sent again as it is, so that what the service has read stays valid."""
    assert repair(repair(items)) == repair(items)


@given(histories())
def test_nothing_that_was_said_is_lost(items: list[Item]) -> None:
    """Messages and calls stay, in their order."""

    def kept(some: list[Item]) -> list[Item]:
        return [item for item in some if item["type"] in ("message", "function_call")]

    assert kept(repair(items)) == kept(items)
