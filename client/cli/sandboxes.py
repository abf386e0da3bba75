"""`caisson sandboxes`: the local sandboxes of this host, and ending those that no run needs any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from client.cli.faults import ExitCode
from client.cli.session import AsJson, connected, ended, terminal

if TYPE_CHECKING:
    from workers.sweep import Found

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def sandboxes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the local sandboxes of this host, with their runs.

    They are those of CAISSON_SANDBOX_DIR, and Temporal is asked whether the run of each is still open.

    \b
    Example:
        caisson sandboxes
        caisson sandboxes sweep --dry-run
    """
    if context.invoked_subcommand is None:
        ended(_list(as_json))


@app.command()
def sweep(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """End the sandboxes of runs that are closed or unknown, with all they left.

    Never one whose run is open, and none younger than five minutes. The sandbox worker does the same at its start and every ten
    minutes. The exit code is 1 when one could not be ended.

    \b
    Example:
        caisson sandboxes sweep --dry-run
    """
    ended(_sweep(dry_run, as_json))


async def _list(as_json: bool) -> int:
    import time

    from activities.sandbox.providers.local import LocalProvider
    from workers.sweep import look

    session = await connected()
    found = await look(LocalProvider(session.settings.sandbox_dir), session.client)
    now = time.time()
    if as_json:
        _write_json([_row(one, now) for one in found])
    elif not found:
        typer.echo(f"no sandboxes in {session.settings.sandbox_dir}")
    else:
        for one in found:
            terminal().print(_line(one, now), soft_wrap=True)
    return ExitCode.COMPLETED


async def _sweep(dry_run: bool, as_json: bool) -> int:
    import time

    from activities.sandbox.providers.local import LocalProvider
    from workers.sweep import Swept, look, sweep, to_sweep

    session = await connected()
    provider = LocalProvider(session.settings.sandbox_dir)
    now = time.time()
    if dry_run:
        swept = [Swept(one) for one in to_sweep(await look(provider, session.client), now)]
    else:
        swept = await sweep(provider, session.client)
    if as_json:
        _write_json([{**_row(one.found, now), "ended": not dry_run and one.fault is None, "fault": one.fault} for one in swept])
    elif not swept:
        typer.echo("nothing to sweep")
    else:
        for one in swept:
            what = f"could not be ended: {one.fault}" if one.fault else "would be ended" if dry_run else "ended"
            terminal().print(f"{_line(one.found, now)}  {what}", soft_wrap=True)
    return ExitCode.FAILED if any(one.fault for one in swept) else ExitCode.COMPLETED


def _row(one: Found, now: float) -> dict[str, Any]:
    resident = one.resident
    return {
        "sandbox": resident.ref.id,
        "run_id": one.run_id,
        "run": one.standing.value,
        "created_at": resident.created_at,
        "age_seconds": round(now - resident.created_at, 1),
        "pid": resident.pid,
        "alive": resident.alive,
        "disk_bytes": resident.disk_bytes,
    }


def _line(one: Found, now: float) -> str:
    from datetime import timedelta

    from client.show import clean

    resident = one.resident
    age = timedelta(seconds=max(0, int(now - resident.created_at)))
    lives = {True: f"pid {resident.pid}", False: "dead", None: "of another container"}[resident.alive]
    run = clean(one.run_id) if one.run_id is not None else "(none)"
    return f"{resident.ref.id}  run {run} is {one.standing.value}  age {age}  {lives}  {resident.disk_bytes / 1e6:.1f} MB"


def _write_json(value: object) -> None:
    import json

    typer.echo(json.dumps(value, ensure_ascii=False, indent=2).encode("utf-8", "replace"))
