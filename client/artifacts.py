"""Copying a run's artifacts out of the store: verified, never outside the directory that was named."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter

from contracts.base import BadInput
from contracts.blob import BlobRef
from contracts.run import Artifact, ArtifactList

_LIST = TypeAdapter(tuple[Artifact, ...])
_PART = ".caisson-part-"


class Blobs(Protocol):
    """The part of the blob store that is needed here. Both raise a store error for bytes that are not those named."""

    async def get(self, ref: BlobRef) -> bytes: ...

    def stream(self, ref: BlobRef) -> AsyncIterator[bytes]: ...


async def all_artifacts(blobs: Blobs, artifacts: ArtifactList) -> tuple[Artifact, ...]:
    """Return the whole list of a run's artifacts; a result itself holds only the first of them."""
    if artifacts.index is None or artifacts.count <= len(artifacts.first):
        return artifacts.first
    return _LIST.validate_python(json.loads(await blobs.get(artifacts.index)))


async def copy_artifacts(blobs: Blobs, artifacts: Sequence[Artifact], directory: Path, *, overwrite: bool) -> list[Path]:
    """Write artifacts below `directory`, each under its path in the workspace, and return where they are.

    All targets are checked first, so nothing is written when one cannot be. A file appears only whole, with the bytes that its
    digest names. Of its mode only the execute permission is taken over. Raises BadInput for a path that leads outside, or a
    file that is there already, unless `overwrite`.
    """
    targets = [_target(directory, artifact.path) for artifact in artifacts]
    for target in targets:
        _check_free(directory, target, overwrite)
    for artifact, target in zip(artifacts, targets, strict=True):
        await _write(blobs, artifact, target, overwrite)
    return targets


def _target(directory: Path, path: str) -> Path:
    # A list of artifacts comes from the store, which others may write to: it is not trusted to stay inside.
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise BadInput(
            f"artifact {path!r}: its path leads outside {directory}; nothing was written, do not trust this run's list"
        )
    return directory.joinpath(*parts)


def _check_free(directory: Path, target: Path, overwrite: bool) -> None:
    for folder in reversed(target.relative_to(directory).parents):
        here = directory / folder
        if here != directory and here.is_symlink():
            raise BadInput(f"{here}: is a link, which would lead outside {directory}; remove it or name another directory")
        if here.exists() and not here.is_dir():
            raise BadInput(f"{here}: a file is where a directory is needed; remove it or name another directory")
    if target.is_dir() and not target.is_symlink():
        raise BadInput(f"{target}: a directory is where a file is to be written; remove it or name another directory")
    if os.path.lexists(target) and not overwrite:
        raise BadInput(f"{target}: is there already; nothing was written; name another directory, or give --overwrite")


async def _write(blobs: Blobs, artifact: Artifact, target: Path, overwrite: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f"{_PART}{secrets.token_hex(8)}"
    try:
        with part.open("xb") as file:
            async for chunk in blobs.stream(artifact.blob):
                file.write(chunk)
        _put(part, target, bool(artifact.mode & 0o111), overwrite)
    except FileExistsError as error:
        raise BadInput(f"{target}: is there already; name another directory, or give --overwrite") from error
    finally:
        part.unlink(missing_ok=True)


def _put(part: Path, target: Path, executable: bool, overwrite: bool) -> None:
    if executable:
        part.chmod(part.stat().st_mode | 0o111)
    if not overwrite:
        target.touch(exist_ok=False)
    part.replace(target)
