"""The harness's half of materialising a manifest: reading what it names into the store, as the snapshot of a workspace.

The sandbox worker only ever sees the resulting snapshot, so no source's credential or path comes near model-written code.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.agents import AgentReader
from activities.heartbeat import Beat, beating
from activities.store.blobs import BlobStore
from activities.workspace.ingest import Content, Pending
from activities.workspace.snapshots import Contents, Scan, SnapshotStore
from activities.workspace.tree import FILE, Directory, Entry
from contracts.activity_names import FETCH_MANIFEST, ErrorType
from contracts.base import BadInput
from contracts.manifest import InlineEntry, LocalEntry, Manifest, ManifestLimits
from contracts.prepare import FetchManifestInput, FetchManifestResult

_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
TIME_OF_NO_FILE = 946_684_800_000_000_000
"""The modification time of what has none: 2000-01-01, always the same, so that equal manifests make equal workspaces; and no
earlier, because zip archives cannot hold times before 1980."""


@dataclass(frozen=True)
class Found:
    """A file or, without a source, a directory that an entry brings. `source` is a file of this host, or the bytes themselves."""

    path: str
    mode: int
    size: int = 0
    mtime: int = TIME_OF_NO_FILE
    source: Path | bytes | None = None


class ManifestActivities:
    """Reads manifest sources. Local ones only below the allowed roots."""

    def __init__(self, blobs: BlobStore, roots: Sequence[Path]) -> None:
        self._snapshots = SnapshotStore(blobs)
        self._roots = [root.resolve() for root in roots]
        self._agents = AgentReader(blobs)

    @activity.defn(name=FETCH_MANIFEST.name)
    async def fetch_manifest(self, given: FetchManifestInput) -> FetchManifestResult:
        """Store everything the manifest names. Raises ApplicationError `BadInput` naming entry, reason and remedy."""
        async with beating() as beat:
            manifest = (await self._agents.get(given.agent)).spec.manifest
            try:
                scan = await asyncio.to_thread(self._tree, manifest, beat)
                snapshot = await self._snapshots.save(scan, Contents(), None)
            except BadInput as error:
                raise ApplicationError(str(error), type=ErrorType.BAD_INPUT, non_retryable=True) from None
            return FetchManifestResult(snapshot=snapshot)

    def _tree(self, manifest: Manifest, beat: Beat) -> Scan:
        root = Directory(mtime=TIME_OF_NO_FILE)
        pending: list[Pending] = []
        total, limits = 0, manifest.limits
        for place, entry in sorted(manifest.entries.items()):
            for item in self._inline(place, entry) if isinstance(entry, InlineEntry) else self._local(place, entry, limits):
                if item.source is None:
                    _directory_at(root, item.path).mode = item.mode
                    continue
                total += item.size
                if len(pending) >= limits.max_files:
                    raise _over(place, "files", limits.max_files)
                if total > limits.max_bytes:
                    raise _over(place, "bytes", limits.max_bytes)
                pending.append(_pending(root, place, item))
                beat.details = {"entry": place, "files": len(pending), "bytes": total}
        return Scan(root, pending)

    def _inline(self, place: str, entry: InlineEntry) -> Iterator[Found]:
        data = entry.text.encode()
        yield Found(place, 0o444 if entry.read_only else 0o644, len(data), source=data)

    def _local(self, place: str, entry: LocalEntry, limits: ManifestLimits) -> Iterator[Found]:
        source = self._allowed(place, entry.path)
        if source.is_dir():
            yield from _directory(place, source, source, entry.read_only)
        else:
            yield _file(place, source, place, entry.read_only)

    def _allowed(self, place: str, path: str) -> Path:
        """Resolve a local entry's path to a real one below an allowed root, whatever links lie on the way."""
        given = Path(path)
        roots = ", ".join(map(str, self._roots)) or "none"
        for root in self._roots:
            real = Path(os.path.realpath(root / given))
            if real.is_relative_to(root) and real.exists():
                return real
        field = f"manifest.entries.{place}.path"
        if any(Path(os.path.realpath(root / given)).is_relative_to(root) for root in self._roots):
            raise BadInput(f"{field}: {path!r} does not exist below the allowed roots ({roots}); correct the path")
        raise BadInput(f"{field}: {path!r} is not below an allowed root ({roots}); move the data, or set CAISSON_LOCAL_ROOTS")


def _directory(place: str, top: Path, folder: Path, read_only: bool) -> Iterator[Found]:
    here = _join(place, folder.relative_to(top).as_posix())
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise _unreadable(place, folder, error) from error
    yield Found(here, 0o555 if read_only else 0o755)
    for child in children:
        path = _join(place, child.relative_to(top).as_posix())
        if child.is_symlink():
            real = Path(os.path.realpath(child))
            if not real.is_relative_to(top):
                raise BadInput(f"manifest.entries.{place}: {child} is a link that leaves {top}; remove it, or copy what it names")
            if not real.is_file():
                raise BadInput(f"manifest.entries.{place}: {child} is a link to no file; remove it, or copy what it names")
            yield _file(place, real, path, read_only)
        elif child.is_dir():
            yield from _directory(place, top, child, read_only)
        else:
            yield _file(place, child, path, read_only)


def _file(place: str, source: Path, path: str, read_only: bool) -> Found:
    try:
        status = source.lstat()
    except OSError as error:
        raise _unreadable(place, source, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"manifest.entries.{place}: {source} is no regular file; leave it out")
    executable = bool(status.st_mode & 0o111)
    mode = (0o555 if executable else 0o444) if read_only else (0o755 if executable else 0o644)
    return Found(path, mode, status.st_size, status.st_mtime_ns, source)


def _pending(root: Directory, place: str, item: Found) -> Pending:
    folder, _, name = item.path.rpartition("/")
    parent = _directory_at(root, folder) if folder else root
    entry = parent.children[os.fsencode(name)] = Entry(FILE)
    return Pending(os.fsencode(item.path), parent, os.fsencode(name), entry, item.size, 0, partial(_open, place, item))


def _open(place: str, item: Found) -> Content:
    """Open what was found, as it is to lie in the workspace. Raises BadInput when it cannot be read, or is another size now."""
    if isinstance(item.source, bytes):
        descriptor = os.memfd_create("inline", os.MFD_CLOEXEC)
        os.pwrite(descriptor, item.source, 0)
        return Content(descriptor, item.size, item.mtime, item.mode)
    source = item.source or Path()
    try:
        descriptor = os.open(source, _FILE_FLAGS)
    except OSError as error:
        raise _unreadable(place, source, error) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != item.size:
        os.close(descriptor)
        raise BadInput(f"manifest.entries.{place}: {source} was changed while it was read; try again when nobody writes to it")
    return Content(descriptor, item.size, item.mtime, item.mode)


def _directory_at(root: Directory, path: str) -> Directory:
    here = root
    for part in path.split("/"):
        below = here.children.setdefault(os.fsencode(part), Directory(mtime=TIME_OF_NO_FILE))
        if not isinstance(below, Directory):
            raise BadInput(f"manifest.entries: {path} lies below a file; give each entry its own place")
        here = below
    return here


def _unreadable(place: str, source: Path, error: OSError) -> BadInput:
    return BadInput(f"manifest.entries.{place}: {source} cannot be read: {error.strerror}; give the tools worker access to it")


def _join(place: str, relative: str) -> str:
    return place if relative == "." else f"{place}/{relative}"


def _over(place: str, what: str, limit: int) -> BadInput:
    return BadInput(f"manifest.entries.{place}: more than {limit} {what} in all; raise manifest.limits.max_{what}, or give less")
