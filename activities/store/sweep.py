"""Removing what no kept run needs: planned first, then carried out, safe against everything that is written meanwhile.

What a plan removes, by area of the store:

    blobs, records, staging   what nothing needs, and is older than the grace, and was written a grace before the oldest run that
                              goes on had started
    payloads                  only when asked for, by age
    runs                      moved to `sweep/forgotten/`; removed from there, with the blobs that only they name, by a sweep at
                              least a grace later

Much of what a run needs while it goes on is named in Temporal's history and its workers' memory alone: the answer that waits for
people, content that a later snapshot leans on. So nothing that was written since its start is removed, whoever wrote it. What it
found in the store already was at most FRESH_SECONDS old, or became young by being written again (activities/store/guard.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from activities.store.blobs import BLOBS, PAYLOADS, RECORDS, STAGING, BlobStore
from activities.store.catalogue import FORGOTTEN, RunRecords, Stored, parallel, read_runs
from activities.store.checkpoints import RUNS, RunStart
from activities.store.mark import Marker, Needs
from activities.store.names import Names, names_of
from activities.store.port import ObjectInfo, ObjectMissing, ObjectStore
from activities.store.removal import SweepStopped, Tell, clear, forget, remove_objects
from activities.store.retention import DAY_SECONDS, Known, Verdict, decide
from contracts.retention import RetentionPolicy
from contracts.run import RunResult

_PAYLOAD_BYTES = 100 * 1024
"""A payload that left history is larger than this (workers/connect.py)."""
_PAYLOAD_MARK = b"\x0a\x08encoding"
"""In the first bytes of a serialised `temporal.api.common.v1.Payload`: the first key of its metadata."""


class Standings(Protocol):
    """Asks Temporal."""

    async def open_ids(self) -> set[str]:
        """Return the ids of the runs that go on; those of the last seconds may be missing."""

    async def is_open(self, start: RunStart) -> bool:
        """Tell exactly whether one run goes on."""

    async def result_of(self, start: RunStart) -> RunResult | None:
        """Return the result of a run that does not go on, if Temporal still knows one."""


@dataclass(frozen=True)
class SweepChoice:
    """What a person asks for."""

    policy: RetentionPolicy
    grace: float = DAY_SECONDS
    """Seconds."""
    payload_days: int | None = None


@dataclass
class Condemned:
    """A run, or checkpoints of one, that the policy drops."""

    run: RunRecords
    verdict: Verdict
    records: list[Stored]
    freed: int = 0
    """Bytes of the blobs that only this needs, or only it and others that are dropped too, each counted once."""


@dataclass
class Plan:
    """What a sweep does."""

    limit: float
    """Nothing that was written since is removed."""
    kept: int
    condemned: list[Condemned] = field(default_factory=list)
    remove: dict[str, list[ObjectInfo]] = field(default_factory=dict)
    forgotten: list[Stored] = field(default_factory=list)
    """Records that were forgotten long enough ago."""
    oldest_open: RunRecords | None = None
    payload_limit: float | None = None


async def plan_sweep(blobs: BlobStore, choice: SweepChoice, ask: Standings, now: float, tell: Tell = lambda _: None) -> Plan:
    """Look at everything and say what a sweep is to do. Changes nothing.

    Raises SweepStopped naming the run and the blob when something that a kept run needs cannot be read.
    """
    objects = blobs.objects
    tell("reading the runs")
    runs = await read_runs(objects)
    open_places = await _settle(objects, runs, ask)
    verdicts = _decide(choice.policy, runs, open_places, now, choice.grace)
    # A run that was reset after its end goes on, though its end is written down.
    busy = await ask.open_ids()
    doubtful = [run for run in runs.values() if run.ended is not None and (not verdicts[run.place].is_whole or _id(run) in busy)]
    open_places |= {place for place, is_open in await _ask_all(doubtful, ask) if is_open}
    # After `runs`, so that what another sweep moves meanwhile is in one of the two.
    forgotten = await read_runs(objects, FORGOTTEN)
    pins = _pins(runs, forgotten, open_places)
    verdicts = _decide(choice.policy, runs, open_places, now, choice.grace)
    condemned = list(_condemned(runs, verdicts, pins))
    due = [
        stored
        for run in forgotten.values()
        for stored in run.stored()
        if stored.info.modified < now - choice.grace and stored.info.key not in pins
    ]
    oldest = min((runs[place] for place in open_places), key=_started_at, default=None)
    limit = min(now, _started_at(oldest) if oldest is not None else now) - choice.grace
    kept = len(runs) - sum(not one.verdict.is_kept for one in condemned)
    plan = Plan(limit, kept, condemned, forgotten=due, oldest_open=oldest)
    if choice.payload_days is not None:
        plan.payload_limit = min(limit, now - choice.payload_days * DAY_SECONDS)
    tell(f"reading what {len(runs)} runs need")
    await _mark(blobs, plan, runs, forgotten, pins, tell)
    return plan


async def carry_out(objects: ObjectStore, plan: Plan, ask: Standings, tell: Tell = lambda _: None) -> int:
    """Do what a plan says, and return how many objects were removed. Interrupted anywhere, another sweep does the rest."""
    await clear(objects)
    # All areas together, since each round waits for writers first.
    removed = await remove_objects(objects, [info for found in plan.remove.values() for info in found], tell)
    async for _ in parallel(plan.forgotten, lambda stored: objects.delete(stored.info.key)):
        removed += 1
    for condemned in plan.condemned:
        # Looking at everything took a while, in which somebody may have reset the run.
        begun = condemned.run.begun
        if begun is None or not await ask.is_open(begun):
            await forget(objects, condemned.records)
    return removed


# --- planning


def _started_at(run: RunRecords) -> float:
    return run.start.info.modified if run.start is not None else 0.0


def _id(run: RunRecords) -> str | None:
    return run.begun.run_id if run.begun is not None else None


async def _settle(objects: ObjectStore, runs: dict[str, RunRecords], ask: Standings) -> set[str]:
    """Ask how the runs stand whose end is not written down, and return the places of those that go on."""
    going_on: set[str] = set()
    endless = [run for run in runs.values() if run.begun is not None and run.ended is None]

    async def one(run: RunRecords) -> RunRecords:
        begun = run.begun
        if begun is None or await ask.is_open(begun):
            going_on.add(run.place)
            return run
        # It may have written more between the first look and its end, but writes nothing any more.
        again = (await read_runs(objects, RUNS, run.place)).get(run.place, run)
        result = await ask.result_of(begun)
        again.result = Names() if result is None else names_of(result)
        return again

    async for run in parallel(endless, one):
        runs[run.place] = run
    return going_on


async def _ask_all(runs: Iterable[RunRecords], ask: Standings) -> list[tuple[str, bool]]:
    async def one(run: RunRecords) -> tuple[str, bool]:
        return run.place, run.begun is not None and await ask.is_open(run.begun)

    return [answer async for answer in parallel(runs, one)]


def _decide(
    policy: RetentionPolicy, runs: dict[str, RunRecords], going_on: set[str], now: float, grace: float
) -> dict[str, Verdict]:
    known = []
    for run in runs.values():
        if run.begun is not None:
            ended = run.ended
            ended_at = None if run.place in going_on else ended.ended_at if ended is not None else run.touched_at
            known.append(Known(run.place, run.begun.labels, ended_at, list(run.steps)))
    verdicts = decide(policy, known, now)
    for run in runs.values():
        if run.begun is None:
            # What a sweep left that was killed while it forgot a run; or a run that began while the store was listed.
            is_young = run.touched_at >= now - grace
            verdicts[run.place] = Verdict(is_young, "its start is not there")
    return verdicts


def _pins(runs: dict[str, RunRecords], forgotten: dict[str, RunRecords], going_on: set[str]) -> dict[str, str]:
    """Return the records that a run needs which goes on from one of them and has no checkpoint of its own yet: key to place."""
    pins: dict[str, str] = {}
    for place in going_on:
        fork = runs[place]
        origin = fork.begun.origin if fork.begun is not None else None
        if origin is None or fork.steps:
            continue
        found = 0
        for run in (*runs.values(), *forgotten.values()):
            # Of a run that is kept only checkpoints are forgotten, and its start is where it was.
            begun = run.begun or (runs[run.place].begun if run.place in runs else None)
            if begun is None or begun.run_id != origin.run_id or origin.chain not in (None, begun.chain):
                continue
            steps = [run.steps[step] for step in run.steps if origin.step in (None, step)]
            found += len(steps)
            # With the run's own start, by which it is found.
            pins |= {stored.info.key: place for stored in (*steps, *filter(None, (run.start,)))}
        if not found:
            raise SweepStopped(
                f"run {fork.name} goes on from a checkpoint of {origin.run_id!r} that is not there, and has none of its own yet; "
                "nothing is removed until it has one, or has ended"
            )
    return pins


def _condemned(runs: dict[str, RunRecords], verdicts: dict[str, Verdict], pins: dict[str, str]) -> Iterator[Condemned]:
    for run in runs.values():
        verdict = verdicts[run.place]
        records = [step for n, step in run.steps.items() if n in verdict.dropped_steps] if verdict.is_kept else list(run.stored())
        if records and not any(stored.info.key in pins for stored in records):
            yield Condemned(run, verdict, records)


async def _mark(
    blobs: BlobStore,
    plan: Plan,
    runs: dict[str, RunRecords],
    forgotten: dict[str, RunRecords],
    pins: dict[str, str],
    tell: Tell,
) -> None:
    dropped = {stored.info.key for condemned in plan.condemned for stored in condemned.records}
    gone = {stored.info.key for stored in plan.forgotten}
    kept: dict[str, list[Names]] = {}
    for run in runs.values():
        records = [stored.names for stored in run.stored() if stored.info.key not in dropped]
        if records:
            kept[run.place] = [*records, run.result]
    others: list[Names] = []
    for stored in (stored for run in forgotten.values() for stored in run.stored() if stored.info.key not in gone):
        (kept[pins[stored.info.key]] if stored.info.key in pins else others).append(stored.names)
    leaving = [stored.names for condemned in plan.condemned for stored in condemned.records]
    marker = Marker(blobs)
    await marker.read([*(record for records in kept.values() for record in records), *others, *leaving])
    needed = marker.needs(record for records in kept.values() for record in records)
    if needed.faults:
        raise _stopped(runs, kept, marker, lambda needs: needs.faults)
    spared = needed.blobs | marker.needs([*others, *leaving]).blobs
    tell("listing the store")
    sizes = await _choose(blobs.objects, plan, spared)
    if missing := needed.blobs - sizes.keys():
        raise _stopped(runs, kept, marker, lambda needs: [f"blob {d} is not in the store" for d in needs.blobs & missing])
    counted = set(needed.blobs)
    for condemned in plan.condemned:
        own = marker.needs(stored.names for stored in condemned.records).blobs - counted
        counted |= own
        condemned.freed = sum(sizes.get(digest, 0) for digest in own)


def _stopped(
    runs: dict[str, RunRecords], kept: dict[str, list[Names]], marker: Marker, of: Callable[[Needs], list[str]]
) -> SweepStopped:
    for place, records in kept.items():
        faults = of(marker.needs(records))
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            return SweepStopped(
                f"run {runs[place].name} is kept, and something that it needs cannot be read: {faults[0]}{more}; "
                "nothing was removed: restore it from a copy of the store, or let the policy drop the run"
            )
    return SweepStopped("something that a kept run needs cannot be read; nothing was removed")


async def _choose(objects: ObjectStore, plan: Plan, needed: set[str]) -> dict[str, int]:
    """List the store, put what may be removed into the plan, and return the sizes of all blobs."""
    sizes: dict[str, int] = {}
    large: list[ObjectInfo] = []
    chosen = plan.remove.setdefault(BLOBS, [])
    async for info in objects.list(f"{BLOBS}/"):
        digest = info.key.rpartition("/")[2]
        sizes[digest] = info.size
        if digest not in needed and info.modified < plan.limit:
            (large if info.size >= _PAYLOAD_BYTES else chosen).append(info)
    payloads = plan.remove.setdefault(PAYLOADS, [])
    async for info, is_payload in parallel(large, lambda info: _is_payload(objects, info)):
        if not is_payload:
            chosen.append(info)
        elif plan.payload_limit is not None and info.modified < plan.payload_limit:
            payloads.append(info)
    for area in (RECORDS, STAGING):
        # Records serve the retries of runs that go on; those of such runs were written after the limit.
        plan.remove[area] = [info async for info in objects.list(f"{area}/") if info.modified < plan.limit]
    if plan.payload_limit is not None:
        payloads += [info async for info in objects.list(f"{PAYLOADS}/") if info.modified < plan.payload_limit]
    return sizes


async def _is_payload(objects: ObjectStore, info: ObjectInfo) -> tuple[ObjectInfo, bool]:
    """Tell whether a blob is a payload of Temporal's, from when those had no place of their own."""
    try:
        start = await objects.get_range(info.key, 0, 64)
    except ObjectMissing:
        return info, False
    return info, start.startswith(b"\x0a") and _PAYLOAD_MARK in start
