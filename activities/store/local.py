"""The object store in a local directory: one file an object, fsync'd and renamed into place."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from activities.store.port import ObjectChanged, ObjectExists, ObjectInfo, ObjectMissing, StoreError, StoreUnavailable

_KEY = re.compile(r"^(?!.*(?:^|/)\.{1,2}(?:/|$))[A-Za-z0-9._=-]+(?:/[A-Za-z0-9._=-]+)*$")
_CHUNK = 1 << 20
_TEMPORARY = ".writing-"
T = TypeVar("T")


class LocalStore:
    """Objects as files below `root`, which is made (0700) when it is not there."""

    def __init__(self, root: Path) -> None:
        self._root = root
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreUnavailable(f"store directory {root}: {error.strerror}; make it writable or name another") from error

    async def put(self, key: str, data: bytes, *, create_only: bool = False, if_version: str | None = None) -> None:
        """See ObjectStore."""
        await self._run(key, lambda path: _put(path, data, create_only, if_version))

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """See ObjectStore."""
        path = self._path(key)
        temporary = await asyncio.to_thread(_begin, path)
        try:
            with temporary.open("wb") as file:
                async for chunk in chunks:
                    await asyncio.to_thread(file.write, chunk)
                await asyncio.to_thread(_sync, file.fileno())
            await asyncio.to_thread(_finish, temporary, path, False)
        except OSError as error:
            raise StoreUnavailable(f"writing {key}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)

    async def get(self, key: str) -> bytes:
        """See ObjectStore."""
        return await self._run(key, lambda path: path.read_bytes())

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        """See ObjectStore."""
        file = await self._run(key, lambda path: path.open("rb"))
        with file:
            while chunk := await asyncio.to_thread(file.read, _CHUNK):
                yield chunk

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See ObjectStore."""
        return await self._run(key, lambda path: _read_range(path, offset, length))

    async def head(self, key: str) -> ObjectInfo | None:
        """See ObjectStore."""
        try:
            return await self._run(key, lambda path: _info(key, path))
        except ObjectMissing:
            return None

    async def delete(self, key: str) -> None:
        """See ObjectStore."""
        await self._run(key, lambda path: path.unlink(missing_ok=True))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See ObjectStore."""
        for key in await asyncio.to_thread(lambda: sorted(_keys(self._root, prefix))):
            info = await self.head(key)
            if info is not None:
                yield info

    async def presign(self, key: str, seconds: int) -> str:
        """See ObjectStore."""
        raise StoreError(f"object {key}: a store in a local directory has no URLs to give; use one on object storage")

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise StoreError(f"object key {key!r}: parts of letters, digits and ._=- with / between them are allowed")
        return self._root / key

    async def _run(self, key: str, work: Callable[[Path], T]) -> T:
        path = self._path(key)
        try:
            return await asyncio.to_thread(work, path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissing(f"no object {key}") from error
        except FileExistsError as error:
            raise ObjectExists(f"object {key} exists") from error
        except OSError as error:
            raise StoreUnavailable(f"object {key}: {error.strerror}") from error


def _put(path: Path, data: bytes, create_only: bool, if_version: str | None) -> None:
    if if_version is None:
        _write(path, iter((data,)), create_only)
        return
    # One writer at a time between the look and the rename, whatever process it is in.
    with path.open("rb") as current:
        fcntl.flock(current, fcntl.LOCK_EX)
        if not _is_still(path, current.fileno()) or _version(os.fstat(current.fileno())) != if_version:
            raise ObjectChanged(f"object {path.name} is not version {if_version} any more")
        _write(path, iter((data,)), create_only=False)


def _is_still(path: Path, descriptor: int) -> bool:
    return path.stat().st_ino == os.fstat(descriptor).st_ino


def _version(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def _info(key: str, path: Path) -> ObjectInfo:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(key)
    return ObjectInfo(key, status.st_size, status.st_mtime, _version(status))


def _read_range(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(length)


def _write(path: Path, chunks: Iterator[bytes], create_only: bool) -> None:
    temporary = _begin(path)
    try:
        with temporary.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            _sync(file.fileno())
        _finish(temporary, path, create_only)
    finally:
        temporary.unlink(missing_ok=True)


def _begin(path: Path) -> Path:
    _make_directory(path.parent)
    return path.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"


def _make_directory(directory: Path) -> None:
    """Make a directory and those above it; each new name is on the disk before anything is put below it."""
    if directory.is_dir():
        return
    _make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    _sync_directory(directory.parent)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _sync(descriptor: int) -> None:
    os.fdatasync(descriptor)


def _finish(temporary: Path, path: Path, create_only: bool) -> None:
    if create_only:
        os.link(temporary, path)
    else:
        temporary.replace(path)
    # Without this the file's name may be lost in a power cut although its bytes are on the disk.
    _sync_directory(path.parent)


def _keys(root: Path, prefix: str) -> Iterator[str]:
    for folder, _, names in os.walk(root):
        for name in names:
            if name.startswith(_TEMPORARY):
                continue
            key = (Path(folder) / name).relative_to(root).as_posix()
            if key.startswith(prefix):
                yield key
