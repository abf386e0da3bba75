"""Workspaces on this host for the snapshot tests: a place instead of a sandbox, a second pair of eyes, and a store that fails."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from activities.sandbox.port import Capabilities, Sandbox, SandboxGone, SandboxProvider
from activities.sandbox.registry import ProviderRegistry
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.store.port import ObjectInfo, ObjectMissing, ObjectStore, StoreUnavailable
from activities.workspace.keeper import WorkspaceKeeper
from contracts.sandbox import SandboxRef
from contracts.snapshot import SnapshotRef

Picture = dict[bytes, tuple[object, ...]]


class Place:
    """What of a host sandbox the keeper may use, and nothing else: a workspace, and room beside it."""

    owner: tuple[int, int] | None = None

    def __init__(self, directory: Path) -> None:
        self.workspace = directory / "workspace"
        self.scratch = directory / "scratch"
        self.workspace.mkdir(parents=True)
        self.ref = SandboxRef(provider="place", id=directory.name, nonce=str(directory), queue="q")

    async def extend(self, seconds: float) -> None:
        """Tell that it is gone, as a sandbox does."""
        if not self.workspace.exists():
            raise SandboxGone(self.ref.id)

    def as_sandbox(self) -> Sandbox:
        """This, where a sandbox is asked for."""
        return cast("Sandbox", self)


class _Places:
    name = "place"
    capabilities = Capabilities(host_bound=True, native_jobs=True, host_files=True)


def _places() -> ProviderRegistry:
    return ProviderRegistry({"place": lambda: cast("SandboxProvider", _Places())})


class Room:
    """A store, a keeper that uses it, and places to work in."""

    def __init__(self, root: Path, objects: ObjectStore | None = None) -> None:
        self.root = root
        self.objects = LocalStore(root / "store") if objects is None else objects
        self.keeper = WorkspaceKeeper(_places(), BlobStore(self.objects))
        self._places = 0

    def place(self) -> Place:
        """A new place with an empty workspace."""
        self._places += 1
        return Place(self.root / f"place-{self._places}")

    async def save(self, place: Place, base: SnapshotRef | None = None, *excludes: str) -> SnapshotRef:
        """Snapshot a place."""
        return await self.keeper.snapshot(place.as_sandbox(), base, excludes)

    async def save_anew(self, place: Place, *excludes: str) -> SnapshotRef:
        """Snapshot a place as a worker does that knows nothing of it."""
        return await WorkspaceKeeper(_places(), self.keeper.store.blobs).snapshot(place.as_sandbox(), None, excludes)

    async def restore(self, ref: SnapshotRef, place: Place | None = None, *excludes: str, keep: bool = False) -> Place:
        """Restore a snapshot, to a new place if none is given."""
        place = self.place() if place is None else place
        await self.keeper.restore(place.as_sandbox(), ref, excludes, keep=keep)
        return place

    def stored_bytes(self) -> int:
        """How many bytes the local store has."""
        return sum(path.stat().st_size for path in (self.root / "store").rglob("*") if path.is_file())

    def blob(self, digest: str) -> Path:
        """Where a blob lies in the local store."""
        return self.root / "store" / "blobs" / digest[:2] / digest


def picture(root: Path, *, times: bool = True) -> Picture:
    """Describe everything below a directory, and the directory itself, by the plainest calls there are.

    Written for the tests, with nothing of the product's: type, permissions, time, size, digest, link text, attributes, and the
    first path of the same inode.
    """
    found: Picture = {}
    here = os.open(root, os.O_RDONLY)
    _describe_all(here, b"", found, times)
    os.close(here)
    first: dict[object, bytes] = {}
    for path, what in sorted(found.items()):
        if what[0] == "file":
            found[path] = (*what[:-1], first.setdefault(what[-1], path))
    return found


def _describe_all(folder: int, path: bytes, found: Picture, times: bool) -> None:
    found[path or b"."] = _describe(folder, b".", times)
    for name in os.listdir(folder):
        raw = os.fsencode(name)
        full = path + b"/" + raw if path else raw
        found[full] = _describe(folder, raw, times)
        if found[full][0] == "directory":
            below = os.open(raw, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
            _describe_all(below, full, found, times)
            os.close(below)


def _describe(top: int, path: bytes, times: bool) -> tuple[object, ...]:
    status = os.stat(path, dir_fd=top, follow_symlinks=False)
    kind = stat.S_IFMT(status.st_mode)
    mtime = status.st_mtime_ns if times else 0
    if stat.S_ISLNK(kind):
        return "link", os.readlink(path, dir_fd=top), mtime
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        return "other", kind
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=top)
    try:
        xattrs = sorted((name, os.getxattr(fd, name)) for name in os.listxattr(fd) if name.startswith("user."))
        if stat.S_ISDIR(kind):
            return "directory", stat.S_IMODE(status.st_mode), mtime, tuple(xattrs)
        with open(fd, "rb", closefd=False) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    finally:
        os.close(fd)
    return "file", stat.S_IMODE(status.st_mode), mtime, status.st_size, digest, tuple(xattrs), status.st_ino


@dataclass
class Faults:
    """How likely each fault of a store is, from 0 to 1."""

    put_error: float = 0
    torn_put: float = 0
    slow_put: float = 0
    flip: float = 0
    missing: float = 0
    range_error: float = 0
    log: list[str] = field(default_factory=list)

    @classmethod
    def random(cls, dice: random.Random) -> Faults:
        """Some of the faults, each in about a third of the calls."""
        put_error, torn_put, slow_put, flip, missing, range_error = dice.choices([0, 0, 0.3], k=6)
        return cls(put_error, torn_put, slow_put, flip, missing, range_error)


class FaultyStore:
    """A local store that fails as its dice say."""

    def __init__(self, inner: LocalStore, dice: random.Random) -> None:
        self.inner = inner
        self.dice = dice
        self.faults = Faults()

    def _falls(self, chance: float, what: str) -> bool:
        if chance and self.dice.random() < chance:
            self.faults.log.append(what)
            return True
        return False

    def _spoiled(self, key: str, data: bytes) -> bytes:
        if data and self._falls(self.faults.flip, f"flip {key}"):
            changed = bytearray(data)
            changed[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
            return bytes(changed)
        return data

    async def put(self, key: str, data: bytes, *, create_only: bool = False, if_version: str | None = None) -> None:
        """See ObjectStore."""
        if self._falls(self.faults.slow_put, f"slow {key}"):
            await asyncio.sleep(0.005)
        if self._falls(self.faults.put_error, f"error {key}"):
            raise StoreUnavailable(f"writing {key}: the connection broke")
        if self._falls(self.faults.torn_put, f"torn {key}"):
            await self.inner.put(key, data[: self.dice.randrange(len(data))])
            raise StoreUnavailable(f"writing {key}: the connection broke half way")
        await self.inner.put(key, data, create_only=create_only, if_version=if_version)

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """See ObjectStore."""
        await self.inner.put_stream(key, chunks)

    async def get(self, key: str) -> bytes:
        """See ObjectStore."""
        if self._falls(self.faults.missing, f"missing {key}"):
            raise ObjectMissing(f"no object {key}")
        return self._spoiled(key, await self.inner.get(key))

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See ObjectStore."""
        if self._falls(self.faults.range_error, f"range {key}"):
            raise StoreUnavailable(f"reading {key}: the connection broke")
        if self._falls(self.faults.missing, f"missing {key}"):
            raise ObjectMissing(f"no object {key}")
        return self._spoiled(key, await self.inner.get_range(key, offset, length))

    def stream(self, key: str) -> AsyncIterator[bytes]:
        """See ObjectStore."""
        return self.inner.stream(key)

    async def head(self, key: str) -> ObjectInfo | None:
        """See ObjectStore."""
        return await self.inner.head(key)

    async def delete(self, key: str) -> None:
        """See ObjectStore."""
        await self.inner.delete(key)

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See ObjectStore."""
        return self.inner.list(prefix)

    async def presign(self, key: str, seconds: int) -> str:
        """See ObjectStore."""
        return await self.inner.presign(key, seconds)
