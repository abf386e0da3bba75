"""What every store in a network shares: the port on top of a bucket, calls in threads, one retry, the prefix nothing can leave.

A service's own file implements `Bucket`, which blocks and knows any key; `RemoteStore` (here) makes the port of it, and
`BucketSource` (activities/store/source.py) what manifests read and write.

Retries: an SDK makes none. What can be repeated without harm is repeated here once, after a pause; Temporal does the rest. A put
with a condition is never repeated, because the second try would meet the first one's own object and call it somebody else's.
"""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import ModuleType
from typing import Protocol, TypeVar

from activities.store.port import ObjectChanged, ObjectInfo, ObjectMissing, StoreError, StoreUnavailable

PIECE = 8 << 20
"""Bytes of one request in a stream, either way: what a stream holds in memory, about three times over."""

THREADS = 16
"""Requests at a time in one store; its connection pool has as many."""

CONNECT_SECONDS, READ_SECONDS = 5, 60
_PAUSE = 0.3
_KEY = re.compile(r"^(?!.*(?:^|/)\.{1,2}(?:/|$))[A-Za-z0-9._=-]+(?:/[A-Za-z0-9._=-]+)*$")
T = TypeVar("T")


class Upload(Protocol):
    """An object being written in parts; a reader sees nothing of it before `finish`."""

    repeatable: bool
    """Whether `send` may be called again with the same part after it failed."""

    def send(self, part: bytes) -> None:
        """Send the next part, of PIECE bytes."""

    def finish(self, last: bytes) -> None:
        """Send the last part, of at most PIECE bytes, and make the object."""

    def abort(self) -> None:
        """Forget the parts. Never raises StoreError: what made the upload fail is what is to be told."""


class Bucket(Protocol):
    """One bucket (or container) of one service. Calls block, take any key, and raise the port's errors."""

    place: str
    """What people call it, such as s3://bucket: for messages."""

    def put(self, key: str, data: bytes, create_only: bool, if_version: str | None) -> None:
        """Write a whole object. Raises ObjectExists and ObjectChanged as the port's put does."""

    def read(self, key: str, offset: int, length: int | None, version: str | None) -> bytes:
        """Read from `offset`, nothing where the object has ended. Raises ObjectChanged when it is another version."""

    def head(self, key: str) -> ObjectInfo | None:
        """Tell what is known of an object."""

    def delete(self, key: str) -> None:
        """Remove an object, if there is one."""

    def page(self, prefix: str, token: str | None, limit: int | None) -> tuple[list[ObjectInfo], str | None]:
        """List a page of at most `limit` objects, perhaps none, and the token of the next one."""

    def presign(self, key: str, seconds: int) -> str:
        """Make a URL that reads this object."""

    def upload(self, key: str, create_only: bool) -> Upload:
        """Begin an object in parts."""

    def close(self) -> None:
        """Close the connections."""


