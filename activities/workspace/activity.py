"""The sandbox's half of the workspace: restoring snapshots into it, taking them, and reading its outputs as artifacts."""

from __future__ import annotations

import mimetypes

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.agents import AgentReader
from activities.heartbeat import Beat, beating
from activities.sandbox.activity import sandbox_errors
from activities.sandbox.output import render
from activities.sandbox.port import Command, FileChange, FileFault, FileView, Sandbox
from activities.sandbox.registry import ProviderRegistry
from activities.sandbox.turns import Turns
from activities.store.blobs import BlobStore
from activities.workspace.keeper import WorkspaceKeeper
from activities.workspace.names import is_utf8, readable
from activities.workspace.take import take_results
from contracts.activity_names import (
    COLLECT_OUTPUTS,
    RESTORE_WORKSPACE,
    RUN_SETUP,
    SNAPSHOT_WORKSPACE,
    TAKE_RESULTS,
    WRITE_FILES,
    ErrorType,
)
from contracts.blob import BlobRef
from contracts.prepare import (
    CollectOutputsInput,
    CollectOutputsResult,
    RestoreWorkspaceInput,
    RestoreWorkspaceResult,
    RunSetupInput,
    RunSetupResult,
    SnapshotWorkspaceInput,
    SnapshotWorkspaceResult,
    TakeResultsInput,
    TakeResultsResult,
    WriteFilesInput,
    WriteFilesResult,
)
from contracts.run import Artifact, ArtifactList

_FIRST = 50
MAX_TOLD = 200
"""Paths of a merge that its result names."""
SETUP_OUTPUT = 4096
"""Bytes of a failed setup command's output that people are shown."""
MAX_ARTIFACTS = 10_000
_KINDS = {
    "closed directory": "this directory cannot be listed; open it with chmod",
    "other": "a FIFO, socket or device, not a regular file",
}


