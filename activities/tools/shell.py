"""The shell tool as the model sees it, and the two things its arguments can mean: a new command, or a word to a session."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from activities.model.calls import ToolDefinition
from contracts.agent import ShellTool

MAX_WAIT_SECONDS = 600
WAIT_SECONDS = 5.0
"""How long a session is waited for when the model does not say."""
MAX_INPUT = 16 * 1024
"""Characters that are typed at once: even at four bytes each they fit into one order to a sandbox."""

_DESCRIPTION = """\
Run a command with bash in the workspace. Each call is a new shell: directory changes and variables do not last, files do. \
Standard input is closed. The exit code and both output streams come back; of long output the beginning and the end. \
A command is ended with its children after timeout_seconds (default {default:g}, at most {most:g}). Processes started with & \
go on after the call.

Sessions, for long commands and for programs that ask: with wait_seconds the call returns after that time while the command \
goes on, and gives a session id. With tty: true the command has a terminal. A later call with session (and without command) \
waits up to wait_seconds (default {wait:g}) and gives the output that is new; it can type input first, or resize the terminal, \
or kill the session. A session lasts at most {most:g} seconds, and ends with the run."""

_ONLY_NEW = {"timeout_seconds": "say it when the command is started", "tty": "say it when the command is started"}
_ONLY_SESSION = {
    "input": "start the command with tty: true, then call again with its session id and input",
    "resize": "start the command with tty: true, then call again with its session id and resize",
    "kill": "it is for a session: give its id instead of a command",
}


@dataclass(frozen=True)
class StartCommand:
    """Run a command: to its end, or as a session when `wait` says how long this call may take."""

    command: str
    timeout: float
    terminal: bool = False
    wait: float | None = None
    until_end: bool = True


@dataclass(frozen=True)
class UseSession:
    """Say something to a session, then read it."""

    session: str
    wait: float
    until_end: bool
    input: str | None = None
    size: tuple[int, int] | None = None
    kill: bool = False


def define_shell(tool: ShellTool) -> ToolDefinition:
    """Return what the model is told of the shell."""
    most = min(MAX_WAIT_SECONDS, tool.max_timeout_seconds)
    size = {"type": "integer", "minimum": 1, "maximum": 1000}
    return ToolDefinition(
        "shell",
        _DESCRIPTION.format(default=tool.timeout_seconds, most=tool.max_timeout_seconds, wait=min(WAIT_SECONDS, most)),
        {
            "type": "object",
            "properties": {
                "command": {"type": "string", "minLength": 1, "description": "what bash runs; may span lines"},
                "timeout_seconds": {"type": "number", "exclusiveMinimum": 0, "maximum": tool.max_timeout_seconds},
                "wait_seconds": {
                    "type": "number",
                    "minimum": 0,
                    "maximum": most,
                    "description": "return after this time at the latest; the command goes on as a session",
                },
                "wait_for": {
                    "enum": ["output", "end"],
                    "description": "what ends the wait early: new output followed by a short silence (default for a session "
                    "and a tty), or only the end of the command",
                },
                "tty": {"type": "boolean", "description": "start the command with a terminal of 24 rows and 80 columns"},
                "session": {"type": "string", "minLength": 1, "description": "id of a running command, instead of command"},
                "input": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": MAX_INPUT,
                    "description": "typed as it is; end a line with \\n. \\u0003 is Ctrl-C, \\u0004 the end of input",
                },
                "resize": {
                    "type": "object",
                    "properties": {"rows": size, "cols": size},
                    "required": ["rows", "cols"],
                    "additionalProperties": False,
                },
                "kill": {"type": "boolean", "description": "end the session with its children"},
            },
            "additionalProperties": False,
        },
        fault_of_combination,
    )


def fault_of_combination(arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with arguments taken together, whatever each of them is, and what to do, or None."""
    is_new, is_session = "command" in arguments, "session" in arguments
    if not is_new and not is_session:
        return "'command' is a required property, unless session names a running command"
    if is_new and is_session:
        return "command starts a command and session names a running one; give one of them"
    for name, advice in (_ONLY_NEW if is_session else _ONLY_SESSION).items():
        if arguments.get(name):
            return f"{name}: not with {'session' if is_session else 'command'}; {advice}"
    if is_new and "wait_for" in arguments and "wait_seconds" not in arguments and not arguments.get("tty"):
        return "wait_for: needs wait_seconds; without it a command is waited for to its end"
    if arguments.get("kill") and ("input" in arguments or "resize" in arguments):
        return "kill: not with input or resize; a killed session takes neither"
    return None


def read_shell(arguments: Mapping[str, Any], tool: ShellTool) -> StartCommand | UseSession:
    """Return what arguments without fault mean."""
    usual = min(WAIT_SECONDS, tool.max_timeout_seconds)
    wait = arguments.get("wait_seconds")
    terminal = bool(arguments.get("tty"))
    if "command" in arguments:
        is_session = terminal or wait is not None
        longest = tool.max_timeout_seconds if is_session else tool.timeout_seconds
        return StartCommand(
            command=arguments["command"],
            timeout=min(float(arguments.get("timeout_seconds") or longest), tool.max_timeout_seconds),
            terminal=terminal,
            wait=float(usual if wait is None else wait) if is_session else None,
            until_end=arguments.get("wait_for", "output" if terminal else "end") == "end",
        )
    size = arguments.get("resize")
    return UseSession(
        session=arguments["session"],
        wait=float(usual if wait is None else wait),
        until_end=arguments.get("wait_for") == "end",
        input=arguments.get("input"),
        size=(size["rows"], size["cols"]) if size else None,
        kill=bool(arguments.get("kill")),
    )
