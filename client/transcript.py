"""Writing a transcript for people. The items are those of the Responses API, as `activities.model.transcript` keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Protocol

from client.show import clean

_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_TEXT_PARTS = ("input_text", "output_text", "summary_text", "reasoning_text", "text")
_ARGUMENT_OF = {"shell": "command", "apply_patch": "patch"}
"""Tools whose one telling argument is written as it is, instead of as JSON."""
_WHO = {"user": "user", "note": "harness", "tool": "output", "model": "model"}
_UNKNOWN_LIMIT = 2000


class Entry(Protocol):
    """One item of a transcript, the model call it went with, and where it came from."""

    @property
    def step(self) -> int: ...

    @property
    def origin(self) -> Literal["user", "note", "tool", "model"]: ...

    @property
    def item(self) -> dict[str, Any]: ...


def by_step(entries: Iterable[Entry]) -> Iterator[tuple[int, Entry]]:
    """Pair each entry with the step it belongs to, in order.

    An output is stored with the model call that read it, which is the next step's; it belongs to the step that asked for it.
    """
    asked_in: dict[str, int] = {}
    for entry in entries:
        call_id = str(entry.item.get("call_id", ""))
        if entry.item.get("type") in _CALLS:
            asked_in[call_id] = entry.step
        yield (asked_in.get(call_id, entry.step) if entry.origin == "tool" else entry.step), entry


def render(entries: Iterable[tuple[int, Entry]]) -> Iterator[str]:
    """Write entries as lines: a heading for each step, then who says what."""
    current = None
    for step, entry in entries:
        if step != current:
            yield ("" if current is None else "\n") + f"── step {step} " + "─" * 60
            current = step
        heading, body = _told(entry)
        yield f"{heading}:"
        yield from ("    " + line for line in clean(body).split("\n"))


def _told(entry: Entry) -> tuple[str, str]:
    """Return a heading and the text of one entry."""
    item, who = entry.item, _WHO[entry.origin]
    kind = item.get("type", "message")
    if kind == "message":
        return who, _text(item.get("content"))
    if kind in _CALLS:
        return f"{who} calls {clean(str(item.get('name')))} [{clean(str(item.get('call_id')))}]", _arguments(item)
    if kind in _OUTPUTS:
        return f"output of [{clean(str(item.get('call_id')))}]", _text(item.get("output"))
    if kind == "reasoning":
        return f"{who} (reasoning)", _text([*item.get("summary", []), *(item.get("content") or [])]) or "(not shown by the model)"
    if kind == "compaction":
        return f"{who} (compaction)", "What was said so far is compacted here; from now on the model sees that and what follows."
    whole = json.dumps(item, ensure_ascii=False)
    cut = whole if len(whole) <= _UNKNOWN_LIMIT else whole[:_UNKNOWN_LIMIT] + "… (the whole: --json)"
    return f"{who} ({clean(str(kind))})", cut


def _arguments(item: dict[str, Any]) -> str:
    raw = item.get("arguments", item.get("input", ""))
    try:
        arguments = json.loads(raw)
    except (TypeError, ValueError):
        # What a model wrote need not be JSON; it is shown as it is.
        return str(raw)
    name = _ARGUMENT_OF.get(str(item.get("name")))
    if isinstance(arguments, dict) and name is not None and isinstance(arguments.get(name), str):
        rest = {key: value for key, value in arguments.items() if key != name}
        return str(arguments[name]) + (f"\n({json.dumps(rest, ensure_ascii=False)})" if rest else "")
    return json.dumps(arguments, indent=2, ensure_ascii=False)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(_part(part) for part in parts)


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return str(part.get("text", ""))
    return f"(refused) {part.get('refusal', '')}" if kind == "refusal" else f"({kind})"
