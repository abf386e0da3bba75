"""The sandbox's half of the workspace: writing a tree into it, and reading its outputs as artifacts."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Iterable, Iterator

from temporalio import activity

from activities.heartbeat import Beat, beating
from activities.sandbox.activity import sandbox_errors
from activities.sandbox.port import Command, FileChange, FileFault, FileView, Sandbox, SandboxUnavailable
from activities.sandbox.registry import ProviderRegistry
from activities.store.blobs import BlobStore
from contracts.activity_names import COLLECT_OUTPUTS, FILL_WORKSPACE
from contracts.blob import BlobRef
from contracts.prepare import (
    CollectOutputsInput,
    CollectOutputsResult,
    FillWorkspaceInput,
    FillWorkspaceResult,
    TreeEntry,
)
from contracts.run import Artifact, ArtifactList

_BATCH_BYTES = 16 << 20
_BATCH_FILES = 1000
_FIRST = 50
MAX_ARTIFACTS = 10_000


class WorkspaceActivities:
    """Moves files between the store and a workspace through the sandbox port."""

    def __init__(self, providers: ProviderRegistry, blobs: BlobStore) -> None:
        self._providers = providers
        self._blobs = blobs

    @activity.defn(name=FILL_WORKSPACE.name)
    async def fill_workspace(self, given: FillWorkspaceInput) -> FillWorkspaceResult:
        """Write a tree into the workspace. Repeating it gives the same files."""
        async with beating() as beat, sandbox_errors():
            sandbox = await self._providers.attach(given.sandbox)
            tree = [TreeEntry.model_validate(entry) for entry in json.loads(await self._blobs.get(given.tree))]
            files = [entry for entry in tree if entry.kind == "file"]
            directories = [entry for entry in tree if entry.kind == "directory"]
            folders = [entry.path for entry in directories]
            await _run(sandbox, "mkdir", "mkdir -p --", folders)
            # An earlier attempt may have come as far as closing them.
            await _run(sandbox, "open", "chmod u+w --", folders)
            done = 0
            for batch in _batches(files):
                contents = await self._blobs.get_many(_ref(entry) for entry in batch)
                changes = [FileChange(entry.path, data, entry.mode) for entry, data in zip(batch, contents, strict=True)]
                try:
                    await sandbox.change(changes)
                except FileFault as fault:
                    raise SandboxUnavailable(f"the workspace could not be filled: {fault}") from fault
                done += len(batch)
                beat.details = {"files": done, "of": len(files)}
            # Last, because nothing can be written into a directory that is closed already.
            closed = [entry.path for entry in directories if not entry.mode & 0o200]
            await _run(sandbox, "chmod", "chmod a-w --", closed)
            return FillWorkspaceResult(files=len(files), total_bytes=sum(entry.size for entry in files))

    @activity.defn(name=COLLECT_OUTPUTS.name)
    async def collect_outputs(self, given: CollectOutputsInput) -> CollectOutputsResult:
        """Store every regular file below the declared outputs; what is none is listed as skipped."""
        async with beating() as beat, sandbox_errors():
            sandbox = await self._providers.attach(given.sandbox)
            artifacts: list[Artifact] = []
            skipped: list[str] = []
            for output in given.outputs:
                await self._collect(sandbox, given, output.path, artifacts, skipped, beat)
            index = await self._blobs.put_json([artifact.model_dump(mode="json") for artifact in artifacts])
            return CollectOutputsResult(
                artifacts=ArtifactList(
                    count=len(artifacts),
                    total_bytes=sum(artifact.blob.size for artifact in artifacts),
                    first=tuple(artifacts[:_FIRST]),
                    index=index,
                    skipped=tuple(skipped[:_FIRST]),
                )
            )

    async def _collect(
        self,
        sandbox: Sandbox,
        given: CollectOutputsInput,
        top: str,
        artifacts: list[Artifact],
        skipped: list[str],
        beat: Beat,
    ) -> None:
        for path, view in await _listing(sandbox, top):
            if view.kind == "directory":
                continue
            if view.kind != "file":
                skipped.append(f"{path}: a {view.kind}, not a regular file")
                continue
            if len(artifacts) >= MAX_ARTIFACTS:
                skipped.append(f"{path}: more than {MAX_ARTIFACTS} artifacts")
                return
            try:
                blob = await self._blobs.put_chunks(f"{given.sandbox.id}/{path}", sandbox.read(path))
            except FileFault as fault:
                skipped.append(str(fault))
                continue
            media_type = mimetypes.guess_type(path, strict=True)[0] or "application/octet-stream"
            artifacts.append(Artifact(path=path, blob=blob, media_type=media_type, mode=view.mode & 0o777))
            beat.details = {"artifacts": len(artifacts), "last": path}


async def _listing(sandbox: Sandbox, top: str) -> list[tuple[str, FileView]]:
    """What an output path holds: itself when it is no directory, nothing when nothing was written there."""
    view = (await sandbox.look([top], 0))[top]
    if view.kind == "missing":
        return []
    return await sandbox.walk(top) if view.kind == "directory" else [(top, view)]


async def _run(sandbox: Sandbox, job: str, command: str, paths: list[str]) -> None:
    if not paths:
        return
    stdin = b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths)
    result = await sandbox.exec(
        Command(job_id=f"fill/{activity.info().attempt}/{job}", argv=("sh", "-c", f"xargs -0 {command}"), stdin=stdin)
    )
    if result.exit_code != 0:
        raise SandboxUnavailable(f"the workspace could not be filled: {command}: {result.stderr.decode(errors='replace')[:500]}")


def _ref(entry: TreeEntry) -> BlobRef:
    if entry.digest is None:
        raise ValueError(f"tree entry {entry.path} is a file without a digest")
    return BlobRef(digest=entry.digest, size=entry.size)


def _batches(files: Iterable[TreeEntry]) -> Iterator[list[TreeEntry]]:
    batch: list[TreeEntry] = []
    size = 0
    for entry in files:
        if batch and (size + entry.size > _BATCH_BYTES or len(batch) >= _BATCH_FILES):
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += entry.size
    if batch:
        yield batch
