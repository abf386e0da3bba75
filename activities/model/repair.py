"""Making a list of items one that the Responses API accepts, whatever was interrupted before.

Rules of the API: every function call has exactly one output; an output follows its call; a reasoning item is sent with the item
it was produced for, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from activities.model.transcript import Item

INTERRUPTED = "interrupted: this call was aborted before it gave an output; it may have had an effect"
_CALLS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
_OUTPUTS = set(_CALLS.values())


def repair(items: Sequence[Item]) -> list[Item]:
    """Return the items with pairs kept together.

    A call without an output gets one that says it was interrupted, after the answer it belongs to; an output without a call, and
    a second output for a call, are left out; a reasoning item that no item of the same answer follows is left out.
    """
    return _without_lone_reasoning(_with_one_output_each(items))


def _with_one_output_each(items: Sequence[Item]) -> list[Item]:
    outputs: dict[str, Item] = {}
    for item in items:
        if item.get("type") in _OUTPUTS:
            outputs.setdefault(str(item.get("call_id")), item)
    asked = {str(item.get("call_id")) for item in items if item.get("type") in _CALLS}
    result: list[Item] = []
    waiting: list[Item] = []
    given: set[str] = set()
    for item in items:
        kind, call_id = item.get("type"), str(item.get("call_id"))
        if kind in _OUTPUTS:
            if call_id in given or call_id not in asked:
                continue
            given.add(call_id)
            waiting = [call for call in waiting if call["call_id"] != call_id]
        elif waiting and not _is_models(item):
            # What follows is no longer the answer that asked for the call: its output must stand before this item.
            for call in waiting:
                own = str(call["call_id"])
                result.append(outputs.get(own) or _interrupted(call))
                given.add(own)
            waiting = []
        result.append(item)
        if kind in _CALLS:
            waiting.append(item)
    return result + [_interrupted(call) for call in waiting]


def _without_lone_reasoning(items: Iterable[Item]) -> list[Item]:
    result: list[Item] = []
    for item in items:
        if not _is_answer(item):
            while result and result[-1].get("type") == "reasoning" and item.get("type") != "reasoning":
                result.pop()
        result.append(item)
    while result and result[-1].get("type") == "reasoning":
        result.pop()
    return result


def _is_answer(item: Item) -> bool:
    return item.get("type") in _CALLS or (item.get("type") == "message" and item.get("role") == "assistant")


def _is_models(item: Item) -> bool:
    return _is_answer(item) or item.get("type") == "reasoning"


def _interrupted(call: Item) -> Item:
    return {"type": _CALLS[call["type"]], "call_id": call["call_id"], "output": INTERRUPTED}
