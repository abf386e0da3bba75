"""Looking at the workspace of any step of any run: `files`, `diff`, `checkout`. Only the store is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.cli.faults import ExitCode
from client.cli.session import AsJson, Chain, RunId, ended, terminal

if TYPE_CHECKING:
    from pydantic import JsonValue

    from activities.workspace.read import TreeReader
    from client.changes import Told
    from client.moments import Moment
    from client.trees import Node
    from workers.settings import Settings

Step = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="As it was after this step, 0 before the first; else the last.")
]
_SHOWN_SKIPPED = 20
_STYLES = {"added": "green", "removed": "red", "changed": "yellow"}
_LINE_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def files(
    run_id: RunId,
    path: Annotated[str | None, typer.Argument(metavar="PATH", help="Only this file or directory.")] = None,
    step: Step = None,
    chain: Chain = None,
    cat: Annotated[bool, typer.Option("--cat", help="Print the content of the file PATH.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the files of a run's workspace after any step.

    Works while the run works, after its end, and when its sandbox is lost: the list is that of the step's snapshot. What a
    snapshot leaves out is told on standard error. Times are UTC.

    \b
    Example:
        caisson files analyst-3f0c9a1d2b4e
        caisson files analyst-3f0c9a1d2b4e outputs --step 3
        caisson files analyst-3f0c9a1d2b4e outputs/totals.md --cat
    """
    from contracts.base import BadInput

    if cat and path is None:
        raise BadInput(f"files: --cat prints one file; name it: caisson files {run_id} PATH --cat")
    if cat and as_json:
        raise BadInput("files: --cat and --json exclude each other")
    ended(_cat(run_id, path, step, chain) if cat and path is not None else _files(run_id, path or "", step, chain, as_json))


def diff(
    run_id: RunId,
    first: Annotated[int | None, typer.Option("--from", min=0, metavar="N", help="After this step; else the start.")] = None,
    last: Annotated[int | None, typer.Option("--to", min=0, metavar="M", help="After this step; else the last.")] = None,
    other: Annotated[
        str | None,
        typer.Option("--with", metavar="RUN[@STEP]", help="Compare RUN (--from; else its last step) with another run."),
    ] = None,
    chain: Chain = None,
    stat: Annotated[bool, typer.Option("--stat", help="Only say which files differ.")] = False,
    lines: Annotated[int, typer.Option(min=0, metavar="N", help="Lines shown of each file's difference; 0: all.")] = 200,
    as_json: AsJson = False,
) -> None:
    """Show what changed between two steps, or two runs.

    Files of the workspace are added, removed or changed: their content, their permissions, their type, or where a link leads.
    Times do not count, and a renamed file is one removed and one added.

    \b
    Example:
        caisson diff analyst-3f0c9a1d2b4e
        caisson diff analyst-3f0c9a1d2b4e --from 3 --to 4 --stat
        caisson diff analyst-3f0c9a1d2b4e --with analyst-77ab01c9d2e4@12
    """
    from contracts.base import BadInput

    if other is not None and last is not None:
        raise BadInput("diff: --to is a step of RUN, so it does not go with --with; give the other's step as --with RUN@STEP")
    ended(_diff(run_id, first, last, other, chain, stat, lines, as_json))


def checkout(
    run_id: RunId,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty directory.")],
    step: Step = None,
    chain: Chain = None,
) -> None:
    """Write the workspace of any step into a new directory.

    Every byte is verified; on a fault nothing is left. THE FILES ARE MADE BY A MODEL'S COMMANDS: look at them before you run,
    build or open any, links may lead anywhere, and tools such as git or an editor obey settings that lie in a directory.
    Permissions are those of the snapshot, never set-uid.

    \b
    Example:
        caisson checkout analyst-3f0c9a1d2b4e --step 3 look-at-it/
    """
    ended(_checkout(run_id, directory, step, chain))


def _opened() -> tuple[Settings, TreeReader]:
    from activities.workspace.read import TreeReader
    from workers.connect import open_blobs
    from workers.settings import load_settings

    settings = load_settings()
    return settings, TreeReader(open_blobs(settings))


