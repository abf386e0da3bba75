"""Snapshots as the control plane sees them: a reference of constant size to an immutable record of a whole workspace."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from contracts.base import Contract
from contracts.blob import BlobRef, Digest

MAX_EXCLUDES = 200


def check_exclude(pattern: str) -> str:
    """Refuse a pattern that excludes nothing, or cannot be written on one line."""
    if not pattern.strip() or pattern.lstrip().startswith("#") or "\n" in pattern or "\0" in pattern:
        raise ValueError("give one pattern as a line of .gitignore has it, such as node_modules/ or *.tmp; no comment")
    return pattern


ExcludePattern = Annotated[str, Field(max_length=1000), AfterValidator(check_exclude)]


class SnapshotPolicy(Contract):
    """What is left out of a run's snapshots, beside what the workspace's own `.caissonignore` names; and who may keep what."""

    exclude: tuple[ExcludePattern, ...] = Field(
        default=(), max_length=MAX_EXCLUDES, description="patterns as .gitignore has them; what they match is gone after a loss"
    )
    native: bool = Field(
        default=True,
        description="whether a provider that can may keep a sandbox that is put away: paused, or as an image of its own, "
        "beside the snapshot in the store; false: it is ended, and nothing of it stays at the provider",
    )


class SnapshotRef(Contract):
    """One snapshot.

    `id` is the digest of the tree: the same workspace has the same id, whatever sandbox or provider it lies in. `record` is the
    blob that everything else of the snapshot is found from.
    """

    id: Digest
    record: BlobRef
    files: int = Field(default=0, ge=0, description="regular files")
    total_bytes: int = Field(default=0, ge=0, description="of all regular files")
    skipped: int = Field(default=0, ge=0, description="sockets, FIFOs, devices and unreadable files that it does not hold")
