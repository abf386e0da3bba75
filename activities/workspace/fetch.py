"""The harness's half of materialising a manifest: reading what it names into the store, as the snapshot of a workspace.

The sandbox worker only ever sees the resulting snapshot, so no source's credential or path comes near model-written code. Every
entry is listed, and everything that can be refused is refused, before anything is fetched.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import JsonValue
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.agents import AgentReader
from activities.governance.egress_policy import matches
from activities.governance.secrets import Secrets
from activities.heartbeat import Beat, beating
from activities.store.blobs import BlobStore
from activities.tools.guidance import read_guidance
from activities.workspace.fetch_report import (
    SourceFile,
    SourceRecord,
    check_pinned,
    listing,
    put_records,
    read_pins,
    source_of,
)
from activities.workspace.fetch_save import Fetching, owner_of
from activities.workspace.fetch_spool import RunSpool, Spool, identity_of
from activities.workspace.fetch_tree import Alike, TreeBuilder, check_name, naming
from activities.workspace.names import readable
from activities.workspace.sources.bucket import BucketFiles, open_bucket
from activities.workspace.sources.inline import InlineSource, in_memory
from activities.workspace.sources.local import LocalSource
from activities.workspace.sources.port import Found, Source
from activities.workspace.sources.select import Selection
from activities.workspace.sources.snapshot import SnapshotSource
from activities.workspace.tree import Entry
from contracts.activity_names import FETCH_MANIFEST, ErrorType
from contracts.agent import AgentSpec
from contracts.base import BadInput, canonical_json, contract_digest, sha256_hex
from contracts.manifest import BucketEntry, GitEntry, InlineEntry, LocalEntry, ManifestEntry, SnapshotEntry
from contracts.prepare import FetchManifestInput, FetchManifestResult
from contracts.snapshot import SnapshotRef

if TYPE_CHECKING:
    from activities.workspace.sources.git_access import GitReach

MOST_LISTED = 500_000
"""What a source may list for an entry with patterns, of which most may be left out."""
LAZY_NAMES = ".caisson-lazy.json"


class ManifestActivities:
    """Reads manifest sources. Local ones only below the allowed roots. `spool` is where large objects lie meanwhile."""

    def __init__(
        self,
        blobs: BlobStore,
        roots: Sequence[Path],
        secrets: Secrets | None = None,
        spool: Path | None = None,
        git_reach: GitReach | None = None,
    ) -> None:
        self._blobs = blobs
        self._roots = [root.resolve() for root in roots]
        self._agents = AgentReader(blobs)
        self._secrets = secrets or Secrets(None)
        self._spool = Spool(spool)
        self._git_reach = git_reach

    @activity.defn(name=FETCH_MANIFEST.name)
    async def fetch_manifest(self, given: FetchManifestInput) -> FetchManifestResult:
        """Store everything the manifest names. Raises ApplicationError `BadInput` naming entry, reason and remedy."""
        async with beating() as beat:
            spec = (await self._agents.get(given.agent)).spec
            owner = owner_of(given.run_id, given.chain)
            try:
                spool = self._spool.of(owner)
                attempt = _Attempt(self._blobs, spec, self._open_source, spool, beat)
                try:
                    result = await attempt.run(owner)
                except BadInput:
                    spool.clear()
                    raise
            except BadInput as error:
                raise ApplicationError(readable(str(error)), type=ErrorType.BAD_INPUT, non_retryable=True) from None
            spool.clear()
            return result

    def _open_source(self, place: str, entry: ManifestEntry, spool: RunSpool, pin: str) -> Source:
        match entry:
            case InlineEntry():
                return InlineSource(entry)
            case LocalEntry():
                return LocalSource(entry, self._roots)
            case SnapshotEntry():
                return SnapshotSource(entry, name_of(place, entry), self._blobs, spool)
            case BucketEntry():
                return BucketFiles(entry, name_of(place, entry), partial(open_bucket, entry, self._secrets), spool)
            case GitEntry():
                # What it needs is only imported where it is used.
                from activities.workspace.sources.git import GitSource

                secret = None if entry.secret is None else self._secrets.text(entry.secret)
                wanted = Selection(entry.include, entry.exclude)
                return GitSource(
                    entry,
                    secret,
                    spool.folder(),
                    reach=self._git_reach,
                    expected=pin,
                    is_wanted=lambda path: wanted.takes(path, is_directory=False),
                )


def name_of(place: str, entry: ManifestEntry) -> str:
    """Return what tells an entry from all others of a run, and from itself in another form."""
    return f"{place}\0{contract_digest(entry)}"


Opens = Callable[[str, ManifestEntry, RunSpool, str], Source]
"""Opens an entry's source: of its place, the entry, where it may leave large objects, and what it is pinned to."""


