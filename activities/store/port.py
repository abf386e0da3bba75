"""The object-store port: named bytes, written whole, and the ways a store can fail.

StoreError
├── ObjectMissing      no object has this key
├── ObjectExists       a create-only put found the key taken
├── ObjectDamaged      the bytes read are not the bytes named
└── StoreUnavailable   the store cannot be reached or written now: retry
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol


class StoreError(Exception):
    """The store could not do what was asked; the message names the key."""


class ObjectMissing(StoreError):
    """No object has this key."""


class ObjectExists(StoreError):
    """A create-only put found the key taken."""


class ObjectDamaged(StoreError):
    """What was read is not what was written under this name."""


class StoreUnavailable(StoreError):
    """The store cannot be reached, or has no room."""


class ObjectStore(Protocol):
    """Bytes by key. A key is a relative path of `/`-separated parts, each of letters, digits and `._=-`."""

    async def put(self, key: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a whole object, durably and atomically: a reader sees all of it or none. Raises ObjectExists."""

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """Write a whole object from chunks, as `put` does, in bounded memory."""

    async def get(self, key: str) -> bytes:
        """Read a whole object. Raises ObjectMissing."""

    def stream(self, key: str) -> AsyncIterator[bytes]:
        """Read an object in chunks. Raises ObjectMissing at the first."""

    async def size(self, key: str) -> int | None:
        """Return the object's size in bytes, or None when there is none."""

    async def delete(self, key: str) -> None:
        """Remove an object. Removing one that is not there is no error."""

    def list(self, prefix: str) -> AsyncIterator[str]:
        """List the keys that start with `prefix`, in order."""
