"""Building a request of the Responses API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from activities.model.repair import repair
from activities.model.transcript import Entry, Item
from activities.tools.definitions import definitions
from contracts.prepare import ResolvedAgent

COMPACTION = "compaction"
"""The kind of item that an endpoint with `context_management` puts before its answer when it has compacted what went before:
https://developers.openai.com/api/docs/guides/compaction."""


def build_request(agent: ResolvedAgent, entries: Iterable[Entry], run_id: str, step: int) -> dict[str, Any]:
    """Return the arguments of `responses.create`, without those that say how the reply is delivered.

    All of it travels as `extra_body`, which the SDK sends as it is: its typed conversion of a long list takes seconds, and even
    of the tools alone milliseconds.
    """
    spec, settings = agent.spec, agent.spec.model_settings
    body: dict[str, Any] = {
        "instructions": agent.instructions,
        "input": repair(since_compaction([entry.item for entry in entries])),
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
        "context_management": _compaction(settings.compact_tokens),
    }
    body.update({name: value for name, value in optional.items() if value is not None})
    return {"model": agent.model, "extra_body": body}


def since_compaction(items: list[Item]) -> list[Item]:
    """Return the items from the last one on in which the service has compacted all those before it.

    That one stands for them: it is sent back as it came, and only the service can read it. The transcript keeps all.
    """
    last = next((number for number in range(len(items) - 1, -1, -1) if items[number].get("type") == COMPACTION), 0)
    return items[last:]


def _compaction(tokens: int | None) -> list[dict[str, Any]] | None:
    return None if tokens is None else [{"type": COMPACTION, "compact_threshold": tokens}]


def _text_format(schema: dict[str, Any] | None) -> dict[str, Any] | None:
    if schema is None:
        return None
    return {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": _is_strict(schema)}}


_STRICT_KEYWORDS = frozenset(
    (
        *("$defs", "$ref", "additionalProperties", "anyOf", "const", "definitions", "description", "enum"),
        *("exclusiveMaximum", "exclusiveMinimum", "format", "items", "maxItems", "maximum", "minItems", "minimum"),
        *("multipleOf", "pattern", "properties", "required", "title", "type"),
    )
)
_STRICT_FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uuid"))


def _is_strict(schema: dict[str, Any]) -> bool:
    """Whether the service's strict mode accepts a schema; one that it does not know would be refused, and so the whole run."""
    return schema.get("type") == "object" and "anyOf" not in schema and _is_strict_part(schema)


def _is_strict_part(schema: Any) -> bool:
    if not isinstance(schema, dict) or not _STRICT_KEYWORDS.issuperset(schema):
        return False
    if "$ref" in schema:
        return len(schema) == 1
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    properties = schema.get("properties", {})
    if "object" in kinds or "properties" in schema:
        # Every object closed, and all its properties required.
        if schema.get("additionalProperties") is not False or set(schema.get("required", ())) != set(properties):
            return False
    elif "additionalProperties" in schema:
        return False
    return (
        ("type" in schema or "anyOf" in schema)
        and ("array" not in kinds or "items" in schema)
        and schema.get("format", "date") in _STRICT_FORMATS
        and all(map(_is_strict_part, properties.values()))
        and all(map(_is_strict_part, schema.get("anyOf", ())))
        and ("items" not in schema or _is_strict_part(schema["items"]))
        and all(_is_strict_part(part) for name in ("$defs", "definitions") for part in schema.get(name, {}).values())
    )
