"""How much of the store each run takes up, alone and together with others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from activities.store.blobs import BLOBS, BlobStore
from activities.store.catalogue import read_runs
from activities.store.mark import Marker


@dataclass(frozen=True)
class RunUsage:
    """One run. Bytes are of blobs: `own_bytes` of those that no other run needs, `shared_bytes` of the others."""

    run_id: str
    chain: str
    status: str
    started_at: float
    labels: dict[str, str]
    checkpoints: int
    own_bytes: int
    shared_bytes: int
    faults: tuple[str, ...]
    """What could not be read, so that the run may need more than is told here."""


@dataclass(frozen=True)
class StoreUsage:
    """The whole store. `areas` are the bytes by the first part of the key; `unreferenced_bytes` of blobs that no run needs."""

    runs: tuple[RunUsage, ...]
    areas: dict[str, int]
    unreferenced_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of everything in the store."""
        return sum(self.areas.values())


async def store_usage(blobs: BlobStore, tell: Callable[[str], None] = lambda _: None) -> StoreUsage:
    """Measure the store. The latest run comes first."""
    tell("reading the runs")
    runs = [run for run in (await read_runs(blobs.objects)).values() if run.begun is not None]
    tell(f"reading what {len(runs)} runs need")
    marker = Marker(blobs)
    await marker.read(stored.names for run in runs for stored in run.stored())
    needed = {run.place: marker.needs(stored.names for stored in run.stored()) for run in runs}
    users = Counter(digest for needs in needed.values() for digest in needs.blobs)
    tell("listing the store")
    sizes: dict[str, int] = {}
    areas: Counter[str] = Counter()
    async for info in blobs.objects.list(""):
        area = info.key.partition("/")[0]
        areas[area] += info.size
        if area == BLOBS:
            sizes[info.key.rpartition("/")[2]] = info.size
    told = []
    for run in runs:
        needs, begun, ended = needed[run.place], run.begun, run.ended
        if begun is None:
            continue
        own = sum(sizes.get(digest, 0) for digest in needs.blobs if users[digest] == 1)
        shared = sum(sizes.get(digest, 0) for digest in needs.blobs if users[digest] > 1)
        faults = [*needs.faults, *(f"blob {digest} is not in the store" for digest in sorted(needs.blobs - sizes.keys()))]
        told.append(
            RunUsage(
                run_id=begun.run_id,
                chain=begun.chain,
                status="no end" if ended is None else ended.status.value,
                started_at=begun.started_at,
                labels=begun.labels,
                checkpoints=len(run.steps),
                own_bytes=own,
                shared_bytes=shared,
                faults=tuple(faults),
            )
        )
    told.sort(key=lambda run: run.started_at, reverse=True)
    unreferenced = sum(size for digest, size in sizes.items() if digest not in users)
    return StoreUsage(tuple(told), dict(areas), unreferenced)
