"""What the model is told of subagents: how to start them, and how to wait for, talk to and stop those that go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from activities.model.calls import ToolDefinition
from contracts.agent import AgentSpec

_SPAWN = """\
Start subagents: each is another agent with a sandbox of its own, which works on a task by itself and answers once. They see \
nothing of this conversation, so say in the task all that they must know. Several in one call work at the same time. Roles:
{roles}
With wait (the default) the call returns when all of them have ended, with the answer of each; without it at once, and the tool \
`subagents` tells the answers later. What a subagent leaves in its output directories is put into subagents/<name>/ of your \
workspace when it is told of. Up to {parallel} go on at a time, {total} in all."""

_MANAGE = """\
See to subagents that were started without wait: wait for any or all of them, or for some by name; say something to one; stop \
some, which makes them end after what they are doing and answer with what they have. Without arguments it tells \
who is going on."""

_NAME = {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]{0,40}$"}


def define_subagents(spec: AgentSpec) -> list[ToolDefinition]:
    """Return the two tools of an agent that may have subagents; none for one that may not."""
    limits = spec.subagent_limits
    if not spec.subagents or limits.total == 0:
        return []
    roles = "\n".join(f"- {role.name}: {role.description} {_SEES[role.workspace]}" for role in spec.subagents)
    agent = {
        "type": "object",
        "properties": {
            "role": {"enum": [role.name for role in spec.subagents]},
            "name": {**_NAME, "description": "yours to choose; each subagent of a run has another"},
            "task": {"type": "string", "minLength": 1, "maxLength": 32_768},
            "inputs": {
                "type": "array",
                "items": {"type": "string", "minLength": 1},
                "maxItems": 200,
                "description": "files and directories of your workspace that it gets, at the same paths",
            },
            "merge": {
                "enum": ["none", "patch"],
                "description": "patch: merge its changes of the workspace into yours when it is told of (default none)",
            },
            "collect": {"type": "boolean", "description": "bring its outputs to subagents/<name>/ (default true)"},
        },
        "required": ["role", "name", "task"],
        "additionalProperties": False,
    }
    spawn = {
        "type": "object",
        "properties": {
            "agents": {"type": "array", "items": agent, "minItems": 1, "maxItems": limits.parallel},
            "wait": {"type": "boolean", "description": "default true"},
        },
        "required": ["agents"],
        "additionalProperties": False,
    }
    manage = {
        "type": "object",
        "properties": {
            "wait_for": {"anyOf": [{"enum": ["any", "all"]}, {"type": "array", "items": _NAME, "minItems": 1}]},
            "message": {
                "type": "object",
                "properties": {"name": _NAME, "text": {"type": "string", "minLength": 1, "maxLength": 32_768}},
                "required": ["name", "text"],
                "additionalProperties": False,
            },
            "stop": {"type": "array", "items": _NAME, "minItems": 1},
        },
        "additionalProperties": False,
    }
    told = _SPAWN.format(roles=roles, parallel=limits.parallel, total=limits.total)
    workspaces = {role.name: role.workspace for role in spec.subagents}

    def fault(arguments: Mapping[str, Any]) -> str | None:
        return _fault_of_spawn(arguments, workspaces)

    return [
        ToolDefinition("spawn_agents", told, spawn, fault),
        ToolDefinition("subagents", _MANAGE, manage, _fault_of_message),
    ]


_SEES = {
    "own": "(It has a workspace of its own.)",
    "inputs": "(It gets the files that you name in inputs.)",
    "fork": "(It gets a copy of your whole workspace; merge: patch brings its changes back.)",
}


def _fault_of_spawn(arguments: Mapping[str, Any], workspaces: Mapping[str, str]) -> str | None:
    agents = arguments.get("agents")
    if not isinstance(agents, list):
        return None  # the schema says it better
    for one in agents:
        if not isinstance(one, dict):
            return None
        sees, name = workspaces.get(str(one.get("role"))), one.get("name")
        # A pattern's $ also lets a newline follow.
        if isinstance(name, str) and name.endswith("\n"):
            return f"agents: {name!r}: a name has no line breaks; take them out"
        if isinstance(task := one.get("task"), str) and not task.strip():
            return f"agents: {name!r}: task is empty; say what is to be done"
        if one.get("inputs") and sees != "inputs":
            return f"agents: {name!r}: inputs are for roles that get files; leave them out, or say in the task what matters"
        if sees == "inputs" and not one.get("inputs"):
            return f"agents: {name!r}: this role works on files of yours; name them in inputs"
        if one.get("merge") == "patch" and sees != "fork":
            return f"agents: {name!r}: merge is for roles that get a copy of the workspace; leave it out"
        for path in one.get("inputs") or ():
            if isinstance(path, str) and (path.startswith("/") or ".." in path.split("/")):
                return f"agents: {name!r}: inputs: {path!r} must be relative to the workspace, without '..'"
    return None


def _fault_of_message(arguments: Mapping[str, Any]) -> str | None:
    said = arguments.get("message")
    text = said.get("text") if isinstance(said, dict) else None
    if isinstance(text, str) and not text.strip():
        return "message: text is empty; say something, or leave message out"
    return None
