"""A hundred subagents from one parent, beside their commands alone and as many bare Temporal child workflows.

Each subagent is a run of its own, forked from its parent's workspace: prepared, given a sandbox with a copy of the files, two
model calls and one command that needs about 0.3 s of processor time, its outputs looked for, its sandbox ended. One call of
`spawn_agents` starts them all. Its time goes, by the server's clock, from the start of the first child workflow to the parent's
next model call.

The baseline is the sum of two things that are measured in turns with it: the same commands started plainly on the host, as many
at a time as the sandbox worker has slots; and a bare workflow with as many children, each with as many activities as a subagent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent

from benchmarks.registry import Say
from benchmarks.report import Metric
from benchmarks.stack import WORKERS, BenchStack, Handle, bench_stack, shell_steps
from benchmarks.workspaces import forget_peak, peak_memory
from contracts.activity_names import CALL_MODEL, Queues
from workers.settings import load_settings

FEW, MANY = 10, 100
ROUNDS = 2
COMMAND = "for ((i = 0; i < 180000; i++)); do :; done"
FILL = "mkdir notes && for ((i = 0; i < 50; i++)); do seq $i $((i + 200)) > notes/$i; done"
"""What the parent has in its workspace, and each subagent a copy of: 50 files of about 800 bytes."""
CHILD = "fanout_child"
BASELINE, AT_TEN = "commands_and_bare_hops", "with_10"
MAX_RATIO, MAX_GROWTH = 1.5, 1.2
MIB_EACH = 1.0
"""What each subagent more may cost the workers, and the server, at their peak."""
SAMPLE_SECONDS = 0.5
PATIENCE, PATIENCE_EACH = 60.0, 5.0
"""Seconds for a run, and more for each subagent, after which it counts as stuck."""
SERVER = "temporal"


@dataclass(frozen=True)
class Round:
    """One measurement with so many subagents: seconds, and MiB at the peak."""

    ours: float
    commands: float
    hops: float
    workers: float
    server: float
    sandboxes: float
    recoveries: int

    @property
    def ratio(self) -> float:
        """Over what it has to cost."""
        return self.ours / (self.commands + self.hops)


async def measure(say: Say) -> dict[str, Metric]:
    """Measure, in about five minutes."""
    rounds: dict[int, list[Round]] = {FEW: [], MANY: []}
    scenarios = [shell_steps(CHILD, 1, COMMAND), *map(_parent, rounds)]
    async with bench_stack(scenarios) as stack:
        say("warming up")
        await _subagents(stack, FEW)
        for _ in range(ROUNDS):
            for count, done in rounds.items():
                done.append(await _round(stack, count, say))
    few, many = rounds[FEW], rounds[MANY]
    each = {count: median(one.ours for one in done) / count for count, done in rounds.items()}
    base = {count: median(one.commands + one.hops for one in done) / count for count, done in rounds.items()}
    return {
        "ratio": Metric(
            value=median(one.ratio for one in many), unit="ratio", target=MAX_RATIO, baseline=BASELINE, baseline_value=1
        ),
        "ratio_10": Metric(
            value=median(one.ratio for one in few), unit="ratio", target=MAX_RATIO, baseline=BASELINE, baseline_value=1
        ),
        "seconds_each": _seconds(each[MANY], base[MANY]),
        "seconds_each_10": _seconds(each[FEW], base[FEW]),
        "growth": Metric(
            value=each[MANY] / each[FEW],
            unit="ratio",
            target=MAX_GROWTH,
            baseline=BASELINE,
            baseline_value=base[MANY] / base[FEW],
        ),
        # With ten only before the first hundred: what a process has once had it keeps.
        "workers_memory": _memory(max(one.workers for one in many), few[0].workers),
        "server_memory": _memory(max(one.server for one in many), few[0].server),
        "sandbox_memory": Metric(
            value=max(one.sandboxes for one in many) / MANY,
            unit="MiB each",
            target=1.2 * few[0].sandboxes / FEW,
            baseline=AT_TEN,
            baseline_value=few[0].sandboxes / FEW,
        ),
        # A sandbox that nobody killed and that was given up for lost: its command is run again.
        "recoveries": Metric(
            value=sum(one.recoveries for one in many) / ROUNDS, unit="sandboxes", target=0, baseline="none", baseline_value=0
        ),
    }


def _seconds(value: float, base: float) -> Metric:
    return Metric(value=value, unit="s", target=MAX_RATIO * base, baseline=BASELINE, baseline_value=base)


def _memory(value: float, at_ten: float) -> Metric:
    most = at_ten + MIB_EACH * (MANY - FEW)
    return Metric(value=value, unit="MiB", target=most, baseline=AT_TEN, baseline_value=at_ten)


def _parent(count: int) -> dict[str, Any]:
    agents = [{"role": "worker", "name": f"w{n}", "task": f"Play [{CHILD}]."} for n in range(count)]
    return {
        "name": f"fanout_{count}",
        "match": {"text": rf"\[fanout_{count}\]"},
        "turns": [
            {"calls": [{"name": "shell", "arguments": {"command": FILL}}]},
            {"calls": [{"name": "spawn_agents", "arguments": {"agents": agents}}]},
            {"expect": r"subagent w0 \(worker\): completed", "text": "all are done"},
        ],
    }


async def _round(stack: BenchStack, count: int, say: Say) -> Round:
    pids = {name: stack.dev.running[name].pid or 0 for name in (*WORKERS, SERVER)}
    for pid in pids.values():
        forget_peak(pid)
    used = {name: _processor_seconds(pid) for name, pid in pids.items()}
    async with _watching(stack) as sandboxes:
        handle, recoveries = await _subagents(stack, count)
    used = {name: _processor_seconds(pid) - used[name] for name, pid in pids.items()}
    peaks = {name: peak_memory(pid) for name, pid in pids.items()}
    children = [await _events(stack.dev.client.get_workflow_handle(f"{handle.id}/w{n}")) for n in range(count)]
    # The least of all: one that lost its sandbox has more, and must not raise what the rest is compared with.
    activities = min(sum(event.HasField("activity_task_scheduled_event_attributes") for event in events) for events in children)
    commands = await _commands(count, load_settings({}).sandbox_slots)
    bare = await stack.run_bare("FanOut", count, (activities + 1) // 2)
    events = await _events(bare)
    hops = _time(events[-1]) - _time(_first(events, EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED))
    done = Round(
        ours=_spawning(await _events(handle)),
        commands=commands,
        hops=hops,
        workers=sum(peaks[name] for name in WORKERS),
        server=peaks[SERVER],
        sandboxes=max(sandboxes, default=0.0),
        recoveries=recoveries,
    )
    say(f"{count} subagents: {done.ours:.1f} s, {recoveries} sandboxes given up")
    say(f"{count} subagents: commands alone {commands:.1f} s, as many bare children of {activities} activities {hops:.1f} s")
    say(f"{count} subagents: processor seconds " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in used.items()))
    say(f"{count} subagents: MiB " + ", ".join(f"{name} {peak:.0f}" for name, peak in peaks.items()))
    say(f"{count} subagents: s waited for a slot + s at work: {_where_time_goes(children)}")
    return done


async def _subagents(stack: BenchStack, count: int) -> tuple[Handle, int]:
    """Do one run with so many subagents, and tell how many sandboxes it gave up. Raises RuntimeError if it is not completed."""
    handle = await stack.dev.client.start_workflow(
        "AgentRun",
        {
            "task": f"Play [fanout_{count}].",
            "agent": {
                "name": "lead",
                "subagents": [{"name": "worker", "description": "Works.", "workspace": "fork"}],
                "subagent_limits": {"parallel": MANY, "total": MANY},
            },
            "budget": {"steps": 10 * count + 10},
        },
        id=f"fanout-{uuid.uuid4().hex[:8]}",
        task_queue=Queues(load_settings({}).task_queue).workflow,
    )
    try:
        result: dict[str, Any] = await asyncio.wait_for(handle.result(), PATIENCE + PATIENCE_EACH * count)
    except TimeoutError:
        raise RuntimeError(f"{handle.id} does not come to an end; see what its subagents wait for") from None
    if result["status"] != "completed" or result["usage"]["model_calls"] != 3 + 2 * count:
        raise RuntimeError(f"{handle.id} is {result['status']} after {result['usage']['model_calls']} model calls")
    recoveries = result["recoveries"]
    for n in range(count):
        one: dict[str, Any] = await stack.dev.client.get_workflow_handle(f"{handle.id}/w{n}").result()
        if one["status"] != "completed":
            raise RuntimeError(f"{handle.id}/w{n} is {one['status']}: {one['reason']}")
        recoveries += one["recoveries"]
    return handle, recoveries


async def _commands(count: int, slots: int) -> float:
    """Run the commands plainly, and return the seconds until all are done."""
    free = asyncio.Semaphore(slots)

    async def one() -> None:
        async with free:
            process = await asyncio.create_subprocess_exec("bash", "-c", COMMAND)
            if await process.wait() != 0:
                raise RuntimeError("the command failed")

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return time.perf_counter() - started


@contextlib.asynccontextmanager
async def _watching(stack: BenchStack) -> AsyncIterator[list[float]]:
    """Note now and then what all sandboxes' own processes have in memory together, in MiB: shared pages by their shares."""
    seen: list[float] = []
    root = stack.dev.logs.parent / "sandboxes"

    async def watch() -> None:
        while True:
            seen.append(await asyncio.to_thread(_sandbox_memory, root))
            await asyncio.sleep(SAMPLE_SECONDS)

    watcher = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


