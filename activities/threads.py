"""Work in a thread that is waited for, come what may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_end(work: Callable[..., T], *given: object, undo: Callable[[T], object] | None = None) -> T:
    """Run `work` in a thread, and return only when it has ended, also when the caller is cancelled meanwhile.

    `asyncio.to_thread` leaves a cancelled caller's thread behind, which would go on with files that are closed by then, or
    beside the next attempt. `undo` is given what was made for a caller that is not there any more to put it away.
    """
    task = asyncio.ensure_future(asyncio.to_thread(work, *given))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        # A failure was asked for: whoever is cancelled does not hear of it.
        if task.exception() is None and undo is not None:
            undo(task.result())
        raise cancelled
    return task.result()