class Calls:
    """A bucket's calls in threads, for asyncio."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")
        self._seen = False

    async def run(self, work: Callable[[], T], *, again: bool = True) -> T:
        """Run one blocking call, and once more after StoreUnavailable where `again` allows."""
        try:
            return await self._once(work)
        except StoreUnavailable:
            if not again:
                raise
        await asyncio.sleep(_PAUSE)
        return await self._once(work)

    async def head(self, key: str) -> ObjectInfo | None:
        """Tell what is known of an object. Raises StoreDenied where it is the bucket that is missing."""
        found = await self.run(lambda: self.bucket.head(key))
        if found is None:
            await self.check()
        return found

    async def check(self) -> None:
        """Raise StoreDenied when there is no such bucket: an answer of 'not found' often does not tell what was not found."""
        if not self._seen:
            await self.run(lambda: self.bucket.page("", None, 1))
            self._seen = True

    async def pieces(self, key: str, version: str, offset: int, size: int | None) -> AsyncIterator[bytes]:
        """Read one version in pieces, to its end, which is at `size` where that is known."""
        while size is None or offset < size:
            piece = await self.run(lambda at=offset: self.bucket.read(key, at, PIECE, version))  # type: ignore[misc]
            if piece:
                yield piece
            offset += len(piece)
            if len(piece) < PIECE:
                break
        if size is not None and offset < size:
            raise StoreUnavailable(f"{self.bucket.place}/{key}: ended after {offset} of {size} bytes; try again")

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """List all objects, page by page. Raises StoreError when the listing goes in a circle."""
        token, seen = None, set[str]()
        while True:
            page, token = await self.run(lambda after=token: self.bucket.page(prefix, after, None))  # type: ignore[misc]
            for found in page:
                yield found
            if token is None:
                return
            if token in seen:
                raise StoreError(
                    f"{self.bucket.place}/{prefix}: the listing gave one continuation token twice; report it to the store"
                )
            seen.add(token)

    async def write(self, key: str, chunks: AsyncIterator[bytes], create_only: bool) -> None:
        """Write a stream as one object, in bounded memory; nothing is left of it when it fails or is cancelled."""
        held, upload, sending = bytearray(), None, None
        try:
            async for chunk in chunks:
                for start in range(0, len(chunk), PIECE):
                    held += chunk[start : start + PIECE]
                    # A whole piece is kept back, so that the last part is never empty.
                    while len(held) > PIECE:
                        if upload is None:
                            upload = await self.run(lambda: self.bucket.upload(key, create_only))
                        part = bytes(memoryview(held)[:PIECE])
                        del held[:PIECE]
                        sending = self._threads.submit(_send, upload, part)
                        await asyncio.wrap_future(sending)
            last = bytes(held)
            if upload is None:
                await self.run(lambda: self.bucket.put(key, last, create_only, None), again=not create_only)
                return
            sending = self._threads.submit(upload.finish, last)
            await asyncio.wrap_future(sending)
        except BaseException:
            # Also when cancelled. A part still on its way would be left behind by an abort that overtakes it.
            if upload is not None:
                await asyncio.wrap_future(self._threads.submit(_abort, upload, sending))
            raise

    def close(self) -> None:
        """Wait for the calls under way and close the connections."""
        self._threads.shutdown()
        self.bucket.close()

    async def _once(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _send(upload: Upload, part: bytes) -> None:
    try:
        upload.send(part)
    except StoreUnavailable:
        if not upload.repeatable:
            raise
        upload.send(part)


def _abort(upload: Upload, sending: Future[None] | None) -> None:
    if sending is not None:
        wait([sending])
    upload.abort()


class RemoteStore:
    """The object-store port in a bucket, below `prefix`."""

    def __init__(self, bucket: Bucket, prefix: str = "") -> None:
        prefix = prefix.strip("/")
        if prefix and not _KEY.fullmatch(prefix):
            raise StoreError(f"store prefix {prefix!r}: parts of letters, digits and ._=- with / between them are allowed")
        self._calls = Calls(bucket)
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    async def put(self, key: str, data: bytes, *, create_only: bool = False, if_version: str | None = None) -> None:
        """See ObjectStore."""
        full = self._full(key)
        repeatable = not create_only and if_version is None
        try:
            await self._calls.run(lambda: self._bucket.put(full, data, create_only, if_version), again=repeatable)
        except ObjectChanged:
            # Some services say so of an object that is gone, others say that it is missing.
            if await self._calls.head(full) is None:
                raise ObjectMissing(f"{self._bucket.place}/{full}: no such object") from None
            raise
        except ObjectMissing:
            await self._calls.check()
            raise

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """See ObjectStore."""
        await self._calls.write(self._full(key), chunks, create_only=False)

    async def get(self, key: str) -> bytes:
        """See ObjectStore."""
        return await self._read(self._full(key), 0, None)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See ObjectStore."""
        if length <= 0:
            await self._known(self._full(key))
            return b""
        return await self._read(self._full(key), offset, length)

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        """See ObjectStore."""
        full = self._full(key)
        found = await self._known(full)
        async for piece in self._calls.pieces(full, found.version, 0, found.size):
            yield piece

    async def head(self, key: str) -> ObjectInfo | None:
        """See ObjectStore."""
        found = await self._calls.head(self._full(key))
        return None if found is None else self._own(found)

    async def delete(self, key: str) -> None:
        """See ObjectStore."""
        full = self._full(key)
        await self._calls.run(lambda: self._bucket.delete(full))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See ObjectStore."""
        async for found in self._calls.list(self._prefix + prefix):
            yield self._own(found)

    async def presign(self, key: str, seconds: int) -> str:
        """See ObjectStore."""
        full = self._full(key)
        return await self._calls.run(lambda: self._bucket.presign(full, seconds))

    def close(self) -> None:
        """Close the connections; for those who open many stores."""
        self._calls.close()

    def _full(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise StoreError(f"object key {key!r}: parts of letters, digits and ._=- with / between them are allowed")
        return self._prefix + key

    def _own(self, found: ObjectInfo) -> ObjectInfo:
        return ObjectInfo(found.key.removeprefix(self._prefix), found.size, found.modified, found.version)

    async def _read(self, full: str, offset: int, length: int | None) -> bytes:
        try:
            return await self._calls.run(lambda: self._bucket.read(full, offset, length, None))
        except ObjectMissing:
            await self._calls.check()
            raise

    async def _known(self, full: str) -> ObjectInfo:
        found = await self._calls.head(full)
        if found is None:
            raise ObjectMissing(f"{self._bucket.place}/{full}: no such object")
        return found


def load_sdk(module: str, extra: str = "") -> ModuleType:
    """Import a service's SDK when it is first used. Raises StoreError that says what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        wanted = f"caisson[{extra}]" if extra else "caisson"
        raise StoreError(f"{module} is not installed, which this store needs: pip install '{wanted}'") from error


def check_seconds(seconds: int) -> None:
    """Refuse a lifetime that no service gives a URL: S3 and Google allow seven days at most."""
    if not 1 <= seconds <= 7 * 86400:
        raise StoreError(f"a URL for {seconds} seconds: between 1 and 604800 (seven days) are possible")
