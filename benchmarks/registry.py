"""The benchmarks by name. Adding one touches its own module and one line here."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping

from benchmarks.report import Metric

Say = Callable[[str], None]
"""Told, a line each, what a person who waits should know."""

Measure = Callable[[Say], Awaitable[dict[str, Metric]]]

BENCHMARKS: Mapping[str, str] = {
    "step_overhead": "benchmarks.step_overhead",
    "history_growth": "benchmarks.history_growth",
    "sandbox_start": "benchmarks.sandbox_start",
    "snapshot": "benchmarks.snapshot",
    "restore": "benchmarks.restore",
    "materialise": "benchmarks.materialise",
    "fanout": "benchmarks.fanout",
    "recovery": "benchmarks.recovery",
    "provider_calls": "benchmarks.provider_calls",
}
"""Where each benchmark is: a module with an `async def measure(say) -> dict[str, Metric]`."""


class UnknownBenchmark(ValueError):
    """No benchmark has this name; the message lists those there are."""


def find(name: str) -> Measure:
    """Import a benchmark and return what measures it. Raises UnknownBenchmark."""
    if name not in BENCHMARKS:
        raise UnknownBenchmark(f"no benchmark is named {name!r}; there are: {', '.join(BENCHMARKS)}")
    measure: Measure = importlib.import_module(BENCHMARKS[name]).measure
    return measure
