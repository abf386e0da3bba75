"""The transcript: a run's model items as an append-only chain of blobs.

A *head* is a blob that names the head before it (so that heads form a hash chain) and the *segments* that hold the entries, in
order. Appending adds one segment and merges it with its neighbours while they are no larger than it, up to a cap, as a binary
counter does: a transcript of N steps is read in O(log N + bytes / cap) reads, and each entry is rewritten O(log N) times.

Format, version 1 (JSON, canonical):

    head     {"version": 1, "previous": digest | null, "count": entries, "call": {...} | null,
              "segments": [{"digest", "size", "count"}, ...]}
    segment  [entry, ...]
    entry    {"step": int, "origin": "user" | "note" | "tool" | "model", "item": a Responses API input item}
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pydantic import JsonValue

from activities.store.blobs import BlobStore
from activities.store.port import ObjectDamaged
from contracts.base import canonical_json, sha256_hex
from contracts.blob import BlobRef

SEGMENT_CAP = 256 * 1024
"""Bytes from which a segment is not rewritten any more."""

Item: TypeAlias = dict[str, Any]
Origin = Literal["user", "note", "tool", "model"]


@dataclass(frozen=True)
class Entry:
    """One item of the transcript, the step it belongs to, and who it came from."""

    step: int
    origin: Origin
    item: Item

    def json(self) -> Item:
        """The entry as stored."""
        return {"step": self.step, "origin": self.origin, "item": self.item}


@dataclass(frozen=True)
class _Segment:
    ref: BlobRef
    count: int


@dataclass(frozen=True)
class _Head:
    segments: tuple[_Segment, ...]
    count: int

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(segment.ref.size for segment in self.segments)


@dataclass
class TranscriptStore:
    """Reads and extends transcripts. The most recent ones stay in memory, so that a following step reads nothing."""

    blobs: BlobStore
    capacity: int = 64 << 20
    """Bytes of stored transcripts whose entries are kept in memory."""
    _cache: OrderedDict[str, tuple[_Head, tuple[Entry, ...]]] = field(default_factory=OrderedDict)

    async def load(self, head: BlobRef | None) -> tuple[Entry, ...]:
        """Return all entries up to `head`, oldest first. Raises ObjectMissing or ObjectDamaged."""
        return (await self._open(head))[1]

    async def append(self, head: BlobRef | None, new: tuple[Entry, ...], call: JsonValue) -> BlobRef:
        """Add entries after `head` and return the new head. `call` is what is recorded of the model call."""
        old, entries = await self._open(head)
        everything = entries + new
        segments = list(old.segments)
        tail = list(new)
        size = len(_encode(tail))
        while segments and segments[-1].ref.size <= size and segments[-1].ref.size + size <= SEGMENT_CAP:
            merged = segments.pop()
            tail = list(everything[len(everything) - len(tail) - merged.count :])
            size += merged.ref.size
        data = _encode(tail)
        segments.append(_Segment(BlobRef(digest=sha256_hex(data), size=len(data)), len(tail)))
        stored: JsonValue = {
            "version": 1,
            "previous": None if head is None else head.digest,
            "count": len(everything),
            "call": call,
            "segments": [{"digest": s.ref.digest, "size": s.ref.size, "count": s.count} for s in segments],
        }
        # At once: nobody knows the head's name before both are there.
        ref, _ = await asyncio.gather(self.blobs.put_json(stored), self.blobs.put(data))
        if head is not None:
            # A run goes on from its newest head; keeping the old ones would drive out other runs' transcripts.
            self._cache.pop(head.digest, None)
        self._remember(ref, _Head(tuple(segments), len(everything)), everything)
        return ref

    async def _open(self, head: BlobRef | None) -> tuple[_Head, tuple[Entry, ...]]:
        if head is None:
            return _Head((), 0), ()
        if head.digest in self._cache:
            self._cache.move_to_end(head.digest)
            return self._cache[head.digest]
        opened = _parse_head(await self.blobs.get(head))
        entries: list[Entry] = []
        for data in await self.blobs.get_many(segment.ref for segment in opened.segments):
            entries.extend(Entry(step=e["step"], origin=e["origin"], item=e["item"]) for e in json.loads(data))
        if len(entries) != opened.count:
            raise ObjectDamaged(f"transcript {head.digest}: {len(entries)} entries found of {opened.count}")
        self._remember(head, opened, tuple(entries))
        return opened, tuple(entries)

    def _remember(self, ref: BlobRef, head: _Head, entries: tuple[Entry, ...]) -> None:
        self._cache[ref.digest] = (head, entries)
        while len(self._cache) > 1 and sum(kept.size for kept, _ in self._cache.values()) > self.capacity:
            self._cache.popitem(last=False)


def _encode(entries: list[Entry]) -> bytes:
    return canonical_json([entry.json() for entry in entries])


def _parse_head(data: bytes) -> _Head:
    stored = json.loads(data)
    segments = tuple(_Segment(BlobRef(digest=s["digest"], size=s["size"]), s["count"]) for s in stored["segments"])
    return _Head(segments, stored["count"])
