"""Looking at what runs left, and at the agents and skills there are: `transcript`, `artifacts`, `agents`, `skills`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.cli.faults import ExitCode
from client.cli.session import AsJson, RunId, Session, connected, ended

if TYPE_CHECKING:
    from client.transcript import Entry
    from contracts.blob import BlobRef
    from contracts.run import Checkpoint


def transcript(
    run_id: Annotated[str | None, typer.Argument(metavar="RUN", help="The run's id.")] = None,
    step: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only this step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line: step, origin, item.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="One JSON line an item, as the model was given it.")] = False,
    head: Annotated[
        str | None,
        typer.Option(metavar="DIGEST:SIZE", help="The transcript's head; no Temporal is needed then."),
    ] = None,
) -> None:
    """Print a run's whole transcript.

    It is read from the store: what was said, called and answered, step by step.

    \b
    Example:
        caisson transcript analyst-3f0c9a1d2b4e --step 3
        caisson transcript analyst-3f0c9a1d2b4e --json | jq .item
    """
    from contracts.base import BadInput

    if (run_id is None) == (head is None):
        raise BadInput("transcript: name one of the two: a run, or --head DIGEST:SIZE")
    if as_json and raw:
        raise BadInput("transcript: --json and --raw exclude each other")
    ended(_transcript(run_id, None if head is None else _head(head), step, "json" if as_json else "raw" if raw else "text"))


def artifacts(
    run_id: RunId,
    action: Annotated[str | None, typer.Argument(metavar="get", help="Copy them ...")] = None,
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", help="... into this directory.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there already.")] = False,
    as_json: AsJson = False,
) -> None:
    """List a run's artifacts, or copy them.

    Copies are verified against their digests and never leave DIR; a file that is there already is not touched.

    \b
    Example:
        caisson artifacts analyst-3f0c9a1d2b4e
        caisson artifacts analyst-3f0c9a1d2b4e get results/
    """
    from contracts.base import BadInput

    if action is not None and (action != "get" or directory is None):
        raise BadInput(f"artifacts: to copy them, write: caisson artifacts {run_id} get DIR")
    if directory is not None and directory.exists() and not directory.is_dir():
        raise BadInput(f"{directory}: is no directory; name a directory, which is made if it is not there")
    ended(_artifacts(run_id, directory, overwrite, as_json))


def agents(as_json: AsJson = False) -> None:
    """List and check the named agents.

    They are those of the agent directory: CAISSON_AGENTS, else agents/.

    \b
    Example:
        caisson agents
    """
    from activities.agents import AgentDirectory
    from client.show import one_line
    from contracts.base import BadInput
    from workers.settings import load_settings

    settings = load_settings()
    directory, faults, specs = AgentDirectory(settings.agents), [], []
    for name in directory.names():
        try:
            specs.append(directory.load(name))
        except BadInput as error:
            faults.append(str(error))
    if as_json:
        typer.echo(json.dumps([spec.model_dump(mode="json") for spec in specs], indent=2, ensure_ascii=False))
    else:
        for spec in specs:
            model = spec.model or settings.model
            typer.echo(f"{spec.name:<24} {model:<16} {one_line(spec.description, 100)}".rstrip())
        if not specs and not faults:
            typer.echo(
                f"no agents in {settings.agents}: write one as {settings.agents}/NAME.yaml, or set CAISSON_AGENTS", err=True
            )
    if faults:
        raise BadInput("\n".join(faults))


def skills(
    directories: Annotated[list[str] | None, typer.Argument(metavar="[DIRECTORY]...", help="As in an agent's skills.")] = None,
    workspace: Annotated[
        Path, typer.Option("--workspace", metavar="DIR", help="What the manifest makes the workspace.", show_default=True)
    ] = Path(),
    as_json: AsJson = False,
) -> None:
    """Check skills as a run would find them, before there is a run.

    Lists the skills below DIRECTORY (default: skills), in the order of precedence, and what is wrong with others. Links that lead
    out of the workspace are not followed. The exit code is 1 when something is wrong.

    \b
    Example:
        caisson skills
        caisson skills project/skills user/skills --workspace examples/workspace
    """
    ended(_skills(tuple(directories or ("skills",)), workspace, as_json))


async def _skills(directories: tuple[str, ...], workspace: Path, as_json: bool) -> int:
    from activities.tools.skill_scan import find_skills
    from activities.tools.workspace_tree import HostFiles
    from client.show import one_line
    from contracts.base import BadInput
    from contracts.manifest import check_workspace_path

    places = []
    for given in directories:
        try:
            places.append(check_workspace_path(given))
        except ValueError as error:
            raise BadInput(f"DIRECTORY: {given!r}: {error}") from error
    try:
        found = await find_skills(HostFiles(workspace), places)
    except OSError as error:
        raise BadInput(f"--workspace: {error.filename!r} cannot be read: {error.strerror}") from error
    if as_json:
        rows = [
            {name: getattr(skill, name) for name in ("name", "description", "directory", "license")} for skill in found.skills
        ]
        typer.echo(json.dumps({"skills": rows, "faults": found.faults}, indent=2, ensure_ascii=False))
    else:
        for skill in found.skills:
            typer.echo(f"{skill.name:<24} {one_line(skill.directory, 40):<40} {one_line(skill.description, 100)}".rstrip())
        if not found.skills and not found.faults:
            typer.echo(f"no skills below {', '.join(places)}: write one as {places[0]}/NAME/SKILL.md", err=True)
        for fault in found.faults:
            typer.echo(fault, err=True)
    return ExitCode.FAILED if found.faults else ExitCode.COMPLETED


async def _transcript(run_id: str | None, head: BlobRef | None, step: int | None, form: str) -> int:
    from activities.model.transcript import TranscriptStore
    from client.transcript import by_step
    from contracts.base import BadInput
    from workers.connect import open_blobs
    from workers.settings import load_settings

    if run_id is not None:
        session = await connected()
        checkpoint = await _checkpoint(session, run_id)
        head, blobs = (checkpoint.transcript if checkpoint else None), session.blobs
    else:
        blobs = open_blobs(load_settings())
    if head is None:
        raise BadInput(f"run {run_id!r} has no transcript yet: the model has not answered once")
    entries = await TranscriptStore(blobs).load(head)
    chosen = [(number, entry) for number, entry in by_step(entries) if step in (None, number)]
    if not chosen:
        last = max((number for number, _ in by_step(entries)), default=0)
        raise BadInput(f"--step {step}: the transcript has steps 1 to {last}")
    _write(chosen, form)
    return ExitCode.COMPLETED


def _write(entries: list[tuple[int, Entry]], form: str) -> None:
    from client.transcript import render

    match form:
        case "text":
            lines = render(entries)
        case "json":
            lines = (
                json.dumps({"step": number, "origin": entry.origin, "item": entry.item}, ensure_ascii=False)
                for number, entry in entries
            )
        case _:
            lines = (json.dumps(entry.item, ensure_ascii=False) for _, entry in entries)
    for line in lines:
        # As bytes: the item may hold half a character that no output encoding has.
        typer.echo(line.encode("utf-8", "replace"))


async def _checkpoint(session: Session, run_id: str) -> Checkpoint | None:
    from client.live import is_open

    run = session.handle(run_id)
    if await is_open(session.client, run_id):
        return (await run.status()).checkpoint
    # A finished run is read from its result, for which no worker is needed.
    return (await run.outcome()).checkpoint


async def _artifacts(run_id: str, directory: Path | None, overwrite: bool, as_json: bool) -> int:
    from client.artifacts import all_artifacts, copy_artifacts
    from client.live import is_open
    from client.show import clean, quoted, size

    session = await connected()
    if await is_open(session.client, run_id):
        typer.echo(f"run {run_id} is not finished, so it has no artifacts yet: caisson watch {quoted(run_id)}", err=True)
        return ExitCode.NOT_FINISHED
    ending = await session.handle(run_id).outcome()
    found = await all_artifacts(session.blobs, ending.artifacts)
    if directory is not None:
        if not found:
            typer.echo("the run left no artifacts, so nothing was written", err=True)
            return ExitCode.COMPLETED
        written = await copy_artifacts(session.blobs, found, directory, overwrite=overwrite)
        typer.echo(f"{len(written)} artifacts, {size(ending.artifacts.total_bytes)}, are in {directory}, verified")
        return ExitCode.COMPLETED
    if as_json:
        typer.echo(json.dumps([artifact.model_dump(mode="json") for artifact in found], indent=2))
        return ExitCode.COMPLETED
    for artifact in found:
        typer.echo(f"{artifact.blob.digest[:12]}  {size(artifact.blob.size):>8}  {clean(artifact.path)}")
    for skipped in ending.artifacts.skipped:
        typer.echo(f"not an artifact: {clean(skipped)}", err=True)
    if not found:
        typer.echo("the run left no artifacts", err=True)
    return ExitCode.COMPLETED


def _head(text: str) -> BlobRef:
    from contracts.base import BadInput
    from contracts.blob import BlobRef

    found = re.fullmatch(r"([0-9a-f]{64}):([0-9]{1,18})", text)
    if found is None:
        raise BadInput(f"--head {text!r}: must be DIGEST:SIZE, 64 hexadecimal digits, a colon and the size in bytes")
    return BlobRef(digest=found[1], size=int(found[2]))
