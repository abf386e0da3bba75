"""The shell tool's arguments: what they mean, and what a model is told when they do not fit together."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from activities.model.calls import parse_arguments, summarise
from activities.sandbox.port import Sandbox
from activities.sandbox.shell import ShellCall, session_id
from activities.tools.shell import StartCommand, UseSession, define_shell, fault_of_combination, read_shell
from contracts.agent import ShellTool
from contracts.blob import BlobRef, Text
from contracts.model import ToolCall, ToolCallInput
from contracts.sandbox import SandboxRef

TOOL = ShellTool(timeout_seconds=20, max_timeout_seconds=300)
SESSION = "3-0-9f3a"


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ({"command": "ls"}, StartCommand("ls", 20)),
        ({"command": "ls", "timeout_seconds": 40}, StartCommand("ls", 40)),
        ({"command": "ls", "tty": False}, StartCommand("ls", 20)),
        ({"command": "make", "wait_seconds": 2}, StartCommand("make", 300, wait=2)),
        ({"command": "make", "wait_seconds": 0, "timeout_seconds": 9}, StartCommand("make", 9, wait=0)),
        ({"command": "make", "wait_seconds": 9, "wait_for": "output"}, StartCommand("make", 300, wait=9, until_end=False)),
        ({"command": "python3", "tty": True}, StartCommand("python3", 300, terminal=True, wait=5, until_end=False)),
        ({"command": "sh", "tty": True, "wait_for": "end"}, StartCommand("sh", 300, terminal=True, wait=5)),
        ({"session": SESSION}, UseSession(SESSION, 5, until_end=False)),
        ({"session": SESSION, "wait_seconds": 200, "wait_for": "end"}, UseSession(SESSION, 200, until_end=True)),
        ({"session": SESSION, "input": "\x03"}, UseSession(SESSION, 5, until_end=False, input="\x03")),
        ({"session": SESSION, "resize": {"rows": 5, "cols": 7}}, UseSession(SESSION, 5, until_end=False, size=(5, 7))),
        ({"session": SESSION, "kill": True}, UseSession(SESSION, 5, until_end=False, kill=True)),
    ],
)
def test_what_arguments_mean(arguments: dict[str, Any], meant: StartCommand | UseSession) -> None:
    """A command alone runs to its end; a session lives as long as a command may ask for."""
    assert fault_of_combination(arguments) is None
    assert read_shell(arguments, TOOL) == meant


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "'command' is a required property, unless session names a running command"),
        ({"command": "ls", "session": SESSION}, "give one of them"),
        ({"command": "ls", "input": "y\n"}, "input: not with command; start the command with tty: true, then call again"),
        ({"command": "ls", "resize": {"rows": 1, "cols": 1}}, "resize: not with command"),
        ({"command": "ls", "kill": True}, "kill: not with command"),
        ({"command": "ls", "wait_for": "end"}, "wait_for: needs wait_seconds"),
        ({"session": SESSION, "timeout_seconds": 3}, "timeout_seconds: not with session; say it when the command is started"),
        ({"session": SESSION, "tty": True}, "tty: not with session"),
        ({"session": SESSION, "kill": True, "input": "x"}, "kill: not with input or resize"),
        ({"input": "x"}, "'command' is a required property, unless session names a running command"),
    ],
)
def test_a_misfit_is_told_with_what_to_do(arguments: dict[str, Any], told: str) -> None:
    """Each argument fits the schema, so only their combination is wrong."""
    definition = define_shell(TOOL)
    parse_arguments_of(definition.parameters, arguments)
    assert told in (definition.check(arguments) or "")


def parse_arguments_of(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Check arguments against a schema."""
    assert parse_arguments(json.dumps(arguments), schema) == arguments


