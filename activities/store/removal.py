"""Removing objects beside writers, and forgetting the records of runs: what a sweep does when it is let."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from activities.store import guard
from activities.store.catalogue import FORGOTTEN, Stored, parallel
from activities.store.checkpoints import RUNS
from activities.store.port import ObjectChanged, ObjectExists, ObjectInfo, ObjectMissing, ObjectStore, StoreError

CLOCK = "sweep/clock"
ROUND_OBJECTS = 20_000
Tell = Callable[[str], None]


class SweepStopped(StoreError):
    """Nothing was removed; the message says what is wrong, and what to do."""


async def store_time(objects: ObjectStore) -> float:
    """Return the time by the store's clock, seconds since 1970, by writing a small object."""
    await objects.put(CLOCK, b"")
    found = await objects.head(CLOCK)
    if found is None:
        raise SweepStopped(f"{CLOCK} was written and is not there; is another program removing objects of this store?")
    return found.modified


async def remove_objects(objects: ObjectStore, chosen: list[ObjectInfo], tell: Tell) -> int:
    """Remove objects unless they were written again since they were listed, and return how many were to be removed."""
    left = chosen
    while left:
        some = iter(left)
        left = await _round(objects, list(islice(some, ROUND_OBJECTS))) + list(some)
        tell(f"{len(chosen) - len(left):,} of {len(chosen):,} objects removed")
    return len(chosen)


async def _round(objects: ObjectStore, chosen: list[ObjectInfo]) -> list[ObjectInfo]:
    """Remove some objects as activities/store/guard.py says, and return those that there was no time for."""
    began = time.monotonic()
    left: list[ObjectInfo] = []

    async def remove(info: ObjectInfo) -> None:
        if time.monotonic() - began > guard.ROUND_SECONDS:
            left.append(info)
            return
        found = await objects.head(info.key)
        if found is not None and found.modified <= info.modified:
            await objects.delete(info.key)

    await _announce(objects, chosen)
    await asyncio.sleep(guard.ANNOUNCED_SECONDS * 1.1)
    async for _ in parallel(chosen, remove):
        pass
    # Only when every removal is known to be over. Otherwise it stays until it is stale.
    await objects.delete(guard.ANNOUNCEMENT)
    return left


async def clear(objects: ObjectStore) -> None:
    """Take away the announcement of a sweep that was killed. Raises SweepStopped while another sweep may be at work."""
    if await objects.head(guard.ANNOUNCEMENT) is not None:
        await _announce(objects, [])
        await objects.delete(guard.ANNOUNCEMENT)


async def _announce(objects: ObjectStore, chosen: list[ObjectInfo]) -> None:
    # A line of its own makes it another version than any other sweep's, also where versions are digests of the bytes.
    text = "\n".join([f"sweep={secrets.token_hex(8)}", *(info.key for info in chosen)]).encode()
    try:
        found = await objects.head(guard.ANNOUNCEMENT)
        if found is None:
            await objects.put(guard.ANNOUNCEMENT, text, create_only=True)
            return
        if await store_time(objects) - found.modified > guard.STALE_SECONDS:
            await objects.put(guard.ANNOUNCEMENT, text, if_version=found.version)
            return
    except (ObjectExists, ObjectChanged, ObjectMissing):
        pass  # the other sweep is alive
    raise SweepStopped(
        "another sweep of this store is removing objects, or was stopped in the middle of that less than "
        f"{guard.STALE_SECONDS / 60:g} minutes ago; try again when it is over"
    )


async def forget(objects: ObjectStore, records: list[Stored]) -> None:
    """Move records to where nobody looks for a checkpoint: all of them are there before the first is gone."""

    async def copy(stored: Stored) -> None:
        key = stored.info.key
        with suppress(ObjectMissing):  # another sweep has moved it
            await objects.put(f"{FORGOTTEN}{key.removeprefix(RUNS)}", await objects.get(key))

    async for _ in parallel(records, copy):
        pass
    for stored in records:
        await objects.delete(stored.info.key)
