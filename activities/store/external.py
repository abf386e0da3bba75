"""Temporal's external storage over the object store: the safety net that keeps a large payload from ending a run.

Which payloads are still needed only Temporal's histories tell, so they lie apart from the blobs that runs name.

Source of the driver contract: `temporalio.converter.StorageDriver` (experimental in temporalio 1.35).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from temporalio.api.common.v1 import Payload
from temporalio.converter import (
    StorageDriver,
    StorageDriverClaim,
    StorageDriverRetrieveContext,
    StorageDriverStoreContext,
)

from activities.store.blobs import BLOBS, PAYLOADS, BlobStore
from contracts.blob import BlobRef


class BlobStorageDriver(StorageDriver):
    """Keeps payloads over the threshold in the store; history holds their digest."""

    def __init__(self, blobs: BlobStore) -> None:
        self._payloads = BlobStore(blobs.objects, PAYLOADS)
        self._areas = {PAYLOADS: self._payloads, BLOBS: blobs}

    def name(self) -> str:
        """The name that histories refer to; it must never change."""
        return "caisson.blobs"

    async def store(self, context: StorageDriverStoreContext, payloads: Sequence[Payload]) -> list[StorageDriverClaim]:
        """Store each payload."""
        refs = await asyncio.gather(*(self._payloads.put(payload.SerializeToString()) for payload in payloads))
        return [StorageDriverClaim(claim_data={"digest": ref.digest, "size": str(ref.size), "area": PAYLOADS}) for ref in refs]

    async def retrieve(self, context: StorageDriverRetrieveContext, claims: Sequence[StorageDriverClaim]) -> list[Payload]:
        """Read each payload back, verified. Claims of the first histories name no area: those payloads lie among the blobs."""
        return [Payload.FromString(data) for data in await asyncio.gather(*(self._get(claim.claim_data) for claim in claims))]

    async def _get(self, claim: Mapping[str, str]) -> bytes:
        return await self._areas[claim.get("area", BLOBS)].get(BlobRef(digest=claim["digest"], size=int(claim["size"])))
