"""Reading the tool calls of an answer: strictly, each with an id of its own, and told to people in one line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.model.calls import (
    MAX_CALLS,
    MAX_DEPTH,
    BadJson,
    ToolDefinition,
    judge_calls,
    parse_arguments,
    read_json,
    store_calls,
    summarise,
    unique_call_ids,
)
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from contracts.model import ToolCall

OPEN: dict[str, Any] = {"type": "object"}
SHELL: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string", "minLength": 1}, "timeout_seconds": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
TOOLS = {"shell": ToolDefinition("shell", "", SHELL)}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


async def read_calls(
    output: list[dict[str, Any]], tools: dict[str, ToolDefinition], repeated: set[str], blobs: BlobStore
) -> tuple[ToolCall, ...]:
    """The calls of an answer as the run carries them."""
    return await store_calls(judge_calls(output, tools, repeated), blobs)


def call(call_id: str | None, arguments: str = '{"command": "ls"}', name: str = "shell") -> dict[str, Any]:
    """A call as the model wrote it."""
    return {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "name": name, "arguments": arguments}


@given(st.dictionaries(st.text(), json_values))
def test_every_json_object_is_read_as_it_is(value: dict[str, Any]) -> None:
    """Strictness refuses nothing that is JSON."""
    assert parse_arguments(json.dumps(value), OPEN) == value


# openai/openai-agents-js#887, lsdefine/GenericAgent#746, charmbracelet/fantasy#223
@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ('{"command": "ls', "not JSON: Unterminated string"),
        ("ls", "not JSON: Expecting value at character 0 of 2"),
        ('["ls"]', "must be a JSON object, but this is an array"),
        ('"ls"', "this is a string"),
        ('"{\\"command\\": \\"ls\\"}"', "this is a string"),
        ("null", "this is null"),
        ("7", "this is a number"),
        ("true", "this is a boolean"),
        ('{"command": "ls", "timeout_seconds": NaN}', "holds NaN, which is no JSON value"),
        ('{"command": "ls", "timeout_seconds": -Infinity}', "holds -Infinity"),
        ('{"command": "ls", "timeout_seconds": 1e999}', "holds 1e999, which is too large a number"),
        ('{"command": "ls", "timeout_seconds": ' + "9" * 5000 + "}", "a number of 5000 digits"),
        ('{"command": "a", "command": "b"}', "gives 'command' twice"),
        ('{"command": "\\ud800"}', "half of a surrogate pair"),
        ('{"command": "\udc00"}', "half of a surrogate pair"),
        ('{"command": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}", "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ("", "'command' is a required property"),
        ('{"command": ""}', "command: "),
        ('{"command": 7}', "command: 7 is not of type 'string'"),
        ('{"command": "ls", "cwd": "/"}', "'cwd' was unexpected"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_with_the_reason(raw: str, told: str) -> None:
    """The model reads what is wrong and where."""
    with pytest.raises(BadJson) as caught:
        parse_arguments(raw, SHELL)
    assert told in str(caught.value)


@pytest.mark.parametrize("raw", ["", "  \n"])
def test_no_text_is_an_empty_object_where_the_schema_allows_it(raw: str) -> None:
    """A tool without required fields may be called with nothing."""
    assert parse_arguments(raw, OPEN) == {}


def test_a_whole_surrogate_pair_is_a_character() -> None:
    """An emoji spelt as two escapes is no fault."""
    assert parse_arguments('{"command": "\\ud83d\\ude00"}', SHELL) == {"command": "\U0001f600"}


def test_a_schema_that_goes_round_refuses_instead_of_breaking_off() -> None:
    """A `$ref` without end is a fault of the tool that the model is told of, not an error of the harness."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}
    with pytest.raises(BadJson, match="round in circles"):
        parse_arguments('{"a": 1}', schema)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text of a model raises anything but BadJson."""
    try:
        value = read_json(text)
    except BadJson:
        return
    assert json.loads(json.dumps(value)) == value


@given(st.lists(st.sampled_from(["a", "b", "a~2", "a~3", None]), max_size=8), st.sets(st.sampled_from(["a", "b", "a~2"])))
def test_call_ids_are_unique_whatever_the_model_sends(ids: list[str | None], taken: set[str]) -> None:
    """No id is used twice in the transcript, no call is lost, and ids that were free stay as they are."""
    renamed, repeated = unique_call_ids([call(one) for one in ids], taken)
    new = [item["call_id"] for item in renamed]
    assert len(set(new)) == len(new) == len(ids)
    assert not set(new) & taken
    assert repeated <= set(new)


def test_an_id_of_an_earlier_answer_is_only_renamed() -> None:
    """It is clear which call was meant."""
    renamed, repeated = unique_call_ids([call("a")], {"a"})
    assert ([item["call_id"] for item in renamed], repeated) == (["a~2"], set())


def test_an_id_used_twice_in_one_answer_marks_the_second_call() -> None:
    """It is unclear which call was meant."""
    renamed, repeated = unique_call_ids([call("a"), call("a")], set())
    assert ([item["call_id"] for item in renamed], repeated) == (["a", "a~2"], {"a~2"})


def test_no_call_id_is_longer_than_the_api_takes() -> None:
    """Also one that had to be renamed, or shared its beginning with another."""
    renamed, repeated = unique_call_ids([call("c" * 64), call("c" * 64), call("c" * 70), call("c" * 64)], {"c" * 64})
    ids = [item["call_id"] for item in renamed]
    assert ids == [f"{'c' * 62}~{n}" for n in range(2, 6)]
    assert repeated == {ids[1], ids[3]}


def test_what_is_no_call_is_left_alone() -> None:
    """Messages and reasoning stay where they are."""
    items: list[dict[str, Any]] = [{"type": "reasoning", "id": "r"}, call("a"), {"type": "message", "content": []}]
    assert unique_call_ids(items, set())[0] == items


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    """A store of its own."""
    return BlobStore(LocalStore(tmp_path))


async def test_a_good_call_carries_its_arguments_in_one_canonical_form(blobs: BlobStore) -> None:
    """What is approved is what is executed: order and white space do not change the digest."""
    one, other = await read_calls(
        [call("a", '{"command": "ls", "timeout_seconds": 5}'), call("b", '{ "timeout_seconds":5,"command":"ls"}')],
        TOOLS,
        set(),
        blobs,
    )
    assert (one.fault, one.arguments.inline) == (None, '{"command":"ls","timeout_seconds":5}')
    assert one.arguments_digest == other.arguments_digest


async def test_an_unknown_tool_has_a_fault_that_names_those_there_are(blobs: BlobStore) -> None:
    """However long the name is that the model made up (openai/openai-agents-python#325)."""
    short, long = await read_calls([call("a", name="shel"), call("b", name="s" * 10_000)], TOOLS, set(), blobs)
    assert (short.unknown_tool, short.fault) == (True, "no tool is named 'shel'; the tools are: shell")
    assert (len(long.name), len(long.fault or "") < 300) == (200, True)


async def test_more_calls_than_are_carried_out_are_told_so(blobs: BlobStore) -> None:
    """The first sixty-four run."""
    calls = await read_calls([call(str(n)) for n in range(MAX_CALLS + 2)], TOOLS, set(), blobs)
    assert [n for n, one in enumerate(calls) if one.fault is not None] == [MAX_CALLS, MAX_CALLS + 1]
    assert "at most 64 calls" in (calls[-1].fault or "")


async def test_a_bad_call_can_be_stored_whatever_it_holds(blobs: BlobStore) -> None:
    """Half a surrogate pair in its text would break the result of the activity, and with it the paid answer."""
    (bad,) = await read_calls([call("a", '{"command": "\ud800"}')], TOOLS, set(), blobs)
    assert bad.model_validate_json(bad.model_dump_json()) == bad
    assert "surrogate" in (bad.fault or "")


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("shell", {"command": "ls -l\n  | wc"}, "$ ls -l | wc"),
        (
            "apply_patch",
            {"patch": "*** Begin Patch\n*** Update File: a/b.py\n@@\n-x\n*** Add File: c\n+y\n*** Delete File: d\n*** End Patch"},
            "apply_patch U a/b.py, A c, D d",
        ),
        (
            "apply_patch",
            {"patch": "***update file : a  \n*** MOVE TO: b\r\n***   Add File:c\n*** Begin Patch\n"},
            "apply_patch U a -> b, A c",
        ),
        ("lookup", {"claim": 7}, 'lookup({"claim":7})'),
        ("lookup", {}, "lookup()"),
        ("shell", {"command": "printf '\x1b[31m\u202e'"}, "$ printf '\ufffd[31m\ufffd'"),
    ],
)
def test_a_call_is_told_in_one_line(name: str, arguments: dict[str, Any], line: str) -> None:
    """What cannot be printed, such as a terminal's control sequences, is replaced."""
    assert summarise(name, arguments) == line


