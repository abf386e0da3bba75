"""Which local sandboxes may be ended: only what no run needs any more."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from activities.sandbox.providers.local import LocalProvider
from activities.sandbox.providers.local_inventory import Resident, disk_use
from activities.sandbox.providers.local_state import Record, host_identity, start_time
from contracts.sandbox import RUN_LABEL, SandboxRef
from workers.sweep import YOUNGEST_SECONDS, Found, Standing, to_sweep

NOW = 1_800_000_000.0
OLD = YOUNGEST_SECONDS + 1


def found(standing: Standing, age: float = OLD, alive: bool | None = True) -> Found:
    """A sandbox of a run that stands so."""
    ref = SandboxRef(provider="local", id="local-1", nonce="n", queue="q")
    labels = {} if standing is Standing.FOREIGN else {RUN_LABEL: "run-1"}
    return Found(Resident(ref, labels, NOW - age, 1, alive, 0), standing)


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("standing", [Standing.CLOSED, Standing.UNKNOWN, Standing.MOVED])
def test_what_no_run_needs_is_ended(standing: Standing, alive: bool) -> None:
    """A closed run, one that Temporal does not know, or one in another sandbox by now; the files of a dead one go as well."""
    assert len(to_sweep([found(standing, alive=alive)], NOW)) == 1


@pytest.mark.parametrize("age", [OLD, 30 * 24 * 3600.0])
@pytest.mark.parametrize("alive", [True, False])
def test_what_an_open_run_has_is_never_ended(age: float, alive: bool) -> None:
    """However old it is; also a dead one, whose run is still to be told of its death."""
    assert to_sweep([found(Standing.OPEN, age, alive)], NOW) == []


@pytest.mark.parametrize("standing", list(Standing))
@pytest.mark.parametrize("age", [-60.0, 0.0, YOUNGEST_SECONDS - 1])
def test_a_young_sandbox_is_never_ended(standing: Standing, age: float) -> None:
    """Nor one from the future, which a clock that was set back makes."""
    assert to_sweep([found(standing, age)], NOW) == []


def test_what_this_server_cannot_know_is_never_ended() -> None:
    """A sandbox of another namespace, or of no run."""
    assert to_sweep([found(Standing.FOREIGN)], NOW) == []


def test_what_lives_out_of_reach_is_never_ended() -> None:
    """Its files must not be taken from it by one who cannot see whether it runs."""
    assert to_sweep([found(Standing.CLOSED, alive=None)], NOW) == []


async def test_the_inventory_tells_the_living_the_dead_and_the_unseen(tmp_path: Path) -> None:
    """Each with its labels and size, the oldest first; a record that cannot be read is passed over, and nothing is removed."""
    boot, _, _ = host_identity().partition("/")
    started = start_time(os.getpid())
    assert started is not None
    for n, (host, pid) in enumerate([(host_identity(), os.getpid()), (host_identity(), 2**22 + 1), (f"{boot}/pid:[1]", 7)]):
        directory = tmp_path / f"local-{n}"
        directory.mkdir()
        record = Record(directory.name, "n", "q", host, pid, started, 100.0 - n, {RUN_LABEL: f"r{n}"}, {})
        (directory / "state.json").write_text(json.dumps(asdict(record)))
        (directory / "data").write_bytes(bytes(100_000))
    (tmp_path / "local-9").mkdir()
    (tmp_path / "local-9/state.json").write_text("")
    residents = await LocalProvider(tmp_path).inventory()
    assert [(one.ref.id, one.alive) for one in residents] == [("local-2", None), ("local-1", False), ("local-0", True)]
    assert [one.labels[RUN_LABEL] for one in residents] == ["r2", "r1", "r0"]
    assert all(100_000 <= one.disk_bytes < 200_000 for one in residents)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_size_is_told_whatever_the_name(tmp_path: Path) -> None:
    """Sizes are in bytes, of whole blocks."""
    odd = tmp_path / "odd name\twith a tab"
    odd.mkdir()
    (odd / "file").write_bytes(bytes(10_000))
    assert 10_000 <= disk_use([odd])[str(odd)] < 40_000
    assert disk_use([]) == {}
