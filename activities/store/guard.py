"""Writers and the sweep: how an object that is written while a sweep removes objects is never lost.

A writer that finds a blob in the store does not write it again. If nothing that is kept names the blob yet, a sweep may be about
to remove it. Two rules keep them apart:

1. What is found is only trusted while it is younger than FRESH_SECONDS; else it is written again, which makes it young. A sweep
   removes nothing younger than its grace, which is at least MIN_GRACE_SECONDS: so whoever trusted an object has the rest of
   that time to write down who needs it.
2. Not every store can remove an object on condition that it is still the old one, so a sweep might remove what was written an
   instant ago. It therefore first announces the keys of the next round in one object, waits ANNOUNCED_SECONDS, looks at each
   object once more, removes those that are as old as before, and takes the announcement away when all that is done. A writer
   looks at the announcement, at most every LOOK_SECONDS. If its object was not announced, and is written within
   ANNOUNCED_SECONDS of that look, the sweep's own last look comes after the write and sees it. Else the writer waits for the
   round to end, and writes again what is gone.

An announcement older than STALE_SECONDS is of a sweep that was killed; whatever it had under way has long landed. Durations are
taken from this process's clock. Ages compare it with the store's: a difference of some minutes is harmless.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from activities.store.port import ObjectMissing, ObjectStore

ANNOUNCEMENT = "sweep/removing"
"""The keys of a round, a line each."""
MIN_GRACE_SECONDS = 3600.0
FRESH_SECONDS = MIN_GRACE_SECONDS / 2
LOOK_SECONDS = 2.0
ANNOUNCED_SECONDS = 6.0
STALE_SECONDS = 600.0
ROUND_SECONDS = 240.0
"""After so long a round removes nothing more, so that its announcement is never stale while it goes on."""
_POLL_SECONDS = 0.2


class WriteGuard:
    """Writes objects that a sweep might be about to remove."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._announced: frozenset[str] = frozenset()
        self._looked_at = float("-inf")

    async def has_fresh(self, key: str, size: int) -> bool:
        """Whether an object of this size is there, and safe from every sweep for a while."""
        found = await self._objects.head(key)
        return found is not None and found.size == size and time.time() - found.modified < FRESH_SECONDS

    async def write(self, key: str, put: Callable[[], Awaitable[None]]) -> None:
        """Let `put` write the object `key`, and return when no sweep that is under way can remove it any more."""
        if time.monotonic() - self._looked_at > LOOK_SECONDS:
            await self._look()
        is_free, looked_at = key not in self._announced, self._looked_at
        while True:
            await put()
            if is_free and time.monotonic() - looked_at < ANNOUNCED_SECONDS:
                return
            looked_at = await self._end_of_round(key)
            # Only now: every removal before that look is over, and every later one looks at the object again.
            if await self._objects.head(key) is not None:
                return
            is_free = True

    async def _end_of_round(self, key: str) -> float:
        while True:
            looked_at, announced = await self._look()
            if key not in announced:
                return looked_at
            await asyncio.sleep(_POLL_SECONDS)

    async def _look(self) -> tuple[float, frozenset[str]]:
        looked_at, announced = time.monotonic(), frozenset[str]()
        found = await self._objects.head(ANNOUNCEMENT)
        if found is not None and time.time() - found.modified < STALE_SECONDS:
            try:
                announced = frozenset((await self._objects.get(ANNOUNCEMENT)).decode().split())
            except ObjectMissing:
                announced = frozenset()
        # Both at once, since other writes of this process go on meanwhile.
        self._looked_at, self._announced = looked_at, announced
        return looked_at, announced
