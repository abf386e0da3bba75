"""Building a response and its stream of events, in the shapes of the Responses API.

Source of the shapes: the types of the `openai` package (`openai.types.responses`), which the tests hold every event against.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.scripted_model.conversation import Compacted, CreateRequest
from workers.scripted_model.scenario import CallSpec, ErrorEventFault, FailedFault, Fault, TurnSpec
from workers.scripted_model.templates import render, render_json

JsonObject = dict[str, object]

# A long text comes in this many deltas at most, so that a long run is not spent on tiny events.
_MOST_DELTAS = 24
_SMALLEST_DELTA = 16

# Fields of a request that a response repeats, with what the endpoint says when they were not given.
_ECHOED: JsonObject = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "model": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
}

# What an item lacks while it is being made.
_BEFORE_CONTENT: dict[str, JsonObject] = {
    "reasoning": {"summary": []},
    "compaction": {},
    "message": {"content": []},
    "function_call": {"arguments": ""},
}

TERMINAL_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed", "error"})


@dataclass(frozen=True)
class Reply:
    """A turn with its templates filled: the output items, how the response ends, and what it cost."""

    output: list[JsonObject]
    status: str
    incomplete_reason: str | None
    usage: JsonObject
    delay_s: float
    chunk_delay_s: float


def make_reply(
    turn: TurnSpec,
    outputs: Sequence[str],
    request: CreateRequest,
    place: Compacted,
    response_id: str,
    input_chars: int,
) -> Reply:
    """Fill `turn` at `place` of a conversation with tool `outputs`. Raises ExpectationFailed when a template finds nothing."""
    number = place.turn
    stem = response_id.removeprefix("resp_")
    output: list[JsonObject] = []
    if request.compacts(input_chars // 4):
        # As the endpoint does: before all else, and readable to itself alone.
        output.append({"type": "compaction", "id": f"cmp_{stem}_0", "encrypted_content": place.seal()})
    reasoning = "" if turn.reasoning is None else render(turn.reasoning, number, outputs)
    if turn.reasoning is not None:
        output.append(_reasoning_item(f"rs_{stem}_{len(output)}", reasoning, request))
    if turn.text is not None:
        text = render(turn.text, number, outputs)
        output.append(_message_item(f"msg_{stem}_{len(output)}", text, turn.status))
    for index, call in enumerate(turn.calls, start=1):
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{stem}_{len(output)}",
                "call_id": call.call_id or f"call_{number}_{index}",
                "name": call.name,
                "arguments": _arguments(call, number, outputs),
                "status": "completed",
            }
        )
    incomplete = turn.status == "incomplete"
    return Reply(
        output=output,
        status="incomplete" if incomplete else "completed",
        incomplete_reason=turn.incomplete_reason if incomplete else None,
        usage=_usage(turn, input_chars, output, len(reasoning)),
        delay_s=turn.delay_ms / 1000,
        chunk_delay_s=turn.chunk_delay_ms / 1000,
    )


def response_object(request: CreateRequest, response_id: str, created_at: float, status: str) -> JsonObject:
    """Return the response as it is before any output."""
    given = request.model_dump(exclude_unset=True, exclude={"input", "stream", "include"})
    echoed = {name: given[name] if given.get(name) is not None else default for name, default in _ECHOED.items()}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(created_at),
        "status": status,
        "background": bool(request.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "store": request.store is not False,
        "usage": None,
        "user": None,
        **echoed,
    }


def finished(response: JsonObject, reply: Reply, completed_at: float) -> JsonObject:
    """Return `response` with the reply's output and usage."""
    details = None if reply.incomplete_reason is None else {"reason": reply.incomplete_reason}
    return {
        **response,
        "status": reply.status,
        "completed_at": int(completed_at) if reply.status == "completed" else None,
        "incomplete_details": details,
        "output": reply.output,
        "usage": reply.usage,
    }


def failed(response: JsonObject, code: str, message: str) -> JsonObject:
    """Return `response` as failed."""
    return {**response, "status": "failed", "error": {"code": code, "message": message}}


def stream_events(response: JsonObject, reply: Reply, fault: Fault | None, completed_at: float) -> list[JsonObject]:
    """Return every event of a response's stream in order, numbered from 0, ending where `fault` makes it end."""
    events: list[JsonObject] = []
    opening = {**response, "status": "queued"} if response["background"] else response
    events.append({"type": "response.created", "response": opening})
    if response["background"]:
        events.append({"type": "response.queued", "response": opening})
    events.append({"type": "response.in_progress", "response": {**response, "status": "in_progress"}})
    for index, item in enumerate(reply.output):
        events.extend(_item_events(index, item))
    events.append(
        {"type": f"response.{reply.status}", "response": finished(response, reply, completed_at)},
    )
    if isinstance(fault, FailedFault):
        events[min(fault.after_events, len(events) - 1) :] = [
            {"type": "response.failed", "response": failed(response, fault.code, fault.message)}
        ]
    if isinstance(fault, ErrorEventFault):
        events[min(fault.after_events, len(events) - 1) :] = [
            {"type": "error", "code": fault.code, "message": fault.message, "param": None}
        ]
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def encode_event(event: JsonObject) -> bytes:
    """Return one server-sent event. Escaped JSON, because a scripted string may hold what UTF-8 cannot."""
    return f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode()


