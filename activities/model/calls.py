"""Reading the tool calls of an answer: each is either fit to be carried out, or has the fault that becomes its output."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator

from activities.model.transcript import Item
from activities.store.blobs import BlobStore
from contracts.base import canonical_json, sha256_hex
from contracts.model import ToolCall

MAX_CALLS = 64
"""Calls of one answer that are carried out; a wider fan-out is told to the model instead."""

_PATCH_LINE = re.compile(r"^\*\*\* (Add|Update|Delete) File: (.+?)\s*$", re.MULTILINE)
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ToolDefinition:
    """A tool as the model sees it; `parameters` is the JSON Schema of its arguments object."""

    name: str
    description: str
    parameters: dict[str, Any]


class _BadArguments(ValueError):
    pass


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
        fault = f"no tool is named {name!r}; the tools are: {', '.join(sorted(tools)) or 'none'}"
    else:
        try:
            arguments = parse_arguments(raw, tools[name].parameters)
        except _BadArguments as error:
            fault = f"{name}: the arguments {error}; nothing was run, correct them and call again"
    canonical = canonical_json(arguments).decode() if fault is None else _SURROGATE.sub("\ufffd", raw)
    return ToolCall(
        call_id=call_id,
        name=name[:200],
        arguments=await blobs.put_text(canonical),
        arguments_digest=sha256_hex(canonical.encode()),
        summary=summarise(name, arguments),
        fault=fault,
        unknown_tool=name not in tools,
    )


def parse_arguments(raw: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Parse a call's arguments strictly and check them against the tool's schema.

    No text at all counts as `{}`. Raises ValueError saying what is wrong: text that is not JSON, not an object, holds NaN, a name
    twice or half a surrogate pair, or does not fit the schema.
    """
    try:
        value = json.loads(raw, parse_constant=_no_constant, object_pairs_hook=_no_duplicates) if raw.strip() else {}
    except json.JSONDecodeError as error:
        raise _BadArguments(f"are not JSON: {error.msg} at character {error.pos} of {len(raw)}") from error
    except RecursionError as error:
        raise _BadArguments("are nested too deeply") from error
    if not isinstance(value, dict):
        raise _BadArguments(f"must be a JSON object, but are {_kind(value)}")
    if _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise _BadArguments("hold half of a surrogate pair, which is no character")
    faults = sorted(Draft202012Validator(schema).iter_errors(value), key=lambda e: list(map(str, e.absolute_path)))
    for fault in faults:
        where = ".".join(map(str, fault.absolute_path))
        raise _BadArguments(f"do not fit: {where + ': ' if where else ''}{fault.message[:500]}")
    return value


def summarise(name: str, arguments: Mapping[str, Any]) -> str:
    """Say in one line of at most 120 characters what a call does, for the Web UI and the terminal."""
    if name == "shell" and isinstance(arguments.get("command"), str):
        line = "$ " + " ".join(arguments["command"].split())
    elif name == "apply_patch" and isinstance(arguments.get("patch"), str):
        files = [f"{verb[0]} {path}" for verb, path in _PATCH_LINE.findall(arguments["patch"])]
        line = "apply_patch " + ", ".join(files)
    else:
        shown = canonical_json(dict(arguments)).decode() if arguments else ""
        line = f"{name}({shown})"
    line = "".join(c if c.isprintable() else "\ufffd" for c in line)
    return line if len(line) <= 120 else line[:117] + "..."


def _no_constant(name: str) -> Any:
    raise _BadArguments(f"hold {name}, which is no JSON value")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _BadArguments(f"give {twice!r} twice")
    return result


def _kind(value: object) -> str:
    kinds: dict[type, str] = {str: "a string", list: "an array", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
