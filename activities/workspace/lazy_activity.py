"""Fetching files of `lazy` entries when the model asks for them; the tools worker's half, which holds the secrets."""

from __future__ import annotations

from temporalio import activity

from activities.agents import AgentReader
from activities.governance.secrets import Secrets
from activities.heartbeat import beating
from activities.store.blobs import BlobStore
from activities.workspace.lazy import fetch_lazy
from contracts.activity_names import FETCH_FILES
from contracts.base import BadInput
from contracts.prepare import FetchedFile, FetchFilesInput, FetchFilesResult


class LazyActivities:
    """Reads single files of buckets, exactly as they were listed."""

    def __init__(self, blobs: BlobStore, secrets: Secrets) -> None:
        self._blobs = blobs
        self._secrets = secrets
        self._agents = AgentReader(blobs)

    @activity.defn(name=FETCH_FILES.name)
    async def fetch_files(self, given: FetchFilesInput) -> FetchFilesResult:
        """Read each of the files. What cannot be read as it was listed is told, and never ends the run."""
        async with beating() as beat:
            entries = (await self._agents.get(given.agent)).spec.manifest.entries
            files: list[FetchedFile] = []
            faults: list[str] = []
            for path in dict.fromkeys(given.paths):
                beat.details = {"fetched": len(files), "next": path[:200]}
                try:
                    blob = await fetch_lazy(self._blobs, self._secrets, entries, given.lazy, path)
                except BadInput as fault:
                    faults.append(str(fault)[:500])
                else:
                    files.append(FetchedFile(path=path, blob=blob))
            return FetchFilesResult(files=tuple(files), faults=tuple(faults))
