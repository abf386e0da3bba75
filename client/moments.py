"""The workspace of a run as it was after one of its steps, found in the store alone: no server, worker or sandbox is asked."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from activities.store.blobs import BlobStore
from activities.store.checkpoints import CheckpointStore, NoCheckpoint, RunStart
from activities.workspace.read import TreeReader
from activities.workspace.tree import HARD_LINK, Directory, Entry
from client.trees import Node, shown_path
from contracts.base import BadInput
from contracts.run import Checkpoint, CheckpointChoice
from contracts.sandbox import WORKSPACE
from contracts.snapshot import SnapshotRef

_SHOWN_NAMES = 10


@dataclass(frozen=True)
class Moment:
    """A run after a step. `root` is not filled yet, and None when nothing had been put into the workspace by then."""

    run_id: str
    chain: str
    step: int
    ref: SnapshotRef | None
    root: Directory | None
    excludes: tuple[str, ...] = ()
    skipped: tuple[tuple[bytes, str], ...] = ()

    @property
    def name(self) -> str:
        """What people call it."""
        return f"run {self.run_id} after step {self.step}" if self.step else f"run {self.run_id} before its first step"


async def checkpoint_of(
    blobs: BlobStore, store: str, run_id: str, step: int | None, chain: str | None = None, *, first: bool = False
) -> tuple[RunStart, Checkpoint]:
    """Return a run's start and its checkpoint after `step`; without one its last, or with `first` its first.

    Raises BadInput that says what there is; `store` is what the settings call the store, for people who look in a wrong one.
    """
    checkpoints = CheckpointStore(blobs)
    try:
        start = await checkpoints.start_of(run_id, chain)
    except NoCheckpoint as error:
        raise BadInput(f"{error} (here it is {store})") from error
    if step is None and first:
        step = next(iter(await checkpoints.steps_of(start)), None)
    try:
        return await checkpoints.find(CheckpointChoice(run_id=run_id, step=step, chain=start.chain))
    except NoCheckpoint as error:
        raise BadInput(str(error)) from error


async def moment_of(
    reader: TreeReader, store: str, run_id: str, step: int | None, chain: str | None = None, *, first: bool = False
) -> Moment:
    """Return a run as it was after a step, as `checkpoint_of` finds it. Raises BadInput or StoreError."""
    start, checkpoint = await checkpoint_of(reader.blobs, store, run_id, step, chain, first=first)
    if checkpoint.snapshot is None:
        return Moment(run_id, start.chain, checkpoint.step, None, None)
    found = await reader.open(checkpoint.snapshot)
    return Moment(run_id, start.chain, checkpoint.step, found.ref, found.root, found.excludes, found.skipped)


async def stands_at(reader: TreeReader, moment: Moment, path: str) -> tuple[bytes, Node | None]:
    """Return a path in the workspace as a snapshot has it, and what stands there. Raises BadInput naming what is near.

    People may write it from the workspace on, or with `/workspace/` before it.
    """
    whole = posixpath.normpath(posixpath.join(WORKSPACE, path))
    if whole != WORKSPACE and not whole.startswith(WORKSPACE + "/"):
        raise BadInput(f"{path!r}: is not in the workspace; give a path in it, such as outputs or {WORKSPACE}/outputs")
    wanted = whole.removeprefix(WORKSPACE).lstrip("/").encode("utf-8", "surrogateescape")
    found = None if moment.root is None else await reader.find(moment.root, wanted)
    if wanted and found is None:
        raise BadInput(f"{path!r}: is not in the workspace of {moment.name}; {await _near(reader, moment, wanted)}")
    return wanted, found


async def without_link(reader: TreeReader, moment: Moment, node: Node) -> Node:
    """Return the file that a hard link is a further name of; anything else as it is."""
    if not isinstance(node, Entry) or node.kind != HARD_LINK or moment.root is None:
        return node
    return await reader.find(moment.root, node.target) or node


async def _near(reader: TreeReader, moment: Moment, wanted: bytes) -> str:
    if moment.root is None:
        return "nothing had been put into it by then"
    here = posixpath.dirname(wanted)
    while not isinstance(found := await reader.find(moment.root, here), Directory):
        here = posixpath.dirname(here)
    await reader.fill([found])
    names = [shown_path(name) for name in sorted(found.children)]
    where = f"{shown_path(here)}/" if here else "it"
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{where} has {', '.join(names[:_SHOWN_NAMES]) or 'nothing'}{more}"
