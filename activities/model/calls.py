"""Reading the tool calls of an answer: each is either fit to be carried out, or has the fault that becomes its output."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from pydantic import JsonValue

from activities.model.transcript import Item
from activities.store.blobs import BlobStore
from contracts.base import canonical_json, sha256_hex
from contracts.blob import INLINE_LIMIT
from contracts.model import ToolCall

MAX_CALLS = 64
"""Calls of one answer that are carried out; a wider fan-out is told to the model instead."""

MAX_ACTIVITY_ARGUMENTS = 64 * 1024
"""Bytes of arguments that an activity tool may be given."""
_STORE_READERS = ("shell", "apply_patch")

MAX_DEPTH = 100
"""Levels of JSON that a model may nest; pydantic, which carries it on, refuses more than about 200."""

_MAX_DIGITS = 300
_PATCH_LINE = re.compile(r"^\*\*\* (Add|Update|Delete) File: (.+?)\s*$", re.MULTILINE)
_SURROGATE = re.compile("[\ud800-\udfff]")


Check = Callable[[Mapping[str, Any]], str | None]


@dataclass(frozen=True)
class ToolDefinition:
    """A tool as the model sees it; `parameters` is the JSON Schema of its arguments object.

    `check` says what is wrong with arguments taken together, in words that teach, or None. It is asked before the schema.
    A foreign tool's schema is somebody else's text: only what is harmless in it is checked here, the rest where the tool is.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    check: Check = lambda arguments: None
    is_foreign: bool = False


class BadJson(ValueError):
    """What a model wrote is not the JSON that is wanted; the message says why."""


def unique_call_ids(output: Sequence[Item], taken: set[str]) -> tuple[list[Item], set[str]]:
    """Rename calls whose id was used before, so that every output finds its call.

    Returns the items, and the ids of calls that repeated an id *within* this answer: which of the two was meant is unknown.
    Some servers start counting anew with each answer; an id known from an earlier answer is only renamed.
    """
    result: list[Item] = []
    repeated: set[str] = set()
    here: set[str] = set()
    known = set(taken)
    for item in output:
        if item.get("type") not in ("function_call", "custom_tool_call"):
            result.append(item)
            continue
        asked = str(item.get("call_id") or "call")
        call_id, n = asked, 1
        while call_id in known:
            n += 1
            call_id = f"{asked}~{n}"
        if asked in here:
            repeated.add(call_id)
        here.add(asked)
        known.add(call_id)
        result.append(item if call_id == item.get("call_id") else {**item, "call_id": call_id})
    return result, repeated


async def read_calls(
    output: Sequence[Item], tools: Mapping[str, ToolDefinition], repeated: set[str], blobs: BlobStore
) -> tuple[ToolCall, ...]:
    """Return the calls of an answer in order. `output` has unique call ids."""
    asked = [item for item in output if item.get("type") in ("function_call", "custom_tool_call")]
    return tuple([await _read(item, n, tools, repeated, blobs) for n, item in enumerate(asked)])


async def _read(item: Item, n: int, tools: Mapping[str, ToolDefinition], repeated: set[str], blobs: BlobStore) -> ToolCall:
    call_id, name = str(item["call_id"]), str(item.get("name") or "")
    raw = item.get("arguments", item.get("input"))
    raw = raw if isinstance(raw, str) else json.dumps(raw)
    fault, arguments = None, {}
    if call_id in repeated:
        fault = "not run: this call id was used twice in one answer; ask again with one call for each action"
    elif n >= MAX_CALLS:
        fault = f"not run: at most {MAX_CALLS} calls are carried out for one answer; ask again for the rest"
    elif name not in tools:
        fault = f"no tool is named {name[:200]!r}; the tools are: {', '.join(sorted(tools)) or 'none'}"
    else:
        try:
            tool = tools[name]
            arguments = parse_arguments(raw, harmless(tool.parameters) if tool.is_foreign else tool.parameters, tool.check)
        except BadJson as error:
            fault = f"{name}: bad arguments: {error}; nothing was run, correct them and call again"
    reads_store = name in _STORE_READERS or (name in tools and tools[name].is_foreign)
    canonical = canonical_json(arguments).decode() if fault is None else _SURROGATE.sub("\ufffd", raw)
    return ToolCall(
        call_id=call_id,
        name=name[:200],
        # An activity tool gets its arguments in history, where somebody else's worker can read them; the others read the store.
        arguments=await blobs.put_text(canonical, INLINE_LIMIT if reads_store else MAX_ACTIVITY_ARGUMENTS),
        arguments_digest=sha256_hex(canonical.encode()),
        summary=summarise(name, arguments),
        fault=fault,
        unknown_tool=name not in tools,
    )


