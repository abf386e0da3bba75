"""The object store in a local directory: one file an object, fsync'd and renamed into place."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from activities.store.port import ObjectExists, ObjectMissing, StoreError, StoreUnavailable

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

    async def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """See ObjectStore."""
        await self._run(key, lambda path: _write(path, iter((data,)), create_only))

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

    async def size(self, key: str) -> int | None:
        """See ObjectStore."""
        try:
            return await self._run(key, lambda path: path.stat().st_size)
        except ObjectMissing:
            return None

    async def delete(self, key: str) -> None:
        """See ObjectStore."""
        await self._run(key, lambda path: path.unlink(missing_ok=True))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        """See ObjectStore."""
        for key in await asyncio.to_thread(lambda: sorted(_keys(self._root, prefix))):
            yield key

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
