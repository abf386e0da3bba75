"""The checks by name: every `check_*` of the modules `checks_*`, in the order in which they are written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import ModuleType

from tests.conformance import (
    checks_exec,
    checks_failure,
    checks_files,
    checks_jobs,
    checks_lifecycle,
    checks_processes,
    checks_sessions,
    checks_snapshot,
    checks_spec,
)
from tests.conformance.subjects import Subject

GROUPS: dict[str, ModuleType] = {
    "lifecycle": checks_lifecycle,
    "commands": checks_exec,
    "processes": checks_processes,
    "jobs and output": checks_jobs,
    "files": checks_files,
    "sessions": checks_sessions,
    "snapshots": checks_snapshot,
    "limits, network, images": checks_spec,
    "failure": checks_failure,
}


@dataclass(frozen=True)
class Check:
    """One check. It returns nothing when the provider does what it should, and else the refusal that it found in its place."""

    name: str
    group: str
    run: Callable[[Subject], Awaitable[str | None]]

    @property
    def text(self) -> str:
        """What it shows, in one sentence."""
        return " ".join((self.run.__doc__ or "").split())


def checks() -> list[Check]:
    """Return all checks."""
    return [
        Check(name.removeprefix("check_"), group, function)
        for group, module in GROUPS.items()
        for name, function in vars(module).items()
        if name.startswith("check_")
    ]
