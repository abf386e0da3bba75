"""A store with runs in it as workers leave them, made without workers; a Temporal that says what a test wants; a second walk."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from activities.model.transcript import Entry, TranscriptStore
from activities.store.blobs import BlobStore, blob_key
from activities.store.checkpoints import CheckpointStore, RunEnd, RunStart
from activities.store.local import LocalStore
from activities.store.port import ObjectStore
from activities.store.removal import store_time
from activities.store.sweep import Plan, SweepChoice, carry_out, plan_sweep
from activities.workspace.tree import Directory, walk
from activities.workspace.tree import Entry as FileEntry
from contracts.blob import BlobRef, Text
from contracts.model import UserItem
from contracts.retention import RetentionPolicy
from contracts.run import Artifact, ArtifactList, Checkpoint, CheckpointChoice, RunResult, RunStatus
from tests.snapshot_support import Picture, Place, Room, picture

HOUR, DAY = 3600.0, 86400.0
FOREVER: list[dict[str, Any]] = [{"keep": "forever"}]
DROP: list[dict[str, Any]] = [{"label": {"keep": "no"}, "keep": {"days": 1}}]
"""Runs labelled `keep: no` go a day after their end."""


@dataclass
class Asked:
    """Temporal: the runs that are open, by (run id, chain), and the results of some that are not."""

    open: set[tuple[str, str]] = field(default_factory=set)
    results: dict[str, RunResult] = field(default_factory=dict)

    async def open_ids(self) -> set[str]:
        """See Standings."""
        return {run_id for run_id, _ in self.open}

    async def is_open(self, start: RunStart) -> bool:
        """See Standings."""
        return (start.run_id, start.chain) in self.open

    async def result_of(self, start: RunStart) -> RunResult | None:
        """See Standings."""
        return self.results.get(start.run_id)


@dataclass
class Made:
    """A run that was made, with what its workspace held after each step."""

    start: RunStart
    place: Place
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    pictures: dict[int, Picture] = field(default_factory=dict)
    said: dict[int, int] = field(default_factory=dict)


class World:
    """A store on this host, and all that works on it."""

    def __init__(self, root: Path, store: Path | None = None) -> None:
        self.store_root = store or root / "store"
        self.objects: ObjectStore = LocalStore(self.store_root)
        self.blobs = BlobStore(self.objects)
        self.room = Room(root, LocalStore(self.store_root))
        self.checkpoints = CheckpointStore(self.blobs)
        self.temporal = Asked()

    async def begin(
        self, run_id: str, labels: dict[str, str] | None = None, origin: CheckpointChoice | None = None, chain: str = "c"
    ) -> Made:
        """Begin a run, as `prepare_run` does. It is open."""
        agent = await self.blobs.put_json({"agent": "the same for all"})
        task = await self.blobs.put_text(f"The task of {run_id}. " * 50)
        start = RunStart(
            run_id=run_id,
            chain=chain,
            started_at=time.time(),
            agent=agent,
            agent_digest=agent.digest,
            agent_name="a",
            task=task,
            labels=labels or {},
            origin=origin,
        )
        await self.checkpoints.begin(start)
        self.temporal.open.add((run_id, chain))
        return Made(start, self.room.place())

    async def step(self, run: Made, files: dict[str, bytes | None], call: str = "") -> Checkpoint:
        """Do a step: write or remove files, snapshot, say something, and write down the checkpoint."""
        for name, data in files.items():
            path = run.place.workspace / name
            if data is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        number = max(run.checkpoints, default=0) + 1
        last = run.checkpoints.get(number - 1)
        snapshot = await self.room.save(run.place, last.snapshot if last else None)
        said = Entry(number, "model", {"type": "message", "text": f"{run.start.run_id} {number} {call} " * 40})
        head = await TranscriptStore(self.blobs).append(last.transcript if last else None, (said,), {"step": number})
        item = UserItem(text=(await self.blobs.put_text(f"output {number} of {run.start.run_id} " * 30)).reference())
        return await self.write_down(run, Checkpoint(step=number, transcript=head, items=(item,), snapshot=snapshot))

    async def write_down(self, run: Made, checkpoint: Checkpoint) -> Checkpoint:
        """Write down a checkpoint."""
        await self.checkpoints.put(run.start.run_id, run.start.chain, checkpoint)
        run.checkpoints[checkpoint.step] = checkpoint
        run.pictures[checkpoint.step] = picture(run.place.workspace)
        run.said[checkpoint.step] = len(await TranscriptStore(self.blobs).load(checkpoint.transcript))
        return checkpoint

    async def end(self, run: Made, days_ago: float = 0, artifact: bytes | None = None) -> None:
        """Write down a run's end."""
        artifacts = ArtifactList()
        if artifact is not None:
            one = Artifact(path="outputs/a", blob=await self.blobs.put(artifact), media_type="text/plain")
            index = await self.blobs.put_json([one.model_dump(mode="json")])
            artifacts = ArtifactList(count=1, total_bytes=len(artifact), index=index)
        end = RunEnd(
            status=RunStatus.COMPLETED,
            ended_at=time.time() - days_ago * DAY,
            steps=len(run.checkpoints),
            artifacts=artifacts,
            output=await self.blobs.put(f"the output of {run.start.run_id}".encode()),
            egress_log=await self.blobs.put(f"the log of {run.start.run_id}".encode()),
        )
        await self.checkpoints.end(run.start.run_id, run.start.chain, end)
        self.close(run)

    def close(self, run: Made) -> None:
        """Let Temporal say that a run is closed."""
        self.temporal.open.discard((run.start.run_id, run.start.chain))

    async def ended(self, run_id: str, labels: dict[str, str] | None = None, days_ago: float = 0, steps: int = 1) -> Made:
        """Make a whole run with files and an artifact of its own."""
        run = await self.begin(run_id, labels)
        for number in range(steps):
            await self.step(run, {f"f{number}": f"{run_id} {number}".encode() * 400, "shared": b"shared by all" * 100})
        await self.end(run, days_ago, f"artifact of {run_id}".encode())
        return run

    def age(self, seconds: float) -> None:
        """Make everything in the store older."""
        for path in self.store_root.rglob("*"):
            if path.is_file():
                at = path.stat().st_mtime - seconds
                os.utime(path, (at, at))

    async def plan(self, rules: list[dict[str, Any]], grace: float = HOUR, payload_days: int | None = None) -> Plan:
        """Plan a sweep."""
        policy = RetentionPolicy.model_validate({"rules": rules})
        choice = SweepChoice(policy, grace, payload_days)
        return await plan_sweep(self.blobs, choice, self.temporal, await store_time(self.objects))

    async def sweep(self, rules: list[dict[str, Any]], grace: float = HOUR, payload_days: int | None = None) -> Plan:
        """Plan a sweep and carry it out."""
        plan = await self.plan(rules, grace, payload_days)
        await carry_out(self.objects, plan, self.temporal)
        return plan

    async def keys(self, prefix: str) -> set[str]:
        """All keys that start so."""
        return {info.key async for info in self.objects.list(prefix)}

    async def run_ids(self) -> set[str]:
        """The ids of all runs that the store knows."""
        return {start.run_id async for start in self.checkpoints.runs()}

    async def is_whole(self, run: Made, steps: set[int] | None = None) -> None:
        """Check that checkpoints of a run are there, and come back byte for byte with their transcripts."""
        found = set(await self.checkpoints.steps_of(run.start))
        wanted = set(run.checkpoints) if steps is None else steps
        assert found == wanted, f"{run.start.run_id}: {found} and not {wanted}"
        await self.blobs.get(run.start.agent)
        await self.blobs.get_text(run.start.task.reference())
        for step in wanted:
            await self.comes_back(run, step, await self.checkpoints.checkpoint(run.start, step))
        end = await self.checkpoints.end_of(run.start)
        for ref in blobs_of_end(end) if end is not None else []:
            await self.blobs.get(ref)
        if end is not None and end.artifacts.index is not None:
            for one in json.loads(await self.blobs.get(end.artifacts.index)):
                await self.blobs.get(BlobRef.model_validate(one["blob"]))

    async def comes_back(self, run: Made, step: int, checkpoint: Checkpoint) -> None:
        """Check that one checkpoint has all that it needs."""
        entries = await TranscriptStore(self.blobs).load(checkpoint.transcript)
        assert len(entries) == run.said[step]
        for item in checkpoint.items:
            assert await self.blobs.get_text(Text(blob=item.text.blob)) if isinstance(item, UserItem) else True
        if checkpoint.snapshot is not None:
            restored = await self.room.restore(checkpoint.snapshot)
            assert picture(restored.workspace) == run.pictures[step]

    async def needed(self) -> set[str]:
        """The keys of all blobs that the runs of the store need, found by a second walk, with nothing of the marker's."""
        digests: set[str] = set()
        async for start in self.checkpoints.runs():
            digests |= {start.agent.digest} | ({start.task.blob.digest} if start.task.blob else set())
            for step in await self.checkpoints.steps_of(start):
                digests |= await self._of_checkpoint(await self.checkpoints.checkpoint(start, step))
            end = await self.checkpoints.end_of(start)
            if end is not None:
                digests |= {ref.digest for ref in blobs_of_end(end)}
                if end.artifacts.index is not None:
                    digests |= {one["blob"]["digest"] for one in json.loads(await self.blobs.get(end.artifacts.index))}
        return {blob_key(digest) for digest in digests}

    async def _of_checkpoint(self, checkpoint: Checkpoint) -> set[str]:
        found = {item.text.blob.digest for item in checkpoint.items if isinstance(item, UserItem) and item.text.blob}
        head = checkpoint.transcript.digest if checkpoint.transcript else None
        is_last = True
        while head is not None:
            stored = json.loads(await self.objects.get(blob_key(head)))
            found |= {head} | ({segment["digest"] for segment in stored["segments"]} if is_last else set())
            head, is_last = stored["previous"], False
        if checkpoint.snapshot is not None:
            found |= {checkpoint.snapshot.record.digest} | await self.packs_of(checkpoint)
        return found

    async def packs_of(self, checkpoint: Checkpoint) -> set[str]:
        """The packs of a checkpoint's snapshot, from the whole tree."""
        assert checkpoint.snapshot is not None
        root = (await self.room.keeper.store.load(checkpoint.snapshot)).root
        frames = [root.frame]
        for _, entry in walk(root):
            frames += [entry.frame] if isinstance(entry, Directory) else [piece.frame for piece in _pieces(entry)]
        return {frame.pack.digest.hex() for frame in frames if frame is not None}


def _pieces(entry: FileEntry) -> tuple[Any, ...]:
    return entry.pieces


def blobs_of_end(end: RunEnd) -> list[BlobRef]:
    """The blobs that an end names itself."""
    return [ref for ref in (end.output, end.egress_log, end.artifacts.index) if ref is not None]
