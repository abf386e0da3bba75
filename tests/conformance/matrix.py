"""Writes what the conformance suite found into docs/providers.md: `python -m tests.conformance.matrix [RESULTS]`.

Without RESULTS, the file of an earlier run (CONFORMANCE_RESULTS), it runs the suite on what is here. Live services are never
among that, and a matrix never claims them: what was shown on an emulator is called so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.checks import Check, checks
from tests.conformance.subjects import subjects

DOCUMENT = Path(__file__).parents[2] / "docs/providers.md"
BEGIN, END = "<!-- matrix: written by `python -m tests.conformance.matrix` -->", "<!-- end of matrix -->"
SIGNS = {"pass": "pass", "refused": "refused"}


@dataclass(frozen=True)
class Line:
    """How one check went with one subject."""

    subject: str
    where: str
    check: str
    outcome: str
    text: str


def read(path: Path) -> list[Line]:
    """Read the results of a run; live ones are left out. Raises SystemExit when a check failed."""
    lines = [Line(**json.loads(line)) for line in path.read_text().splitlines()]
    failed = [f"{line.subject}: {line.check}: {line.text}" for line in lines if line.outcome == "failed"]
    if failed:
        raise SystemExit("the matrix is not written, since checks failed:\n" + "\n".join(failed))
    return [line for line in lines if line.where != "live"]


def matrix(lines: Sequence[Line], columns: Sequence[str], rows: Sequence[Check]) -> str:
    """Return the matrix in Markdown: a table of checks and subjects, and under it what was refused and why."""
    cells = {(line.check, line.subject): line for line in lines}
    where = {line.subject: line.where for line in lines}
    text = [
        "| check | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
        "| shown on | " + " | ".join(where.get(column, "not run") for column in columns) + " |",
    ]
    notes: list[str] = []
    group = ""
    for check in rows:
        if check.group != group:
            group = check.group
            text.append(f"| **{group}** |" + " |" * len(columns))
        row = []
        for column in columns:
            line = cells.get((check.name, column))
            cell = "not run" if line is None else SIGNS.get(line.outcome, "not run")
            if line is not None and line.text:
                if line.text not in notes:
                    notes.append(line.text)
                cell += f" ({notes.index(line.text) + 1})"
            row.append(cell)
        text.append(f"| {check.name.replace('_', ' ')} | " + " | ".join(row) + " |")
    return "\n".join([*text, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))])


def write(table: str, document: Path = DOCUMENT) -> None:
    """Put the matrix between its marks. Raises SystemExit when they are not there."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{document}: the marks of the matrix are missing")
    document.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def run(results: Path) -> None:
    """Run the suite on every subject that is here. Raises SystemExit when it fails."""
    environment = {**os.environ, "CONFORMANCE_RESULTS": str(results), "CONFORMANCE_SUBJECTS": ",".join(subjects()), "CONFIRM": ""}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/conformance"], env=environment, check=False)
    if done.returncode:
        raise SystemExit("the matrix is not written, since the suite failed")


def main(arguments: Sequence[str]) -> None:
    """Write the matrix."""
    columns = [name for name in subjects() if not name.endswith("-live")]
    if arguments:
        lines = read(Path(arguments[0]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            results = Path(directory) / "results"
            run(results)
            lines = read(results)
    write(matrix(lines, columns, checks()))


if __name__ == "__main__":
    main(sys.argv[1:])