@pytest.mark.parametrize("most", [30.0, 300.0, 7200.0])
def test_no_wait_is_longer_than_a_call_may_take(most: float) -> None:
    """The wait is in one activity, whose time follows from the longest command."""
    waits = define_shell(ShellTool(max_timeout_seconds=most)).parameters["properties"]["wait_seconds"]
    assert waits["maximum"] == min(most, 600)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"command": "python3", "tty": True}, "$ python3"),
        ({"session": SESSION}, f"session {SESSION}: read"),
        ({"session": SESSION, "wait_for": "end"}, f"session {SESSION}: wait for its end"),
        ({"session": SESSION, "input": "print(1)\n\x03"}, f'session {SESSION}: type "print(1)\\n\\u0003"'),
        ({"session": SESSION, "resize": {"rows": 5, "cols": 7}}, f"session {SESSION}: resize to 5 rows, 7 columns"),
        ({"session": SESSION, "kill": True}, f"session {SESSION}: kill"),
    ],
)
def test_a_call_of_a_session_is_told_in_one_line(arguments: dict[str, Any], line: str) -> None:
    """What is typed is shown as it would be written, so that a control character can be seen."""
    assert summarise("shell", arguments) == line


@pytest.mark.parametrize(
    "asked",
    [StartCommand("make", 300, wait=2), StartCommand("sh", 300, terminal=True, wait=2), UseSession("1", 5, until_end=False)],
)
async def test_a_sandbox_without_sessions_says_so(asked: StartCommand | UseSession) -> None:
    """Nothing is run there, not even once; the model is told what works."""
    unused = cast("Sandbox", None)
    arguments = Text(inline="{}")
    call = ToolCall(call_id="c", name="shell", arguments=arguments, arguments_digest="d" * 64, summary="s")
    blob = BlobRef(digest="a" * 64, size=1)
    ref = SandboxRef(provider="other", id="1", nonce="n", queue="q")
    given = ToolCallInput(run_id="r", step=1, job_id="r/t/1/0", sandbox=ref, agent=blob, call=call)
    shown = await ShellCall(unused, None, given, TOOL, asked).carry_out()
    assert shown.failed
    assert "this sandbox has no sessions" in shown.text
    assert "Give command alone" in shown.text


async def test_a_command_that_fits_into_no_argument_is_refused() -> None:
    """The model is told how much fits and what to do, before any sandbox is asked."""
    unused = cast("Sandbox", None)
    call = ToolCall(call_id="c", name="shell", arguments=Text(inline="{}"), arguments_digest="d" * 64, summary="s")
    ref = SandboxRef(provider="other", id="1", nonce="n", queue="q")
    given = ToolCallInput(run_id="r", step=1, job_id="r/1/0", sandbox=ref, agent=BlobRef(digest="a" * 64, size=1), call=call)
    shown = await ShellCall(unused, None, given, TOOL, StartCommand("echo " + "\u00e9" * 60_000, 20)).carry_out()
    assert shown.failed
    assert shown.text.startswith("shell: the command has 120005 bytes, and at most 100000 fit; nothing was run.")
    assert "apply_patch" in shown.text


def test_the_id_of_a_session_is_short_and_its_calls_own() -> None:
    """The same at every attempt, another one for each call, and for the same call after a reset of the workflow."""
    call = ToolCall(call_id="c", name="shell", arguments=Text(inline="{}"), arguments_digest="d" * 64, summary="s")
    ref = SandboxRef(provider="local", id="1", nonce="n", queue="q")

    def made(job: str, step: int) -> str:
        blob = BlobRef(digest="a" * 64, size=1)
        return session_id(ToolCallInput(run_id="r", step=step, job_id=job, sandbox=ref, agent=blob, call=call))

    ids = [made("r/t1/3/0", 3), made("r/t1/3/1", 3), made("r/t1/4/0", 4), made("r/t2/3/0", 3)]
    assert len(set(ids)) == 4
    assert made("r/t1/3/0", 3) == ids[0]
    assert all(len(one) <= 12 for one in ids)
