"""Work in a thread that is waited for, come what may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_end(work: Callable[..., T], *given: object) -> T:
    """Run `work` in a thread, and return only when it has ended, also when the caller is cancelled meanwhile.

    `asyncio.to_thread` leaves a cancelled caller's thread behind, which would go on with files that are closed by then, or
    beside the next attempt.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *given))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if not task.done():
                cancelled = error
    if cancelled is not None:
        task.exception()  # it was asked for: whoever is cancelled does not hear of it
        raise cancelled
    return task.result()
