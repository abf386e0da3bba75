"""`caisson dev` and `caisson worker`: the processes that do the work."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from client.cli.faults import ExitCode
from client.cli.session import ended, exit_code, terminal

if TYPE_CHECKING:
    from rich.console import Console

    from contracts.run import RunInput, RunResult
    from workers.dev.options import DevOptions
    from workers.dev.stack import DevStack

Got = TypeVar("Got")
_CHECK_SECONDS = 0.5
_CANCEL_SECONDS = 60.0


def dev(
    file: Annotated[Path, typer.Option(metavar="FILE.yml", help="The Compose file that says what to start.")] = Path(
        "temporal-dev.yml"
    ),
    run: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Do this run, show it, and stop the stack.")] = None,
    scenario: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="What the scripted model plays when there is no OPENAI_API_KEY."),
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Temporal's port; usually 7233.")] = None,
    ui_port: Annotated[int | None, typer.Option(min=1, max=65535, help="The Web UI's port; usually 8233.")] = None,
    state_dir: Annotated[Path, typer.Option(metavar="DIR", help="Where server, store, sandboxes and logs live.")] = Path(
        ".caisson"
    ),
) -> None:
    """Start the development stack, without Docker.

    That is Temporal with its Web UI, and one worker process for each role. It runs until Ctrl-C, and restarts what dies. Runs
    outlive it: those that were not finished go on when it starts again. Without OPENAI_API_KEY a scripted model answers, which
    is no language model.

    With --run the exit code is the run's, and Ctrl-C cancels the run too.

    \b
    Example:
        caisson dev
        caisson dev --run my-run.json
    """
    from client.request import run_input
    from workers.dev.options import DevOptions

    request = None if run is None else run_input(None, run, None, None, [])
    options = DevOptions(file=file, run=run, scenario=scenario, port=port, ui_port=ui_port, state_dir=state_dir)
    ended(_dev(options, request))


def worker(
    role: Annotated[list[str], typer.Option(metavar="ROLE", help="workflow, model, sandbox or tools. May be repeated.")],
) -> None:
    """Run one worker process.

    It works until SIGTERM, then finishes what is in flight or hands it on. Each role has a task queue and an environment of its
    own. Only the model worker may see OPENAI_API_KEY, so model and sandbox are never one process.

    \b
    Example:
        caisson worker --role workflow --role tools
    """
    import asyncio

    from contracts.base import BadInput
    from workers.process import serve
    from workers.settings import Role, load_settings

    known = [known.value for known in Role]
    wrong = [name for name in role if name not in known]
    if wrong:
        raise BadInput(f"--role {wrong[0]!r}: no such role; there are: {', '.join(known)}")
    asyncio.run(serve(frozenset(Role(name) for name in role), load_settings()))


async def _dev(options: DevOptions, request: RunInput | None) -> int:
    import asyncio
    import contextlib

    from workers.dev.stack import SCRIPTED, DevStack
    from workers.settings import load_settings, whole_environment

    console = terminal()
    _end_on_sigterm()
    stack = DevStack(options, load_settings(), whole_environment(), lambda line: console.print(line, soft_wrap=True))
    if stack.scripted:
        console.print(f"OPENAI_API_KEY is not set, so the model is {SCRIPTED}", style="bold black on yellow", soft_wrap=True)
    console.print("starting the dev stack ...")
    async with stack:
        console.print(f"Temporal:  {stack.address}")
        console.print(f"Web UI:    {stack.ui_url}")
        console.print(f"logs:      {stack.logs}", soft_wrap=True)
        if request is None:
            console.print('ready: start a run with  caisson run "..."  and stop the stack with Ctrl-C')
            # Ctrl-C is how one ends it, so it is no fault; leaving the stack's context then stops everything in order.
            with contextlib.suppress(asyncio.CancelledError):
                await _watched(stack, asyncio.Event().wait())
            console.print("stopping the dev stack ...")
            return ExitCode.COMPLETED
        ending = await _one_run(stack, options, request, console)
        console.print("stopping the dev stack ...")
    return ending


async def _one_run(stack: DevStack, options: DevOptions, request: RunInput, console: Console) -> int:
    import asyncio

    from client.live import follow_run
    from client.sdk import CaissonClient, new_run_id
    from client.show import print_result, run_page
    from workers.settings import load_settings

    run_id = new_run_id(request)
    page = run_page(stack.ui_url, stack.client.namespace, run_id)
    run = await CaissonClient(stack.client, load_settings().task_queue).start(request, run_id)
    console.print(f"run {run_id} is started: {page}", soft_wrap=True)
    try:
        ending = await _watched(stack, follow_run(stack.client, run_id, console))
    except asyncio.CancelledError:
        # The stack was started for this run alone, so both end: nothing may be left working on this machine.
        console.print(f"cancelling run {run_id}; Ctrl-C again leaves it to the next `caisson dev`", soft_wrap=True)
        await run.cancel()
        try:
            ending = await asyncio.wait_for(_watched(stack, run.outcome()), _CANCEL_SECONDS)
        except TimeoutError:
            console.print(f"it has not ended after {_CANCEL_SECONDS:g} s; the next `caisson dev` goes on with ending it")
            return ExitCode.INTERRUPTED
    print_result(console, run_id, ending, page=page)
    await _keep(stack, options.state_dir / "runs" / run_id, ending, console)
    return exit_code(ending)


async def _keep(stack: DevStack, directory: Path, ending: RunResult, console: Console) -> None:
    """Put the result where it can be read when the stack is gone."""
    from client.artifacts import all_artifacts, copy_artifacts

    _write_result(directory, ending)
    console.print(f"result: {directory / 'result.json'}", soft_wrap=True)
    found = await all_artifacts(stack.blobs, ending.artifacts)
    if found:
        await copy_artifacts(stack.blobs, found, directory / "artifacts", overwrite=False)
        console.print(f"artifacts: {directory / 'artifacts'}", soft_wrap=True)
    head = ending.checkpoint.transcript if ending.checkpoint else None
    if head is not None:
        console.print(f"when the stack is gone: caisson transcript --head {head.digest}:{head.size}", soft_wrap=True)


def _write_result(directory: Path, ending: RunResult) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "result.json").write_text(ending.model_dump_json(indent=2) + "\n", encoding="utf-8")


async def _watched(stack: DevStack, work: Coroutine[Any, Any, Got]) -> Got:
    """Do some work while the stack runs. Raises ServiceFailed when a part of the stack cannot run any more."""
    import asyncio

    doing = asyncio.ensure_future(work)
    try:
        while not doing.done():
            stack.check()
            await asyncio.wait([doing], timeout=_CHECK_SECONDS)
        return await doing
    finally:
        doing.cancel()
        await asyncio.wait([doing])


def _end_on_sigterm() -> None:
    import asyncio
    import signal

    # As on Ctrl-C, so that a service manager that ends this process leaves no worker or server behind.
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