async def _files(run_id: str, path: str, step: int | None, chain: str | None, as_json: bool) -> int:
    from activities.workspace.tree import Directory, walk
    from client.moments import moment_of, stands_at, without_link

    settings, reader = _opened()
    moment = await moment_of(reader, settings.store, run_id, step, chain)
    base, found = await stands_at(reader, moment, path)
    nodes: list[tuple[bytes, Node]] = []
    if isinstance(found, Directory):
        await reader.fill_all(found)
        below = sorted(walk(found), key=lambda item: item[0].split(b"/"))
        nodes = [(base + b"/" + path_below if base else path_below, node) for path_below, node in below]
    elif found is not None:
        nodes = [(base, found)]
    # A hard link has the size, mode and time of the file that it is another name of.
    rows = [(full, node, await without_link(reader, moment, node)) for full, node in nodes]
    if as_json:
        _print_json(_files_json(moment, rows))
        return ExitCode.COMPLETED
    _print_files(moment, rows, path)
    return ExitCode.COMPLETED


def _files_json(moment: Moment, rows: list[tuple[bytes, Node, Node]]) -> JsonValue:
    from client.trees import as_json, kind_name, text_of

    entries: list[JsonValue] = []
    for path, node, real in rows:
        further = {} if real is node else {"type": kind_name(node), "target": as_json(node)["target"]}
        entries.append({"path": text_of(path), **as_json(real), **further})
    return {**_moment_json(moment), **_left_out_json(moment), "entries": entries}


def _print_files(moment: Moment, rows: list[tuple[bytes, Node, Node]], path: str) -> None:
    from activities.workspace.tree import FILE, Entry
    from client.show import size
    from client.trees import shown_mode, shown_name, shown_time

    where = f" below {path}" if path else ""
    own = [node for _, node, _ in rows if isinstance(node, Entry) and node.kind == FILE]
    total = f"{_count(len(own), 'file')}, {size(sum(node.size for node in own))}"
    _say(f"{moment.name}: {total}{where}" if moment.root else f"{moment.name}: nothing had been put into the workspace")
    for full, node, real in rows:
        bytes_of = size(real.size) if isinstance(real, Entry) and real.kind == FILE else ""
        typer.echo(f"{shown_mode(real)}  {bytes_of:>8}  {shown_time(real.mtime)}  {shown_name(full, node)}")
    _say_left_out(moment)


async def _cat(run_id: str, path: str, step: int | None, chain: str | None) -> int:
    import contextlib

    from activities.workspace.read import read_file
    from activities.workspace.tree import FILE, SYMLINK, Directory
    from client.moments import moment_of, stands_at, without_link
    from client.show import quoted, size
    from client.textdiff import is_binary
    from client.trees import TerminalText, shown_path
    from contracts.base import BadInput

    settings, reader = _opened()
    moment = await moment_of(reader, settings.store, run_id, step, chain)
    _, found = await stands_at(reader, moment, path)
    node = None if found is None else await without_link(reader, moment, found)
    if node is None or isinstance(node, Directory):
        raise BadInput(f"{path!r}: is a directory; list it without --cat, or name a file in it")
    if node.kind == SYMLINK:
        raise BadInput(f"{path!r}: is a link to {shown_path(node.target)}; name the file itself")
    if node.kind != FILE:
        raise BadInput(f"{path!r}: is another name of {shown_path(node.target)}, which is no file here")
    out, shown = typer.get_binary_stream("stdout"), TerminalText()
    is_terminal, is_first = out.isatty(), True
    async with contextlib.aclosing(read_file(reader.blobs, node)) as content:
        async for chunk in content:
            if is_first and is_terminal and is_binary(chunk):
                raise BadInput(
                    f"{path!r}: is binary, {size(node.size)}, and would garble the terminal; write it to a file: "
                    f"caisson files {quoted(run_id)} {quoted(path)} --cat > FILE"
                )
            is_first = False
            out.write(shown(chunk) if is_terminal else chunk)
    if is_terminal:
        out.write(shown(b"", final=True))
    out.flush()
    return ExitCode.COMPLETED


