"""Losing a sandbox in the middle of a command: until the command runs again in a new one, beside making one and `tar -x`.

A run's first command fills its workspace (nothing; 1,000 files and 10 MB; 10,000 files and 200 MB). The second writes down the
time, to the microsecond, at which it begins, and sleeps. In its middle the sandbox is killed (SIGKILL to its init, which takes
everything in it). What is measured ends with the time that the same command writes down in the next sandbox; between them are
noticing the loss, ending what is left of the sandbox, the pause before a new one, making it, and restoring the files.

The baseline is a local sandbox made by its provider, without Temporal, and `tar -xf` of that same workspace into it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from temporalio.api.history.v1 import HistoryEvent

from activities.sandbox.providers.local import LocalProvider
from activities.workspace.restore import restore_tree
from activities.workspace.snapshots import SnapshotStore
from benchmarks.registry import Say
from benchmarks.report import Metric
from benchmarks.stack import BenchStack, Handle, bench_stack
from benchmarks.workspaces import LARGE, SMALL, command, room, timed
from contracts.sandbox import RUN_LABEL, SandboxRef, SandboxSpec
from contracts.snapshot import SnapshotRef

ROUNDS = 3
SLEEP = 2.0
KILL_AFTER = 0.5
"""Seconds into the command at which its sandbox is killed: what it has done until then is done again."""
FOLDERS = 100
WORKSPACES = {"empty": (0, 0), "small": SMALL, "large": LARGE}
BASELINE, WITHOUT = "create_and_tar_x", "without_a_loss"
MAX_RATIO, ALLOWED = 1.5, 1.0
"""The target: so many times the baseline, as for a restore, and a second for noticing, the pause of 0.2 s, and five hops."""
PATIENCE = 120.0
STEPS = 3
PHASES = 8


@dataclass(frozen=True)
class Loss:
    """One run that lost a sandbox beside one that lost none, and the baseline; in seconds."""

    until_again: float
    with_one: float
    without: float
    baseline: float
    more_calls: int


async def measure(say: Say) -> dict[str, Metric]:
    """Measure, in about four minutes."""
    metrics: dict[str, Metric] = {}
    async with bench_stack([_scenario(name, *tree) for name, tree in WORKSPACES.items()]) as stack:
        say("warming up")
        await _lose(stack, "empty", say)
        for name, (files, size) in WORKSPACES.items():
            say(f"{files} files, {files * size / 1e6:.0f} MB")
            metrics |= _metrics(name, [await _lose(stack, name, say) for _ in range(ROUNDS)])
    return metrics


def _metrics(name: str, losses: list[Loss]) -> dict[str, Metric]:
    base = median(loss.baseline for loss in losses)
    most = MAX_RATIO * base + ALLOWED
    return {
        f"{name}_seconds": Metric(
            value=median(loss.until_again for loss in losses), unit="s", target=most, baseline=BASELINE, baseline_value=base
        ),
        f"{name}_run_seconds": Metric(
            value=median(loss.with_one for loss in losses),
            unit="s",
            target=median(loss.without for loss in losses) + KILL_AFTER + most,
            baseline=WITHOUT,
            baseline_value=median(loss.without for loss in losses),
        ),
        f"{name}_model_calls": Metric(
            value=max(loss.more_calls for loss in losses), unit="more calls", target=0, baseline=WITHOUT, baseline_value=0
        ),
    }


def _scenario(name: str, files: int, size: int) -> dict[str, Any]:
    each = files // FOLDERS
    # Every other folder of random bytes, the others of what compresses: as in the other benchmarks, and fast.
    fill = (
        f"for d in {{1..{FOLDERS}}}; do mkdir f$d; "
        f"if ((d % 2)); then cat /dev/urandom; else od -An -tx1 /dev/urandom; fi | head -c {each * size} "
        f"| split -b {size} -a 3 - f$d/; done"
    )
    again = f"echo $EPOCHREALTIME > begun; sleep {SLEEP}; ls | wc -l"
    turns = [fill if files else "true", again, "true"]
    return {
        "name": f"recovery_{name}",
        "match": {"text": rf"\[recovery_{name}\]"},
        "turns": [*({"calls": [{"name": "shell", "arguments": {"command": turn}}]} for turn in turns), {"text": "done"}],
    }


async def _lose(stack: BenchStack, name: str, say: Say) -> Loss:
    """Do a run that loses no sandbox and one that loses one, and the baseline with the files that they had."""
    whole = await stack.start(f"recovery_{name}", STEPS)
    result = await stack.finish(whole, STEPS)
    with room() as root:
        baseline = await _baseline(stack, result, root)
    lost = await stack.start(f"recovery_{name}", STEPS)
    first, begun = await _begun(stack, lost)
    await asyncio.sleep(max(begun + KILL_AFTER - time.time(), 0))
    killed = time.time()
    os.kill(json.loads((first / "state.json").read_text())["pid"], signal.SIGKILL)
    _, again = await _begun(stack, lost, other_than=first)
    result = await stack.finish(lost, STEPS)
    if result["recoveries"] != 1:
        raise RuntimeError(f"{lost.id} lost {result['recoveries']} sandboxes, and one was killed")
    events = list((await lost.fetch_history()).events)
    say(f"again after {again - killed:.2f} s (create and tar -x: {baseline:.2f} s): {_phases(events, killed)}")
    return Loss(
        until_again=again - killed,
        with_one=_time(events[-1]) - _time(events[0]),
        without=await _seconds(whole),
        baseline=baseline,
        more_calls=_answered(stack, lost) - _answered(stack, whole),
    )


async def _baseline(stack: BenchStack, result: dict[str, Any], root: Path) -> float:
    """Return the seconds of making a sandbox and of `tar -xf` of the workspace that a run ended with."""
    tree = await SnapshotStore(stack.dev.blobs).load(SnapshotRef.model_validate(result["checkpoint"]["snapshot"]))
    await restore_tree(stack.dev.blobs, tree.root, root / "workspace", owner=None)
    await command("tar", "-cf", root / "archive.tar", "-C", root / "workspace", ".")
    provider = LocalProvider(root / "sandboxes")
    await provider.kill(await _create(provider, "warm-up"))
    seconds, ref = await timed(_create(provider, "only"))
    sandbox = await provider.attach(ref)
    unpacked, _ = await timed(command("tar", "-xf", root / "archive.tar", "-C", sandbox.workspace))
    await provider.kill(ref)
    return seconds + unpacked


async def _create(provider: LocalProvider, key: str) -> SandboxRef:
    return await provider.create(SandboxSpec(), key, environment={}, labels={}, queue="q")


async def _begun(stack: BenchStack, handle: Handle, other_than: Path | None = None) -> tuple[Path, float]:
    """Wait until the command has begun in a sandbox of a run; return that sandbox, and when, by the command's own clock."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for state in (stack.dev.logs.parent / "sandboxes").glob("*/state.json"):
            with contextlib.suppress(OSError, ValueError):
                is_of_run = json.loads(state.read_text())["labels"][RUN_LABEL] == handle.id
                if is_of_run and state.parent != other_than:
                    return state.parent, float((state.parent / "workspace/begun").read_text())
        await asyncio.sleep(0.01)
    raise RuntimeError(f"{handle.id}: its command has not begun within {PATIENCE:g} s")


