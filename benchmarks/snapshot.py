"""Snapshots of a local sandbox's workspace, beside GNU tar, git, and openai-agents' local snapshots.

A workspace of 1,000 files and 10 MB, one of 10,000 files and 200 MB, and a file of 1 GB. All in turns in the same run, on the
same disk, each after the disk has taken what was written before.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from statistics import median

from benchmarks.registry import Say
from benchmarks.report import Metric
from benchmarks.workspaces import (
    GIT,
    LARGE,
    LOCAL_SNAPSHOT,
    SMALL,
    TAR,
    Bench,
    change,
    command,
    commit,
    forget_peak,
    make_tree,
    peak_memory,
    peer,
    remove,
    room,
    size_of,
    timed,
)
from contracts.snapshot import SnapshotRef

ROUNDS = 5
GIB = 1 << 30


async def measure(say: Say) -> dict[str, Metric]:
    """Measure, in about three minutes; the first time a little longer, for the peer's environment."""
    metrics: dict[str, Metric] = {}
    for label, (files, size) in (("small_", SMALL), ("", LARGE)):
        say(f"{files} files, {files * size / 1e6:.0f} MB")
        with room() as root:
            bench = Bench(root)
            try:
                metrics |= await _tree(bench, root, label, files, size)
            finally:
                await bench.close()
    say("appending to a file of 1 GB")
    with room() as root:
        bench = Bench(root)
        try:
            metrics |= await _append(bench, root)
        finally:
            await bench.close()
    return metrics


async def _tree(bench: Bench, root: Path, label: str, files: int, size: int) -> dict[str, Metric]:
    sandbox = await bench.sandbox()
    make_tree(sandbox.workspace, files, size)
    other = await asyncio.to_thread(peer, sandbox.workspace)
    forget_peak()
    firsts: list[float] = []
    ratios: list[float] = []
    tars: list[float] = []
    ref: SnapshotRef | None = None
    archive = root / "archive.tar"
    for number in range(ROUNDS):
        remove(archive)
        tar, _ = await timed(command("tar", "-cf", archive, "-C", sandbox.workspace, "."))
        remove(root / "store")
        bench.keeper = bench.worker("store")
        first, ref = await timed(bench.keeper.snapshot(sandbox, None))
        firsts.append(first)
        tars.append(tar)
        ratios.append(first / tar)
        if number == 0:
            git_first, _ = await timed(commit(root / "repository", sandbox.workspace))
    stored, in_git = bench.stored(), size_of(root / "repository")
    unchanged = [(await timed(bench.keeper.snapshot(sandbox, ref)))[0] for _ in range(ROUNDS)]
    git_unchanged, _ = await timed(commit(root / "repository", sandbox.workspace))
    one, one_git, one_bytes = await _changed(bench, root, sandbox.workspace, ref, 1)
    hundred, hundred_git, hundred_bytes = await _changed(bench, root, sandbox.workspace, None, 100)
    memory = peak_memory()
    return {
        f"{label}first": Metric(value=median(ratios), unit="ratio", target=2, baseline=TAR, baseline_value=1),
        f"{label}first_ms": _ms(median(firsts), 2e3 * median(tars), TAR, median(tars)),
        f"{label}first_beside_git_ms": _ms(median(firsts), 1e3 * git_first, GIT, git_first),
        f"{label}first_beside_peer_ms": _ms(median(firsts), other["first_ms"], LOCAL_SNAPSHOT, other["first_ms"] / 1e3),
        f"{label}stored": _mb(stored, size_of(archive), TAR, size_of(archive)),
        f"{label}stored_beside_git": _mb(stored, size_of(archive), GIT, in_git),
        f"{label}unchanged_ms": _ms(median(unchanged), 50, GIT, git_unchanged),
        f"{label}one_changed_ms": _ms(one, 100, GIT, one_git),
        f"{label}one_changed_beside_peer_ms": _ms(one, 100, LOCAL_SNAPSHOT, other["one_changed_ms"] / 1e3),
        f"{label}one_changed_stored": Metric(
            value=one_bytes,
            unit="x changed bytes",
            target=2,
            baseline=LOCAL_SNAPSHOT,
            baseline_value=other["stored_bytes"] / size,
        ),
        f"{label}hundred_changed_ms": _ms(hundred, 300, GIT, hundred_git),
        f"{label}hundred_changed_stored": Metric(
            value=hundred_bytes,
            unit="x changed bytes",
            target=2,
            baseline=LOCAL_SNAPSHOT,
            baseline_value=other["stored_bytes"] / (100 * size),
        ),
        f"{label}memory": Metric(
            value=memory, unit="MiB", target=256, baseline=LOCAL_SNAPSHOT, baseline_value=other["memory_mib"]
        ),
    }


async def _changed(bench: Bench, root: Path, workspace: Path, ref: SnapshotRef | None, count: int) -> tuple[float, float, float]:
    """Return the seconds of a snapshot and of a commit after some files changed, and what was stored over what changed."""
    sandbox = await bench.provider.attach((await bench.provider.list({}))[0])
    ref = ref or await bench.keeper.snapshot(sandbox, None)
    ours: list[float] = []
    gits: list[float] = []
    shares: list[float] = []
    for number in range(ROUNDS):
        changed = change(workspace, count, 100 * count + number)
        before = bench.stored()
        seconds, ref = await timed(bench.keeper.snapshot(sandbox, ref))
        shares.append((bench.stored() - before) / changed)
        ours.append(seconds)
        gits.append((await timed(commit(root / "repository", workspace)))[0])
    return median(ours), median(gits), median(shares)


async def _append(bench: Bench, root: Path) -> dict[str, Metric]:
    sandbox = await bench.sandbox()
    dice = random.Random(1)
    with (sandbox.workspace / "large").open("wb") as file:
        for _ in range(GIB >> 20):
            file.write(dice.randbytes(1 << 20))
    forget_peak()
    ref = await bench.keeper.snapshot(sandbox, None)
    with (sandbox.workspace / "large").open("ab") as file:
        file.write(dice.randbytes(1 << 20))
    before = bench.stored()
    seconds, _ = await timed(bench.keeper.snapshot(sandbox, ref))
    grown, memory = bench.stored() - before, peak_memory()
    archive = root / "archive.tar"
    tar, _ = await timed(command("tar", "-cf", archive, "-C", sandbox.workspace, "."))
    return {
        "append_ms": _ms(seconds, 2e3 * tar, TAR, tar),
        "append_stored": _mb(grown, 8e6, TAR, size_of(archive)),
        "append_memory": Metric(value=memory, unit="MiB", target=256, baseline="none", baseline_value=0),
    }


def _ms(seconds: float, target: float, baseline: str, baseline_seconds: float) -> Metric:
    return Metric(value=seconds * 1e3, unit="ms", target=target, baseline=baseline, baseline_value=baseline_seconds * 1e3)


def _mb(size: float, target: float, baseline: str, baseline_size: float) -> Metric:
    return Metric(value=size / 1e6, unit="MB", target=target / 1e6, baseline=baseline, baseline_value=baseline_size / 1e6)
