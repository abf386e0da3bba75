"""Files of another run's workspace, read from its snapshot in the store.

They are read and stored anew rather than referred to: what the other run has stored may be swept at any time, until this run has
written down that it needs it. The blobs that are still young are not written twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from activities.store.blobs import BlobStore
from activities.store.checkpoints import CheckpointStore, NoCheckpoint
from activities.store.port import ObjectDamaged, ObjectMissing
from activities.workspace.fetch_spool import RunSpool, identity_of
from activities.workspace.ingest import Content
from activities.workspace.read import TreeReader, read_file
from activities.workspace.sources.port import Bound, Found
from activities.workspace.sources.select import Selection
from activities.workspace.tree import FILE, HARD_LINK, Directory, Entry
from contracts.base import BadInput
from contracts.manifest import SnapshotEntry
from contracts.run import CheckpointChoice


class SnapshotSource:
    """A file or directory of one snapshot. `name` is what tells the entry from every other one of the run."""

    def __init__(self, entry: SnapshotEntry, name: str, blobs: BlobStore, spool: RunSpool) -> None:
        self._entry = entry
        self._name = name
        self._blobs = blobs
        self._spool = spool
        self._selection = Selection(entry.include, entry.exclude)
        self._pin = ""
        self._loop = asyncio.get_running_loop()

    async def find(self, most_files: int) -> list[Found]:
        """See Source."""
        entry = self._entry
        try:
            _, checkpoint = await CheckpointStore(self._blobs).find(CheckpointChoice(run_id=entry.run_id, step=entry.step))
            if checkpoint.snapshot is None:
                raise BadInput(f".run_id: run {entry.run_id!r} had no workspace at step {checkpoint.step}; name a later step")
            self._pin = checkpoint.snapshot.id
            reader = TreeReader(self._blobs)
            root = (await reader.open(checkpoint.snapshot)).root
            top = await reader.find(root, (entry.path or "").encode("utf-8", "surrogateescape"))
            if top is None:
                raise BadInput(f".path: {entry.path!r} was not in the workspace of run {entry.run_id!r}; correct the path")
            return await self._walk(reader, root, top, most_files)
        except NoCheckpoint as error:
            raise BadInput(f".run_id: {error}") from error
        except (ObjectMissing, ObjectDamaged) as error:
            raise BadInput(f".run_id: the snapshot of run {entry.run_id!r} cannot be read: {error}") from error

    def pin(self) -> str:
        """See Source: the id of the snapshot."""
        return self._pin

    async def close(self) -> None:
        """See Source."""

    async def _walk(self, reader: TreeReader, root: Directory, top: Entry | Directory, most_files: int) -> list[Found]:
        found: list[Found] = []
        bound = Bound(most_files, repr(self._entry.path or "the workspace"))
        own = (self._entry.path or "").rpartition("/")[2]
        waiting: list[tuple[str, Entry | Directory]] = [("", top)]
        while waiting:
            path, here = waiting.pop()
            is_directory = isinstance(here, Directory)
            judged = path or ("" if is_directory else own)
            if self._selection.leaves_out(judged, is_directory=is_directory):
                continue
            if isinstance(here, Directory):
                bound.count(is_directory=True)
                await reader.fill([here])
                for name, child in here.children.items():
                    below = name.decode("utf-8", "surrogateescape")
                    waiting.append((f"{path}/{below}" if path else below, child))
            if self._selection.takes(judged, is_directory=is_directory):
                found.append(await self._found(reader, root, path, judged, here))
                if not is_directory:
                    bound.count(is_directory=False)
        return sorted(found, key=lambda item: item.path)

    async def _found(self, reader: TreeReader, root: Directory, path: str, name: str, here: Entry | Directory) -> Found:
        if isinstance(here, Directory):
            return Found(path, name)
        if here.kind == HARD_LINK:
            first = await reader.find(root, here.target)
            if not isinstance(first, Entry) or first.kind != FILE:
                raise BadInput(f"{path!r} is a link to a file that the snapshot does not have; leave it out with exclude")
            here = first
        if here.kind != FILE:
            return Found(path, name, mtime=here.mtime, target=here.target)
        opens = partial(self._open, name, here)
        return Found(path, name, here.digest.hex(), here.size, here.mtime, bool(here.mode & 0o111), opens)

    def _open(self, name: str, entry: Entry) -> Content:
        return asyncio.run_coroutine_threadsafe(self._read(name, entry), self._loop).result()

    async def _read(self, name: str, entry: Entry) -> Content:
        async def chunks(offset: int) -> AsyncIterator[bytes]:
            at = 0
            async for data in read_file(self._blobs, entry):
                if at + len(data) > offset:
                    yield data[max(0, offset - at) :]
                at += len(data)

        try:
            return await self._spool.fill(identity_of(self._name, name, entry.digest.hex()), entry.size, chunks, repr(name))
        except (ObjectMissing, ObjectDamaged) as error:
            raise BadInput(f"run {self._entry.run_id!r}: {error}") from error