class WorkspaceActivities:
    """Moves files between the store and a workspace through the sandbox port."""

    def __init__(
        self, providers: ProviderRegistry, blobs: BlobStore, keeper: WorkspaceKeeper, turns: Turns | None = None
    ) -> None:
        self._turns = turns or Turns()
        self._providers = providers
        self._blobs = blobs
        self._keeper = keeper
        self._agents = AgentReader(blobs)

    @activity.defn(name=RESTORE_WORKSPACE.name)
    async def restore_workspace(self, given: RestoreWorkspaceInput) -> RestoreWorkspaceResult:
        """Bring a snapshot into a new sandbox, every byte checked. Repeating it gives the same files."""
        async with beating() as beat, sandbox_errors():
            excludes = await self._excludes(given.agent)
            sandbox = await self._providers.attach(given.sandbox)

            def progress(files: int) -> None:
                beat.details = {"files": files, "of": given.snapshot.files}

            if given.expected and await self._keeper.holds(sandbox, given.snapshot, excludes):
                return RestoreWorkspaceResult(snapshot=given.snapshot)
            await self._keeper.restore(sandbox, given.snapshot, excludes, keep=given.keep, progress=progress)
            if not given.keep:
                return RestoreWorkspaceResult(snapshot=given.snapshot)
            return RestoreWorkspaceResult(snapshot=await self._keeper.snapshot(sandbox, given.snapshot, excludes))

    @activity.defn(name=RUN_SETUP.name)
    async def run_setup(self, given: RunSetupInput) -> RunSetupResult:
        """Run one command of the manifest's setup to its end. Raises ApplicationError `BadInput` when it does not do well."""
        async with beating() as beat, sandbox_errors(), self._turns.commands:
            spec = (await self._agents.get(given.agent)).spec
            command = spec.manifest.setup[given.index]
            sandbox = await self._providers.attach(given.sandbox)
            beat.details = {"setup": given.index, "command": command[:200]}
            timeout = spec.manifest.limits.setup_seconds
            job = Command(job_id=given.job_id, argv=("bash", "-c", command), timeout=timeout, output_limit=SETUP_OUTPUT)
            result = await sandbox.exec(job)
            if result.exit_code != 0:
                said = render(result, timeout, SETUP_OUTPUT, None)
                raise ApplicationError(
                    f"manifest.setup[{given.index}]: {command[:200]!r} did not do well, so the model was not asked; "
                    "correct it, or allow what it needs (sandbox.network.allow, sandbox.limits, manifest.limits.setup_seconds). "
                    f"{said}",
                    type=ErrorType.BAD_INPUT,
                    non_retryable=True,
                )
            excludes = spec.sandbox.snapshots.exclude
            return RunSetupResult(snapshot=await self._keeper.snapshot(sandbox, given.snapshot, excludes))

    @activity.defn(name=SNAPSHOT_WORKSPACE.name)
    async def snapshot_workspace(self, given: SnapshotWorkspaceInput) -> SnapshotWorkspaceResult:
        """Store what the workspace holds now."""
        async with beating(), sandbox_errors():
            excludes = await self._excludes(given.agent)
            sandbox = await self._providers.attach(given.sandbox)
            return SnapshotWorkspaceResult(snapshot=await self._keeper.snapshot(sandbox, given.snapshot, excludes))

    async def _excludes(self, agent: BlobRef) -> tuple[str, ...]:
        return (await self._agents.get(agent)).spec.sandbox.snapshots.exclude

    @activity.defn(name=WRITE_FILES.name)
    async def write_files(self, given: WriteFilesInput) -> WriteFilesResult:
        """Put files into the workspace, each whole or not at all."""
        async with beating() as beat, sandbox_errors():
            sandbox = await self._providers.attach(given.sandbox)
            fault = None
            for done, one in enumerate(given.files):
                beat.details = {"written": done, "of": len(given.files)}
                try:
                    await sandbox.change([FileChange(one.path, await self._blobs.get(one.blob))])
                except FileFault as found:
                    fault = str(found)
                    break
            snapshot = await self._keeper.snapshot(sandbox, given.snapshot, await self._excludes(given.agent))
            return WriteFilesResult(snapshot=snapshot, fault=fault)

    @activity.defn(name=TAKE_RESULTS.name)
    async def take_results(self, given: TakeResultsInput) -> TakeResultsResult:
        """Bring what a subagent made into the workspace: all of a merge, or nothing of it."""
        async with beating(), sandbox_errors():
            excludes = await self._excludes(given.agent)
            sandbox = await self._providers.attach(given.sandbox)
            # What is there now, whatever has been written in the background since the last call.
            now = await self._keeper.snapshot(sandbox, given.snapshot, excludes)
            taken = await take_results(given.model_copy(update={"snapshot": now}), sandbox, self._blobs)
            return TakeResultsResult(
                snapshot=await self._keeper.snapshot(sandbox, now, excludes),
                files=taken.files,
                merged=taken.merged[:MAX_TOLD],
                conflicts=taken.conflicts[:MAX_TOLD],
                fault=taken.fault,
            )

    @activity.defn(name=COLLECT_OUTPUTS.name)
    async def collect_outputs(self, given: CollectOutputsInput) -> CollectOutputsResult:
        """Store every regular file below the declared outputs; what is none is listed as skipped."""
        async with beating() as beat, sandbox_errors():
            sandbox = await self._providers.attach(given.sandbox)
            artifacts: list[Artifact] = []
            skipped: list[str] = []
            seen: set[str] = set()
            for output in given.outputs:
                await self._collect(sandbox, given, output.path, artifacts, skipped, seen, beat)
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
        seen: set[str],
        beat: Beat,
    ) -> None:
        try:
            listed = await _listing(sandbox, top)
        except FileFault as fault:
            skipped.append(readable(str(fault)))
            return
        for path, view in listed:
            if view.kind == "directory" or path in seen:
                continue
            seen.add(path)
            if not is_utf8(path):
                skipped.append(f"{readable(path)}: its name is not UTF-8; rename it")
                continue
            if view.kind != "file":
                skipped.append(f"{path}: {_KINDS.get(view.kind, f'a {view.kind}, not a regular file')}")
                continue
            if len(artifacts) >= MAX_ARTIFACTS:
                skipped.append(f"{path}: more than {MAX_ARTIFACTS} artifacts")
                return
            try:
                blob = await self._blobs.put_chunks(f"{given.sandbox.id}/{path}", sandbox.read(path))
            except FileFault as fault:
                skipped.append(readable(str(fault)))
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
