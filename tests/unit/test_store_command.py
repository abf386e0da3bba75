"""`caisson store`, as far as it goes without Temporal."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.cli.main import app
from tests.sweep_support import World


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The store that the command finds."""
    made = World(tmp_path)
    for name in [name for name in os.environ if name.startswith(("CAISSON_", "TEMPORAL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CAISSON_STORE", str(made.store_root))
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    return made


async def caisson(*argv: str) -> tuple[int, str, str]:
    """Run the command in a thread, since it has an event loop of its own."""
    done = await asyncio.to_thread(CliRunner().invoke, app, argv)
    return done.exit_code, done.stdout, done.stderr


async def test_usage_tells_of_each_run(world: World) -> None:
    """A line a run, the sum below, and what cannot be read on standard error; the same as JSON."""
    run = await world.ended("a run", {"team": "docs"}, steps=2)
    await world.begin("goes on")
    code, out, err = await caisson("store", "usage")
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) == 4
    assert lines[1].endswith("  goes on")
    assert " 2  completed " in lines[2]
    assert lines[2].endswith("  a run  team=docs")
    assert "no run needs 0 B of the blobs" in lines[3]
    world.room.blob(run.start.agent.digest).unlink()
    code, out, err = await caisson("store", "usage", "--json")
    rows = json.loads(out)["runs"]
    assert (code, [row["run_id"] for row in rows]) == (0, ["goes on", "a run"])
    assert all(row["total_bytes"] == row["own_bytes"] + row["shared_bytes"] and row["faults"] for row in rows)
    code, out, err = await caisson("store", "usage")
    assert f"run 'a run': blob {run.start.agent.digest} is not in the store" in err


async def test_an_empty_store_is_measured(world: World) -> None:
    """It has nothing."""
    code, out, _ = await caisson("store", "usage")
    assert (code, out) == (0, "0 B in all (nothing); no run needs 0 B of the blobs\n")


@pytest.mark.parametrize(
    ("policy", "more", "complaint"),
    [
        (None, [], "cannot be read"),
        ("a: [", [], "is not YAML"),
        ("- keep: forever", [], "cannot be used"),
        ("rules: [{keep: {weeks: 1}}]", [], "rules.0.keep.weeks: unknown field"),
        ("rules: []", ["--grace", "0.5"], "--grace 0.5: must be at least 1 hour"),
        ("rules: []", ["--grace", "nan"], "--grace nan: must be at least 1 hour"),
        ("rules: []", ["--payloads-older-than", "0"], "Invalid value for '--payloads-older-than'"),
    ],
)
async def test_what_cannot_be_done_is_said_before_anything_is_read(
    world: World, tmp_path: Path, policy: str | None, more: list[str], complaint: str
) -> None:
    """Exit code 2, and what to change."""
    file = tmp_path / "policy.yaml"
    if policy is not None:
        file.write_text(policy)
    code, _, err = await caisson("store", "sweep", "--policy", str(file), *more)
    assert code == 2
    assert complaint in err
    assert await world.keys("") == set()


async def test_without_temporal_nothing_is_swept(world: World, tmp_path: Path) -> None:
    """Nobody else knows which runs go on."""
    (tmp_path / "policy.yaml").write_text("rules: []")
    code, _, err = await caisson("store", "sweep", "--policy", str(tmp_path / "policy.yaml"), "--apply")
    assert code == 2
    assert "Temporal cannot be reached" in err
    assert await world.keys("") == set()
