"""`caisson run`, `fork`, `watch` and `result`: starting a run, following it, and what it made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.cli.faults import ExitCode
from client.cli.session import AsJson, Chain, RunId, Session, WebUi, connected, ended, exit_code, terminal

if TYPE_CHECKING:
    from pydantic import JsonValue
    from rich.console import Console

    from activities.store.checkpoints import RunStart
    from contracts.run import RunInput, RunResult


def run(
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="What is to be done.")] = None,
    input: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="A run's whole input as JSON; - reads standard input.")
    ] = None,
    agent: Annotated[str | None, typer.Option(metavar="NAME", help="An agent of the workers' agent directory.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model to ask, instead of the agent's.")] = None,
    id: Annotated[str | None, typer.Option(metavar="RUN", help="The run's id; else one is chosen.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Kept with the run. May be repeated.")] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start the run and return at once.")] = False,
    as_json: AsJson = False,
    ui: WebUi = None,
) -> None:
    """Start a run and follow it to its end.

    The input is checked first; nothing is started when it cannot be used. What the options say replaces what FILE.json says.
    Ctrl-C leaves the run alone: it goes on, and `caisson watch` shows it again. A run id is used once.

    \b
    Example:
        caisson run "Summarise inputs/notes.md" --agent analyst --label team=claims
        caisson run --input my-run.json --detach

    Exit codes: 0 completed, 1 failed or refused, 2 bad input, 3 a budget was exceeded, 4 stopped or cancelled, 130 Ctrl-C.
    """
    from client.request import run_input
    from client.sdk import checked_run_id, new_run_id

    request = run_input(task, input, agent, model, label or [])
    run_id = new_run_id(request) if id is None else checked_run_id(id)
    ended(_run(request, run_id, detach, as_json, ui))


def fork(
    run_id: RunId,
    task: Annotated[str | None, typer.Option(metavar="TEXT", help="What is to be done next; said to the model.")] = None,
    step: Annotated[int | None, typer.Option(min=0, metavar="N", help="Go on after this step; else after the last.")] = None,
    chain: Chain = None,
    input: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="The rest of the input, such as a budget; - reads standard input.")
    ] = None,
    agent: Annotated[str | None, typer.Option(metavar="NAME", help="Another agent of the workers' agent directory.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Another model.")] = None,
    provider: Annotated[str | None, typer.Option(metavar="NAME", help="Another provider of sandboxes.")] = None,
    id: Annotated[str | None, typer.Option(metavar="NEW", help="The new run's id; else one is chosen.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Kept with the run. May be repeated.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the new run to its end.")] = False,
    as_json: AsJson = False,
    ui: WebUi = None,
) -> None:
    """Start a new run from a checkpoint of another.

    It has that run's conversation and workspace as they were after the step, and its agent, model and limits unless others are
    given. The first run is not touched; whether it still works, has ended or has lost its sandbox does not matter. What the new
    run uses counts from zero.

    \b
    Example:
        caisson fork analyst-3f0c9a1d2b4e --step 12 --task "Take the median instead of the mean."
        caisson fork analyst-3f0c9a1d2b4e --task "Go on." --provider e2b --watch

    Exit codes with --watch are those of `caisson run`.
    """
    from client.request import run_input
    from client.sdk import checked_run_id
    from contracts.base import BadInput

    if task is None and input is None:
        raise BadInput(f'fork: say what is to be done next: caisson fork {run_id} --task "..."')
    if provider is not None and agent is not None:
        raise BadInput("fork: --provider changes the first run's sandbox, but --agent brings its own; give one of the two")
    request = run_input(task, input, agent, model, label or [])
    if request.manifest is not None:
        raise BadInput("manifest: a run from a checkpoint has the workspace of that checkpoint; leave the manifest out")
    new_id = None if id is None else checked_run_id(id)
    ended(_fork(run_id, step, chain, request, provider, new_id, watch, as_json, ui))


def watch(run_id: RunId, as_json: AsJson = False, ui: WebUi = None) -> None:
    """Follow a run to its end, whoever started it.

    Ctrl-C leaves the run alone. Exit codes are those of `caisson run`.

    \b
    Example:
        caisson watch analyst-3f0c9a1d2b4e
    """
    ended(_watch(run_id, as_json, ui))


def result(
    run_id: RunId,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end of a run that still works.")] = False,
    as_json: AsJson = False,
    ui: WebUi = None,
) -> None:
    """Show how a run ended and what it made.

    Exit codes are those of `caisson run`, and 5 for a run that is not finished yet.

    \b
    Example:
        caisson result analyst-3f0c9a1d2b4e --json
    """
    ended(_result(run_id, wait, as_json, ui))


async def _run(request: RunInput, run_id: str, detach: bool, as_json: bool, ui: str | None) -> int:
    from client.show import quoted

    session = await connected()
    console = terminal(stderr=as_json)
    await session.caisson.start(request, run_id)
    page = session.page(run_id, ui)
    if detach:
        if as_json:
            _write_json({"run_id": run_id, "page": page})
            return ExitCode.COMPLETED
        console.print(f"run {run_id} is started", soft_wrap=True)
        _tell_how_to_go_on(console, run_id, page)
        return ExitCode.COMPLETED
    console.print(
        f"run {run_id} is started" + (f": {page}" if page else f" (stop it: caisson stop {quoted(run_id)})"), soft_wrap=True
    )
    return await _follow(session, run_id, console, as_json, page)


async def _fork(
    run_id: str,
    step: int | None,
    chain: str | None,
    request: RunInput,
    provider: str | None,
    new_id: str | None,
    watch: bool,
    as_json: bool,
    ui: str | None,
) -> int:
    from client.moments import checkpoint_of
    from client.sdk import new_run_id
    from client.show import quoted

    session = await connected()
    # Looked up here as well as by the workers, so that nothing is started from a checkpoint that is not there.
    start, checkpoint = await checkpoint_of(session.blobs, session.settings.store, run_id, step, chain)
    if provider is not None:
        request = await _elsewhere(session, start, request, provider)
    new_id = new_id or new_run_id(request, start.agent_name)
    await session.caisson.fork(run_id, request, step=checkpoint.step, chain=start.chain, new_id=new_id)
    page, console = session.page(new_id, ui), terminal(stderr=as_json)
    origin: JsonValue = {"run_id": run_id, "step": checkpoint.step, "chain": start.chain}
    if as_json and not watch:
        _write_json({"run_id": new_id, "page": page, "from": origin})
        return ExitCode.COMPLETED
    started = f"run {new_id} is started, from run {run_id} after step {checkpoint.step}"
    if watch:
        console.print(started + (f": {page}" if page else f" (stop it: caisson stop {quoted(new_id)})"), soft_wrap=True)
        return await _follow(session, new_id, console, as_json, page)
    console.print(started, soft_wrap=True)
    _tell_how_to_go_on(console, new_id, page)
    return ExitCode.COMPLETED


async def _elsewhere(session: Session, start: RunStart, request: RunInput, provider: str) -> RunInput:
    """Ask for the sandbox that the first run had, or the input names, of another provider."""
    import json

    from pydantic import ValidationError

    from contracts.base import BadInput, explain
    from contracts.prepare import ResolvedAgent
    from contracts.sandbox import SandboxSpec

    first = ResolvedAgent.model_validate(json.loads(await session.blobs.get(start.agent)), extra="ignore").spec
    known = request.sandbox or (first if request.agent is None or isinstance(request.agent, str) else request.agent).sandbox
    try:
        sandbox = SandboxSpec.model_validate({**known.model_dump(), "provider": provider})
    except ValidationError as error:
        raise BadInput(explain(error, f"--provider {provider!r}")) from error
    return request.model_copy(update={"sandbox": sandbox})


async def _watch(run_id: str, as_json: bool, ui: str | None) -> int:
    session = await connected()
    return await _follow(session, run_id, terminal(stderr=as_json), as_json, session.page(run_id, ui))


async def _follow(session: Session, run_id: str, console: Console, as_json: bool, page: str | None) -> int:
    import asyncio

    from client.live import follow_run

    try:
        ending = await follow_run(session.client, run_id, console)
    except asyncio.CancelledError:
        console.print(f"no longer watching; run {run_id} goes on", soft_wrap=True)
        _tell_how_to_go_on(console, run_id, page)
        raise
    await _print(session, run_id, ending, as_json, page)
    return exit_code(ending)


async def _result(run_id: str, wait: bool, as_json: bool, ui: str | None) -> int:
    from client.live import is_open
    from client.show import quoted

    session = await connected()
    if not wait and await is_open(session.client, run_id):
        typer.echo(f"run {run_id} is not finished; follow it: caisson watch {quoted(run_id)}", err=True)
        return ExitCode.NOT_FINISHED
    ending = await session.handle(run_id).outcome()
    await _print(session, run_id, ending, as_json, session.page(run_id, ui))
    return exit_code(ending)


async def _print(session: Session, run_id: str, ending: RunResult, as_json: bool, page: str | None) -> None:
    from client.show import print_result

    if as_json:
        _write_json({"run_id": run_id, **ending.model_dump(mode="json")})
        return
    print_result(terminal(), run_id, ending, page=page, output=await _whole_output(session, ending))


async def _whole_output(session: Session, ending: RunResult) -> JsonValue:
    """Read an answer that was too long for the result; None when there is no more to read, or the store is another one."""
    from activities.store.port import StoreError

    if ending.output_blob is None:
        return None
    try:
        return (await session.blobs.get(ending.output_blob)).decode("utf-8", "replace")
    except StoreError:
        return None  # the result is printed with the preview then, and says so


def _tell_how_to_go_on(console: Console, run_id: str, page: str | None) -> None:
    from client.show import quoted

    console.print(f"  watch it:  caisson watch {quoted(run_id)}", soft_wrap=True)
    console.print(f"  stop it:   caisson stop {quoted(run_id)}", soft_wrap=True)
    if page is not None:
        console.print(f"  Web UI:    {page}", soft_wrap=True)


def _write_json(value: JsonValue) -> None:
    import json

    typer.echo(json.dumps(value, ensure_ascii=False, indent=2).encode("utf-8", "replace"))
