"""Input that cannot be used is refused at once, with the field and the remedy, before anything is spent or made."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.client import WorkflowExecutionStatus
from temporalio.common import RawValue

from tests.integration.helpers import activity_tool, failed_tasks, sandboxes_of
from tests.integration.stack import QUEUE, Handle, Stack

TASK = "Play [hello]."
LINE = {"type": "inline", "text": "x"}


class Bad(NamedTuple):
    """An input, and what the refusal must say."""

    name: str
    given: Any
    told: tuple[str, ...]


def run(**fields: Any) -> dict[str, Any]:
    """A good input with these fields beside its task."""
    return {"task": TASK, **fields}


def agent(**fields: Any) -> dict[str, Any]:
    """A good input with an inline agent of these fields."""
    return run(agent=fields)


def entry(place: str, **source: Any) -> dict[str, Any]:
    """A good input with one manifest entry."""
    return run(manifest={"entries": {place: source or {"type": "inline", "text": "x"}}})


def local(path: str) -> dict[str, Any]:
    """A good input with one local entry."""
    return entry("inputs/data", type="local", path=path)


def raw(data: bytes, encoding: bytes = b"json/plain") -> RawValue:
    """An input as bytes, which may be none that a JSON library would write."""
    return RawValue(Payload(metadata={"encoding": encoding}, data=data))


def tool(**fields: Any) -> dict[str, Any]:
    """A good input with one activity tool of these fields."""
    return agent(tools=[{**activity_tool("q", "lookup"), **fields}])


SHAPES = (
    Bad("unknown field", run(taks="x"), ("taks: unknown field", "correct its name")),
    Bad("misspelt field of the manifest", run(manifest={"output": []}), ("manifest.output: unknown field",)),
    Bad("misspelt field of an inline agent", agent(toolz=["shell"]), ("toolz: unknown field",)),
    Bad(
        "a hundred thousand unknown fields", run(**{f"k{n}": 1 for n in range(100_000)}), ("k0: unknown field", "and 99980 more")
    ),
    Bad("an unknown field with a long name", run(**{"k" * 1_500_000: 1}), ("kkk...kkk", "unknown field; remove it")),
    Bad("a field given twice", raw(b'{"task": "x", "task": "y"}'), ("the field 'task' is given twice", "keep one")),
    Bad("wrong type", {"task": 7}, ("task: ", "string", "found 7")),
    Bad("wrong type in the budget", run(budget={"steps": "many"}), ("budget.steps: ", "integer", "'many'")),
    Bad("missing task", {"agent": "plain"}, ("task: required, but missing",)),
    Bad("empty task", {"task": ""}, ("task: ", "must not be empty; say what is to be done")),
    Bad("blank task", {"task": " \n\t"}, ("task: ", "must not be empty")),
    Bad("task too long", {"task": "x" * 262_145}, ("task: ", "at most 262144 characters")),
    Bad("null", None, ("task: required, but missing",)),
    Bad("a list", [TASK], ("the run's input", "dictionary")),
    Bad("a string", TASK, ("the run's input", "dictionary")),
    Bad("an array of bytes", raw(b"\xff\xfe", b"binary/plain"), ("the run's input", "dictionary")),
    Bad("cut JSON", raw(b'{"task": "x'), ("the input cannot be read", "must be one JSON object")),
    Bad("half a surrogate pair", raw(b'{"task": "\\ud800"}'), ("the input cannot be read", "hex escape", "one JSON object")),
    Bad("unknown encoding", raw(b"??", b"binary/encrypted"), ("the input cannot be read", "binary/encrypted")),
)
AGENTS = (
    Bad("agent that is not there", run(agent="nobody"), ("agent: no agent is named 'nobody'", "plain", "add nobody.yaml")),
    Bad("agent name that is a path", run(agent="../secrets"), ("agent", "pattern")),
    Bad("agent file with an unknown field", run(agent="broken"), ("agent 'broken'", "broken.yaml", "toolz: unknown field")),
    Bad("two tools of one name", agent(tools=["shell", "shell"]), ("tools: the name 'shell' is used more than once", "its own")),
    Bad("unknown tool type", agent(tools=["browser"]), ("agent", "tools", "'browser'", "'shell', 'apply_patch', 'activity'")),
    Bad(
        "approval for an unknown tool",
        run(approvals={"tools": {"shel": "prompt"}}),
        ("approvals.tools: no tool is named 'shel'", "the agent has shell, apply_patch"),
    ),
    Bad(
        "approval that is no verdict", run(approvals={"default": "maybe"}), ("approvals.default", "'allow', 'prompt' or 'forbid'")
    ),
    Bad(
        "background without store", agent(model_settings={"background": True}), ("model_settings", "background needs store: true")
    ),
    Bad("task queue of the server's own", tool(task_queue="/_sys/x"), ("agent.tools.0.task_queue: ", "/_sys/")),
    Bad("task queue that is too long", tool(task_queue="q" * 1500), ("agent.tools.0.task_queue: ", "at most 200 characters")),
    Bad("activity name that is too long", tool(activity="a" * 1500), ("agent.tools.0.activity: ", "at most 200 characters")),
    Bad("a tool named as one of Caisson's", tool(name="fetch_file"), ("tools: 'fetch_file'", "give the activity tool another")),
    Bad(
        "role with an agent that is not there",
        agent(subagents=[{"name": "helper", "description": "d", "agent": "nobody"}]),
        ("subagents.helper: agent: no agent is named 'nobody'",),
    ),
    Bad("unknown sandbox provider", run(sandbox={"provider": "clowd"}), ("sandbox.provider", "'clowd'", "local")),
    Bad(
        "cost limit without a price",
        run(model="mystery-1", budget={"cost_usd": 1}),
        ("budget.cost_usd", "'mystery-1'", "budget.tokens"),
    ),
)
SCHEMAS = (
    Bad("output schema of a wrong type", run(output_schema={"type": "objekt"}), ("output_schema: not a JSON Schema", "objekt")),
    Bad("output schema that is a list", run(output_schema=[1]), ("output_schema: ", "dictionary")),
    Bad("pattern that is no expression", run(output_schema={"pattern": "("}), ("output_schema", "pattern", "'('")),
    Bad(
        "remote $ref", run(output_schema={"$ref": "https://example.com/s.json"}), ("output_schema: $ref", "example.com", "$defs")
    ),
    Bad(
        "$ref that leads nowhere", run(output_schema={"$ref": "#/$defs/claim"}), ("output_schema: $ref '#/$defs/claim'", "$defs")
    ),
    Bad("$ref to a server", run(output_schema={"$dynamicRef": "http://127.0.0.1:9/s"}), ("output_schema: $dynamicRef", "$ref")),
    Bad("$ref that goes round", run(output_schema={"$ref": "#"}), ("output_schema: ", "round in circles")),
    Bad("tool parameters of a wrong type", tool(parameters={"type": "objekt"}), ("tools.lookup.parameters: not a JSON Schema",)),
    Bad("tool parameters that are no object", tool(parameters={"type": "array"}), ("tools.lookup.parameters", "type: object")),
    Bad(
        "remote $ref in tool parameters",
        tool(parameters={"type": "object", "properties": {"a": {"$ref": "other.json"}}}),
        ("tools.lookup.parameters: $ref 'other.json'", "$defs"),
    ),
)
# A limit of zero read as no limit: opensearch-project/ml-commons#4820.
BUDGETS = (
    *(
        Bad(f"{field} {value!r}", run(budget={field: value}), (f"budget.{field}: ", "greater than 0"))
        for field in ("steps", "tokens", "cost_usd", "wall_seconds")
        for value in (0, "0", -1)
    ),
    Bad("a budget of more seconds than there are", run(budget={"wall_seconds": 1e15}), ("budget.wall_seconds: ", "1000000000")),
    Bad("a budget of more steps than a float holds", run(budget={"steps": 10**400}), ("budget.steps: ", "1000000000000")),
)
MANIFESTS = (
    Bad("path with ..", entry("inputs/../../etc/x"), ("manifest.entries", "stays inside the workspace")),
    Bad("absolute path", entry("/etc/x"), ("manifest.entries", "relative", "for example inputs/notes.md")),
    Bad("backslash path", entry("inputs\\x"), ("manifest.entries", "with / between its parts")),
    Bad("the workspace itself", entry("."), ("manifest.entries", "not the workspace itself")),
    Bad("output outside the workspace", run(manifest={"outputs": [{"path": "../out"}]}), ("manifest.outputs.0.path", "inside")),
    Bad(
        "five thousand entries, one inside another",
        run(manifest={"entries": {**{f"d/{n}": LINE for n in range(5000)}, "d": LINE}}),
        ("entries 'd' and 'd/0' overlap",),
    ),
    Bad("a home of its own", run(manifest={"environment": {"HOME": "/x"}}), ("environment HOME is the sandbox's own",)),
    Bad("a blank command", run(manifest={"setup": [" "]}), ("manifest.setup.0: a command is not blank",)),
    Bad("unknown entry type", entry("a", type="ftp"), ("manifest.entries.a", "'inline', 'local'")),
    Bad(
        "entries inside each other",
        run(manifest={"entries": {name: {"type": "inline", "text": "x"} for name in ("a", "a/b")}}),
        ("'a' and 'a/b' overlap", "give each its own place"),
    ),
    Bad(
        "two entries at one place",
        run(manifest={"entries": {name: {"type": "inline", "text": "x"} for name in ("a/b", "a//b")}}),
        ("manifest.entries", "'a//b'", "give each its own"),
    ),
    Bad(
        "credential by its name",
        run(manifest={"environment": {"API_TOKEN": "x"}}),
        ("environment API_TOKEN looks like a credential",),
    ),
    Bad(
        "credential by its value",
        run(manifest={"environment": {"X": "sk-" + "a" * 30}}),
        ("environment X looks like a credential",),
    ),
    Bad(
        "no variable name", run(manifest={"environment": {"A B": "x"}}), ("environment name 'A B' is not a valid variable name",)
    ),
    Bad(
        "local entry outside the roots",
        local("/etc/passwd"),
        ("manifest.entries.inputs/data.path", "not below", "CAISSON_LOCAL_ROOTS"),
    ),
    Bad("local entry that climbs out", local("../stack.db"), ("manifest.entries.inputs/data.path", "not below an allowed root")),
    Bad(
        "local entry that is missing",
        local("nothing.csv"),
        ("manifest.entries.inputs/data.path", "does not exist", "correct the path"),
    ),
    Bad("local entry with NUL", local("a\0b"), ("manifest.entries.inputs/data", "NUL")),
    Bad("local pipe", local("bad/pipe"), ("manifest.entries.inputs/data: ", "bad/pipe is no regular file", "leave it out")),
    Bad("pipe in a directory", local("bad"), ("manifest.entries.inputs/data: ", "pipe is no regular file")),
    Bad("link out of the root", local("links/out"), ("manifest.entries.inputs/data.path", "not below an allowed root")),
    Bad(
        "link out of its directory",
        local("leaving"),
        ("manifest.entries.inputs/data: ", "leaving/out is a link that leaves", "copy"),
    ),
    Bad("link to nothing", local("dangling"), ("manifest.entries.inputs/data: ", "dangling/gone is a link to no")),
    Bad(
        "more bytes than allowed",
        run(manifest={"entries": {"a": {"type": "inline", "text": "12345"}}, "limits": {"max_bytes": 4}}),
        ("manifest.entries.a: more than 4 bytes", "raise", "limits.max_bytes"),
    ),
)


@pytest.fixture(scope="module", autouse=True)
def sources(stack: Stack) -> None:
    """What lies in the allowed root and cannot be given to a run."""
    root = stack.state / "shared"
    for name in ("bad", "links", "leaving", "dangling"):
        (root / name).mkdir()
    os.mkfifo(root / "bad" / "pipe")
    (root / "links" / "out").symlink_to("/etc/hostname")
    (root / "leaving" / "out").symlink_to(root / "links")
    (root / "dangling" / "gone").symlink_to("nowhere")


async def refusal(stack: Stack, *given: Any) -> tuple[Handle, str]:
    """Start a run, and return how it was refused within ten seconds."""
    handle: Handle = await stack.dev.client.start_workflow("AgentRun", args=given, id=uuid.uuid4().hex, task_queue=QUEUE)
    error = await stack.failure(handle, 10)
    assert error.type == "BadInput", error
    return handle, error.message


def named(cases: Iterable[Bad]) -> list[Any]:
    """The cases as parameters, each named after what is wrong."""
    return [pytest.param(case.given, case.told, id=case.name) for case in cases]


@pytest.mark.parametrize(("given", "told"), named((*SHAPES, *AGENTS, *SCHEMAS, *BUDGETS, *MANIFESTS)))
async def test_bad_input_is_refused_with_field_and_remedy(stack: Stack, given: Any, told: tuple[str, ...]) -> None:
    """The run fails at once, says what is wrong, has asked no model, and leaves no sandbox (temporalio/sdk-python#1285)."""
    handle, message = await refusal(stack, given)
    assert [part for part in told if part not in message] == [], message
    assert await stack.closed_as(handle) is WorkflowExecutionStatus.FAILED
    assert stack.journal(handle) == []
    assert sandboxes_of(stack, handle.id) == []
    assert await failed_tasks(handle) == []


async def test_no_input_at_all_is_refused(stack: Stack) -> None:
    """A start without any input names the one field that is required."""
    _, message = await refusal(stack)
    assert "task: required, but missing" in message


async def test_a_second_input_is_refused(stack: Stack) -> None:
    """A person gives one input; a second one is not taken for what a run carries when it continues as new."""
    handle, message = await refusal(stack, run(), run())
    assert "takes one input" in message
    assert await failed_tasks(handle) == []


async def test_a_long_value_is_not_repeated_whole_in_the_refusal(stack: Stack) -> None:
    """A refusal shows at most 80 characters of what was found."""
    _, message = await refusal(stack, {"task": "x" * 300_000})
    assert len(message) < 300


async def test_a_credential_is_not_repeated_in_the_refusal(stack: Stack) -> None:
    """Whoever gave a key by mistake does not find it in the failure, which more people read than the input."""
    _, message = await refusal(stack, run(manifest={"environment": {"X": "sk-" + "a1" * 15}}))
    assert "a1a1" not in message


async def test_a_refused_run_still_answers_status(stack: Stack) -> None:
    """Whoever looks at a refused run afterwards sees that it never began."""
    handle, _ = await refusal(stack, {})
    assert (await handle.query("status"))["step"] == 0


async def test_three_inputs_are_refused(stack: Stack) -> None:
    """More inputs than the workflow has places for are refused, and do not fail its task again and again."""
    handle, message = await refusal(stack, run(), run(), run())
    assert "3 inputs were given where one is taken" in message
    assert await failed_tasks(handle) == []
