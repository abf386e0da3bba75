"""Delivering a run's artifacts to where its outputs say: every one of them, or a list of what is missing.

An object that is there already with the very same content counts as delivered, so that a retry after a crash, at whatever point,
ends as if nothing had happened. Anything else that is there stays, unless the target says `overwrite`. Only when all is there is
`_caisson.json` written, by which whoever picks the outputs up knows that they are whole.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.governance.secrets import Secrets
from activities.heartbeat import Beat, beating
from activities.store.blobs import BlobStore
from activities.store.port import ObjectExists, StoreError, StoreUnavailable
from activities.store.source import SourceBucket, SourceObject
from activities.threads import to_end
from activities.workspace.sources.bucket import open_bucket, place_of, told
from contracts.activity_names import DELIVER_OUTPUTS, ErrorType
from contracts.base import BadInput, canonical_json
from contracts.blob import BlobRef
from contracts.manifest import BucketTarget, OutputSpec
from contracts.prepare import DeliverOutputsInput, DeliverOutputsResult
from contracts.run import Artifact

SEAL = "_caisson.json"
_SMALL = 1 << 20
"""Up to this size 16 are uploaded at a time, and 4 of the larger ones, which hold up to three pieces of 8 MiB each."""
_FIRST = 50


@dataclass
class _Destination:
    """One place, and what belongs there by its whole key. Outputs of one target are one destination."""

    target: BucketTarget
    prefix: str
    wanted: dict[str, Artifact] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    delivered: int = 0
    bytes: int = 0

    @property
    def name(self) -> str:
        return place_of(self.target.model_copy(update={"prefix": self.prefix}))

    def miss(self, key: str, reason: str) -> None:
        self.missing.append(f"{self.name}: {key!r}: {reason}")


class DeliverActivities:
    """Uploads artifacts."""

    def __init__(self, blobs: BlobStore, secrets: Secrets) -> None:
        self._blobs = blobs
        self._secrets = secrets

    @activity.defn(name=DELIVER_OUTPUTS.name)
    async def deliver_outputs(self, given: DeliverOutputsInput) -> DeliverOutputsResult:
        """Bring every artifact below an output that has a `to` to its destination.

        What a destination refuses is told in the result. Raises StoreUnavailable for what may go well at another time.
        """
        async with beating() as beat:
            artifacts = [Artifact.model_validate(item) for item in json.loads(await self._blobs.get(given.artifacts))]
            try:
                destinations = _destinations(given.run_id, given.outputs, artifacts)
            except BadInput as error:
                raise ApplicationError(str(error), type=ErrorType.BAD_INPUT, non_retryable=True) from None
            for destination in destinations:
                await self._deliver(given.run_id, destination, beat)
            missing = [told for destination in destinations for told in destination.missing]
            return DeliverOutputsResult(
                complete=not missing,
                delivered=sum(destination.delivered for destination in destinations),
                total_bytes=sum(destination.bytes for destination in destinations),
                destinations=tuple(destination.name for destination in destinations if not destination.missing),
                missing=tuple(missing[:_FIRST]),
                missing_count=len(missing),
            )

    async def _deliver(self, run_id: str, destination: _Destination, beat: Beat) -> None:
        try:
            bucket = await to_end(
                open_bucket, destination.target, self._secrets, destination.prefix, undo=lambda bucket: bucket.close()
            )
        except BadInput as error:
            destination.missing += [f"{destination.name}: {str(error).lstrip('.')}"]
            return
        try:
            await _Delivery(self._blobs, bucket, destination, beat).run(run_id)
        except BadInput as error:
            # The whole place refuses: what is there already is not known.
            destination.missing += [f"{destination.name}: {error}"]
        finally:
            await asyncio.to_thread(bucket.close)


class _Delivery:
    """To one destination."""

    def __init__(self, blobs: BlobStore, bucket: SourceBucket, destination: _Destination, beat: Beat) -> None:
        self._blobs = blobs
        self._bucket = bucket
        self._to = destination
        self._beat = beat
        self._there: dict[str, SourceObject] = {}
        self._small, self._large = asyncio.Semaphore(16), asyncio.Semaphore(4)
        self._is_failing = False

    async def run(self, run_id: str) -> None:
        """Deliver everything, then the seal. Raises BadInput when the place itself refuses, and StoreUnavailable."""
        to = self._to
        seal, sealed = self._key(SEAL), _seal(run_id, to)
        with told(to.target):
            # Listed even when it is replaced: a bucket that is wrong is better found before than after an hour of uploads.
            async for info in self._bucket.list(_below(to.prefix, "")):
                if info.key in to.wanted or info.key == seal:
                    self._there[info.key] = info
        if not to.target.overwrite and await self._is_another(
            seal, BlobRef(digest=hashlib.sha256(sealed).hexdigest(), size=len(sealed))
        ):
            to.miss(seal, "another delivery is there; give each run a prefix of its own with {run_id}, or say overwrite: true")
            return
        if seal in self._there and to.target.overwrite:
            # Of what is about to be replaced: nobody may take the mixture for whole.
            await self._put(seal, _seal(run_id, None))
        done = await asyncio.gather(*(self._one(*item) for item in sorted(to.wanted.items())), return_exceptions=True)
        fault = next((fault for fault in done if fault is not None), None)
        if fault is not None:
            raise fault
        if not to.missing:
            await self._put(seal, sealed)

    async def _one(self, key: str, artifact: Artifact) -> None:
        async with self._small if artifact.blob.size <= _SMALL else self._large:
            if self._is_failing:
                return
            try:
                is_there = key in self._there and not await self._is_another(key, artifact.blob)
                if not is_there:
                    await self._upload(key, artifact)
            except BadInput as error:
                self._to.miss(key, str(error))
                return
            except BaseException:
                # What is under way is brought to its end, since the next attempt need not do it again; nothing else is begun.
                self._is_failing = True
                raise
            self._to.delivered += 1
            self._to.bytes += artifact.blob.size
            self._beat.details = {"delivered": self._to.delivered, "of": len(self._to.wanted), "to": self._to.name}

    async def _upload(self, key: str, artifact: Artifact) -> None:
        overwrite = self._to.target.overwrite
        if key in self._there and not overwrite:
            raise BadInput(
                "an object with other content is there; give each run its own prefix with {run_id}, or say overwrite: true"
            )
        with told(self._to.target):
            try:
                await self._bucket.upload(key, self._content(artifact), overwrite=overwrite)
            except ObjectExists:
                # Written since the listing: by another attempt of this activity, most likely.
                async for info in self._bucket.list(key):
                    if info.key == key:
                        self._there[key] = info
                if key not in self._there or await self._is_another(key, artifact.blob):
                    raise BadInput(
                        "an object with other content appeared there meanwhile; give each run its own prefix"
                    ) from None

    async def _put(self, key: str, data: bytes) -> None:
        async def chunks() -> AsyncIterator[bytes]:
            yield data

        with told(self._to.target):
            try:
                await self._bucket.upload(key, chunks(), overwrite=self._to.target.overwrite)
            except ObjectExists:
                if key not in self._there:
                    raise StoreUnavailable(f"{self._to.name}: {key!r} appeared there meanwhile; try again") from None

    async def _content(self, artifact: Artifact) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._blobs.stream(artifact.blob):
                yield chunk
        except StoreUnavailable:
            raise
        except StoreError as error:
            raise BadInput(f"the artifact {artifact.path!r} cannot be read from the run's store: {error}") from error

    async def _is_another(self, key: str, blob: BlobRef) -> bool:
        """Whether an object of other content than a blob's is there. It is read if sizes are equal: no store keeps a SHA-256."""
        info = self._there.get(key)
        if info is None:
            return False
        if info.size != blob.size:
            return True
        digest = hashlib.sha256()
        with told(self._to.target):
            async for piece in self._bucket.stream(key, info.version):
                await asyncio.to_thread(digest.update, piece)
        return digest.hexdigest() != blob.digest

    def _key(self, name: str) -> str:
        return _below(self._to.prefix, name)


