"""Heartbeats from an activity's first line, and telling a worker's shutdown from a person's stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta

from pydantic import JsonValue
from temporalio import activity
from temporalio.exceptions import ApplicationError

from contracts.activity_names import ErrorType

INTERVAL_SECONDS = 2.0
"""Well below the shortest heartbeat timeout (15 s), so that a busy loop or a slow server does not end an activity."""


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