@given(st.sampled_from(["shell", "apply_patch", "lookup"]), st.text(max_size=400))
def test_a_line_is_short_and_printable(name: str, text: str) -> None:
    """Whatever the model writes."""
    line = summarise(name, {"command": text, "patch": text})
    assert len(line) <= 120
    assert line.isprintable()


def refused(raw: str, schema: dict[str, Any] = OPEN) -> str:
    """Why arguments are refused."""
    with pytest.raises(BadJson) as caught:
        parse_arguments(raw, schema)
    return str(caught.value)


HOSTILE: dict[str, Callable[[], object]] = {
    "spaces in a name": lambda: summarise("apply_patch", {"patch": "*** Add File: a" + " " * 40_000 + "x"}),
    "many markers": lambda: summarise("apply_patch", {"patch": "***\n" * 100_000 + "*** Add File:" * 50_000}),
    "many names": lambda: refused("{" + "".join(f'"a{n}":0,' for n in range(40_000)) + '"z":1,"z":1}'),
    "one id for all": lambda: unique_call_ids([call("same")] * 20_000, set()),
    "many faults": lambda: refused(json.dumps({"a": ["x"] * 100_000}), {"properties": {"a": {"items": {"type": "number"}}}}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_no_answer_keeps_a_worker_busy(case: str) -> None:
    """What a model writes is read in a time that grows with its length, not with the square of it."""
    started = time.process_time()
    HOSTILE[case]()
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("raw", "schema"),
    [
        ('{"long": 1, "long": 1}'.replace("long", "q" * 100_000), OPEN),
        (json.dumps({"q" * 100_000: 1}), {"type": "object", "additionalProperties": {"type": "string"}}),
        (json.dumps({"q" * 100_000: 1}), SHELL),
    ],
    ids=["twice", "place", "unknown"],
)
def test_a_fault_does_not_repeat_what_is_long(raw: str, schema: dict[str, Any]) -> None:
    """It goes back to the model, and into history."""
    assert len(refused(raw, schema)) <= 300
