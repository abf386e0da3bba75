"""Reading a whole answer into the items of the transcript.

Compatible servers leave fields out, or write them otherwise than the API does. What is clear is read; nothing here raises because
of a form, since the answer is paid for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from activities.model.repair import CALLS, OUTPUTS
from activities.model.transcript import Item
from contracts.blob import whole_characters
from contracts.usage import CallUsage

MAX_KEPT_CALLS: Final = 256
"""Calls of one answer that are kept at all. Each is told what became of it, and a result that lists too many fits nowhere."""

MAX_TOKENS: Final = 10**12
"""A number of tokens above this is no count of anything."""

_LONGEST_NAME: Final = 200
_REFUSED_IN_NAMES: Final = re.compile("[^a-zA-Z0-9_-]")
_WRITTEN: Final = {"function_call": "arguments", "custom_tool_call": "input"}
"""The kinds of calls, and the field of each that holds what the model wrote."""


@dataclass(frozen=True)
class Reply:
    """A whole answer: its items as they go into the transcript, and what kind of answer it is."""

    id: str
    output: tuple[Item, ...]
    finish: Literal["tools", "final", "refused", "incomplete"]
    incomplete_reason: str | None
    text: str
    usage: CallUsage
    model: str


def read_reply(response: Mapping[str, Any], model: str) -> Reply:
    """Read a response whose status is `completed` or `incomplete`. `model` is the one that was asked."""
    output = tuple(map(_input_form, _kept(_items(response.get("output")))))
    text, refusal = _texts(output)
    details = response.get("incomplete_details")
    reason = _name(details.get("reason")) if isinstance(details, dict) else _name(details)
    finish: Literal["tools", "final", "refused", "incomplete"]
    if response.get("status") == "incomplete":
        finish = "refused" if reason == "content_filter" else "incomplete"
        # A call that was cut short must never run: its arguments may be only the beginning of what was meant.
        output = tuple(item for item in output if item["type"] not in CALLS)
    elif any(item["type"] in CALLS for item in output):
        finish = "tools"
    elif refusal is not None and not text:
        finish = "refused"
    else:
        finish = "final"
    return Reply(
        id=_name(response.get("id")),
        output=output,
        finish=finish,
        incomplete_reason=reason or None,
        text=text or refusal or "",
        usage=_usage(response.get("usage")),
        model=_name(response.get("model")) or model,
    )


def sent_back(item: Item) -> Item:
    """Return an item as later requests hold it: text that can be encoded, and no name of a tool that the API refuses."""
    sent: Item = sendable(item)
    if sent.get("type") in CALLS:
        name = _REFUSED_IN_NAMES.sub("_", str(sent.get("name") or ""))[:64]
        return {**sent, "name": name or "unnamed"}
    return sent


def sendable(value: Any) -> Any:
    """Return a JSON value in which every string can be encoded and every number is one.

    A model may write half of a surrogate pair, and a server NaN. Left as it is, no later request of the run could be sent.
    """
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, list):
        return [sendable(part) for part in value]
    if isinstance(value, dict):
        return {whole_characters(name): sendable(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _items(output: object) -> Iterator[Item]:
    """The items of an output, each with a type and the fields that its type needs. What is none is left out."""
    for given in output if isinstance(output, list) else [output]:
        item = {"type": "message", "content": given} if isinstance(given, str) else given
        if not isinstance(item, dict):
            continue
        kind = item.get("type") or ("message" if "content" in item else None)
        if kind == "message":
            yield {**item, "type": kind, "role": "assistant", "content": list(_parts(item.get("content")))}
        elif isinstance(kind, str) and kind in CALLS:
            yield {**item, "name": _written(item.get("name"), ""), _WRITTEN[kind]: _written(item.get(_WRITTEN[kind]), "{}")}
        elif isinstance(kind, str) and kind not in OUTPUTS:
            yield item


def _parts(content: object) -> Iterator[Item]:
    for given in content if isinstance(content, list) else [content]:
        part = {"type": "text", "text": given} if isinstance(given, str) else given
        if not isinstance(part, dict):
            continue
        kind = part.get("type") or ("refusal" if "refusal" in part else "text")
        if kind in ("text", "output_text"):
            yield {**part, "type": "output_text", "text": _written(part.get("text"), "")}
        elif kind == "refusal":
            yield {**part, "type": kind, "refusal": _written(part.get("refusal"), "")}
        else:
            yield part


def _written(value: object, nothing: str) -> str:
    """What was written where the API has text: a value of another kind is its JSON."""
    return value if isinstance(value, str) else nothing if value is None else json.dumps(value)


def _kept(items: Iterable[Item]) -> Iterator[Item]:
    calls = 0
    for item in items:
        calls += item["type"] in CALLS
        if calls <= MAX_KEPT_CALLS or item["type"] not in CALLS:
            yield item


def _name(value: object) -> str:
    return whole_characters(value)[:_LONGEST_NAME] if isinstance(value, str) else ""


def _input_form(item: Item) -> Item:
    """An output item as it is sent back. `status` is the service's own; some endpoints refuse it in a request."""
    # Arguments stay as they came until they are judged: a repaired one would run something else than the model wrote.
    return {
        whole_characters(name): value if name in _WRITTEN.values() else sendable(value)
        for name, value in item.items()
        if name != "status" and value is not None
    }


def _texts(output: Sequence[Item]) -> tuple[str, str | None]:
    texts: list[str] = []
    refusals: list[str] = []
    for item in output:
        for part in item["content"] if item["type"] == "message" else ():
            if part.get("type") == "output_text":
                texts.append(part["text"])
            elif part.get("type") == "refusal":
                refusals.append(part["refusal"])
    return "".join(texts), "".join(refusals) if refusals else None


def _usage(usage: object) -> CallUsage:
    counted = usage if isinstance(usage, dict) else {}
    given, made = _count(counted, "input_tokens"), _count(counted, "output_tokens")
    return CallUsage(
        input_tokens=given,
        cached_input_tokens=min(given, _count(counted.get("input_tokens_details"), "cached_tokens")),
        output_tokens=made,
        reasoning_tokens=min(made, _count(counted.get("output_tokens_details"), "reasoning_tokens")),
    )


def _count(counted: object, name: str) -> int:
    """A number of tokens, and 0 for what is none: budgets and search attributes rest on it."""
    value = counted.get(name) if isinstance(counted, dict) else None
    if isinstance(value, str) and len(value) <= len(str(MAX_TOKENS)) and value.isascii() and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_TOKENS:
        return 0
    return int(value)