def _destinations(run_id: str, outputs: Sequence[OutputSpec], artifacts: Sequence[Artifact]) -> list[_Destination]:
    """Work out every key. Raises BadInput when two artifacts would become one object."""
    found: dict[str, _Destination] = {}
    for output in outputs:
        if output.to is None:
            continue
        prefix = output.to.prefix.replace("{run_id}", safe_run_id(run_id))
        target = output.to.model_copy(update={"prefix": prefix})
        destination = found.setdefault(target.model_dump_json(), _Destination(output.to, prefix))
        for artifact in artifacts:
            if artifact.path != output.path and not artifact.path.startswith(output.path + "/"):
                continue
            name = artifact.path.removeprefix(output.path).removeprefix("/") or artifact.path.rpartition("/")[2]
            key = _below(prefix, name)
            other = destination.wanted.setdefault(key, artifact)
            if other.path != artifact.path or name == SEAL:
                what = "the record of the delivery" if name == SEAL else repr(other.path)
                raise BadInput(
                    f"manifest.outputs: {artifact.path!r} and {what} would both become {key!r} in {destination.name}; "
                    "give their outputs different prefixes"
                )
    return list(found.values())


def safe_run_id(run_id: str) -> str:
    """Return a run id as a part of a key; what `{run_id}` of a prefix stands for. Never '.' or '..', which no key may have."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", run_id)
    return safe if safe.strip(".") else "_" * len(safe)


def _below(prefix: str, name: str) -> str:
    return f"{prefix}{name}" if not prefix or prefix.endswith("/") else f"{prefix}/{name}"


def _seal(run_id: str, to: _Destination | None) -> bytes:
    """The same bytes whenever it is the same run with the same artifacts. Without a destination: that it is being written."""
    wanted = {} if to is None else to.wanted
    objects = [
        {"key": key, "path": artifact.path, "size": artifact.blob.size, "sha256": artifact.blob.digest}
        for key, artifact in sorted(wanted.items())
    ]
    return canonical_json({"run_id": run_id, "complete": to is not None, "objects": objects}) + b"\n"