async def _diff(
    run_id: str,
    first: int | None,
    last: int | None,
    other: str | None,
    chain: str | None,
    stat: bool,
    lines: int,
    as_json: bool,
) -> int:
    from client.changes import tell_all
    from client.moments import moment_of
    from client.trees import compare

    settings, reader = _opened()
    store = settings.store
    before = await moment_of(reader, store, run_id, first, chain, first=other is None)
    if other is None:
        after = await moment_of(reader, store, run_id, last, chain)
    else:
        other_id, other_step = _run_and_step(other)
        after = await moment_of(reader, store, other_id, other_step)
    changes = await compare(before.root, after.root, reader.fill)
    told = tell_all(reader, (before, after), changes, lines=None if stat else lines)
    if as_json:
        listed: list[JsonValue] = [one.as_json() async for one in told]
        _print_json({"from": _moment_json(before), "to": _moment_json(after), "changes": listed})
        return ExitCode.COMPLETED
    same = before.run_id == after.run_id and before.chain == after.chain
    _say(f"from {before.name} to {f'after step {after.step}' if same else after.name}")
    async for one in told:
        _print_change(one)
    counts = [(kind, sum(change.kind == kind for change in changes)) for kind in ("added", "changed", "removed")]
    _say(", ".join(f"{count} {kind}" for kind, count in counts if count) or "nothing differs")
    if before.ref and after.ref and before.excludes != after.excludes:
        _say(f"the two leave out other files: {_patterns(before.excludes)}; {_patterns(after.excludes)}")
    return ExitCode.COMPLETED


def _print_change(told: Told) -> None:
    from rich.text import Text

    from client.trees import visible

    console, kind = terminal(), told.change.kind
    detail = f"  {told.detail}" if told.detail else ""
    console.print(Text.assemble((f"{kind:<8} ", _STYLES[kind]), told.name, (detail, "dim")), soft_wrap=True)
    for line in told.lines:
        console.print(Text(visible(line.removesuffix("\n")), style=_LINE_STYLES.get(line[:1], "")), soft_wrap=True)
    if told.note:
        console.print(Text(f"         ({told.note})", style="dim"), soft_wrap=True)
    if told.lines:
        console.print()


async def _checkout(run_id: str, directory: Path, step: int | None, chain: str | None) -> int:
    from client.checkout import check_out
    from client.moments import moment_of
    from client.show import size
    from contracts.base import BadInput

    settings, reader = _opened()
    moment = await moment_of(reader, settings.store, run_id, step, chain)
    if moment.ref is None:
        raise BadInput(f"{moment.name}: nothing had been put into the workspace, so there is nothing to write; name a later step")
    whole = await reader.load(moment.ref)
    count = await check_out(reader.blobs, whole.root, directory)
    typer.echo(
        f"{directory} has the workspace of {moment.name}: {_count(count, 'file')}, {size(moment.ref.total_bytes)}, verified"
    )
    _say_left_out(moment)
    _say("the files are made by a model's commands: look at them before you run, build or open any")
    return ExitCode.COMPLETED


def _run_and_step(other: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(.+)@([0-9]{1,8})", other, re.DOTALL)
    return (found[1], int(found[2])) if found else (other, None)


def _moment_json(moment: Moment) -> dict[str, JsonValue]:
    snapshot = None if moment.ref is None else moment.ref.id
    return {"run_id": moment.run_id, "chain": moment.chain, "step": moment.step, "snapshot": snapshot}


def _left_out_json(moment: Moment) -> dict[str, JsonValue]:
    from client.trees import text_of

    return {
        "excludes": list(moment.excludes),
        "skipped": [{"path": text_of(path), "reason": reason} for path, reason in moment.skipped],
        "skipped_total": 0 if moment.ref is None else moment.ref.skipped,
    }


def _say_left_out(moment: Moment) -> None:
    """Tell what the workspace had that its snapshot does not."""
    from client.show import one_line
    from client.trees import shown_path

    for path, reason in moment.skipped[:_SHOWN_SKIPPED]:
        _say(f"not in the snapshot: {shown_path(path)} ({one_line(reason)})")
    more = (moment.ref.skipped if moment.ref else 0) - min(len(moment.skipped), _SHOWN_SKIPPED)
    if more > 0:
        _say(f"not in the snapshot: {more} more")
    if moment.excludes:
        _say(f"left out of snapshots: {_patterns(moment.excludes)}")


def _patterns(excludes: Iterable[str]) -> str:
    from client.show import one_line

    return one_line(", ".join(excludes) or "nothing", 400)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _say(line: str) -> None:
    from client.show import clean

    typer.echo(clean(line), err=True)


def _print_json(value: JsonValue) -> None:
    # ASCII only, so that names which are no text come through as escapes.
    typer.echo(json.dumps(value, indent=2))
