"""Fetching what was planned, and saving it: in chunks, each noted in the store, so that a worker that takes over goes on there.

A chunk is itself a small snapshot, whose files are named by the digest of what they are: entry, name there, version, size. Who
takes over lists the sources again, and takes from the notes what is the very same.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pydantic import JsonValue

from activities.heartbeat import Beat
from activities.store.blobs import BlobStore
from activities.store.guard import FRESH_SECONDS
from activities.store.port import ObjectDamaged, ObjectMissing
from activities.workspace.fetch_spool import Ahead, RunSpool
from activities.workspace.fetch_tree import Planned, TreeBuilder, naming
from activities.workspace.ingest import WHOLE_BYTES, Content, Pending, Unreadable, Vanished
from activities.workspace.snapshots import Contents, Scan, SnapshotStore
from activities.workspace.sources.port import SourceChanged
from activities.workspace.tree import Directory, Entry, kept_time
from contracts.base import BadInput, canonical_json, sha256_hex
from contracts.snapshot import SnapshotRef

CHUNK_FILES, CHUNK_BYTES = 1000, 128 << 20
"""What is lost at most when a worker is killed, beside what its spool files keep."""


class Fetching:
    """One attempt to fetch one run's files. `owner` names the run, for all attempts."""

    def __init__(self, blobs: BlobStore, owner: str, spool: RunSpool, beat: Beat) -> None:
        self._blobs = blobs
        self._snapshots = SnapshotStore(blobs)
        self._owner = owner
        self._spool = spool
        self._beat = beat
        self._notes = 0

    async def run(self, tree: TreeBuilder) -> SnapshotRef:
        """Fetch every planned file and return the snapshot of the whole tree. Raises BadInput, StoreError."""
        # As the ingest takes them, so that what runs ahead is what is needed next.
        files = sorted(tree.files, key=lambda planned: planned.found.size > WHOLE_BYTES)
        contents = Contents()
        left = await self._take_up(files, contents)
        total = {"of_files": len(tree.files), "of_bytes": sum(planned.found.size for planned in tree.files)}
        remote = [planned for planned in left if planned.is_remote]
        ahead = Ahead([(planned.found.size, _opener(planned)) for planned in remote], self._spool.stopped)
        numbers = {id(planned): number for number, planned in enumerate(remote)}
        done = {
            "files": len(tree.files) - len(left),
            "bytes": sum(p.found.size for p in tree.files) - sum(p.found.size for p in left),
        }

        def pending(planned: Planned) -> Pending:
            number = numbers.get(id(planned))
            opens = _opener(planned) if number is None else partial(ahead.take, number)

            def counted() -> Content:
                content = _checked(planned, opens)
                done["files"] += 1
                done["bytes"] += planned.found.size
                self._beat.details = {"entry": planned.place, **done, **total}
                return content

            path = planned.path.encode("utf-8", "surrogateescape")
            return Pending(path, planned.parent, planned.name, planned.entry, planned.found.size, 0, counted)

        try:
            *chunks, last = list(_chunks(left)) or [[]]
            for chunk in chunks:
                flat = Directory(children={_key(planned): planned.entry for planned in chunk if planned.identity})
                ref = await self._save(Scan(flat, [pending(planned) for planned in chunk]), contents)
                await self._note(ref)
                for planned in chunk:
                    self._spool.done(planned.identity)
            return await self._save(Scan(tree.root, [pending(planned) for planned in last]), contents)
        finally:
            self._spool.stopped.set()
            ahead.end()

    async def _save(self, scan: Scan, contents: Contents) -> SnapshotRef:
        saving = asyncio.create_task(self._snapshots.save(scan, contents, None))
        try:
            return await asyncio.shield(saving)
        except asyncio.CancelledError:
            # First, so that the thread does not wait for a download to its end.
            self._spool.stopped.set()
            saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)
            raise

    async def _note(self, ref: SnapshotRef) -> None:
        """Write down a chunk under the next free number: another attempt, which nobody waits for, may be noting as well."""
        note: JsonValue = {"at": time.time(), "ref": ref.model_dump(mode="json")}
        while await self._blobs.put_record(self._note_name(self._notes), note) != note:
            self._notes += 1
        self._notes += 1

    async def _take_up(self, files: Sequence[Planned], contents: Contents) -> list[Planned]:
        """Fill in what earlier attempts have fetched, and return the rest."""
        fetched: dict[bytes, Entry] = {}
        while True:
            note: Any = await self._blobs.get_record(self._note_name(self._notes))
            if note is None:
                break
            self._notes += 1
            # What nothing refers to yet is only safe from a sweep while it is young.
            if time.time() - note["at"] > FRESH_SECONDS:
                continue
            try:
                chunk = await self._snapshots.load(SnapshotRef.model_validate(note["ref"]))
            except (ObjectMissing, ObjectDamaged):
                continue
            fetched |= {name: entry for name, entry in chunk.root.children.items() if isinstance(entry, Entry)}
        contents.add(fetched.values())
        left = []
        for planned in files:
            found = fetched.get(_key(planned)) if planned.identity else None
            if found is None:
                left.append(planned)
                continue
            entry = planned.entry
            entry.size, entry.digest, entry.pieces = found.size, found.digest, found.pieces
            entry.mode, entry.mtime = planned.mode, kept_time(planned.found.mtime)
        return left

    def _note_name(self, number: int) -> str:
        return f"fetch/{self._owner}/{number}"


def _key(planned: Planned) -> bytes:
    found = planned.found
    return sha256_hex(canonical_json([planned.identity, found.path, found.name, found.version, found.size])).encode()


def _opener(planned: Planned) -> Callable[[], Content]:
    if planned.found.open is None:
        raise ValueError(f"{planned.path} has no content")
    return planned.found.open


def _checked(planned: Planned, opens: Callable[[], Content]) -> Content:
    """Open a file as it is to lie in the workspace. A file that is not what was listed is never left out silently."""
    found = planned.found
    with naming(planned.place):
        try:
            content = opens()
        except (Vanished, Unreadable) as error:
            raise BadInput(f"{found.name!r} cannot be read: {error or 'it is gone'}; try again") from error
        if content.size != found.size:
            raise SourceChanged(f"{found.name!r} has {content.size} bytes and not the {found.size} that were listed; try again")
    content.mode, content.mtime, content.xattrs = planned.mode, found.mtime, ()
    return content


def _chunks(files: Sequence[Planned]) -> Iterator[list[Planned]]:
    chunk: list[Planned] = []
    size = 0
    for planned in files:
        if chunk and (len(chunk) >= CHUNK_FILES or size + planned.found.size > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(planned)
        size += planned.found.size
    if chunk:
        yield chunk


def owner_of(run_id: str, chain: str) -> str:
    """Return what names a run for all attempts at its manifest."""
    return json.dumps([run_id, chain])
