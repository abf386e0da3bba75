"""`caisson store`: what lies in the store, and removing what no run needs any more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from client.cli.faults import ExitCode
from client.cli.session import AsJson, connected, ended, terminal

if TYPE_CHECKING:
    from activities.store.sweep import Condemned, Plan, SweepChoice
    from activities.store.usage import RunUsage, StoreUsage
    from contracts.retention import RetentionPolicy

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look into the store, and remove what no run needs.")

_SHOWN = 20
_AREAS = {
    "blobs": "blobs that nothing needs",
    "payloads": "payloads of Temporal histories",
    "records": "records for retries that are over",
    "staging": "uploads that were broken off",
}


@app.command()
def usage(as_json: AsJson = False) -> None:
    """Tell how much of the store each run takes up.

    `alone` are the bytes that only this run needs, which forgetting it would free; `shared` those that others need as well.
    Everything that runs need is read for it, except for the content of files. No Temporal is needed.

    \b
    Example:
        caisson store usage
        caisson store usage --json | jq '.runs[] | select(.labels.team == "docs")'
    """
    ended(_usage(as_json))


@app.command()
def sweep(
    policy: Annotated[Path, typer.Option("--policy", metavar="FILE", help="The retention policy, a YAML file.")],
    grace: Annotated[float, typer.Option("--grace", metavar="HOURS", help="Remove nothing younger; at least 1.")] = 24,
    payloads_older_than: Annotated[
        int | None,
        typer.Option("--payloads-older-than", metavar="DAYS", min=1, help="Also remove payloads of Temporal's histories."),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Do it; else only say what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget the runs that a policy does not keep, and remove what nothing needs.

    Without --apply nothing is changed. With it, what is forgotten now frees its room with a later sweep, after the grace: let it
    run every day. Nothing is removed that a kept run or one that goes on needs, whatever is written meanwhile. If something that
    a kept run needs cannot be read, nothing is removed at all. Temporal is asked which runs go on: use the namespace of the
    store's runs. docs/operating.md describes the policy file.

    \b
    Example:
        caisson store sweep --policy retention.yaml
        caisson store sweep --policy retention.yaml --apply
    """
    ended(_sweep(policy, grace, payloads_older_than, apply, as_json))


async def _usage(as_json: bool) -> int:
    from activities.store.usage import store_usage
    from client.show import clean, size
    from workers.connect import open_blobs
    from workers.settings import load_settings

    found = await store_usage(open_blobs(load_settings()), _tell)
    if as_json:
        _write_json(_usage_row(found))
        return ExitCode.COMPLETED
    if found.runs:
        _print(f"{'alone':>9} {'shared':>9} {'total':>9} {'checkpoints':>11}  {'status':<15} {'started':<16}  run")
    for run in found.runs:
        _print(_usage_line(run))
    for run in found.runs:
        for fault in run.faults[:3]:
            typer.echo(f"run {clean(repr(run.run_id))}: {clean(fault)}", err=True)
    areas = ", ".join(f"{area} {size(count)}" for area, count in sorted(found.areas.items()) if count)
    _print(f"{size(found.total_bytes)} in all ({areas or 'nothing'}); no run needs {size(found.unreferenced_bytes)} of the blobs")
    return ExitCode.COMPLETED


async def _sweep(file: Path, grace: float, payload_days: int | None, apply: bool, as_json: bool) -> int:
    import time

    from activities.store.guard import MIN_GRACE_SECONDS
    from activities.store.removal import store_time
    from activities.store.sweep import SweepChoice, carry_out, plan_sweep
    from client.standings import TemporalStandings
    from contracts.base import BadInput

    if not grace * 3600 >= MIN_GRACE_SECONDS:
        raise BadInput(f"--grace {grace:g}: must be at least 1 hour, since what is being written now is not named by a run yet")
    choice = SweepChoice(_read_policy(file), grace * 3600, payload_days)
    session = await connected()
    standings = TemporalStandings(session.client)
    objects = session.blobs.objects
    now = await store_time(objects) if apply else time.time()
    plan = await plan_sweep(session.blobs, choice, standings, now, _tell)
    if as_json:
        _write_json({"applied": apply, **_plan_row(plan)})
    else:
        _print_plan(plan, apply)
    if apply:
        await carry_out(objects, plan, standings, _tell)
        typer.echo("done", err=True)
    elif not as_json and (plan.condemned or plan.forgotten or any(plan.remove.values())):
        _print(f"nothing was changed; to do it: {_command(file, choice)}")
    return ExitCode.COMPLETED