class _Attempt:
    """One attempt at a manifest."""

    def __init__(self, blobs: BlobStore, spec: AgentSpec, opens: Opens, spool: RunSpool, beat: Beat) -> None:
        self._blobs = blobs
        self._spec = spec
        self._manifest = spec.manifest
        self._hosts = spec.sandbox.network.allow
        self._opens = opens
        self._spool = spool
        self._beat = beat
        self._tree = TreeBuilder(spec.manifest.limits)
        self._sources: list[Source] = []
        self._records: list[tuple[SourceRecord, list[Entry | None]]] = []
        self._lazy: dict[str, JsonValue] = {}

    async def run(self, owner: str) -> FetchManifestResult:
        entries = sorted(self._manifest.entries.items())
        try:
            pins = await read_pins(self._blobs, self._manifest.pins, [place for place, _ in entries])
            for place, entry in entries:
                self._beat.details = {"entry": place, "listing": True}
                with naming(place):
                    source = self._opens(place, entry, self._spool, "" if pins is None else pins[place].pin)
                    self._sources.append(source)
                    found = await source.find(self._most(entry))
                self._beat.details = {"entry": place, "listed": len(found)}
                await self._plan(place, entry, source, found)
                if pins is not None:
                    check_pinned(pins[place], self._records[-1][0])
            snapshot = await Fetching(self._blobs, owner, self._spool, self._beat).run(self._tree)
            records = [_with_digests(record, files) for record, files in self._records]
            records = [_with_notes(record, source) for record, source in zip(records, self._sources, strict=True)]
            for record in records if pins is not None else ():
                check_pinned(pins[record.entry], record)  # type: ignore[index]
            return await self._result(snapshot, records)
        finally:
            self._spool.stopped.set()
            await asyncio.gather(*(source.close() for source in self._sources))

    async def _result(self, snapshot: SnapshotRef, records: list[SourceRecord]) -> FetchManifestResult:
        guidance, found = await read_guidance(self._blobs, snapshot, self._spec)
        if found.missing:
            raise BadInput(
                f"skills: no directory {found.missing[0]!r} is among what the manifest brings; correct the path, or add an entry "
                f"that fills it (there: {', '.join(sorted(self._manifest.entries)[:20])})"
            )
        return FetchManifestResult(
            snapshot=snapshot,
            sources=await put_records(self._blobs, records),
            listing=listing(records, self._manifest.entries),
            lazy=await self._blobs.put_json(self._lazy) if self._lazy else None,
            guidance=guidance,
        )

    def _most(self, entry: ManifestEntry) -> int:
        if isinstance(entry, InlineEntry):
            return 1
        # One that is found to have more files than its own limit is told how many, if that is within reason.
        return MOST_LISTED if entry.include or entry.exclude else self._manifest.limits.max_files

    async def _plan(self, place: str, entry: ManifestEntry, source: Source, found: list[Found]) -> None:
        """Check everything that an entry brings, and put it into the tree."""
        if not isinstance(entry, InlineEntry):
            selection = Selection(entry.include, entry.exclude)
            found = [item for item in found if selection.takes(item.path or item.file_name, is_directory=item.is_directory)]
        files = [item for item in found if not item.is_directory]
        if not files and not isinstance(entry, InlineEntry) and (entry.include or not found):
            raise BadInput(f"manifest.entries.{place}: include and exclude leave no file; correct the patterns")
        mode = str(entry.mode) if isinstance(entry, BucketEntry) and entry.mode in ("lazy", "presigned") else "copy"
        if mode == "lazy":
            # The place is the directory of the list, so that the one object of a whole key lies in it by its own name.
            found = [dataclasses.replace(item, path=item.path or item.file_name) for item in files]
            files = found
        alike = Alike()
        for item in found:
            check_name(place, item, is_key=isinstance(entry, BucketEntry))
            alike.look(item.path)
        self._tree.check_limits(place, entry, files, contents=mode == "copy")
        planned: list[Entry | None] = [None] * len(files)
        if mode == "copy":
            planned = self._copy(place, entry, source, found)
        elif mode == "lazy":
            self._name_only(place, entry, files)
        elif isinstance(source, BucketFiles):
            await self._sign(place, entry, source, files)
        record = SourceRecord(
            entry=place,
            type=entry.type,
            source=source_of(entry),
            pin=source.pin(),
            mode=mode,
            files=tuple(map(_listed, files)),
            notes=tuple(alike.notes),
        )
        self._records.append((record, planned))

    def _copy(self, place: str, entry: ManifestEntry, source: Source, found: list[Found]) -> list[Entry | None]:
        entries: list[Entry | None] = []
        is_remote = isinstance(source, (BucketFiles, SnapshotSource))
        name = name_of(place, entry)
        for item in found:
            planned = self._tree.add(place, entry, item)
            if planned is not None:
                planned.is_remote = is_remote
                planned.identity = identity_of(name, item.name, item.version) if item.version else ""
            if not item.is_directory:
                entries.append(planned.entry if planned is not None else None)
        return entries

    def _name_only(self, place: str, entry: ManifestEntry, files: list[Found]) -> None:
        names = canonical_json([{"path": item.path, "size": item.size} for item in files])
        self._generated(place, entry, LAZY_NAMES, names)
        # They must all have room beside each other and the list, though none of them is there yet.
        there = TreeBuilder(self._manifest.limits)
        for item in (Found(LAZY_NAMES, LAZY_NAMES, open=lambda: in_memory(names)), *files):
            there.add(place, entry, item)
        self._lazy[place] = {item.path: [item.name, item.version, item.size] for item in files}

    async def _sign(self, place: str, entry: ManifestEntry, source: BucketFiles, files: list[Found]) -> None:
        if len(files) != 1:
            raise BadInput(
                f"manifest.entries.{place}: presigned is for exactly one object, and there are {len(files)}; "
                "name the object's whole key in prefix, or select it with include"
            )
        with naming(place):
            url = await source.presign(files[0])
        host = urlsplit(url).hostname or ""
        if not any(matches(pattern, host) for pattern in self._hosts):
            raise BadInput(
                f"manifest.entries.{place}: the URL is of host {host}, which the sandbox may not reach; "
                f"add {host} to sandbox.network.allow, or take mode: copy"
            )
        self._generated(f"{place}.url", entry, "", url.encode() + b"\n")

    def _generated(self, place: str, entry: ManifestEntry, path: str, data: bytes) -> None:
        found = Found(path, path or place, size=len(data), open=lambda: in_memory(data))
        self._tree.add(place, entry, found)


def _listed(found: Found) -> SourceFile:
    # A link is its text.
    sha256 = sha256_hex(found.target) if found.target is not None else ""
    return SourceFile(path=found.path, name=found.name, version=found.version, size=found.size, sha256=sha256)


def _with_digests(record: SourceRecord, files: list[Entry | None]) -> SourceRecord:
    """Add the digests of what was fetched."""
    known = tuple(
        file if entry is None else file.model_copy(update={"sha256": entry.digest.hex()})
        for file, entry in zip(record.files, files, strict=True)
    )
    return record.model_copy(update={"files": known})


def _with_notes(record: SourceRecord, source: Source) -> SourceRecord:
    """Add what a source has to say of what it gave, if it has."""
    notes: Callable[[], list[str]] = getattr(source, "notes", list)
    return record.model_copy(update={"notes": (*record.notes, *notes())})
