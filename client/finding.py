"""What a check of `caisson doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How serious a finding is: with a warning everything may still work; with a failure something does not."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """What one check found, and how to mend it."""

    check: str
    state: State
    found: str
    remedy: str = ""