def _read_policy(file: Path) -> RetentionPolicy:
    import yaml
    from pydantic import ValidationError

    from contracts.base import BadInput, explain
    from contracts.retention import RetentionPolicy

    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--policy {file}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise BadInput(f"--policy {file}: is not YAML: {error}") from error
    try:
        return RetentionPolicy.model_validate(raw)
    except ValidationError as error:
        raise BadInput(explain(error, f"--policy {file}")) from error


def _command(file: Path, choice: SweepChoice) -> str:
    import shlex

    words = ["caisson", "store", "sweep", "--policy", str(file), "--grace", f"{choice.grace / 3600:g}"]
    if choice.payload_days is not None:
        words += ["--payloads-older-than", str(choice.payload_days)]
    return shlex.join([*words, "--apply"])


def _print_plan(plan: Plan, apply: bool) -> None:
    from client.show import clean, size

    would = "" if apply else "would be "
    _print(f"{plan.kept} runs are kept")
    for one in plan.condemned[:_SHOWN]:
        _print(f"{would}forgotten: {_condemned_line(one)}")
    if len(plan.condemned) > _SHOWN:
        _print(f"{would}forgotten: {len(plan.condemned) - _SHOWN} more (--json lists all)")
    if plan.condemned:
        _print(f"  which frees {size(sum(one.freed for one in plan.condemned))}, by a sweep after the grace")
    if plan.forgotten:
        _print(f"{would}removed: {len(plan.forgotten):,} records of runs that were forgotten before")
    for area, what in _AREAS.items():
        found = plan.remove.get(area, [])
        if found:
            _print(f"{would}removed: {len(found):,} {what}, {size(sum(info.size for info in found))}")
    if not plan.condemned and not plan.forgotten and not any(plan.remove.values()):
        _print("nothing to remove")
    if plan.oldest_open is not None:
        name = clean(plan.oldest_open.name)
        _print(
            f"nothing is removed that was written after {_when(plan.limit)}, a grace before the start of run {name}, still open"
        )


def _condemned_line(one: Condemned) -> str:
    from client.show import clean, size

    what = f"run {clean(one.run.name)}"
    if one.verdict.is_kept:
        what = f"{len(one.records)} checkpoints of {what}"
    return f"{what}, {size(one.freed)} ({clean(one.verdict.why)})"


def _plan_row(plan: Plan) -> dict[str, Any]:
    def run_row(one: Condemned) -> dict[str, Any]:
        begun = one.run.begun
        return {
            "run_id": begun.run_id if begun is not None else None,
            "place": one.run.place,
            "why": one.verdict.why,
            "whole": not one.verdict.is_kept,
            "checkpoints": sum(stored.record is None for stored in one.records),
            "frees_bytes": one.freed,
        }

    oldest = plan.oldest_open.begun if plan.oldest_open is not None else None
    return {
        "kept_runs": plan.kept,
        "forget": [run_row(one) for one in plan.condemned],
        "forgotten_records": len(plan.forgotten),
        "remove": {
            area: {"objects": len(found), "bytes": sum(info.size for info in found)} for area, found in plan.remove.items()
        },
        "nothing_after": plan.limit,
        "oldest_open_run": oldest.run_id if oldest is not None else None,
    }


def _usage_row(found: StoreUsage) -> dict[str, Any]:
    from dataclasses import asdict

    rows = [{**asdict(run), "total_bytes": run.own_bytes + run.shared_bytes} for run in found.runs]
    return {
        "runs": rows,
        "areas": found.areas,
        "total_bytes": found.total_bytes,
        "unreferenced_bytes": found.unreferenced_bytes,
    }


def _usage_line(run: RunUsage) -> str:
    from client.show import one_line, size

    labels = "".join(f"  {one_line(f'{name}={value}', 60)}" for name, value in sorted(run.labels.items()))
    sizes = [size(count) for count in (run.own_bytes, run.shared_bytes, run.own_bytes + run.shared_bytes)]
    told = " ".join(f"{text:>9}" for text in sizes)
    return f"{told} {run.checkpoints:>11}  {run.status:<15} {_when(run.started_at)}  {one_line(run.run_id)}{labels}"


def _when(at: float) -> str:
    from datetime import datetime

    return f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M}"


def _print(line: str) -> None:
    terminal().print(line, soft_wrap=True)


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _write_json(value: object) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2).encode("utf-8", "replace"))
