"""Calling activities by stub, with the timeouts and retries that fit each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType
from temporalio.workflow import ActivityCancellationType

with workflow.unsafe.imports_passed_through():
    from contracts.activity_names import (
        APPLY_PATCH,
        CALL_MCP_TOOL,
        CALL_MODEL,
        CLOSE_SANDBOX,
        COLLECT_OUTPUTS,
        DELIVER_OUTPUTS,
        END_STRAYS,
        FETCH_FILES,
        FETCH_MANIFEST,
        LIST_MCP_TOOLS,
        LOAD_SKILL,
        OPEN_SANDBOX,
        PREPARE_RUN,
        RECORD_END,
        RESTORE_WORKSPACE,
        RESUME_SANDBOX,
        RUN_SETUP,
        RUN_SHELL,
        SNAPSHOT_WORKSPACE,
        TAKE_RESULTS,
        WRITE_FILES,
        ActivityStub,
        ErrorType,
    )
    from contracts.base import Contract

Input = TypeVar("Input", bound=Contract)
Result = TypeVar("Result", bound=Contract)

HEARTBEAT = timedelta(seconds=15)
HOST_LOST = timedelta(seconds=30)
"""A host's queue that nobody has polled for this long: the host, and with it the sandbox, counts as lost."""


@dataclass(frozen=True)
class _Rule:
    """How one activity is tried. `seconds` bounds one attempt, unless the caller knows better."""

    seconds: float
    attempts: int
    longest_wait: float = 60.0


_RULES = {
    PREPARE_RUN.name: _Rule(seconds=60, attempts=5),
    CALL_MODEL.name: _Rule(seconds=600, attempts=10),
    RECORD_END.name: _Rule(seconds=60, attempts=5),
    FETCH_MANIFEST.name: _Rule(seconds=3600, attempts=5),
    OPEN_SANDBOX.name: _Rule(seconds=300, attempts=10),
    RESUME_SANDBOX.name: _Rule(seconds=300, attempts=5),
    RESTORE_WORKSPACE.name: _Rule(seconds=3600, attempts=5, longest_wait=10),
    SNAPSHOT_WORKSPACE.name: _Rule(seconds=3600, attempts=5, longest_wait=10),
    RUN_SETUP.name: _Rule(seconds=3600, attempts=10, longest_wait=10),
    RUN_SHELL.name: _Rule(seconds=3600, attempts=10, longest_wait=10),
    APPLY_PATCH.name: _Rule(seconds=300, attempts=10, longest_wait=10),
    TAKE_RESULTS.name: _Rule(seconds=3600, attempts=5, longest_wait=10),
    FETCH_FILES.name: _Rule(seconds=3600, attempts=5),
    LOAD_SKILL.name: _Rule(seconds=60, attempts=5, longest_wait=10),
    LIST_MCP_TOOLS.name: _Rule(seconds=180, attempts=5),
    CALL_MCP_TOOL.name: _Rule(seconds=300, attempts=5, longest_wait=10),
    WRITE_FILES.name: _Rule(seconds=3600, attempts=5, longest_wait=10),
    DELIVER_OUTPUTS.name: _Rule(seconds=6 * 3600, attempts=10),
    COLLECT_OUTPUTS.name: _Rule(seconds=3600, attempts=5, longest_wait=10),
    CLOSE_SANDBOX.name: _Rule(seconds=300, attempts=3, longest_wait=10),
    END_STRAYS.name: _Rule(seconds=60, attempts=2),
}


async def call(
    stub: ActivityStub[Input, Result],
    given: Input,
    *,
    queue: str,
    summary: str,
    seconds: float | None = None,
    attempts: int | None = None,
    on_host: bool = False,
    within: timedelta | None = None,
    keep: Callable[[Result], None] | None = None,
) -> Result:
    """Run one activity to its end, whatever worker it takes.

    A cancelled run waits here until the activity has cleaned up (its command is dead). `keep` is given the result first, also
    when the run is cancelled and has no more use for it: for what must be put away again. `within` is how long a worker may
    take to take it up; for one on a host it is HOST_LOST. Raises ActivityError.
    """
    rule = _RULES[stub.name]
    try:
        result: Result = await workflow.execute_activity(
            stub.name,
            given,
            result_type=stub.result,
            task_queue=queue,
            summary=summary[:200],
            start_to_close_timeout=timedelta(seconds=seconds or rule.seconds),
            schedule_to_start_timeout=HOST_LOST if on_host else within,
            heartbeat_timeout=HEARTBEAT,
            retry_policy=RetryPolicy(
                initial_interval=timedelta(seconds=1),
                maximum_interval=timedelta(seconds=rule.longest_wait),
                maximum_attempts=attempts or rule.attempts,
            ),
            cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )
    except ActivityError:
        # One whose worker was lost meanwhile is not tried again, and fails with its timeout. The run was cancelled all the same.
        if _is_cancelled():
            raise asyncio.CancelledError from None
        raise
    if keep is not None:
        keep(result)
    # An activity that is done before it hears of the cancellation returns as if there had been none; the run must not go on.
    if _is_cancelled():
        raise asyncio.CancelledError
    return result


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


def cancellation_is_seen_to() -> None:
    """Let a run that has taken note of its cancellation call what is left to do."""
    task = asyncio.current_task()
    while task is not None and task.cancelling():
        task.uncancel()


def explain_failure(error: ActivityError) -> tuple[str, str]:
    """Return the type of what finally failed an activity, and a message for people that says what to do."""
    cause = error.cause
    if isinstance(cause, ApplicationError):
        return cause.type or "Error", str(cause.message)
    if isinstance(cause, TimeoutError):
        if cause.type is TimeoutType.SCHEDULE_TO_START:
            return (
                ErrorType.HOST_LOST,
                f"{error.activity_type}: no sandbox worker of the sandbox's host has answered for {HOST_LOST.seconds} s, so the "
                "host and the sandbox on it count as lost; start a sandbox worker on that host or on another one",
            )
        return (
            "Timeout",
            f"{error.activity_type}: no attempt finished in time ({cause.message}); look at the workers of its task queue",
        )
    return "Error", f"{error.activity_type}: {cause or error.message}"
