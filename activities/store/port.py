"""The object-store port: named bytes, written whole, and the ways a store can fail.

    StoreError
    ├── ObjectMissing      no object has this key
    ├── ObjectExists       a create-only put found the key taken
    ├── ObjectChanged      a put found another version than the one it was to replace
    ├── ObjectDamaged      the bytes read are not the bytes named
    ├── StoreUnavailable   the store cannot be reached or written now: retry
    └── StoreDenied        the store refuses the credential, or knows no such bucket: stop and say so

An implementation keeps its SDK's own retries low (Temporal retries) and translates foreign errors once, in its own file.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


class StoreError(Exception):
    """The store could not do what was asked; the message names the key."""


class ObjectMissing(StoreError):
    """No object has this key."""


class ObjectExists(StoreError):
    """A create-only put found the key taken."""


class ObjectChanged(StoreError):
    """The object is not, or no longer, the version that was to be replaced."""


class ObjectDamaged(StoreError):
    """What was read is not what was written under this name."""


class StoreUnavailable(StoreError):
    """The store cannot be reached, or has no room."""


class StoreDenied(StoreError):
    """The store refuses the credential or the bucket; trying again changes nothing."""


@dataclass(frozen=True)
class ObjectInfo:
    """What a store says of one object without its bytes.

    `size` in bytes; `modified` in seconds since 1970, by the store's clock; `version` changes whenever the object does (an
    ETag or a generation).
    """

    key: str
    size: int
    modified: float
    version: str


class ObjectStore(Protocol):
    """Bytes by key. A key is a relative path of `/`-separated parts, each of letters, digits and `._=-`."""

    async def put(self, key: str, data: bytes, *, create_only: bool = False, if_version: str | None = None) -> None:
        """Write a whole object, durably and atomically: a reader sees all of it or none.

        Raises ObjectExists when `create_only` and the key is taken, ObjectChanged when the object's version is not `if_version`.
        """

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """Write a whole object from chunks, as `put` does, in bounded memory. When the iterator raises, nothing is written."""

    async def get(self, key: str) -> bytes:
        """Read a whole object. Raises ObjectMissing."""

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset`, fewer where the object ends before. Raises ObjectMissing."""

    def stream(self, key: str) -> AsyncIterator[bytes]:
        """Read an object in chunks. Raises ObjectMissing at the first."""

    async def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of an object, or None when there is none."""

    async def delete(self, key: str) -> None:
        """Remove an object. Removing one that is not there is no error."""

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """List the objects whose keys start with `prefix`, in the order of their keys."""

    async def presign(self, key: str, seconds: int) -> str:
        """Return a URL that reads this one object for `seconds`. Raises StoreError where the store has none to give."""
