"""A tool's input schema as model services take it. Servers write all dialects of JSON Schema; services take part of the newest.

What is left out here only makes it accept more: the server checks its arguments itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

from pydantic import JsonValue

from activities.governance.redaction import Redactor
from activities.tools.mcp.text import plain
from contracts.blob import whole_characters

Schema = dict[str, JsonValue]

_PROSE = ("description", "title", "$comment")
_MAX_PROSE = 4096
_DATA = ("const", "default", "enum", "example", "examples")
_OF_ONE = (
    *("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "contentSchema"),
)
_OF_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COMBINED = ("allOf", "anyOf", "oneOf")
_NOT_AT_THE_TOP = ("anyOf", "oneOf", "allOf", "not", "enum", "const", "$ref")
"""What services refuse beside `type: object` of a tool's whole arguments."""


def renewed(schema: Schema) -> Schema:
    """Return a schema of an object in the words of the newest dialect."""
    made = _walked(schema, _renewed)
    made.pop("$schema", None)
    if made.get("properties") is None:
        made["properties"] = {}
    return made


def flattened(schema: Schema) -> Schema:
    """Return a schema with all properties at its top that it has in what is combined there, and without that."""
    made = dict(schema)
    if isinstance(known := made["properties"], dict):
        made["properties"] = dict(known)
        for branch in _branches(schema):
            _take_over(made, branch)
    return {name: part for name, part in made.items() if name not in _NOT_AT_THE_TOP}


def plain_schema(schema: Schema, hide: Redactor) -> Schema:
    """Return a schema without secrets, whose prose is plain. Names and values stay else, since the server goes by them."""
    return _walked(cast("Schema", _hidden(schema, hide)), _plain)


def _walked(schema: Schema, change: Callable[[Schema], Schema]) -> Schema:
    """Apply a change to a schema and then to all schemas in it; what is data, or no schema, stays as it is."""
    made: Schema = {}
    for name, part in change(schema).items():
        if name in _OF_ONE and isinstance(part, dict):
            made[name] = _walked(part, change)
        elif name in _OF_MANY and isinstance(part, list):
            made[name] = [_walked(one, change) if isinstance(one, dict) else one for one in part]
        elif name in _BY_NAME and isinstance(part, dict):
            made[name] = {key: _walked(one, change) if isinstance(one, dict) else one for key, one in part.items()}
        else:
            made[name] = part
    return made


def _renewed(schema: Schema) -> Schema:
    """Say what older dialects say in the words of the newest, and what the items of an array are, which services ask for."""
    # Some languages write null for what is not set, and numbers that JSON does not have come as null as well.
    made = {name: part for name, part in schema.items() if part is not None or name in _DATA}
    if isinstance(made.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made.pop("additionalItems")
    kinds = made.get("type")
    if (kinds == "array" or (isinstance(kinds, list) and "array" in kinds)) and "items" not in made:
        made["items"] = {}
    for bound, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(made.get(bound), bool):
            is_exclusive = made.pop(bound)
            if is_exclusive and limit in made:
                made[bound] = made.pop(limit)
    return made


def _branches(whole: Schema) -> list[Schema]:
    """Return the schemas that are combined at the top of a schema, and at the top of those, each once."""
    found: list[Schema] = []
    seen = {id(whole)}
    ahead = deque([whole])
    while ahead:
        schema = ahead.popleft()
        parts = [part for name in _COMBINED if isinstance(several := schema.get(name), list) for part in several]
        for part in (*parts, _target(schema.get("$ref"), whole)):
            if isinstance(part, dict) and id(part) not in seen:
                seen.add(id(part))
                found.append(part)
                ahead.append(part)
    return found


def _target(ref: JsonValue, whole: Schema) -> Schema | None:
    if not isinstance(ref, str) or not ref.startswith("#/"):
        return None
    found: JsonValue = whole
    for name in ref[2:].split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _take_over(schema: Schema, branch: Schema) -> None:
    """Add a branch's properties. One that another branch has as well may be what either says."""
    known, more = schema["properties"], branch.get("properties")
    if not isinstance(known, dict) or not isinstance(more, dict):
        return
    for name, part in more.items():
        here = known.get(name)
        choices = here["anyOf"] if isinstance(here, dict) and list(here) == ["anyOf"] else [here]
        if name not in known or here is True or here == {}:
            known[name] = part
        elif isinstance(choices, list) and part not in choices and part is not True and part != {}:
            known[name] = {"anyOf": [*choices, part]}


def _plain(schema: Schema) -> Schema:
    return {name: plain(part, _MAX_PROSE) if name in _PROSE and isinstance(part, str) else part for name, part in schema.items()}


def _hidden(value: JsonValue, hide: Redactor) -> JsonValue:
    if isinstance(value, str):
        return hide(whole_characters(value))
    if isinstance(value, list):
        return [_hidden(part, hide) for part in value]
    if isinstance(value, dict):
        return {hide(whole_characters(name)): _hidden(part, hide) for name, part in value.items()}
    return value
