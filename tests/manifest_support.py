"""Running `fetch_manifest` and `deliver_outputs` without a server, and looking at what they made."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from temporalio.testing import ActivityEnvironment

from activities.governance.secrets import Secrets
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.store.port import ObjectStore
from activities.workspace.deliver import DeliverActivities
from activities.workspace.fetch import ManifestActivities
from activities.workspace.fetch_report import RECORDS, SourceRecord
from activities.workspace.read import read_file
from activities.workspace.snapshots import SnapshotStore
from activities.workspace.sources.git_access import GitReach
from activities.workspace.tree import FILE, Directory, walk
from contracts.agent import AgentSpec
from contracts.blob import BlobRef
from contracts.prepare import (
    DeliverOutputsInput,
    DeliverOutputsResult,
    FetchManifestInput,
    FetchManifestResult,
    ResolvedAgent,
)


@dataclass
class Desk:
    """A tools worker's things in one directory: store, roots, secrets, spool."""

    home: Path
    objects: ObjectStore | None = None
    roots: list[Path] = field(default_factory=list)
    beats: list[Any] = field(default_factory=list)
    git_reach: GitReach | None = None

    def __post_init__(self) -> None:
        self.blobs = BlobStore(self.objects or LocalStore(self.home / "store"))
        self.secrets = self.home / "secrets"
        self.secrets.mkdir(exist_ok=True)
        self.spool = self.home / "spool"

    def secret(self, name: str, value: object) -> str:
        """Write a secret down, and return its name."""
        path = self.secrets / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        path.chmod(0o600)
        return name

    async def agent(self, manifest: dict[str, Any], **fields: Any) -> BlobRef:
        """Store a resolved agent with this manifest."""
        spec = AgentSpec.model_validate({"manifest": manifest, **fields})
        return await self.blobs.put_json(ResolvedAgent(spec=spec, model="m", instructions="").model_dump(mode="json"))

    async def fetch(self, manifest: dict[str, Any], run_id: str = "run", **fields: Any) -> FetchManifestResult:
        """Fetch a manifest."""
        activities = ManifestActivities(self.blobs, self.roots, Secrets(self.secrets), self.spool, self.git_reach)
        given = FetchManifestInput(run_id=run_id, chain="chain", agent=await self.agent(manifest, **fields))
        environment = ActivityEnvironment()
        environment.on_heartbeat = lambda *details: self.beats.append(details)
        result: FetchManifestResult = await environment.run(activities.fetch_manifest, given)
        return result

    async def entries(self, **entries: dict[str, Any]) -> dict[str, bytes | None]:
        """Fetch entries, and return the tree that they made."""
        return await self.tree(await self.fetch({"entries": entries}))

    async def tree(self, result: FetchManifestResult) -> dict[str, bytes | None]:
        """Every path of a snapshot, with its content; None for a directory."""
        found: dict[str, bytes | None] = {}
        for path, entry in walk(await self.root(result)):
            name = path.decode("utf-8", "surrogateescape")
            if isinstance(entry, Directory):
                found[name] = None
            elif entry.kind == FILE:
                found[name] = b"".join([data async for data in read_file(self.blobs, entry)])
            else:
                found[name] = b"-> " + entry.target
        return found

    async def modes(self, result: FetchManifestResult) -> dict[str, int]:
        """The mode of everything."""
        return {path.decode(): entry.mode for path, entry in walk(await self.root(result))}

    async def root(self, result: FetchManifestResult) -> Directory:
        """The tree."""
        return (await SnapshotStore(self.blobs).load(result.snapshot)).root

    async def sources(self, result: FetchManifestResult) -> dict[str, SourceRecord]:
        """The provenance by entry."""
        assert result.sources is not None
        records = RECORDS.validate_python(json.loads(await self.blobs.get(result.sources)))
        return {record.entry: record for record in records}

    def spooled(self) -> list[Path]:
        """What lies in the spool directory."""
        return sorted(self.spool.iterdir()) if self.spool.exists() else []

    async def index(self, files: dict[str, bytes]) -> BlobRef:
        """Store artifacts by path, and return their index."""
        items: list[JsonValue] = [
            {
                "path": path,
                "blob": (await self.blobs.put(data)).model_dump(),
                "media_type": "application/octet-stream",
                "mode": 0o644,
            }
            for path, data in files.items()
        ]
        return await self.blobs.put_json(items)

    async def deliver(self, index: BlobRef, *outputs: dict[str, Any], run_id: str = "run") -> DeliverOutputsResult:
        """Deliver artifacts."""
        given = DeliverOutputsInput.model_validate({"run_id": run_id, "artifacts": index, "outputs": outputs})
        activities = DeliverActivities(self.blobs, Secrets(self.secrets))
        result: DeliverOutputsResult = await ActivityEnvironment().run(activities.deliver_outputs, given)
        return result


def files_of(tree: dict[str, bytes | None]) -> dict[str, bytes]:
    """The files of a tree, without directories."""
    return {path: data for path, data in tree.items() if data is not None}
