"""What is written down of each run, so that it can be forked, looked into and one day forgotten: start, checkpoints, end.

Keys, all below `runs/<SHA-256 of the run id>/<chain>/`, where the chain is Temporal's first run id of the run:

    start                a RunStart
    steps/<step>         a Checkpoint, the step in eight digits; a step that is done again (after a reset) replaces its own
    end                  a RunEnd
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TypeVar

from pydantic import Field, JsonValue, ValidationError

from activities.store.blobs import BlobStore
from activities.store.port import ObjectDamaged, ObjectMissing
from contracts.base import Contract, canonical_json, sha256_hex
from contracts.blob import BlobRef, Text
from contracts.run import ArtifactList, Checkpoint, CheckpointChoice, RunStatus

RUNS = "runs/"


class RunStart(Contract):
    """How a run began."""

    run_id: str
    chain: str
    started_at: float = Field(description="seconds since 1970")
    agent: BlobRef
    agent_digest: str
    agent_name: str
    task: Text
    labels: dict[str, str] = Field(default_factory=dict)
    origin: CheckpointChoice | None = Field(default=None, description="the checkpoint it went on from, fully named")


class RunEnd(Contract):
    """How a run ended."""

    status: RunStatus
    ended_at: float = Field(description="seconds since 1970")
    steps: int
    artifacts: ArtifactList = ArtifactList()
    output: BlobRef | None = None
    egress_log: BlobRef | None = None
    inputs: BlobRef | None = None


class NoCheckpoint(Exception):
    """There is no such run or checkpoint; the message says what there is."""


Record = TypeVar("Record", bound=Contract)


class CheckpointStore:
    """Writes and reads the records of runs."""

    def __init__(self, blobs: BlobStore) -> None:
        self._objects = blobs.objects

    async def begin(self, start: RunStart) -> None:
        """Write down a run's start."""
        await self._put(start.run_id, start.chain, "start", start)

    async def put(self, run_id: str, chain: str, checkpoint: Checkpoint) -> None:
        """Write down a checkpoint. Everything that it names is in the store already."""
        await self._put(run_id, chain, f"steps/{checkpoint.step:08d}", checkpoint)

    async def end(self, run_id: str, chain: str, end: RunEnd) -> None:
        """Write down a run's end."""
        await self._put(run_id, chain, "end", end)

    async def find(self, choice: CheckpointChoice) -> tuple[RunStart, Checkpoint]:
        """Return a run's start and the checkpoint asked for. Raises NoCheckpoint."""
        start = await self.start_of(choice.run_id, choice.chain)
        steps = await self.steps_of(start)
        if not steps:
            raise NoCheckpoint(f"run {choice.run_id!r} has no checkpoint yet; wait until its first step is complete")
        step = steps[-1] if choice.step is None else choice.step
        if step not in steps:
            raise NoCheckpoint(
                f"run {choice.run_id!r} has no checkpoint of step {step}; it has steps {steps[0]} to {steps[-1]}"
                + (f" ({len(steps)} of them)" if len(steps) != steps[-1] - steps[0] + 1 else "")
            )
        return start, await self.checkpoint(start, step)

    async def start_of(self, run_id: str, chain: str | None = None) -> RunStart:
        """Return how a run began; the latest of that id, unless `chain` names one. Raises NoCheckpoint."""
        found = [start async for start in self._starts(f"{RUNS}{sha256_hex(run_id.encode())}/") if chain in (None, start.chain)]
        if not found:
            which = f" with chain {chain!r}" if chain else ""
            raise NoCheckpoint(
                f"no run {run_id!r}{which} is known to this store; check the id, and that CAISSON_STORE is the run's"
            )
        return max(found, key=lambda start: start.started_at)

    async def steps_of(self, start: RunStart) -> list[int]:
        """Return the steps that have a checkpoint, in order."""
        prefix = f"{_place(start.run_id, start.chain)}steps/"
        return [int(found.key.removeprefix(prefix)) async for found in self._objects.list(prefix)]

    async def checkpoint(self, start: RunStart, step: int) -> Checkpoint:
        """Return one checkpoint. Raises ObjectMissing."""
        return await self._get(f"{_place(start.run_id, start.chain)}steps/{step:08d}", Checkpoint)

    async def end_of(self, start: RunStart) -> RunEnd | None:
        """Return how a run ended, or None when that is not written down."""
        try:
            return await self._get(f"{_place(start.run_id, start.chain)}end", RunEnd)
        except ObjectMissing:
            return None

    def runs(self) -> AsyncIterator[RunStart]:
        """Every run that the store knows."""
        return self._starts(RUNS)

    async def _starts(self, prefix: str) -> AsyncIterator[RunStart]:
        async for found in self._objects.list(prefix):
            if found.key.endswith("/start"):
                yield await self._get(found.key, RunStart)

    async def _put(self, run_id: str, chain: str, name: str, record: Contract) -> None:
        value: JsonValue = record.model_dump(mode="json")
        await self._objects.put(f"{_place(run_id, chain)}{name}", canonical_json(value))

    async def _get(self, key: str, kind: type[Record]) -> Record:
        data = await self._objects.get(key)
        try:
            return kind.model_validate(json.loads(data))
        except (ValueError, ValidationError) as error:
            raise ObjectDamaged(f"object {key} is not what was written there: {error}") from error


def _place(run_id: str, chain: str) -> str:
    # People choose run ids freely; a digest is a safe key of fixed length. Temporal makes the chain, a UUID.
    return f"{RUNS}{sha256_hex(run_id.encode())}/{chain}/"
