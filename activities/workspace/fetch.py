"""The harness's half of materialising a manifest: reading what it names into the store.

The sandbox worker only ever sees the resulting tree of blobs, so no source's credential or path comes near model-written code.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.agents import AgentReader
from activities.heartbeat import Beat, beating
from activities.store.blobs import BlobStore
from contracts.activity_names import FETCH_MANIFEST, ErrorType
from contracts.base import BadInput
from contracts.manifest import InlineEntry, LocalEntry, Manifest
from contracts.prepare import FetchManifestInput, FetchManifestResult, TreeEntry

_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ManifestActivities:
    """Reads manifest sources. Local ones only below the allowed roots."""

    def __init__(self, blobs: BlobStore, roots: Sequence[Path]) -> None:
        self._blobs = blobs
        self._roots = [root.resolve() for root in roots]
        self._agents = AgentReader(blobs)

    @activity.defn(name=FETCH_MANIFEST.name)
    async def fetch_manifest(self, given: FetchManifestInput) -> FetchManifestResult:
        """Store everything the manifest names. Raises ApplicationError `BadInput` naming entry, reason and remedy."""
        async with beating() as beat:
            manifest = (await self._agents.get(given.agent)).spec.manifest
            try:
                entries = await self._tree(manifest, beat)
            except BadInput as error:
                raise ApplicationError(str(error), type=ErrorType.BAD_INPUT, non_retryable=True) from None
            tree = await self._blobs.put_json([entry.model_dump(mode="json") for entry in entries])
            files = [entry for entry in entries if entry.kind == "file"]
            return FetchManifestResult(tree=tree, files=len(files), total_bytes=sum(entry.size for entry in files))

    async def _tree(self, manifest: Manifest, beat: Beat) -> list[TreeEntry]:
        tree: list[TreeEntry] = []
        limits, total, files = manifest.limits, 0, 0
        for place, entry in sorted(manifest.entries.items()):
            found = self._inline(place, entry) if isinstance(entry, InlineEntry) else self._local(place, entry, limits.max_bytes)
            # In a thread, one file at a time: a slow disk must not silence the heartbeat.
            while (item := await asyncio.to_thread(next, found, None)) is not None:
                path, mode, data = item
                if data is None:
                    tree.append(TreeEntry(path=path, kind="directory", mode=mode))
                    continue
                files, total = files + 1, total + len(data)
                if files > limits.max_files:
                    raise BadInput(f"manifest.entries.{place}: more than {limits.max_files} files; raise limits.max_files")
                if total > limits.max_bytes:
                    raise BadInput(f"manifest.entries.{place}: more than {limits.max_bytes} bytes; raise limits.max_bytes")
                ref = await self._blobs.put(data)
                tree.append(TreeEntry(path=path, kind="file", mode=mode, size=ref.size, digest=ref.digest))
                beat.details = {"entry": place, "files": files, "bytes": total}
        return tree

    def _inline(self, place: str, entry: InlineEntry) -> Iterator[tuple[str, int, bytes | None]]:
        yield place, 0o444 if entry.read_only else 0o644, entry.text.encode()

    def _local(self, place: str, entry: LocalEntry, max_bytes: int) -> Iterator[tuple[str, int, bytes | None]]:
        source = self._allowed(place, entry.path)
        if source.is_dir():
            yield from _directory(place, source, source, entry.read_only, max_bytes)
        else:
            yield _file(place, source, place, entry.read_only, max_bytes)

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


def _directory(place: str, top: Path, folder: Path, read_only: bool, max_bytes: int) -> Iterator[tuple[str, int, bytes | None]]:
    here = _join(place, folder.relative_to(top).as_posix())
    try:
        children = sorted(folder.iterdir())
    except OSError as error:
        raise _unreadable(place, folder, error) from error
    yield here, 0o555 if read_only else 0o755, None
    for child in children:
        path = _join(place, child.relative_to(top).as_posix())
        if child.is_symlink():
            real = Path(os.path.realpath(child))
            if not real.is_relative_to(top):
                raise BadInput(f"manifest.entries.{place}: {child} is a link that leaves {top}; remove it, or copy what it names")
            if not real.is_file():
                raise BadInput(f"manifest.entries.{place}: {child} is a link to no file; remove it, or copy what it names")
            yield _file(place, real, path, read_only, max_bytes)
        elif child.is_dir():
            yield from _directory(place, top, child, read_only, max_bytes)
        else:
            yield _file(place, child, path, read_only, max_bytes)


def _file(place: str, source: Path, path: str, read_only: bool, max_bytes: int) -> tuple[str, int, bytes]:
    try:
        descriptor = os.open(source, _FILE_FLAGS)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BadInput(f"manifest.entries.{place}: {source} is no regular file; leave it out")
            if status.st_size > max_bytes:
                raise _over(place, "bytes", max_bytes)
            executable = bool(status.st_mode & 0o111)
            mode = (0o555 if executable else 0o444) if read_only else (0o755 if executable else 0o644)
            return path, mode, file.read()
    except OSError as error:
        raise _unreadable(place, source, error) from error


def _unreadable(place: str, source: Path, error: OSError) -> BadInput:
    return BadInput(f"manifest.entries.{place}: {source} cannot be read: {error.strerror}; give the tools worker access to it")


def _join(place: str, relative: str) -> str:
    return place if relative == "." else f"{place}/{relative}"


def _over(place: str, what: str, limit: int) -> BadInput:
    return BadInput(f"manifest.entries.{place}: more than {limit} {what} in all; raise manifest.limits.max_{what}, or give less")
