"""Files of `lazy` entries: their content, one at a time, when the model asks for it."""

from __future__ import annotations

import asyncio
import json
import secrets as tokens
from collections.abc import AsyncIterator, Mapping
from typing import Any

from activities.governance.secrets import Secrets
from activities.store.blobs import BlobStore
from activities.threads import to_end
from activities.workspace.sources.bucket import open_bucket, told
from activities.workspace.sources.port import SourceChanged
from contracts.base import BadInput
from contracts.blob import BlobRef
from contracts.manifest import BucketEntry, ManifestEntry


async def fetch_lazy(
    blobs: BlobStore, secrets: Secrets, entries: Mapping[str, ManifestEntry], lazy: BlobRef, path: str
) -> BlobRef:
    """Return the content of one file of a `lazy` entry, exactly as it was listed. `path` is its place in the workspace.

    Blocks of at most some MiB are in memory. Raises BadInput in words for whoever asked, and StoreUnavailable.
    """
    listed: dict[str, Any] = json.loads(await blobs.get(lazy))
    place = next((place for place in listed if path == place or path.startswith(place + "/")), None)
    entry = entries.get(place) if place is not None else None
    if place is None or not isinstance(entry, BucketEntry):
        raise BadInput(
            f"{path!r} is not below an entry whose content is fetched one by one; there are: {', '.join(listed) or 'none'}"
        )
    found = listed[place].get(path[len(place) + 1 :])
    if found is None:
        raise BadInput(f"{path!r} is not in {place}/.caisson-lazy.json; that file lists the paths there are")
    key, version, size = found
    with told(entry):
        bucket = await to_end(open_bucket, entry, secrets, undo=lambda bucket: bucket.close())
    read = 0

    async def counted() -> AsyncIterator[bytes]:
        nonlocal read
        with told(entry):
            async for piece in bucket.stream(key, version):
                read += len(piece)
                if read > size:
                    break
                yield piece
        if read != size:
            raise SourceChanged(f"{path!r} has {read} bytes and not the {size} that were listed")

    try:
        return await blobs.put_chunks(f"lazy/{tokens.token_hex(16)}", counted())
    finally:
        await asyncio.to_thread(bucket.close)
