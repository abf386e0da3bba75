"""Blobs (bytes named by their SHA-256), records (small JSON under a chosen name) and text of any size."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

from pydantic import JsonValue

from activities.store.guard import WriteGuard
from activities.store.port import ObjectDamaged, ObjectExists, ObjectMissing, ObjectStore
from contracts.base import canonical_json, sha256_hex
from contracts.blob import INLINE_LIMIT, BlobRef, Text, preview_of, whole_characters

BLOBS, RECORDS, STAGING, PAYLOADS = "blobs", "records", "staging", "payloads"
"""The areas of the store. In that of payloads are blobs that only Temporal's histories name."""

_REFERENCE_WORTHY = 256
"""Text up to this many bytes is cheaper to repeat in history than to reference."""


class BlobStore:
    """The store as Caisson uses it: blobs are written before they are referenced, verified on read, never overwritten."""

    def __init__(self, objects: ObjectStore, area: str = BLOBS) -> None:
        self.objects = objects
        self._area = area
        self._guard = WriteGuard(objects)

    async def put(self, data: bytes) -> BlobRef:
        """Store bytes and return their name. Storing what is there already writes nothing, unless a sweep might remove it."""
        ref = BlobRef(digest=sha256_hex(data), size=len(data))
        await self.put_as(ref, data)
        return ref

    async def put_as(self, ref: BlobRef, data: bytes) -> None:
        """Store bytes whose name the caller has made of them already, in a thread of its own."""
        if not await self._is_fresh(ref):
            await self._write(ref, data)

    async def put_surely(self, ref: BlobRef, data: bytes) -> None:
        """Store bytes as `put_as` does, but do not trust what is there already: read it, and write it again if it is damaged.

        For what other blobs will lean on for long, and what is hardly ever there before.
        """
        if await self._is_fresh(ref):
            with suppress(ObjectDamaged, ObjectMissing):
                await self.get(ref)
                return
        await self._write(ref, data)

    async def put_chunks(self, staging: str, chunks: AsyncIterator[bytes]) -> BlobRef:
        """Store a stream in bounded memory. `staging` is a name no one else uses meanwhile.

        A digest is known only at the end, so the bytes are staged first and copied to their name then.
        """
        digest, size = hashlib.sha256(), 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal size
            async for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                yield chunk

        key = f"{STAGING}/{sha256_hex(staging.encode())}"
        await self.objects.put_stream(key, counted())
        ref = BlobRef(digest=digest.hexdigest(), size=size)
        if not await self._is_fresh(ref):
            target = self._key(ref)
            await self._guard.write(target, lambda: self.objects.put_stream(target, self.objects.stream(key)))
        await self.objects.delete(key)
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        """Read a blob. Raises ObjectMissing, or ObjectDamaged when the bytes are not those that were named."""
        data = await self.objects.get(self._key(ref))
        if len(data) != ref.size or sha256_hex(data) != ref.digest:
            raise ObjectDamaged(f"blob {ref.digest}: {len(data)} bytes read do not have this digest; restore it from a copy")
        return data

    async def get_part(self, ref: BlobRef, offset: int, length: int) -> bytes:
        """Read some of a blob, unchecked: whoever asks knows the digest of what it reads. Raises ObjectMissing."""
        return await self.objects.get_range(self._key(ref), offset, length)

    async def get_many(self, refs: Iterable[BlobRef]) -> list[bytes]:
        """Read several blobs at once, in order."""
        return list(await asyncio.gather(*(self.get(ref) for ref in refs)))

    async def stream(self, ref: BlobRef) -> AsyncIterator[bytes]:
        """Read a blob in chunks. Raises ObjectDamaged after the last chunk when the bytes are not those that were named."""
        digest, size = hashlib.sha256(), 0
        async for chunk in self.objects.stream(self._key(ref)):
            digest.update(chunk)
            size += len(chunk)
            yield chunk
        if size != ref.size or digest.hexdigest() != ref.digest:
            raise ObjectDamaged(f"blob {ref.digest}: {size} bytes read do not have this digest; restore it from a copy")

    async def put_json(self, value: JsonValue) -> BlobRef:
        """Store a JSON value in its canonical form."""
        return await self.put(canonical_json(value))

    async def put_text(self, text: str, inline_limit: int = INLINE_LIMIT) -> Text:
        """Hold text of any size: inline up to `inline_limit` bytes, stored when a later reader may want it by reference."""
        text = whole_characters(text)
        data = text.encode()
        if len(data) <= _REFERENCE_WORTHY:
            return Text(inline=text)
        ref = await self.put(data)
        if len(data) <= inline_limit:
            return Text(inline=text, blob=ref)
        return Text(blob=ref, preview=preview_of(text))

    async def get_text(self, text: Text) -> str:
        """Return the whole text."""
        if text.inline is not None:
            return text.inline
        if text.blob is None:
            return text.preview
        return (await self.get(text.blob)).decode("utf-8", "replace")

    async def put_record(self, name: str, value: JsonValue) -> JsonValue:
        """Store JSON under a name of one's own, once: the first value written stays, and is what is returned.

        Two attempts of one activity that both come this far therefore go on with the same value.
        """
        try:
            await self.objects.put(_record_key(name), canonical_json(value), create_only=True)
        except ObjectExists:
            stored: JsonValue = json.loads(await self.objects.get(_record_key(name)))
            return stored
        return value

    async def get_record(self, name: str) -> JsonValue:
        """Return the record of this name, or None when there is none."""
        try:
            value: JsonValue = json.loads(await self.objects.get(_record_key(name)))
        except ObjectMissing:
            return None
        return value

    async def _is_fresh(self, ref: BlobRef) -> bool:
        return await self._guard.has_fresh(self._key(ref), ref.size)

    async def _write(self, ref: BlobRef, data: bytes) -> None:
        key = self._key(ref)
        await self._guard.write(key, lambda: self.objects.put(key, data))

    def _key(self, ref: BlobRef) -> str:
        return blob_key(ref.digest, self._area)


def blob_key(digest: str, area: str = BLOBS) -> str:
    """Return the key of a blob."""
    return f"{area}/{digest[:2]}/{digest}"


def _record_key(name: str) -> str:
    # Names hold run ids, which people choose freely; their digest is a safe key of fixed length.
    digest = sha256_hex(name.encode())
    return f"{RECORDS}/{digest[:2]}/{digest}"
