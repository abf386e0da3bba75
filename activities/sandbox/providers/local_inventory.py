"""Which local sandboxes this host has, the dead ones too, and what they take up."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from activities.sandbox.providers.local_state import Record, StateDirectory
from contracts.sandbox import SandboxRef


@dataclass(frozen=True)
class Resident:
    """One sandbox of this host. `pid` is its init; a dead one is only files, and what else it left.

    `alive` is None for one in another pid namespace (another container with the same directory), which cannot be told from here.
    """

    ref: SandboxRef
    labels: Mapping[str, str]
    created_at: float
    pid: int
    alive: bool | None
    disk_bytes: int


def inventory(state: StateDirectory, provider: str) -> list[Resident]:
    """Return every sandbox that has a record here, the oldest first. Changes nothing. Blocks its thread."""
    records = [record for path in state.root.glob("local-*") if (record := _record(state, path.name)) is not None]
    sizes = disk_use([state.path(record.id) for record in records])
    residents = [
        Resident(
            ref=record.ref(provider),
            labels=record.labels,
            created_at=record.created_at,
            pid=record.pid,
            alive=False if record.is_dead() else record.is_alive() or None,
            disk_bytes=sizes.get(str(state.path(record.id)), 0),
        )
        for record in records
    ]
    return sorted(residents, key=lambda resident: resident.created_at)


def _record(state: StateDirectory, sandbox_id: str) -> Record | None:
    try:
        return state.load(sandbox_id)
    except (ValueError, TypeError):  # cut off by a crash of the host, or of another version: nobody can attach to it
        return None


def disk_use(directories: Sequence[Path]) -> dict[str, int]:
    """Return the bytes on disk below each directory. `du` goes through trees of any depth, and what it cannot read it skips."""
    if not directories:
        return {}
    command = ["du", "-skx", "--", *map(str, directories)]
    lines = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", check=False).stdout.splitlines()
    sizes = (line.split("\t", 1) for line in lines)
    return {path: int(kilobytes) * 1024 for kilobytes, path in sizes}
