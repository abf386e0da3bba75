"""`caisson`: the whole command, and how it reports what went wrong."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from client.cli import checkup, inspect, runs, sandboxes, say, stack, store, travel
from client.cli.faults import fault_of

HELP = """Run AI agents as durable workflows on Temporal.

Start the development stack and a run in it:

\b
    caisson dev
    caisson run "Count the lines of every CSV in inputs/ and write totals.md"

\b
Exit codes of run, watch and result:
    0 completed            3 a budget was exceeded
    1 failed or refused    4 stopped or cancelled
    2 bad input            5 not finished yet (result only)
    130 interrupted with Ctrl-C; a run that was being watched goes on

Where Temporal is comes from TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, TEMPORAL_API_KEY, TEMPORAL_TLS_* or TEMPORAL_PROFILE, else
localhost:7233; where the store and the agents are, from CAISSON_STORE and CAISSON_AGENTS.
"""


class Guarded(TyperGroup):
    """Writes every fault that a person can cause as a few lines on standard error, and exits with its code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            fault = fault_of(error)
            if fault is None:
                raise
            if ctx.params.get("debug"):
                import traceback

                traceback.print_exception(error)
            typer.echo(f"caisson: {fault.message}", err=True)
            raise typer.Exit(fault.code) from error


class Command(TyperCommand):
    """A command that is given text. Only paths may be what is no text at all."""

    def invoke(self, ctx: Any) -> Any:
        """Check what people gave, and run the command."""
        for name, value in ctx.params.items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and name != "path":
                    _check(name, text)
        return super().invoke(ctx)


def _check(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        where = {"run_id": "RUN", "approval_id": "APPROVAL", "text": "TEXT", "task": "TASK"}.get(
            name, f"--{name.replace('_', '-')}"
        )
        fault = f"{where}: {text[:80]!r} is not UTF-8 text; correct it"
    else:
        if text or name != "run_id":
            return
        fault = "RUN: the run's id is empty; give one, such as `caisson run` shows"
    from contracts.base import BadInput

    raise BadInput(fault)


app = typer.Typer(
    cls=Guarded,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    # Plain help loads in half the time; and typer's own tracebacks can show the values of variables, among them secrets.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show where in the code an error arose.")] = False,
) -> None:
    """Options of all commands; they are read by `Guarded`."""


for _command in (
    stack.dev,
    stack.worker,
    runs.run,
    runs.fork,
    runs.watch,
    runs.result,
    say.message,
    say.pause,
    say.resume,
    say.stop,
    say.approve,
    say.extend,
    inspect.transcript,
    inspect.artifacts,
    travel.files,
    travel.diff,
    travel.checkout,
    inspect.agents,
    inspect.skills,
    checkup.doctor,
):
    app.command(cls=Command)(_command)
app.add_typer(sandboxes.app, name="sandboxes")
app.add_typer(store.app, name="store")


def main() -> None:
    """The console script. Does not return."""
    try:
        app()
    except SystemExit as end:
        if "temporalio.bridge" in sys.modules:
            _leave(end.code)
        raise


def _leave(code: str | int | None) -> NoReturn:
    # The threads of Temporal's client can outlive the interpreter's end and abort the process, which would turn a good exit code
    # into 134 (temporalio/sdk-python issue 300). Nothing is left to be done but to write what is still in the buffers.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
