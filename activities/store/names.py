"""What the records of runs name: blobs, and things in the store that name blobs themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel

from activities.store.checkpoints import RunStart
from contracts.base import Contract
from contracts.blob import BlobRef
from contracts.run import ArtifactList, Checkpoint, RunResult
from contracts.snapshot import SnapshotRef


class Named(NamedTuple):
    """Something in the store that names blobs. `size` is -1 where only the digest is known."""

    kind: str
    digest: str
    size: int


class Place(NamedTuple):
    """A directory of a snapshot, by where its stored form lies."""

    pack: str
    offset: int


Key = Named | Place


@dataclass(frozen=True, slots=True)
class Names:
    """What something names: blobs, and things that name blobs themselves."""

    blobs: tuple[str, ...] = ()
    below: tuple[Key, ...] = ()


def names_of(record: Contract) -> Names:
    """Return what a record of a run names.

    Every reference to a blob counts, wherever in the record it is; what a blob of its own kind names is looked for where a record
    says that it has one.
    """
    blobs: list[str] = []
    below: list[Key] = []
    for value in _models(record):
        match value:
            case SnapshotRef():
                below.append(Named("snapshot", value.record.digest, value.record.size))
            case BlobRef():
                blobs.append(value.digest)
            case Checkpoint(transcript=BlobRef() as head):
                below.append(Named("head", head.digest, head.size))
            case RunResult(provenance_head=BlobRef() as head):
                below.append(Named("head", head.digest, head.size))
            case ArtifactList(index=BlobRef() as index):
                below.append(Named("index", index.digest, index.size))
            case RunStart():
                below.append(Named("agent", value.agent.digest, value.agent.size))
            case _:
                pass
    return Names(tuple(blobs), tuple(below))


def _models(value: object) -> Iterator[BaseModel]:
    if isinstance(value, BaseModel):
        yield value
        for name in type(value).model_fields:
            yield from _models(getattr(value, name))
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _models(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _models(part)
