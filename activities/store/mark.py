"""What runs need: which blobs a record names, and which blobs those name in turn.

Everything is read once, however many runs and steps share it: agents, heads of transcripts, records of snapshots, indices of
artifacts, and the directories of snapshots, level by level. What one run needs is then a walk in memory, which takes some
400 bytes for each distinct directory and head.

Of a transcript's older heads only they themselves are needed (the hash chain), not the segments that newer ones have merged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic import ValidationError

from activities.store.blobs import BlobStore, blob_key
from activities.store.catalogue import parallel
from activities.store.names import Key, Named, Names, Place
from activities.store.port import ObjectDamaged, ObjectMissing
from activities.workspace.packs import Wanted, read_frames, unpack
from activities.workspace.snapshots import VERSION
from activities.workspace.tree import Directory, Frame, Pack, decode_node, pack_of
from contracts.base import sha256_hex
from contracts.blob import BlobRef
from contracts.run import Artifact

_STRIPES = 4
"""Groups of packs that directories are read from at the same time; each reads a few ranges at a time."""


@dataclass
class Needs:
    """Blobs by their digests, and what could not be read, so that more may be needed."""

    blobs: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


class Marker:
    """Reads what names blobs, and tells what records need."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._names: dict[Key, Names] = {}
        self._faults: dict[Key, str] = {}
        self._shared: dict[str, str] = {}
        self._stored: dict[Place, tuple[Wanted, bytes]] = {}
        """What is needed to read the directories that were found and not read yet."""

    async def read(self, records: Iterable[Names]) -> None:
        """Read everything below what records name, and note what is missing or damaged. Raises StoreUnavailable, StoreDenied."""
        waiting = [key for names in records for key in names.below]
        while waiting:
            # A whole level at a time, so that what lies together is read together, whatever run it is of.
            level = [key for key in dict.fromkeys(waiting) if key not in self._names and key not in self._faults]
            waiting = []
            async for key, names in parallel((key for key in level if isinstance(key, Named)), self._read_named):
                self._names[key] = names
                waiting += names.below
            places = [key for key in level if isinstance(key, Place)]
            stripes: list[list[Place]] = [[] for _ in range(_STRIPES)]
            for place in places:
                stripes[int(place.pack[:4], 16) % _STRIPES].append(place)
            async for below in parallel(stripes, self._read_directories):
                waiting += below

    def needs(self, records: Iterable[Names]) -> Needs:
        """Return what records that were read need. Changes nothing and asks nobody."""
        needs = Needs()
        seen: set[Key] = set()
        waiting: list[Key] = []
        for names in records:
            needs.blobs.update(names.blobs)
            waiting += names.below
        while waiting:
            key = waiting.pop()
            if key in seen:
                continue
            seen.add(key)
            if isinstance(key, Named):
                needs.blobs.add(key.digest)
            if key in self._faults:
                needs.faults.append(self._faults[key])
                continue
            names = self._names[key]
            needs.blobs.update(names.blobs)
            waiting += names.below
        return needs

    async def _read_named(self, key: Named) -> tuple[Named, Names]:
        try:
            data = await self._get(key)
            return key, self._shortened(_READERS[key.kind](self, data))
        except (ObjectMissing, ObjectDamaged) as error:
            self._faults[key] = str(error)
        except (ValueError, TypeError, KeyError, msgspec.MsgspecError, ValidationError) as error:
            self._faults[key] = f"blob {key.digest} is no {key.kind}: {type(error).__name__}"
        return key, Names()

    async def _get(self, key: Named) -> bytes:
        if key.size >= 0:
            return await self._blobs.get(BlobRef(digest=key.digest, size=key.size))
        # A head names the one before it by its digest alone.
        data = await self._blobs.objects.get(blob_key(key.digest))
        if sha256_hex(data) != key.digest:
            raise ObjectDamaged(f"blob {key.digest}: {len(data)} bytes read do not have this digest; restore it from a copy")
        return data

    def _head(self, data: bytes) -> Names:
        return Names(tuple(segment["digest"] for segment in json.loads(data)["segments"]), self._chain(data).below)

    def _chain(self, data: bytes) -> Names:
        previous = json.loads(data)["previous"]
        return Names((), () if previous is None else (Named("earlier head", previous, -1),))

    def _agent(self, data: bytes) -> Names:
        return Names(tuple(_references(json.loads(data))))

    def _index(self, data: bytes) -> Names:
        return Names(tuple(Artifact.model_validate(item).blob.digest for item in json.loads(data)))

    def _snapshot(self, data: bytes) -> Names:
        version, _, _, _, digest, (pack, pack_size), (offset, stored, size, sha), *_ = msgspec.msgpack.decode(data)
        if version != VERSION:
            raise ObjectDamaged(f"blob {sha256_hex(data)} is a snapshot of format {version}; this version reads {VERSION}")
        return self._directory(Frame(pack_of(pack, pack_size), offset, stored), size, sha, digest)

    def _directory(self, frame: Frame, size: int, sha: bytes, digest: bytes) -> Names:
        pack = frame.pack.digest.hex()
        place = Place(self._shared.setdefault(pack, pack), frame.offset)
        if place not in self._names:
            self._stored[place] = Wanted(frame, size, sha), digest
        return Names((place.pack,), (place,))

    async def _read_directories(self, places: list[Place]) -> list[Key]:
        below: list[Key] = []
        waiting = {place: self._stored.pop(place) for place in places}
        try:
            async for group in read_frames(self._blobs, [wanted for wanted, _ in waiting.values()]):
                for item, stored in group:
                    place = Place(item.frame.pack.digest.hex(), item.frame.offset)
                    _, digest = waiting.pop(place)
                    below += self._decoded(place, item, stored, digest).below
        except (ObjectMissing, ObjectDamaged) as error:
            if len(places) == 1:
                self._faults[places[0]] = f"{error} (a directory of a snapshot)"
                return below
            # One bad pack must not hide which of the others are good.
            self._stored.update(waiting)
            for place in waiting:
                below += await self._read_directories([place])
        return below

    def _decoded(self, place: Place, item: Wanted, stored: bytes | memoryview, digest: bytes) -> Names:
        packs: dict[bytes, Pack] = {}
        try:
            children = decode_node(unpack(item, stored), item.frame.pack, packs, digest)
        except ObjectDamaged as error:
            self._faults[place] = f"{error} (a directory of a snapshot)"
            return Names()
        names = [
            self._directory(child.frame, child.node_size, child.node_sha, child.digest)
            for child in children.values()
            if isinstance(child, Directory) and child.frame is not None
        ]
        found = self._shortened(
            Names((place.pack, *(pack.hex() for pack in packs)), tuple(key for below in names for key in below.below))
        )
        self._names[place] = found
        return found

    def _shortened(self, names: Names) -> Names:
        """Keep each digest in memory once."""
        return Names(tuple(self._shared.setdefault(digest, digest) for digest in names.blobs), names.below)


_READERS = {
    "head": Marker._head,
    "earlier head": Marker._chain,
    "agent": Marker._agent,
    "index": Marker._index,
    "snapshot": Marker._snapshot,
}


def _references(value: Any) -> Iterator[str]:
    """Yield the digests of what looks like a reference to a blob, anywhere in plain JSON."""
    if isinstance(value, dict):
        if value.keys() == {"digest", "size"}:
            yield str(value["digest"])
        for part in value.values():
            yield from _references(part)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part)
