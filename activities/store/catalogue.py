"""Every run that the store knows, read whole: its start, its checkpoints and its end; also of runs that are being forgotten.

A record is forgotten in two steps, a grace apart: it is moved from `runs/` to `sweep/forgotten/`, where nobody finds it to start
a new run from, and is removed from there by a later sweep. What it names is needed until then, because a run that was being
started from it has written down its own start meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import ValidationError

from activities.store.checkpoints import RUNS, RunEnd, RunStart
from activities.store.names import Names, names_of
from activities.store.port import ObjectDamaged, ObjectInfo, ObjectMissing, ObjectStore
from contracts.run import Checkpoint

FORGOTTEN = "sweep/forgotten/"
PARALLEL = 16
"""Requests to the store at a time."""

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Stored:
    """One record of a run, as it lies in the store."""

    info: ObjectInfo
    names: Names
    record: RunStart | RunEnd | None
    """What it says, if it is not a checkpoint, of which there are too many to keep them all in memory."""


@dataclass
class RunRecords:
    """All records of one run. `place` is `<SHA-256 of the run id>/<chain>`."""

    place: str
    start: Stored | None = None
    steps: dict[int, Stored] = field(default_factory=dict)
    end: Stored | None = None
    result: Names = field(default_factory=Names)
    """What the result names that Temporal knows of a run that could not write down its end itself."""

    def stored(self) -> Iterator[Stored]:
        """Its records, the start last: without it the others are never found again."""
        yield from self.steps.values()
        if self.end is not None:
            yield self.end
        if self.start is not None:
            yield self.start

    @property
    def begun(self) -> RunStart | None:
        """What is written down of its start."""
        return self.start.record if self.start is not None and isinstance(self.start.record, RunStart) else None

    @property
    def ended(self) -> RunEnd | None:
        """What is written down of its end. An end before the newest checkpoint is none: the run was reset, and went on."""
        if self.end is None or any(step.info.modified > self.end.info.modified for step in self.steps.values()):
            return None
        return self.end.record if isinstance(self.end.record, RunEnd) else None

    @property
    def touched_at(self) -> float:
        """When something was last written down of it, by the store's clock."""
        return max(stored.info.modified for stored in self.stored())

    @property
    def name(self) -> str:
        """What people call it."""
        begun = self.begun
        return repr(begun.run_id) if begun is not None else f"(of which only {self.place} is known)"


_KINDS: dict[str, type[RunStart] | type[Checkpoint] | type[RunEnd]] = {"start": RunStart, "end": RunEnd}


async def read_runs(objects: ObjectStore, prefix: str = RUNS, place: str = "") -> dict[str, RunRecords]:
    """Read every run below `prefix`, or only that of `place`. Raises ObjectDamaged naming a record that is none."""
    found = [info async for info in objects.list(prefix + (f"{place}/" if place else ""))]
    runs: dict[str, RunRecords] = {}
    async for stored in parallel(found, lambda info: _read(objects, prefix, info)):
        if stored is None:
            continue
        where, name = split_key(stored.info.key.removeprefix(prefix))
        run = runs.setdefault(where, RunRecords(where))
        if name == "start":
            run.start = stored
        elif name == "end":
            run.end = stored
        else:
            run.steps[int(name.removeprefix("steps/"))] = stored
    for run in runs.values():
        run.steps = dict(sorted(run.steps.items()))
    return runs


def split_key(key: str) -> tuple[str, str]:
    """Return the place and the name of a record's key without its prefix."""
    digest, chain, name = key.split("/", 2)
    return f"{digest}/{chain}", name


async def _read(objects: ObjectStore, prefix: str, info: ObjectInfo) -> Stored | None:
    _, name = split_key(info.key.removeprefix(prefix))
    kind = _KINDS.get(name) or (Checkpoint if name.startswith("steps/") and name.removeprefix("steps/").isdigit() else None)
    if kind is None:
        raise ObjectDamaged(f"object {info.key} is no record of a run; remove it, or update this command")
    try:
        record: RunStart | Checkpoint | RunEnd = kind.model_validate_json(await objects.get(info.key))
    except ObjectMissing:
        return None  # another sweep has moved it meanwhile
    except ValidationError as error:
        raise ObjectDamaged(f"object {info.key} is not what was written there: {error}") from error
    return Stored(info, names_of(record), None if isinstance(record, Checkpoint) else record)


async def parallel(items: Iterable[T], work: Callable[[T], Awaitable[U]]) -> AsyncIterator[U]:
    """Do something with each item, some at a time, and yield what each gave, in order."""
    running: list[asyncio.Task[U]] = []
    try:
        for item in items:
            running.append(asyncio.ensure_future(work(item)))
            if len(running) >= PARALLEL:
                yield await running.pop(0)
        while running:
            yield await running.pop(0)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