def parse_arguments(raw: str, schema: dict[str, Any], check: Check = lambda arguments: None) -> dict[str, Any]:
    """Parse a call's arguments strictly and check them with the tool's own check, then against its schema.

    No text at all counts as `{}`. Raises BadJson for what is no JSON, no object, or does not fit.
    """
    value = read_json(raw) if raw.strip() else {}
    if not isinstance(value, dict):
        raise BadJson(f"must be a JSON object, but this is {_kind(value)}")
    misfit = check(value)
    faults = [misfit] if misfit else schema_faults(value, schema)
    if faults:
        raise BadJson(faults[0])
    return value


def schema_faults(value: JsonValue, schema: dict[str, Any]) -> list[str]:
    """Return how a value does not fit a schema, a line each, in the order of their places."""
    try:
        faults = sorted(Draft202012Validator(schema).iter_errors(value), key=lambda e: list(map(str, e.absolute_path)))
    except RecursionError:
        return ["cannot be checked: the schema's $ref go round in circles"]
    places = [".".join(map(str, fault.absolute_path)) for fault in faults]
    return [f"{place + ': ' if place else ''}{fault.message[:300]}" for place, fault in zip(places, faults, strict=True)]


_KINDS = ("string", "number", "integer", "boolean", "object", "array", "null")


def harmless(schema: JsonValue) -> dict[str, Any]:
    """Return the part of a foreign schema that takes no time worth speaking of to check, and reads nothing from elsewhere.

    A pattern can take for ever on a chosen text, a $ref can name an address, and combinations can multiply. What is left out only
    makes it accept more.
    """
    if not isinstance(schema, dict):
        return {}
    kept: dict[str, Any] = {}
    match schema.get("type"):
        case str(one) if one in _KINDS:
            kept["type"] = one
        case list(many) if many and all(one in _KINDS for one in many):
            kept["type"] = many
    if isinstance(required := schema.get("required"), list):
        kept["required"] = [one for one in required if isinstance(one, str)]
    if isinstance(enum := schema.get("enum"), list) and all(isinstance(one, (str, int, bool)) for one in enum):
        kept["enum"] = enum
    if isinstance(properties := schema.get("properties"), dict):
        kept["properties"] = {name: harmless(one) for name, one in properties.items()}
        if schema.get("additionalProperties") is False and "patternProperties" not in schema:
            kept["additionalProperties"] = False
    if isinstance(items := schema.get("items"), dict):
        kept["items"] = harmless(items)
    return kept


def read_json(text: str) -> JsonValue:
    """Parse what a model wrote as JSON, strictly.

    Raises BadJson saying what is wrong: text that is not JSON, or holds NaN, a number without bounds, a name twice, half of a
    surrogate pair, or nests deeper than what carries it allows.
    """
    try:
        value: JsonValue = json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, parse_int=_countable, object_pairs_hook=_no_duplicates
        )
    except json.JSONDecodeError as error:
        raise BadJson(f"not JSON: {error.msg} at character {error.pos} of {len(text)}") from error
    except RecursionError as error:
        raise BadJson("nested too deeply") from error
    if deeper(value, MAX_DEPTH):
        raise BadJson(f"nested too deeply: at most {MAX_DEPTH} levels")
    if _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise BadJson("holds half of a surrogate pair, which is no character")
    return value


def summarise(name: str, arguments: Mapping[str, Any]) -> str:
    """Say in one line of at most 120 characters what a call does, for the Web UI and the terminal."""
    if name == "shell" and isinstance(arguments.get("command"), str):
        line = "$ " + " ".join(arguments["command"].split())
    elif name == "shell" and isinstance(arguments.get("session"), str):
        line = f"session {arguments['session']}: {_said_to_session(arguments)}"
    elif name == "apply_patch" and isinstance(arguments.get("patch"), str):
        files = [f"{verb[0]} {path}" for verb, path in _PATCH_LINE.findall(arguments["patch"])]
        line = "apply_patch " + ", ".join(files)
    else:
        shown = canonical_json(dict(arguments)).decode() if arguments else ""
        line = f"{name}({shown})"
    line = "".join(c if c.isprintable() else "\ufffd" for c in line)
    return line if len(line) <= 120 else line[:117] + "..."


def _said_to_session(arguments: Mapping[str, Any]) -> str:
    if arguments.get("kill"):
        return "kill"
    if "input" in arguments:
        return "type " + json.dumps(arguments["input"], ensure_ascii=False)
    if isinstance(size := arguments.get("resize"), dict):
        return f"resize to {size.get('rows')} rows, {size.get('cols')} columns"
    return "wait for its end" if arguments.get("wait_for") == "end" else "read"


def _no_constant(name: str) -> Any:
    raise BadJson(f"holds {name}, which is no JSON value")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise BadJson(f"holds {digits[:40]}, which is too large a number")
    return number


def _countable(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise BadJson(f"holds a number of {len(digits)} digits, which is too large")
    return int(digits)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadJson(f"gives {twice!r} twice")
    return result


def deeper(value: JsonValue, levels: int) -> bool:
    """Return whether a value nests deeper than so many levels."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 1 or deeper(part, levels - 1) for part in parts)


def _kind(value: object) -> str:
    kinds: dict[type, str] = {str: "a string", list: "an array", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
