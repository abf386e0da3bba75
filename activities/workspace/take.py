"""Bringing what a subagent made into its parent's workspace: its artifacts beside the parent's files, or its changes among them.

A change is merged three ways: what the subagent did between its first and its last snapshot, and what the parent has done to the
same files meanwhile. Either all of it is merged, or nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from merge3 import Merge3

from activities.sandbox.port import FileChange, FileFault, Sandbox
from activities.store.blobs import BlobStore
from activities.workspace.read import read_file
from activities.workspace.snapshots import SnapshotStore
from activities.workspace.tree import FILE, Directory, Entry, find, walk
from contracts.prepare import TakeResultsInput
from contracts.run import Artifact

FOLDER = "subagents"
MAX_MERGED_FILE = 16 << 20
_BATCH_BYTES, _BATCH_FILES = 16 << 20, 500


@dataclass
class Taken:
    """What was brought."""

    files: int = 0
    merged: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    fault: str | None = None


async def take_results(given: TakeResultsInput, sandbox: Sandbox, blobs: BlobStore) -> Taken:
    """Bring what `given` names into the workspace. Repeating it, also after it was interrupted, gives the same files."""
    taken = Taken()
    if given.artifacts is not None:
        taken.files, taken.fault = await _bring_artifacts(given, sandbox, blobs)
    if given.base is not None and given.theirs is not None:
        changes, taken.conflicts = await _merge(given, blobs)
        if not taken.conflicts and changes:
            try:
                await sandbox.change(changes)
            except FileFault as fault:
                taken.conflicts = (str(fault),)
            else:
                taken.merged = tuple(f"{'D' if change.data is None else 'M'} {change.path}" for change in changes)
    return taken


async def _bring_artifacts(given: TakeResultsInput, sandbox: Sandbox, blobs: BlobStore) -> tuple[int, str | None]:
    if given.artifacts is None:
        return 0, None
    place = f"{FOLDER}/{given.name}"
    record = f"taken/{given.run_id}/{given.name}/{sandbox.ref.id}/{sandbox.ref.nonce}"
    views = await sandbox.look([FOLDER, place], 0)
    if views[FOLDER].kind not in ("missing", "directory"):
        return 0, f"{FOLDER} is a {views[FOLDER].kind} in your workspace; move it out of the way"
    if views[place].kind != "missing" and await blobs.get_record(record) is None:
        return 0, f"{place} is there already and is yours; it was not touched"
    await blobs.put_record(record, {"began": True})
    artifacts = [Artifact.model_validate(one) for one in json.loads(await blobs.get(given.artifacts))]
    for batch in _batches(artifacts):
        contents = await blobs.get_many(one.blob for one in batch)
        changes = [FileChange(f"{place}/{one.path}", data, one.mode) for one, data in zip(batch, contents, strict=True)]
        try:
            await sandbox.change(changes)
        except FileFault as fault:
            return 0, str(fault)
    return len(artifacts), None


def _batches(artifacts: Iterable[Artifact]) -> Iterator[list[Artifact]]:
    batch: list[Artifact] = []
    size = 0
    for one in artifacts:
        if batch and (size + one.blob.size > _BATCH_BYTES or len(batch) >= _BATCH_FILES):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += one.blob.size
    if batch:
        yield batch


async def _merge(given: TakeResultsInput, blobs: BlobStore) -> tuple[list[FileChange], tuple[str, ...]]:
    """Return the changes that merge what the subagent did, or what stands against it."""
    if given.base is None or given.theirs is None or given.snapshot is None:
        return [], ()
    store = SnapshotStore(blobs)
    base = (await store.load(given.base)).root
    theirs = (await store.load(given.theirs)).root
    ours = (await store.load(given.snapshot)).root
    changes: list[FileChange] = []
    conflicts: list[str] = []
    for path in sorted(changed(base, theirs)):
        shown = path.decode("utf-8", "backslashreplace")
        was, new, now = find(base, path), find(theirs, path), find(ours, path)
        if same(now, new):
            continue
        if any(isinstance(one, Directory) or (one is not None and one.kind != FILE) for one in (was, new, now)):
            conflicts.append(f"{shown}: a link or a directory in one of the workspaces; change it by hand")
            continue
        try:
            name = path.decode()
        except UnicodeDecodeError:
            conflicts.append(f"{shown}: its name is not UTF-8; change it by hand")
            continue
        merged = await _merge_file(blobs, _file(was), _file(new), _file(now))
        if isinstance(merged, str):
            conflicts.append(f"{shown}: {merged}")
        else:
            changes.append(FileChange(name, merged[0], merged[1]))
    return changes, tuple(conflicts)


def _file(entry: Entry | Directory | None) -> Entry | None:
    return entry if isinstance(entry, Entry) else None


def changed(base: Directory, theirs: Directory) -> set[bytes]:
    """Return the paths of files and links that differ between two trees. Equal directories are not gone into."""
    found: set[bytes] = set()
    waiting: list[tuple[bytes, Directory, Directory]] = [(b"", base, theirs)]
    while waiting:
        above, one, other = waiting.pop()
        if one.digest and one.digest == other.digest:
            continue
        for name in one.children.keys() | other.children.keys():
            path = above + b"/" + name if above else name
            was, new = one.children.get(name), other.children.get(name)
            if isinstance(was, Directory) and isinstance(new, Directory):
                waiting.append((path, was, new))
                continue
            for side in (was, new):
                if isinstance(side, Directory):
                    found |= {path + b"/" + below for below, entry in walk(side) if isinstance(entry, Entry)}
                elif side is not None and not same(was, new):
                    found.add(path)
    return found


def same(one: Entry | Directory | None, other: Entry | Directory | None) -> bool:
    """Whether two entries are the same but for their times."""
    if isinstance(one, Entry) and isinstance(other, Entry):
        return (one.kind, one.mode, one.digest, one.target) == (other.kind, other.mode, other.digest, other.target)
    return one is None and other is None


async def _merge_file(
    blobs: BlobStore, was: Entry | None, new: Entry | None, now: Entry | None
) -> tuple[bytes | None, int] | str:
    """Return the merged content and mode of one file (None: removed), or why it cannot be merged."""
    if same(was, now):
        return (None, 0) if new is None else (await _read(blobs, new), new.mode)
    if new is None:
        return "the subagent removed it, and you have changed it"
    if now is None:
        return "the subagent changed it, and you have removed it" if was is not None else "both made it"
    if was is None:
        return "both made it, with other content"
    mode = new.mode if now.mode == was.mode else now.mode
    if new.digest == was.digest:
        return await _read(blobs, now), mode
    if now.digest == was.digest:
        return await _read(blobs, new), mode
    if max(was.size, new.size, now.size) > MAX_MERGED_FILE:
        return f"both changed it, and it is larger than the {MAX_MERGED_FILE >> 20} MB that are merged"
    contents = [await _read(blobs, one) for one in (was, now, new)]
    if any(b"\0" in content for content in contents):
        return "both changed it, and it is no text"
    base, ours, theirs = (content.splitlines(keepends=True) for content in contents)
    merged: list[bytes] = []
    for group in Merge3(base, ours, theirs).merge_groups():
        if group[0] == "conflict":
            return "both changed the same lines"
        merged += group[1]
    return b"".join(merged), mode


async def _read(blobs: BlobStore, entry: Entry) -> bytes:
    return b"".join([piece async for piece in read_file(blobs, entry)])
