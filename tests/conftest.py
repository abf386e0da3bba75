"""Which tests are in the soak: those that need servers, engines or minutes of their own, so that the suite stays quick."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# An example that took longer than a fifth of a second shows a busy machine, and no fault.
settings.register_profile("caisson", deadline=None)
settings.load_profile("caisson")

ROOT = Path(__file__).parent
SOAK = (
    "conformance/test_services.py",
    "providers",
    "stores",
    "sandbox/test_remote_snapshots.py",
    "unit/source_git",
    "unit/test_store_sweep_races.py",
    "integration/test_hosts.py",
    "integration/test_manifests.py",
)
"""What `make soak` runs; with all of it the suite would take a quarter of an hour on two cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in the soak by where it is."""
    for item in items:
        place = item.path.relative_to(ROOT).as_posix()
        if any(place == one or place.startswith(f"{one}/") for one in SOAK):
            item.add_marker(pytest.mark.soak)
