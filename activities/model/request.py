"""Building a request of the Responses API, and reading its reply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openai.types.responses import Response

from activities.model.repair import repair
from activities.model.transcript import Entry, Item
from activities.tools.definitions import definitions
from contracts.blob import whole_characters
from contracts.prepare import ResolvedAgent
from contracts.usage import CallUsage


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


def build_request(agent: ResolvedAgent, entries: Iterable[Entry], run_id: str, step: int) -> dict[str, Any]:
    """Return the arguments of `responses.create`, without those that say how the reply is delivered.

    All of it travels as `extra_body`, which the SDK sends as it is: its typed conversion of a long list takes seconds, and even
    of the tools alone milliseconds.
    """
    spec, settings = agent.spec, agent.spec.model_settings
    body: dict[str, Any] = {
        "instructions": agent.instructions,
        "input": repair([entry.item for entry in entries]),
        "store": settings.store,
        # A stable key per run lets the service reuse the prefix it has already read.
        "prompt_cache_key": run_id[:64],
        "metadata": {"caisson_run": run_id[:512], "caisson_step": str(step)},
    }
    tools = [
        {"type": "function", "name": d.name, "description": d.description, "parameters": d.parameters, "strict": False}
        for d in definitions(agent).values()
    ]
    optional: dict[str, Any] = {
        "tools": tools or None,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_output_tokens": settings.max_output_tokens,
        "parallel_tool_calls": settings.parallel_tool_calls if tools else None,
        "reasoning": {"effort": settings.reasoning_effort} if settings.reasoning_effort else None,
        # Where the service keeps nothing, a reasoning item can only be sent back with its encrypted content.
        "include": None if settings.store else ["reasoning.encrypted_content"],
        "text": _text_format(spec.output_schema),
    }
    body.update({name: value for name, value in optional.items() if value is not None})
    return {"model": agent.model, "extra_body": body}


def read_reply(response: Response) -> Reply:
    """Read a response whose status is `completed` or `incomplete`."""
    output = tuple(_input_form(item.model_dump(mode="json", exclude_unset=True)) for item in response.output)
    text, refusal = _texts(output)
    reason = response.incomplete_details.reason if response.incomplete_details else None
    finish: Literal["tools", "final", "refused", "incomplete"]
    if response.status == "incomplete":
        finish = "refused" if reason == "content_filter" else "incomplete"
        # A call that was cut short must never run: its arguments may be only the beginning of what was meant.
        output = tuple(item for item in output if item["type"] not in ("function_call", "custom_tool_call"))
    elif any(item["type"] in ("function_call", "custom_tool_call") for item in output):
        finish = "tools"
    elif refusal is not None and not text:
        finish = "refused"
    else:
        finish = "final"
    return Reply(response.id, output, finish, reason, text or refusal or "", _usage(response), response.model)


def _input_form(item: Item) -> Item:
    """An output item as it is sent back. `status` is the service's own; some endpoints refuse it in a request."""
    # Arguments stay as they came until they are judged: a repaired one would run something else than the model wrote.
    return {
        name: value if name in ("arguments", "input") else sendable(value)
        for name, value in item.items()
        if name != "status" and value is not None
    }


def sendable(value: Any) -> Any:
    """Return a JSON value in which every string can be encoded.

    A model may write half of a surrogate pair. Left as it is, no later request of the run could be sent.
    """
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, list):
        return [sendable(part) for part in value]
    if isinstance(value, dict):
        return {name: sendable(part) for name, part in value.items()}
    return value


def _texts(output: Sequence[Item]) -> tuple[str, str | None]:
    texts: list[str] = []
    refusals: list[str] = []
    for item in output:
        for part in item.get("content") or () if item["type"] == "message" else ():
            if part.get("type") == "output_text":
                texts.append(part.get("text") or "")
            elif part.get("type") == "refusal":
                refusals.append(part.get("refusal") or "")
    return "".join(texts), "".join(refusals) if refusals else None


def _usage(response: Response) -> CallUsage:
    usage = response.usage
    if usage is None:
        return CallUsage()
    # Compatible servers leave the details out, whatever the type says.
    cached = getattr(usage.input_tokens_details, "cached_tokens", None) or 0
    reasoning = getattr(usage.output_tokens_details, "reasoning_tokens", None) or 0
    return CallUsage(
        input_tokens=usage.input_tokens or 0,
        cached_input_tokens=cached,
        output_tokens=usage.output_tokens or 0,
        reasoning_tokens=reasoning,
    )


def _text_format(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    return {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": _is_strict(schema)}}


def _is_strict(schema: Any) -> bool:
    """Whether the service's strict mode accepts a schema: every object closed, and all its properties required."""
    if isinstance(schema, list):
        return all(map(_is_strict, schema))
    if not isinstance(schema, dict):
        return True
    if schema.get("type") == "object" or "properties" in schema:
        properties = schema.get("properties") or {}
        if schema.get("additionalProperties") is not False or set(schema.get("required") or ()) != set(properties):
            return False
    return all(map(_is_strict, schema.values()))