def _answered(stack: BenchStack, handle: Handle) -> int:
    """Return how many model calls of a run the endpoint has answered."""
    lines = (stack.dev.logs.parent / "scripted-model.jsonl").read_text().splitlines()
    seen = [entry for entry in map(json.loads, lines) if entry["conversation"] == handle.id[:64]]
    return sum(entry["outcome"] == "answered" for entry in seen)


async def _seconds(handle: Handle) -> float:
    events = (await handle.fetch_history()).events
    return _time(events[-1]) - _time(events[0])


def _time(event: HistoryEvent) -> float:
    return event.event_time.ToNanoseconds() / 1e9


def _phases(events: list[HistoryEvent], killed: float) -> str:
    """Tell when, after the loss, which activity failed, was scheduled, or was done."""
    names = {event.event_id: event.activity_task_scheduled_event_attributes.activity_type.name for event in events}
    told: list[tuple[str, str, HistoryEvent]] = []
    for event in events:
        if _time(event) < killed or len(told) == PHASES:
            continue
        if name := names[event.event_id]:
            told.append((name, "scheduled", event))
        elif scheduled := event.activity_task_completed_event_attributes.scheduled_event_id:
            told.append((names[scheduled], "done", event))
        elif scheduled := event.activity_task_failed_event_attributes.scheduled_event_id:
            told.append((names[scheduled], "failed", event))
    return ", ".join(f"{name} {what} {_time(event) - killed:.2f}" for name, what, event in told)
