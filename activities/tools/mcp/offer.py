"""From what a server says of its tools to what a model is told of them: chosen, named, bounded, without anything hidden."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from pydantic import JsonValue

from activities.governance.redaction import Redactor
from activities.json_schemas import check_form
from activities.model.calls import MAX_DEPTH, deeper
from activities.tools.mcp.schema import flattened, plain_schema, renewed
from activities.tools.mcp.servers import ToolFilter
from activities.tools.mcp.text import plain
from contracts.base import BadInput, sha256_hex
from contracts.blob import whole_characters
from contracts.mcp import BETWEEN, McpTool, McpUse

MAX_NAME = 64
MAX_DESCRIPTION = 1024
MAX_SCHEMA = 16 * 1024
MAX_TOOL_NAME = 256
"""Characters of a tool's own name, which is sent back with each call."""

MAX_TOOLS = 100
"""Tools of all servers of a run together: model services take some 128 with an agent's own, and refuse a request with more."""

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_-]")
_NAMED = 5
"""Tools that a note names; of more it tells the number."""


@dataclass(frozen=True)
class Said:
    """What a server said of one of its tools."""

    name: str
    description: str
    schema: JsonValue
    read_only: bool = False
    idempotent: bool = False


@dataclass(frozen=True)
class Offer:
    """The tools of one server for one run, why others are left out (for the model), and the names of all that it has."""

    tools: tuple[McpTool, ...]
    notes: tuple[str, ...]
    every: frozenset[str]


def model_names(server: str, tools: Sequence[str]) -> dict[str, str]:
    """Return a name for the model for each of a server's tools: the same tools always get the same names, each its own."""
    prefix = f"{server}{BETWEEN}"
    names = {tool: prefix + tool for tool in tools if _PLAIN_NAME.fullmatch(prefix + tool)}
    taken = set(names.values())
    for tool in sorted(set(tools) - set(names)):
        digest = sha256_hex(tool.encode("utf-8", "surrogatepass"))
        cleaned = _NOT_PLAIN.sub("_", tool)
        for digits in (8, 16, 24):
            tail = f"_{digest[:digits]}"
            name = f"{prefix}{cleaned[: MAX_NAME - len(prefix) - len(tail)]}{tail}"
            if name not in taken:
                break
        taken.add(name)
        names[tool] = name
    return names


def choose(use: McpUse, allowed: ToolFilter, said: Sequence[Said], hide: Redactor) -> Offer:
    """Return what of a server's tools an agent is given: what the operator lets, and of that what the agent asks for."""
    names = model_names(use.name, [one.name for one in said])
    kept: dict[str, McpTool] = {}
    left_out: dict[str, list[str]] = {}
    for one in said:
        if not _is_chosen(one.name, allowed.include, allowed.exclude) or not _is_chosen(one.name, use.tools, ()):
            continue
        name = names[one.name]
        fault = "it is there twice" if name in kept else _fault(one)
        schema = renewed(one.schema) if fault is None and isinstance(one.schema, dict) else {}
        fault = fault or _fault_of(schema)
        if fault is not None:
            left_out.setdefault(fault, []).append(name)
            continue
        kept[name] = McpTool(
            server=use.name,
            tool=one.name,
            name=name,
            description=plain(hide(one.description), MAX_DESCRIPTION),
            parameters=plain_schema(flattened(schema), hide),
            read_only=one.read_only,
            idempotent=one.idempotent,
        )
    notes = tuple(f"MCP server {use.name!r}: left out {_listed(tools)}: {fault}." for fault, tools in left_out.items())
    return Offer(tuple(kept.values()), notes, frozenset(names.values()))


def _is_chosen(name: str, include: Iterable[str], exclude: Iterable[str]) -> bool:
    include = tuple(include)
    wanted = not include or any(fnmatchcase(name, glob) for glob in include)
    return wanted and not any(fnmatchcase(name, glob) for glob in exclude)


def _fault(one: Said) -> str | None:
    """Say in our own words why a tool cannot be given to a model, or None."""
    if not one.name or len(one.name) > MAX_TOOL_NAME or whole_characters(one.name) != one.name:
        return f"its name is empty, or no text of at most {MAX_TOOL_NAME} characters"
    if not isinstance(one.schema, dict) or one.schema.get("type") != "object":
        return "its input schema does not describe an object"
    if deeper(one.schema, MAX_DEPTH):
        return f"its input schema nests deeper than {MAX_DEPTH} levels"
    if len(json.dumps(one.schema)) > MAX_SCHEMA:
        return f"its input schema is over {MAX_SCHEMA // 1024} KB"
    return None


def _fault_of(schema: dict[str, JsonValue]) -> str | None:
    """The same, for its schema as a model would be given it."""
    try:
        check_form("schema", schema)
    except (BadInput, ValueError, RecursionError):
        return "its input schema is no JSON Schema, or refers to what is not in it"
    return None


def bound_together(offers: Sequence[Offer]) -> tuple[list[McpTool], list[str]]:
    """Return the tools of all servers, no more than a model service takes, and the notes on all that is left out."""
    tools = [tool for offer in offers for tool in offer.tools]
    notes = [note for offer in offers for note in offer.notes]
    if len(tools) > MAX_TOOLS:
        over = _listed([tool.name for tool in tools[MAX_TOOLS:]])
        notes.append(f"MCP servers: left out {over}: a run has at most {MAX_TOOLS} tools of MCP servers.")
    return tools[:MAX_TOOLS], notes


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
