"""A store's blobs, kept nearby: copies in a local directory, checked against their name each time they are read."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from activities.store.port import ObjectInfo, ObjectStore
from activities.threads import to_end

_BLOB = re.compile(r"(?:blobs|payloads)/(?:[^/]+/)*([0-9a-f]{64})")
_CHUNK = 1 << 20
_TEMPORARY, _ABANDONED = ".writing-", 3600.0
_LOCK = ".lock"


class CachedStore:
    """A store with copies of its `blobs/` objects, whose keys end in the SHA-256 of their bytes and which therefore never change.

    Whether an object exists is always asked of the store itself: a copy may outlive it, and whoever believed a copy would not
    write what is gone. Ranges are too: a part of a blob cannot be checked against the digest of the whole.
    The directory may be shared by processes. It holds `most_bytes`, and what was written since a process last looked: a process
    looks after each sixteenth of that. The least recently read goes first. A disk that is full or broken costs only the copies.
    """

    def __init__(self, store: ObjectStore, directory: Path, most_bytes: int) -> None:
        self._store = store
        self._directory = directory
        self._most = most_bytes
        self._unseen = most_bytes  # so that the first write looks

    async def put(self, key: str, data: bytes, *, create_only: bool = False, if_version: str | None = None) -> None:
        """See ObjectStore. What was just written is soon read."""
        await self._store.put(key, data, create_only=create_only, if_version=if_version)
        await asyncio.to_thread(self._keep, key, data)

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """See ObjectStore."""
        await self._store.put_stream(key, chunks)

    async def get(self, key: str) -> bytes:
        """See ObjectStore."""
        copy = await asyncio.to_thread(self._read, key)
        if copy is not None:
            return copy
        data = await self._store.get(key)
        await asyncio.to_thread(self._keep, key, data)
        return data

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See ObjectStore."""
        return await self._store.get_range(key, offset, length)

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        """See ObjectStore."""
        file = await asyncio.to_thread(self._open, key)
        if file is None:
            async for chunk in self._stream_and_keep(key):
                yield chunk
            return
        with file:
            while chunk := await asyncio.to_thread(file.read, _CHUNK):
                yield chunk

    async def head(self, key: str) -> ObjectInfo | None:
        """See ObjectStore."""
        return await self._store.head(key)

    async def delete(self, key: str) -> None:
        """See ObjectStore. Copies on other machines stay until they are evicted."""
        await self._store.delete(key)
        path = self._path(key)
        if path is not None:
            await asyncio.to_thread(_remove, path)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See ObjectStore."""
        async for found in self._store.list(prefix):
            yield found

    async def presign(self, key: str, seconds: int) -> str:
        """See ObjectStore."""
        return await self._store.presign(key, seconds)

    def _path(self, key: str) -> Path | None:
        blob = _BLOB.fullmatch(key)
        return None if blob is None else self._directory / blob[1][:2] / blob[1]

    def _read(self, key: str) -> bytes | None:
        path = self._path(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == path.name:
                os.utime(path)
                return data
        except FileNotFoundError:
            return None
        except OSError:
            pass  # a disk that cannot read it: the store can
        _remove(path)
        return None

    def _open(self, key: str) -> BinaryIO | None:
        """Open a copy whose bytes are those of its name. Any other is removed."""
        path = self._path(key)
        if path is None:
            return None
        try:
            file = path.open("rb")
        except OSError:
            return None
        try:
            good = hashlib.file_digest(file, "sha256").hexdigest() == path.name
            file.seek(0)
            if good:
                os.utime(file.fileno())
                return file
        except OSError:
            pass  # a disk that cannot read it: the store can
        file.close()
        _remove(path)
        return None

    def _keep(self, key: str, data: bytes) -> None:
        path = self._path(key)
        if path is None or len(data) > self._most or hashlib.sha256(data).hexdigest() != path.name:
            return
        temporary = self._temporary(path)
        try:
            self._make(path.parent)
            temporary.write_bytes(data)
            self._finish(temporary, path, len(data))
        except OSError:
            _remove(temporary)

    async def _stream_and_keep(self, key: str) -> AsyncIterator[bytes]:
        path = self._path(key)
        chunks = self._store.stream(key)
        file = None if path is None else await to_end(self._begin, path, undo=_drop_if_any)
        digest, size = hashlib.sha256(), 0
        try:
            async for chunk in chunks:
                if file is not None:
                    digest.update(chunk)
                    size += len(chunk)
                    if size > self._most or not await asyncio.to_thread(_write, file, chunk):
                        _drop(file)
                        file = None
                yield chunk
            if file is not None and path is not None and digest.hexdigest() == path.name:
                await asyncio.to_thread(self._complete, file, path, size)
                file = None
        finally:
            if file is not None:
                _drop(file)

    def _temporary(self, path: Path) -> Path:
        return path.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"

    def _begin(self, path: Path) -> BinaryIO | None:
        try:
            self._make(path.parent)
            return self._temporary(path).open("wb")
        except OSError:
            return None

    def _complete(self, file: BinaryIO, path: Path, size: int) -> None:
        try:
            file.close()
            self._finish(Path(file.name), path, size)
        except OSError:
            _remove(Path(file.name))

    def _finish(self, temporary: Path, path: Path, size: int) -> None:
        # No fsync: what a power cut damages is found by its digest and fetched again.
        temporary.replace(path)
        self._unseen += size
        if self._unseen > self._most // 16:
            self._unseen = 0
            self._evict()

    def _make(self, directory: Path) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(exist_ok=True)

    def _evict(self) -> None:
        """Remove the least recently read until the bound holds. One process at a time; the others need not wait for it."""
        with (self._directory / _LOCK).open("wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            copies = []
            for folder, _, names in os.walk(self._directory):
                for name in names:
                    found = _status(Path(folder) / name)
                    if found is not None and name != _LOCK:
                        copies.append(found)
            total = sum(size for _, size, _ in copies)
            for read_at, size, path in sorted(copies):
                writing = path.name.startswith(_TEMPORARY)
                abandoned = writing and read_at < time.time() - _ABANDONED
                if abandoned or (total > self._most and not writing):
                    _remove(path)
                    total -= size


def _status(path: Path) -> tuple[float, int, Path] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None  # removed meanwhile
    return status.st_mtime, status.st_size, path


def _write(file: BinaryIO, chunk: bytes) -> bool:
    try:
        file.write(chunk)
    except OSError:
        return False
    return True


def _drop_if_any(file: BinaryIO | None) -> None:
    if file is not None:
        _drop(file)


def _drop(file: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # what is thrown away need not reach the disk
        file.close()
    _remove(Path(file.name))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # it stays, is checked when it is read, and is not returned when it is wrong
