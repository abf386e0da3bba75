"""What a benchmark reports: metrics with their targets and baselines, as JSON for machines and a table for people."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field
from rich.table import Table

from contracts.base import Contract


class Metric(Contract):
    """One cost: lower is better, and `target` is the most it may be. `baseline_value` was measured in the same run, in `unit`."""

    value: float = Field(allow_inf_nan=False)
    unit: str
    target: float = Field(allow_inf_nan=False)
    baseline: str
    baseline_value: float = Field(allow_inf_nan=False)

    @property
    def is_met(self) -> bool:
        """Whether the cost is within its target."""
        return self.value <= self.target


class Report(Contract):
    """One benchmark's result."""

    name: str
    metrics: dict[str, Metric] = Field(min_length=1)
    machine: str
    date: datetime


def make_report(name: str, metrics: dict[str, Metric], busy: float) -> Report:
    """Put a report together. `busy` is the load average from before the benchmark: what else the machine was doing."""
    return Report(name=name, metrics=metrics, machine=_machine(busy), date=datetime.now(UTC).replace(microsecond=0))


def load_average() -> float:
    """Return how many processes wanted a core, on average over the last minute."""
    return os.getloadavg()[0]


def as_table(reports: list[Report]) -> Table:
    """Lay reports out for a terminal."""
    table = Table(title=reports[0].machine if reports else None, title_justify="left")
    for heading in ("benchmark", "metric"):
        table.add_column(heading, no_wrap=True)
    for heading in ("value", "at most"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("unit", "met", "baseline"):
        table.add_column(heading, no_wrap=True)
    table.add_column("its value", justify="right", no_wrap=True)
    for report in reports:
        for n, (name, metric) in enumerate(report.metrics.items()):
            table.add_row(
                report.name if n == 0 else "",
                name,
                _number(metric.value),
                _number(metric.target),
                metric.unit,
                "[green]yes[/]" if metric.is_met else "[red]no[/]",
                metric.baseline,
                _number(metric.baseline_value),
            )
        table.add_section()
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _machine(busy: float) -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return (
        f"{os.cpu_count()} cores ({_processor()}), {memory:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, load before {busy:.1f}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
