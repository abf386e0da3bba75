"""Restoring a snapshot to a local sandbox, beside GNU tar, git, and openai-agents' resume.

The same two workspaces as in `snapshot`. Warm: the store's files are in the host's memory. Cold: they are not, and neither is
what tar and git read. In every case the worker remembers nothing of the run.
"""

from __future__ import annotations

import asyncio
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
    command,
    commit,
    forget_pages,
    forget_peak,
    make_tree,
    peak_memory,
    peer,
    remove,
    room,
    timed,
)
from contracts.base import BadInput
from contracts.snapshot import SnapshotRef

ROUNDS = 5


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
    return metrics


async def _tree(bench: Bench, root: Path, label: str, files: int, size: int) -> dict[str, Metric]:
    sandbox = await bench.sandbox()
    make_tree(sandbox.workspace, files, size)
    other = await asyncio.to_thread(peer, sandbox.workspace)
    archive, repository = root / "archive.tar", root / "repository"
    await command("tar", "-cf", archive, "-C", sandbox.workspace, ".")
    await commit(repository, sandbox.workspace)
    ref = await bench.keeper.snapshot(sandbox, None)
    await bench.provider.kill(sandbox.ref)
    forget_peak()
    ratios: dict[bool, list[float]] = {False: [], True: []}
    ours: dict[bool, list[float]] = {False: [], True: []}
    tars: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for is_cold in (False, True):
            tar = await _unpack(root, archive, is_cold)
            seconds = await _restore(bench, ref, files, is_cold)
            ratios[is_cold].append(seconds / tar)
            ours[is_cold].append(seconds)
            tars[is_cold].append(tar)
    memory = peak_memory()
    git = [await _check_out(root, repository) for _ in range(2)][-1]
    warm = median(ours[False])
    return {
        f"{label}warm": Metric(value=median(ratios[False]), unit="ratio", target=1.5, baseline=TAR, baseline_value=1),
        f"{label}cold": Metric(value=median(ratios[True]), unit="ratio", target=1.5, baseline=TAR, baseline_value=1),
        f"{label}warm_ms": _ms(warm, 1.5e3 * median(tars[False]), TAR, median(tars[False])),
        f"{label}cold_ms": _ms(median(ours[True]), 1.5e3 * median(tars[True]), TAR, median(tars[True])),
        f"{label}warm_beside_git_ms": _ms(warm, 1.5e3 * git, GIT, git),
        f"{label}warm_beside_peer_ms": _ms(warm, other["restore_ms"], LOCAL_SNAPSHOT, other["restore_ms"] / 1e3),
        f"{label}memory": Metric(
            value=memory, unit="MiB", target=256, baseline=LOCAL_SNAPSHOT, baseline_value=other["memory_mib"]
        ),
    }


async def _restore(bench: Bench, ref: SnapshotRef, files: int, is_cold: bool) -> float:
    """Return the seconds of a restore into a new sandbox by a worker that remembers nothing."""
    sandbox = await bench.sandbox()
    keeper = bench.worker("store")
    if is_cold:
        await asyncio.to_thread(forget_pages, bench.root / "store")
    seconds, count = await timed(keeper.restore(sandbox, ref))
    if count != files:
        raise BadInput(f"{count} of {files} files were restored")
    await bench.provider.kill(sandbox.ref)
    return seconds


async def _unpack(root: Path, archive: Path, is_cold: bool) -> float:
    target = root / "unpacked"
    target.mkdir()
    if is_cold:
        await asyncio.to_thread(forget_pages, archive)
    seconds, _ = await timed(command("tar", "-xf", archive, "-C", target))
    await asyncio.to_thread(remove, target)
    return seconds


async def _check_out(root: Path, repository: Path) -> float:
    target = root / "checked-out"
    target.mkdir()
    git = ("git", f"--git-dir={repository}", f"--work-tree={target}")
    seconds, _ = await timed(command(*git, "checkout-index", "-a", "-f", cwd=target))
    await asyncio.to_thread(remove, target)
    return seconds


def _ms(seconds: float, target: float, baseline: str, baseline_seconds: float) -> Metric:
    return Metric(value=seconds * 1e3, unit="ms", target=target, baseline=baseline, baseline_value=baseline_seconds * 1e3)