def _sandbox_memory(root: Path) -> float:
    total = 0
    for state in root.glob("*/state.json"):
        with contextlib.suppress(OSError, ValueError):
            pid = json.loads(state.read_text())["pid"]
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def _processor_seconds(pid: int) -> float:
    """What a process has used of the processors, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _events(handle: Handle) -> list[HistoryEvent]:
    return list((await handle.fetch_history()).events)


def _time(event: HistoryEvent) -> float:
    return event.event_time.ToNanoseconds() / 1e9


def _first(events: list[HistoryEvent], kind: EventType.ValueType) -> HistoryEvent:
    return next(event for event in events if event.event_type == kind)


def _spawning(events: list[HistoryEvent]) -> float:
    """Return the seconds from the start of the first child workflow to the model call after all have ended."""
    asked = [event for event in events if event.activity_task_scheduled_event_attributes.activity_type.name == CALL_MODEL.name]
    return _time(asked[2]) - _time(_first(events, EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED))


def _where_time_goes(children: list[list[HistoryEvent]]) -> str:
    """Return, for each kind of activity, the median seconds that it waited to be started, and that it took."""
    waited: dict[str, list[float]] = defaultdict(list)
    worked: dict[str, list[float]] = defaultdict(list)
    for events in children:
        by_id = {event.event_id: event for event in events}
        for event in events:
            if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
                done = event.activity_task_completed_event_attributes
                scheduled, started = by_id[done.scheduled_event_id], by_id[done.started_event_id]
                name = scheduled.activity_task_scheduled_event_attributes.activity_type.name
                waited[name].append(_time(started) - _time(scheduled))
                worked[name].append(_time(event) - _time(started))
    return ", ".join(f"{name} {median(times):.2f}+{median(worked[name]):.2f}" for name, times in waited.items())
