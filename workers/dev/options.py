"""What a person may choose about the dev stack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DevOptions:
    """`port` and `ui_port` of None mean the usual ones, or free ones where those are taken and a run is given."""

    file: Path = Path("temporal-dev.yml")
    run: Path | None = None
    scenario: Path | None = None
    port: int | None = None
    ui_port: int | None = None
    state_dir: Path = Path(".caisson")
