"""Making a list of items one that the Responses API accepts, whatever was interrupted before.

Rules of the API: every function call has exactly one output; an output follows its call; a reasoning item is sent with the item
it was produced for, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from activities.model.transcript import Item

INTERRUPTED = "interrupted: this call was aborted before it gave an output; it may have had an effect"
CALLS: Final = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
"""The kinds of calls, and of the output that each has."""
OUTPUTS: Final = frozenset(CALLS.values())


def repair(items: Sequence[Item]) -> list[Item]:
    """Return the items with pairs kept together.

    A call without an output gets one that says it was interrupted, after the answer it belongs to; an output without a call, and
    a second output for a call, are left out; a reasoning item that no item of the same answer follows is left out.
    """
    return _without_lone_reasoning(_with_one_output_each(items))


def _with_one_output_each(items: Sequence[Item]) -> list[Item]:
    outputs: dict[str, Item] = {}
    for item in items:
        if item.get("type") in OUTPUTS:
            outputs.setdefault(str(item.get("call_id")), item)
    result: list[Item] = []
    waiting: list[Item] = []
    for item in items:
        # What is no longer the answer that asked for the calls: their outputs stand before it.
        if waiting and not _is_models(item):
            result += [_output_of(call, outputs) for call in waiting]
            waiting = []
        if item.get("type") in OUTPUTS:
            continue
        result.append(item)
        if item.get("type") in CALLS:
            waiting.append(item)
    return result + [_output_of(call, outputs) for call in waiting]


def _output_of(call: Item, outputs: dict[str, Item]) -> Item:
    found = outputs.get(str(call.get("call_id")))
    # An output is recorded without regard to how the model spelt its call.
    return {**found, "type": CALLS[call["type"]]} if found is not None else _interrupted(call)


def _without_lone_reasoning(items: Iterable[Item]) -> list[Item]:
    result: list[Item] = []
    for item in items:
        if not _is_models(item):
            while result and result[-1].get("type") == "reasoning":
                result.pop()
        result.append(item)
    while result and result[-1].get("type") == "reasoning":
        result.pop()
    return result


def _is_models(item: Item) -> bool:
    """Whether an item is part of an answer: all but outputs and what others said, also kinds that are not known here."""
    return item.get("role", "assistant") == "assistant" and item.get("type") not in OUTPUTS


def _interrupted(call: Item) -> Item:
    return {"type": CALLS[call["type"]], "call_id": call.get("call_id"), "output": INTERRUPTED}
