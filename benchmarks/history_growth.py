"""History bytes per step with 8 KB outputs, beside a loop that passes the whole conversation to each activity.

The bytes are the server's own count of a closed workflow's history. How they grow over a run is the ratio of the median step
among its last to that among its first, from the sizes of the single events.
"""

from __future__ import annotations

from statistics import median

from benchmarks.histories import RunCost, StepCost, run_cost
from benchmarks.registry import Say
from benchmarks.report import Metric
from benchmarks.stack import bench_stack, shell_steps
from contracts.activity_names import CALL_MODEL

OUTPUT_BYTES = 8 * 1024
SHORT, LONG = 60, 300
COMPARED = 100
COMMAND = f"head -c {OUTPUT_BYTES} /dev/urandom | base64 -w 100 | head -c {OUTPUT_BYTES}"
BASELINE = "whole_conversation"
MAX_BYTES = 6 * 1024
MAX_GROWTH = 1.05
MIB = 1 << 20


async def measure(say: Say) -> dict[str, Metric]:
    """Measure, in about a minute."""
    lengths = {f"history_{steps}": steps for steps in (SHORT, LONG)}
    costs: dict[str, RunCost] = {}
    async with bench_stack([shell_steps(name, steps, COMMAND) for name, steps in lengths.items()]) as stack:
        say(f"{SHORT} steps that pass the whole conversation")
        bare = await stack.run_bare("WholeConversation", SHORT + 1, OUTPUT_BYTES)
        baseline = await run_cost(stack.bare, bare, "answer")
        before = stack.resident_bytes()
        for name, steps in lengths.items():
            say(f"{steps} steps of a run")
            costs[name] = await run_cost(stack.dev.client, await stack.run(name, steps), CALL_MODEL.name)
        after = stack.resident_bytes()
    for process, size in after.items():
        say(f"{process}: {before[process] / MIB:.0f} MiB, and {size / MIB:.0f} MiB after {SHORT + LONG} steps")
    whole = baseline.total_bytes / (SHORT + 1)
    metrics = {
        f"bytes_per_step_{steps}": Metric(
            value=costs[name].total_bytes / steps, unit="bytes", target=MAX_BYTES, baseline=BASELINE, baseline_value=whole
        )
        for name, steps in lengths.items()
    }
    metrics["growth"] = Metric(
        value=_growth(costs[f"history_{LONG}"].steps, COMPARED),
        unit="ratio",
        target=MAX_GROWTH,
        baseline=BASELINE,
        baseline_value=_growth(baseline.steps, COMPARED * SHORT // LONG),
    )
    return metrics


def _growth(steps: list[StepCost], compared: int) -> float:
    first, last = steps[:compared], steps[-compared:]
    return median(step.bytes for step in last) / median(step.bytes for step in first)
