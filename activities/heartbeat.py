"""Heartbeats from an activity's first line, and telling a worker's shutdown from a person's stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from pydantic import JsonValue
from temporalio import activity
from temporalio.exceptions import ApplicationError

from contracts.activity_names import ErrorType

INTERVAL_SECONDS = 2.0
"""Well below the shortest heartbeat timeout (15 s), so that a busy loop or a slow server does not end an activity."""

PATIENCE_SECONDS = 60.0
"""How long a cancelled activity waits for what it has begun outside of this process."""

T = TypeVar("T")


class Beat:
    """What the heartbeat tells whoever describes the workflow; it costs no history."""

    def __init__(self) -> None:
        self.details: JsonValue = None


@contextlib.asynccontextmanager
async def beating(interval: float = INTERVAL_SECONDS) -> AsyncIterator[Beat]:
    """Heartbeat every `interval` seconds with the current details while the block runs.

    The first comes after one interval: the server's heartbeat timeout runs from the activity's start, and each heartbeat is a
    request and a write of the server's, which an activity of some milliseconds can do without.

    A cancellation because the worker shuts down becomes a retryable failure, so that the next worker takes over; a
    cancellation by a person stays a cancellation.
    """
    beat = Beat()

    async def loop() -> None:
        while True:
            await asyncio.sleep(interval)
            activity.heartbeat(beat.details)

    task = asyncio.create_task(loop())
    try:
        yield beat
    except asyncio.CancelledError:
        if activity.is_worker_shutdown():
            raise ApplicationError(
                "the worker is shutting down; another one takes over",
                type=ErrorType.WORKER_SHUTDOWN,
                next_retry_delay=timedelta(milliseconds=100),
            ) from None
        raise
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def is_stopped_by_a_person() -> bool:
    """Tell whether this activity's cancellation was asked for, and is not that of a worker that shuts down or lost its call."""
    details = activity.cancellation_details()
    return not activity.is_worker_shutdown() and (details is None or details.cancel_requested)


async def carry_through(work: Coroutine[Any, Any, T], patience: float = PATIENCE_SECONDS) -> T:
    """Do what makes or ends something outside, and return how it went also when a person cancels the activity meanwhile.

    What was being made would be made all the same, and the run would not know of it: nobody could end it but a sweep. After
    `patience` seconds it is given up. Any other cancellation goes through at once, since the next attempt finds what there is.
    """
    task = asyncio.ensure_future(work)
    try:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done() or not is_stopped_by_a_person():
                raise
            done, _ = await asyncio.wait([task], timeout=patience)
            if not done:
                raise
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
