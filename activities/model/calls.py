"""Reading the tool calls of an answer: each is either fit to be carried out, or has the fault that becomes its output."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from activities.json_schemas import validator_of
from activities.model.shown import shortened
from activities.model.transcript import Item
from activities.store.blobs import BlobStore
from contracts.agent import SKILL_TOOL
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
_LONGEST_CALL_ID = 64
_LONGEST_FAULT = 300
_LONGEST_LINE = 120
_MOST_FAULTS = 1000
_PATCH_LINE = re.compile(r"\*\*\*\s*(?:(add|update|delete) file|move to)\s*:", re.I)
"""The lines of a patch that name files, read as loosely as `apply_patch` itself reads them."""
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
    Some servers start counting anew with each answer; an id known from an earlier answer is only renamed. No id is longer than
    the API takes.
    """
    result: list[Item] = []
    repeated: set[str] = set()
    here: dict[str, int] = {}
    known = set(taken)
    for item in output:
        if item.get("type") not in ("function_call", "custom_tool_call"):
            result.append(item)
            continue
        asked = str(item.get("call_id") or "call")
        # Counted on from the last one with this id: a thousand calls with one id are a thousand looks.
        n = here.get(asked, 1)
        call_id = asked[:_LONGEST_CALL_ID] if n == 1 else _numbered(asked, n)
        while call_id in known:
            n += 1
            call_id = _numbered(asked, n)
        if asked in here:
            repeated.add(call_id)
        here[asked] = n
        known.add(call_id)
        result.append(item if call_id == item.get("call_id") else {**item, "call_id": call_id})
    return result, repeated


def _numbered(call_id: str, n: int) -> str:
    ending = f"~{n}"
    return call_id[: _LONGEST_CALL_ID - len(ending)] + ending


@dataclass(frozen=True)
class JudgedCall:
    """A call of an answer: `arguments` as they are carried out, or `fault`, and then `raw` as the model wrote them."""

    call_id: str
    name: str
    arguments: dict[str, Any]
    raw: str
    fault: str | None
    reads_store: bool
    unknown_tool: bool


def judge_calls(output: Sequence[Item], tools: Mapping[str, ToolDefinition], repeated: set[str]) -> list[JudgedCall]:
    """Return the calls of an answer in order. `output` has unique call ids. For a long answer this takes its time."""
    asked = [item for item in output if item.get("type") in ("function_call", "custom_tool_call")]
    return [_judge(item, n, tools, repeated) for n, item in enumerate(asked)]


async def store_calls(calls: Iterable[JudgedCall], blobs: BlobStore) -> tuple[ToolCall, ...]:
    """Return calls as the run carries them, their arguments in the store where they are long."""
    return tuple([await _store(call, blobs) for call in calls])


def _judge(item: Item, n: int, tools: Mapping[str, ToolDefinition], repeated: set[str]) -> JudgedCall:
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
    return JudgedCall(call_id, name, arguments, raw, fault, reads_store, name not in tools)


async def _store(call: JudgedCall, blobs: BlobStore) -> ToolCall:
    canonical = canonical_json(call.arguments).decode() if call.fault is None else _SURROGATE.sub("\ufffd", call.raw)
    return ToolCall(
        call_id=call.call_id,
        name=call.name[:200],
        # An activity tool gets its arguments in history, where somebody else's worker can read them; the others read the store.
        arguments=await blobs.put_text(canonical, INLINE_LIMIT if call.reads_store else MAX_ACTIVITY_ARGUMENTS),
        arguments_digest=sha256_hex(canonical.encode()),
        summary=summarise(call.name, call.arguments),
        fault=call.fault,
        unknown_tool=call.unknown_tool,
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
        raise BadJson(shortened(faults[0], _LONGEST_FAULT))
    return value


def schema_faults(value: JsonValue, schema: dict[str, Any]) -> list[str]:
    """Return how a value does not fit a schema, a line each, in the order of their places."""
    try:
        found = itertools.islice(validator_of(schema).iter_errors(value), _MOST_FAULTS)
        faults = sorted(found, key=lambda e: list(map(str, e.absolute_path)))
    except RecursionError:
        return ["cannot be checked: the schema's $ref go round in circles"]
    except Exception as error:  # noqa: BLE001 - whatever a schema does, an answer that was paid for is not asked for again
        return [f"cannot be checked against the schema: {error}"[:_LONGEST_FAULT]]
    places = [".".join(map(str, fault.absolute_path)) for fault in faults]
    return [
        f"{shortened(place, _LONGEST_FAULT) + ': ' if place else ''}{fault.message[:_LONGEST_FAULT]}"
        for place, fault in zip(places, faults, strict=True)
    ]


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
        line = "apply_patch " + _files_of(arguments["patch"])
    elif name == SKILL_TOOL and isinstance(arguments.get("name"), str):
        line = f"load skill {' '.join(arguments['name'].split())}"
    else:
        shown = canonical_json(dict(arguments)).decode() if arguments else ""
        line = f"{name}({shown})"
    return shortened("".join(c if c.isprintable() else "\ufffd" for c in line[: _LONGEST_LINE + 1]), _LONGEST_LINE)


def _files_of(patch: str) -> str:
    files = ""
    for line in patch.split("\n"):
        if (marker := _PATCH_LINE.match(line)) is not None and len(files) <= _LONGEST_LINE:
            verb = marker[1]
            files += f"{', ' if files else ''}{verb[0].upper()} " if verb else " -> "
            files += line[marker.end() :].strip()
    return files


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
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise BadJson(f"gives {twice[:200]!r} twice")
    return result


def deeper(value: JsonValue, levels: int) -> bool:
    """Return whether a value nests deeper than so many levels."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 1 or deeper(part, levels - 1) for part in parts)


def _kind(value: object) -> str:
    kinds: dict[type, str] = {str: "a string", list: "an array", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
