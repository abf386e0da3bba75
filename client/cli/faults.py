"""Which errors are a person's to mend, and with which exit code the command ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """How the command ends. Part of its interface: scripts depend on these numbers."""

    COMPLETED = 0
    FAILED = 1
    BAD_INPUT = 2
    BUDGET_EXCEEDED = 3
    CANCELLED = 4
    NOT_FINISHED = 5
    INTERRUPTED = 130


FAULTS: dict[str, tuple[ExitCode, str]] = {
    "contracts.base.BadInput": (ExitCode.BAD_INPUT, ""),
    "client.sdk.Unanswered": (ExitCode.FAILED, ""),
    "activities.store.port.ObjectMissing": (
        ExitCode.FAILED,
        "; is CAISSON_STORE the store that the workers use? (`caisson dev` keeps it in .caisson/store)",
    ),
    "activities.store.port.StoreError": (ExitCode.FAILED, ""),
    "temporalio.service.RPCError": (ExitCode.FAILED, "; is Temporal up, and may you use it? try `caisson doctor`"),
    "builtins.OSError": (ExitCode.FAILED, ""),
}
"""By the name of the error's class, so that none has to be imported before it is raised: its exit code, and what to do."""


@dataclass(frozen=True)
class Fault:
    """What a person is told."""

    code: ExitCode
    message: str


def fault_of(error: Exception) -> Fault | None:
    """Return what to tell a person of an error, or None for one that is not theirs to mend: a defect of this program."""
    if isinstance(error, BrokenPipeError):
        return None  # whoever read the output has enough; the command line library ends quietly
    for kind in type(error).__mro__:
        known = FAULTS.get(f"{kind.__module__}.{kind.__qualname__}")
        if known is not None:
            from client.show import clean

            return Fault(known[0], clean(f"{str(error) or kind.__name__}{known[1]}"))
    return None