def _reasoning_item(item_id: str, text: str, request: CreateRequest) -> JsonObject:
    # As the endpoint does, the summary is there only when asked for, and the text itself travels encrypted (here: encoded).
    wanted = request.reasoning is not None and request.reasoning.summary is not None
    item: JsonObject = {
        "type": "reasoning",
        "id": item_id,
        "summary": [{"type": "summary_text", "text": text}] if wanted else [],
    }
    if request.include is not None and "reasoning.encrypted_content" in request.include:
        item["encrypted_content"] = "scripted:" + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()
    return item


def _message_item(item_id: str, text: str, status: str) -> JsonObject:
    part: JsonObject = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    if status == "refusal":
        part = {"type": "refusal", "refusal": text}
    return {
        "type": "message",
        "id": item_id,
        "role": "assistant",
        "status": "incomplete" if status == "incomplete" else "completed",
        "content": [part],
    }


def _arguments(call: CallSpec, number: int, outputs: Sequence[str]) -> str:
    if isinstance(call.arguments, str):
        return render(call.arguments, number, outputs)
    return json.dumps(render_json(call.arguments, number, outputs), ensure_ascii=False)


def _usage(turn: TurnSpec, input_chars: int, output: list[JsonObject], reasoning_chars: int) -> JsonObject:
    if turn.usage is not None:
        counts = (turn.usage.input_tokens, turn.usage.cached_tokens, turn.usage.output_tokens, turn.usage.reasoning_tokens)
    else:
        output_tokens = max(1, len(json.dumps(output)) // 4)
        counts = (max(1, input_chars // 4), 0, output_tokens, min(output_tokens, reasoning_chars // 4))
    input_tokens, cached, output_tokens, reasoning = counts
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": input_tokens + output_tokens,
    }


def _item_events(index: int, item: JsonObject) -> Iterator[JsonObject]:
    """Yield the events of one output item, from `output_item.added` to `output_item.done`."""
    where: JsonObject = {"item_id": item["id"], "output_index": index}
    started: JsonObject = {**item, **_BEFORE_CONTENT[str(item["type"])]}
    if item["type"] not in ("reasoning", "compaction"):
        started["status"] = "in_progress"
    yield {"type": "response.output_item.added", "output_index": index, "item": started}
    if item["type"] == "function_call":
        for delta in _chunks(str(item["arguments"])):
            yield {"type": "response.function_call_arguments.delta", **where, "delta": delta}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **where, **done}
    for part_index, part in enumerate(_parts(item, "content")):
        yield from _content_events({**where, "content_index": part_index}, part)
    for part_index, part in enumerate(_parts(item, "summary")):
        yield from _summary_events({**where, "summary_index": part_index}, part)
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _content_events(where: JsonObject, part: JsonObject) -> Iterator[JsonObject]:
    kind = "refusal" if part["type"] == "refusal" else "output_text"
    field = "refusal" if kind == "refusal" else "text"
    logprobs: JsonObject = {} if kind == "refusal" else {"logprobs": []}
    yield {"type": "response.content_part.added", **where, "part": {**part, field: ""}}
    for delta in _chunks(str(part[field])):
        yield {"type": f"response.{kind}.delta", **where, "delta": delta, **logprobs}
    yield {"type": f"response.{kind}.done", **where, field: part[field], **logprobs}
    yield {"type": "response.content_part.done", **where, "part": part}


def _summary_events(where: JsonObject, part: JsonObject) -> Iterator[JsonObject]:
    yield {"type": "response.reasoning_summary_part.added", **where, "part": {**part, "text": ""}}
    for delta in _chunks(str(part["text"])):
        yield {"type": "response.reasoning_summary_text.delta", **where, "delta": delta}
    yield {"type": "response.reasoning_summary_text.done", **where, "text": part["text"]}
    yield {"type": "response.reasoning_summary_part.done", **where, "part": part}


def _parts(item: JsonObject, field: str) -> list[JsonObject]:
    parts = item.get(field)
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _chunks(text: str) -> Iterator[str]:
    size = max(_SMALLEST_DELTA, math.ceil(len(text) / _MOST_DELTAS))
    for start in range(0, len(text), size):
        yield text[start : start + size]
