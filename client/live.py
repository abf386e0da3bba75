"""Following a run: what one look at it finds, and the loop that shows each look until the run ends.

A look asks the server first, which knows whether the run is open and what its activities said last, and then the run itself,
which needs a workflow worker. A worker or a server that is away is told, and waited for; the run goes on, or will.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from google.protobuf.timestamp_pb2 import Timestamp
from pydantic import JsonValue
from rich.console import Console
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus, WorkflowQueryFailedError
from temporalio.service import RPCError, RPCStatusCode

from client.sdk import RunHandle, Unanswered, run_not_found
from client.view import Glimpse, Running, view_for
from contracts.run import RunResult, RunState, StatusReport, StepsPage, StepSummary

_INTERVAL_SECONDS = 0.6
_PATIENCE = timedelta(seconds=5)
_LAST_LOOK = timedelta(seconds=3)
_HOPELESS = frozenset({RPCStatusCode.UNAUTHENTICATED, RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.INVALID_ARGUMENT})
"""What the server says that waiting does not mend."""
_STUCK_ATTEMPTS = 3
_OPEN = (WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.CONTINUED_AS_NEW)


async def follow_run(client: Client, run_id: str, console: Console) -> RunResult:
    """Show a run on `console` until it ends, and return its result, also of a run that failed.

    On a terminal the picture moves; else each change is a plain line. Cancelling this leaves the run alone and the terminal as it
    was. Raises RunNotFound, and BadInput when the workers refused the run's input.
    """
    handle = RunHandle(client, run_id, patience=_PATIENCE)
    shown = 0
    with view_for(console, run_id) as view:
        while True:
            glimpse = await look(handle, shown)
            shown = view.show(glimpse)
            if not glimpse.open:
                break
            await asyncio.sleep(_INTERVAL_SECONDS)
    return await RunHandle(client, run_id, patience=_LAST_LOOK).outcome()


async def look(handle: RunHandle, after: int) -> Glimpse:
    """Find how a run stands now, with the steps after number `after`. Raises RunNotFound, or RPCError when it is hopeless."""
    temporal = handle.client.get_workflow_handle(handle.run_id)
    try:
        described = await temporal.describe(rpc_timeout=_PATIENCE)
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise run_not_found(handle.run_id, handle.client.namespace) from error
        if error.status in _HOPELESS:
            raise
        return Glimpse(open=True, trouble=f"Temporal cannot be reached ({error.message}); trying again")
    still_open = described.status in _OPEN
    running = [await _running(handle.client, info) for info in described.raw_description.pending_activities]
    report, page, trouble = await _ask(handle, after, described, still_open)
    return Glimpse(
        open=still_open,
        report=report,
        steps=_complete(report, page, still_open),
        running=tuple(running),
        trouble=trouble,
    )


async def _ask(
    handle: RunHandle, after: int, described: WorkflowExecutionDescription, still_open: bool
) -> tuple[StatusReport | None, StepsPage | None, str | None]:
    if not still_open:
        handle = RunHandle(handle.client, handle.run_id, patience=_LAST_LOOK)
    try:
        report = await handle.status()
        page = await handle.steps(after) if report.step > after else None
    except Unanswered as error:
        return None, None, _no_answer(described, error) if still_open else None
    except RPCError as error:
        # The server said a moment ago that the run is there; whatever it says now, the next look tells.
        return None, None, f"Temporal does not answer ({error.message}); trying again" if still_open else None
    return report, page, None


def _no_answer(described: WorkflowExecutionDescription, error: Unanswered) -> str:
    if isinstance(error.__cause__, WorkflowQueryFailedError):
        return str(error)
    attempt = described.raw_description.pending_workflow_task.attempt
    if attempt >= _STUCK_ATTEMPTS:
        return (
            f"the workflow worker fails at this run (attempt {attempt} of its workflow task); see the worker's log, or the "
            "run's page in the Web UI"
        )
    return f"waiting for a workflow worker on task queue {described.task_queue} (start one: caisson worker --role workflow)"


def _complete(report: StatusReport | None, page: StepsPage | None, still_open: bool) -> tuple[StepSummary, ...]:
    """The steps that will not change any more: while its tools run, the last step has no actions yet."""
    if report is None or page is None:
        return ()
    over = not still_open or report.state is RunState.FINISHED
    return tuple(step for step in page.steps if step.actions or step.step < report.step or over)


async def _running(client: Client, info: PendingActivityInfo) -> Running:
    details = await _details(client, info)
    started = _since(info, "last_started_time") if info.state != PendingActivityState.PENDING_ACTIVITY_STATE_SCHEDULED else None
    told, tail = details.get("running_seconds"), details.get("tail")
    again = _since(info, "next_attempt_schedule_time")
    return Running(
        activity=info.activity_type.name,
        seconds=float(told) if started is not None and isinstance(told, int | float) else started,
        idle=max(_since(info, "scheduled_time") or 0.0, 0.0) if started is None else 0.0,
        tail=tail if isinstance(tail, str) else "",
        attempt=info.attempt,
        fault=info.last_failure.message if info.HasField("last_failure") else "",
        retry_in=-again if again is not None and again < 0 else None,
    )


def _since(info: PendingActivityInfo, field: str) -> float | None:
    """Seconds since a time that the server noted; None when it noted none. The two clocks may differ a little."""
    if not info.HasField(cast("Any", field)):
        return None
    stamp: Timestamp = getattr(info, field)
    return time.time() - stamp.ToNanoseconds() / 1e9


async def _details(client: Client, info: PendingActivityInfo) -> dict[str, JsonValue]:
    """Decode what an activity's last heartbeat said."""
    if not info.heartbeat_details.payloads:
        return {}
    decoded: Sequence[JsonValue] = await client.data_converter.decode(info.heartbeat_details.payloads)
    first = decoded[0] if decoded else None
    return first if isinstance(first, dict) else {}


async def is_open(client: Client, run_id: str) -> bool:
    """Whether a run still works. Needs no worker. Raises RunNotFound."""
    try:
        described = await client.get_workflow_handle(run_id).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise run_not_found(run_id, client.namespace) from error
        raise
    return described.status in _OPEN
