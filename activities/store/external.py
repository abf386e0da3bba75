"""Temporal's external storage over the object store: the safety net that keeps a large payload from ending a run.

Source of the driver contract: `temporalio.converter.StorageDriver` (experimental in temporalio 1.35).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from temporalio.api.common.v1 import Payload
from temporalio.converter import (
    StorageDriver,
    StorageDriverClaim,
    StorageDriverRetrieveContext,
    StorageDriverStoreContext,
)

from activities.store.blobs import BlobStore
from contracts.blob import BlobRef


class BlobStorageDriver(StorageDriver):
    """Keeps payloads over the threshold as blobs; history holds their digest."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    def name(self) -> str:
        """The name that histories refer to; it must never change."""
        return "caisson.blobs"

    async def store(self, context: StorageDriverStoreContext, payloads: Sequence[Payload]) -> list[StorageDriverClaim]:
        """Store each payload as a blob."""
        refs = await asyncio.gather(*(self._blobs.put(payload.SerializeToString()) for payload in payloads))
        return [StorageDriverClaim(claim_data={"digest": ref.digest, "size": str(ref.size)}) for ref in refs]

    async def retrieve(self, context: StorageDriverRetrieveContext, claims: Sequence[StorageDriverClaim]) -> list[Payload]:
        """Read each payload back, verified."""
        refs = [BlobRef(digest=claim.claim_data["digest"], size=int(claim.claim_data["size"])) for claim in claims]
        return [Payload.FromString(data) for data in await self._blobs.get_many(refs)]
