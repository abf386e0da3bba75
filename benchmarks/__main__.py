"""`python -m benchmarks NAME [--json]` runs one benchmark; `python -m benchmarks --all` runs them all and prints a table."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from rich.console import Console

from benchmarks.registry import BENCHMARKS, Measure, UnknownBenchmark, find
from benchmarks.report import Report, as_table, load_average, make_report

BAD_USE = 2
TABLE_COLUMNS = 120


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for; return 0, or 2 for a name that there is not. Whether a target is met is for the reader to judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=f"Benchmarks: {', '.join(BENCHMARKS)}.")
    parser.add_argument("name", nargs="?", help="the benchmark to run")
    parser.add_argument("--all", action="store_true", help="run every benchmark")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead of a table")
    given = parser.parse_args(arguments)
    if given.all == (given.name is not None):
        parser.error(f"give one name or --all; there are: {', '.join(BENCHMARKS)}")
    try:
        chosen = [(name, find(name)) for name in (BENCHMARKS if given.all else (given.name,))]
    except UnknownBenchmark as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return BAD_USE
    reports = []
    for name, measure in chosen:
        report = asyncio.run(_run(name, measure))
        reports.append(report)
        if given.json:
            print(json.dumps(report.model_dump(mode="json")), flush=True)
    if not given.json:
        # A pipe has no width; a table that is cut to 80 columns would lose its figures.
        Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS).print(as_table(reports))
    return 0


async def _run(name: str, measure: Measure) -> Report:
    busy = load_average()
    # Progress goes to standard error, so that standard output is the JSON alone.
    metrics = await measure(lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True))
    return make_report(name, metrics, busy)


if __name__ == "__main__":
    sys.exit(main())
