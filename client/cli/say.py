"""Saying something to a run while it works: `message`, `pause`, `resume`, `stop`, `approve`, `extend`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from client.cli.faults import ExitCode
from client.cli.session import AsJson, RunId, connected, ended, user_name

if TYPE_CHECKING:
    from client.sdk import RunHandle
    from contracts.run import PendingApproval

By = Annotated[str | None, typer.Option("--by", metavar="NAME", help="Who says so; else the user of this terminal.")]
Why = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; kept with the run.", show_default=False)]
_MIN_DIGEST = 8


def message(run_id: RunId, text: Annotated[str, typer.Argument(metavar="TEXT")]) -> None:
    """Say something to the model, before its next call.

    \b
    Example:
        caisson message analyst-3f0c9a1d2b4e "Skip the files from 2019."
    """
    ended(_tell(run_id, lambda run: run.send_message(text)))


def pause(run_id: RunId, by: By = None, reason: Why = "") -> None:
    """Hold a run before its next model call. What is in flight goes on to its end.

    \b
    Example:
        caisson pause analyst-3f0c9a1d2b4e --reason "waiting for the new files"
    """
    ended(_tell(run_id, lambda run: run.pause(_name(by), reason)))


def resume(run_id: RunId, by: By = None, reason: Why = "") -> None:
    """Let a paused run go on.

    \b
    Example:
        caisson resume analyst-3f0c9a1d2b4e
    """
    ended(_tell(run_id, lambda run: run.resume(_name(by), reason)))


def stop(
    run_id: RunId,
    by: By = None,
    reason: Why = "",
    now: Annotated[bool, typer.Option("--now", help="Cancel it: kill the command in flight and collect nothing more.")] = False,
) -> None:
    """End a run after this step, with all it made.

    \b
    Example:
        caisson stop analyst-3f0c9a1d2b4e --reason "seen enough"
    """

    async def cancel(run: RunHandle) -> str:
        await run.cancel()
        return "the run is being cancelled"

    ended(_tell(run_id, cancel if now else lambda run: run.stop(_name(by), reason)))


def extend(
    run_id: RunId,
    steps: Annotated[int | None, typer.Option(metavar="N", help="More steps.")] = None,
    tokens: Annotated[int | None, typer.Option(metavar="N", help="More tokens.")] = None,
    cost_usd: Annotated[float | None, typer.Option(metavar="USD", help="More US dollars.")] = None,
    wall_seconds: Annotated[float | None, typer.Option(metavar="S", help="More seconds of time.")] = None,
) -> None:
    """Add to a run's limits. A limit that the run does not have stays unlimited.

    \b
    Example:
        caisson extend analyst-3f0c9a1d2b4e --steps 20
    """
    from pydantic import ValidationError

    from contracts.base import BadInput, explain
    from contracts.usage import BudgetExtension

    given = {"steps": steps, "tokens": tokens, "cost_usd": cost_usd, "wall_seconds": wall_seconds}
    if all(value is None for value in given.values()):
        raise BadInput("extend: name at least one of --steps, --tokens, --cost-usd, --wall-seconds, and how much to add")
    try:
        more = BudgetExtension.model_validate(given)
    except ValidationError as error:
        raise BadInput(explain(error, "the extension")) from error
    ended(_tell(run_id, lambda run: run.extend_budget(more)))


def approve(
    run_id: RunId,
    approval_id: Annotated[str | None, typer.Argument(metavar="APPROVAL", help="Which one, as the list shows it.")] = None,
    allow: Annotated[bool | None, typer.Option("--allow/--deny", help="The decision.")] = None,
    digest: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="The beginning of the arguments' digest that you were shown."),
    ] = None,
    by: By = None,
    reason: Why = "",
    as_json: AsJson = False,
) -> None:
    """List open approvals, or decide on one.

    Without a decision it lists the open approvals. A decision counts once, for exactly the arguments that it was given on:
    with --digest it is refused when the call is another one than you were shown.

    \b
    Example:
        caisson approve analyst-3f0c9a1d2b4e
        caisson approve analyst-3f0c9a1d2b4e 4.0 --digest 9f86d081884c --allow
    """
    from contracts.base import BadInput

    if allow is None and (approval_id is not None or digest is not None):
        raise BadInput("approve: say what you decide: --allow or --deny")
    if allow is not None and approval_id is None:
        raise BadInput(f"approve: name the approval that you decide on; `caisson approve {run_id}` lists them")
    if digest is not None and (len(digest) < _MIN_DIGEST or not set(digest) <= set("0123456789abcdef")):
        raise BadInput(
            f"--digest {digest!r}: must be the first {_MIN_DIGEST} or more digits (0-9, a-f) of the digest you were shown"
        )
    if allow is None or approval_id is None:
        ended(_list(run_id, as_json))
    else:
        ended(_decide(run_id, approval_id, digest, allow, _name(by), reason))


async def _list(run_id: str, as_json: bool) -> int:
    from client.show import approval_lines

    report = await (await connected()).handle(run_id).status()
    if as_json:
        import json

        open_ones = [approval.model_dump(mode="json") for approval in report.pending_approvals]
        typer.echo(json.dumps(open_ones, indent=2))
        return ExitCode.COMPLETED
    if not report.pending_approvals:
        typer.echo(f"nothing waits for a decision (the run is {report.state.value.replace('_', ' ')})")
    for approval in report.pending_approvals:
        for line in approval_lines(run_id, approval):
            typer.echo(line.plain)
    return ExitCode.COMPLETED


async def _decide(run_id: str, approval_id: str, digest: str | None, allow: bool, by: str, reason: str) -> int:
    from client.show import clean

    run = (await connected()).handle(run_id)
    approval = chosen((await run.status()).pending_approvals, approval_id, digest)
    answer = await run.decide_approval(approval, allow=allow, by=by, reason=reason)
    typer.echo(f"{answer}: {approval.tool} {clean(approval.arguments)}")
    return ExitCode.COMPLETED


def chosen(pending: tuple[PendingApproval, ...], approval_id: str, digest: str | None) -> PendingApproval:
    """Return the open approval that is meant. Raises BadInput when there is none, or when its arguments are other ones."""
    from contracts.base import BadInput

    approval = next((one for one in pending if one.approval_id == approval_id), None)
    if approval is None:
        known = ", ".join(one.approval_id for one in pending) or "none"
        raise BadInput(f"approval {approval_id!r} is not open (open: {known}); nothing was decided")
    if digest is not None and not approval.arguments_digest.startswith(digest):
        raise BadInput(
            f"--digest {digest}: approval {approval_id} is for other arguments now (digest {approval.arguments_digest[:12]}); "
            "nothing was decided, look at it again"
        )
    return approval


async def _tell(run_id: str, say: Callable[[RunHandle], Awaitable[str]]) -> int:
    session = await connected()
    typer.echo(await say(session.handle(run_id)))
    return ExitCode.COMPLETED


def _name(by: str | None) -> str:
    return user_name() if by is None else by
