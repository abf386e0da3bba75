"""A company's own bucket, as manifests read and write it: any key, one version at a time, nothing outside of the named prefix."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from activities.store.port import ObjectInfo, StoreError
from activities.store.remote import Bucket, Calls, check_seconds

SourceObject = ObjectInfo
"""What a listing says of one object. `key` is whole, as the bucket has it; `version` is an ETag or a generation."""


class SourceBucket(Protocol):
    """Objects by the keys their owner gave them: with spaces, in any script, or `dir/` markers of size 0. Keys are whole, never
    relative to the prefix. Raises the port's errors."""

    def list(self, prefix: str) -> AsyncIterator[SourceObject]:
        """List the objects whose keys start with `prefix`, in the service's order."""

    def stream(self, key: str, version: str, offset: int = 0) -> AsyncIterator[bytes]:
        """Read exactly this version from `offset`. Raises ObjectChanged when it is another now, ObjectMissing when it is gone."""

    async def upload(self, key: str, chunks: AsyncIterator[bytes], *, overwrite: bool) -> None:
        """Write a whole object in bounded memory. Raises ObjectExists when the key is taken and not to be overwritten."""

    async def presign(self, key: str, seconds: int) -> str:
        """Return a URL that reads this one object for `seconds`."""


class BucketSource:
    """SourceBucket on any service's bucket. Keys that do not start with `prefix`, as text, are refused."""

    def __init__(self, bucket: Bucket, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._calls = Calls(bucket)

    async def list(self, prefix: str) -> AsyncIterator[SourceObject]:
        """See SourceBucket."""
        self._inside(prefix)
        async for found in self._calls.list(prefix):
            yield found

    async def stream(self, key: str, version: str, offset: int = 0) -> AsyncIterator[bytes]:
        """See SourceBucket."""
        self._check(key)
        async for piece in self._calls.pieces(key, version, offset, None):
            yield piece

    async def upload(self, key: str, chunks: AsyncIterator[bytes], *, overwrite: bool) -> None:
        """See SourceBucket."""
        self._check(key)
        await self._calls.write(key, chunks, create_only=not overwrite)

    async def presign(self, key: str, seconds: int) -> str:
        """See SourceBucket."""
        self._check(key)
        check_seconds(seconds)
        return await self._calls.run(lambda: self._bucket.presign(key, seconds))

    def close(self) -> None:
        """Close the connections."""
        self._calls.close()

    def _inside(self, key: str) -> None:
        if not key.startswith(self._prefix):
            raise StoreError(f"{self._bucket.place}/{key}: outside of the prefix {self._prefix!r}; name a key below it")

    def _check(self, key: str) -> None:
        self._inside(key)
        # HTTP clients take `a/../b` for `b`, so such a key could name an object outside of the prefix.
        if not key or {".", ".."} & set(key.split("/")):
            raise StoreError(f"{self._bucket.place}/{key}: a key with . or .. for a part cannot be used; rename the object")
