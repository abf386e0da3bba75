"""`python -m contracts.schemas`: write the published JSON Schemas anew."""

from __future__ import annotations

from pathlib import Path

from contracts.schemas import PUBLISHED, schema_text

for name in PUBLISHED:
    (Path(__file__).parent / f"{name}.json").write_text(schema_text(name))
