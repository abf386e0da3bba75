"""Collecting a run's outputs from a real sandbox: what cannot be an artifact costs none of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.sandbox.port import FileFault
from activities.sandbox.registry import ProviderRegistry
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.workspace.activity import WorkspaceActivities
from activities.workspace.deliver import _destinations
from activities.workspace.keeper import WorkspaceKeeper
from contracts.manifest import OutputSpec
from contracts.prepare import CollectOutputsInput
from contracts.run import Artifact, ArtifactList
from tests.sandbox.local_support import Local


async def collect(local: Local, store: Path, *outputs: str) -> ArtifactList:
    """Collect these paths."""
    blobs = BlobStore(LocalStore(store))
    providers = ProviderRegistry({"local": lambda: local.provider})
    activities = WorkspaceActivities(providers, blobs, WorkspaceKeeper(providers, blobs))
    given = CollectOutputsInput(run_id="r", sandbox=local.sandbox.ref, outputs=tuple(OutputSpec(path=path) for path in outputs))
    result = await ActivityEnvironment().run(activities.collect_outputs, given)
    result.model_dump_json()
    artifacts: ArtifactList = result.artifacts
    return artifacts


async def test_a_name_that_is_no_text_is_told_and_left_out(local: Local, tmp_path: Path) -> None:
    """No artifact can be named so, and the others are there."""
    await local.sh(
        r"mkdir outputs; echo a >outputs/a; echo b >'outputs/b\c'; echo c >$'outputs/caf\xe9.txt'; mkfifo $'outputs/\xff'"
    )
    found = await collect(local, tmp_path / "store", "outputs")
    assert [artifact.path for artifact in found.first] == ["outputs/a", "outputs/b\\c"]
    assert found.skipped == (
        "outputs/caf\\xe9.txt: its name is not UTF-8; rename it",
        "outputs/\\xff: its name is not UTF-8; rename it",
    )


async def test_a_directory_that_is_closed_costs_nothing_else(local: Local, tmp_path: Path) -> None:
    """Whether it is an output itself or lies in one."""
    await local.sh("mkdir -p outputs/closed closed; echo a >outputs/a; mkfifo outputs/pipe; chmod 0 closed outputs/closed")
    found = await collect(local, tmp_path / "store", "closed", "outputs", "closed/below")
    assert [artifact.path for artifact in found.first] == ["outputs/a"]
    assert [told.partition(":")[0] for told in found.skipped] == ["closed", "outputs/closed", "outputs/pipe", "closed/below"]
    assert "outputs/pipe: a FIFO, socket or device, not a regular file" in found.skipped


async def test_a_listing_that_fails_is_told(local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what a single file says."""

    async def walk(*_: Any) -> Any:
        raise FileFault("outputs/\udcff: Permission denied")

    await local.sh("mkdir outputs; echo a >a")
    monkeypatch.setattr(type(local.sandbox), "walk", walk)
    found = await collect(local, tmp_path / "store", "outputs", "a")
    assert [artifact.path for artifact in found.first] == ["a"]
    assert found.skipped == ("outputs/\\xff: Permission denied",)


async def test_outputs_that_overlap_are_collected_once(local: Local, tmp_path: Path) -> None:
    """And one file may go to several places."""
    await local.sh("mkdir outputs; echo a >outputs/a.md; ln -s a.md outputs/link")
    found = await collect(local, tmp_path / "store", "outputs", "outputs/a.md", "outputs/link")
    assert [artifact.path for artifact in found.first] == ["outputs/a.md"]
    assert found.skipped == ("outputs/link: a symlink, not a regular file",)
    to = {"type": "s3", "bucket": "bucket", "prefix": "all/"}
    given = [{"path": "outputs", "to": to}, {"path": "outputs/a.md", "to": to}, {"path": "outputs", "to": {**to, "prefix": "x/"}}]
    outputs = [OutputSpec.model_validate(one) for one in given]
    # Also of a run whose artifacts were listed twice.
    listed = [Artifact.model_validate_json(found.first[0].model_dump_json()) for _ in range(2)]
    placed = _destinations("r", outputs, listed)
    assert [sorted(destination.wanted) for destination in placed] == [["all/a.md"], ["x/a.md"]]
