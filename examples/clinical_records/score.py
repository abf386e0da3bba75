"""Score `outputs/encounters.json` against the truth: boundaries, classes, times, and encounters that touch or overlap.

    python examples/clinical_records/score.py OUTPUTS/encounters.json [--truth DIR] [--tolerance CHARS] [--json]

Exit code 0 when it could be scored, however well; 2 when a file is malformed, with the record and the field named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path

CLASSES = ("AMB", "EMER", "IMP")

# Two spans belong together when at least half of their common extent is shared.
_SAME = 0.5


class Malformed(ValueError):
    """A file is not what it should be; the message names the record and the field."""


@dataclass(frozen=True)
class Encounter:
    """One encounter, predicted or true. Offsets count characters; `char_end` is exclusive; a missing end is None."""

    cls: str
    start: datetime
    end: datetime | None
    char_start: int
    char_end: int


@dataclass(frozen=True)
class Pair:
    """Two encounters that stand in some relation, as their places in the list."""

    first: int
    second: int


@dataclass(frozen=True)
class Tally:
    """How many there are in truth, how many were predicted, and how many of these are right."""

    truth: int
    predicted: int
    right: int

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.truth + other.truth, self.predicted + other.predicted, self.right + other.right)

    @property
    def precision(self) -> float:
        """Return the share of what was predicted that is right; 1 when nothing was predicted and nothing was to be."""
        return self.right / self.predicted if self.predicted else float(not self.truth)

    @property
    def recall(self) -> float:
        """Return the share of the truth that was found; 1 when there was nothing to find."""
        return self.right / self.truth if self.truth else 1.0

    @property
    def f1(self) -> float:
        """Return the harmonic mean of precision and recall."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0


@dataclass(frozen=True)
class Score:
    """The score of one record, or of several added up. Times are in minutes."""

    boundaries_exact: Tally
    boundaries_near: Tally
    spans_exact: Tally
    matched: int
    class_right: int
    start_errors: tuple[float, ...]
    end_errors: tuple[float, ...]
    end_not_given: int
    touching_time: Tally
    overlapping_time: Tally
    touching_text: Tally
    overlapping_text: Tally

    def __add__(self, other: Score) -> Score:
        return Score(**{part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)})


# The relations that are scored by pairs. An end that is not given counts as the moment of the start.
RELATIONS: dict[str, Callable[[Encounter, Encounter], bool]] = {
    "touching_time": lambda a, b: _last(a) == b.start or _last(b) == a.start,
    "overlapping_time": lambda a, b: a.start <= b.start < _last(a) or b.start <= a.start < _last(b),
    "touching_text": lambda a, b: a.char_end == b.char_start or b.char_end == a.char_start,
    "overlapping_text": lambda a, b: a.char_start < b.char_end and b.char_start < a.char_end,
}


def score_record(truth: Sequence[Encounter], predicted: Sequence[Encounter], tolerance: int) -> Score:
    """Return the score of one record; boundaries within `tolerance` characters count as near."""
    # The first and the last boundary of a record are given away, so they are not counted as found.
    edges = (min(one.char_start for one in truth), max(one.char_end for one in truth)) if truth else ()
    true_bounds, found_bounds = _boundaries(truth, edges), _boundaries(predicted, edges)
    matches = _match(truth, predicted)
    both = [(truth[t], predicted[p]) for t, p in matches.items()]
    spans = [(t.char_start, t.char_end) == (p.char_start, p.char_end) for t, p in both]
    relations = {name: _score_pairs(relation, truth, predicted, matches) for name, relation in RELATIONS.items()}
    return Score(
        boundaries_exact=Tally(len(true_bounds), len(found_bounds), _hits(true_bounds, found_bounds, 0)),
        boundaries_near=Tally(len(true_bounds), len(found_bounds), _hits(true_bounds, found_bounds, tolerance)),
        spans_exact=Tally(len(truth), len(predicted), sum(spans)),
        matched=len(both),
        class_right=sum(t.cls == p.cls for t, p in both),
        start_errors=tuple(_minutes(p.start, t.start) for t, p in both),
        end_errors=tuple(_minutes(p.end, t.end) for t, p in both if p.end is not None and t.end is not None),
        end_not_given=sum(p.end is None for _, p in both),
        **relations,
    )


def read_predictions(path: Path) -> dict[str, list[Encounter]]:
    """Return the encounters by file name. Raises Malformed."""
    value = _read_json(path)
    records = value.get("records") if isinstance(value, dict) else None
    if not isinstance(records, list):
        raise Malformed(f"{path}: expected an object whose `records` is a list")
    found: dict[str, list[Encounter]] = {}
    for number, record in enumerate(records):
        where = f"{path}: records[{number}]"
        if not isinstance(record, dict):
            raise Malformed(f"{where}: expected an object")
        name = record.get("file")
        if not isinstance(name, str) or not name:
            raise Malformed(f"{where}.file: expected the name of a record, found {name!r}")
        name = Path(name).name
        if name in found:
            raise Malformed(f"{where}.file: {name} is there twice")
        encounters = record.get("encounters")
        if not isinstance(encounters, list):
            raise Malformed(f"{where} ({name}).encounters: expected a list, found {encounters!r}")
        found[name] = [_encounter(one, f"{where} ({name}).encounters[{index}]", "class") for index, one in enumerate(encounters)]
    return found


def read_truth(directory: Path) -> dict[str, list[Encounter]]:
    """Return the true encounters by the name of the record. Raises Malformed."""
    paths = sorted(directory.glob("*.truth.json"))
    if not paths:
        raise Malformed(f"{directory}: no *.truth.json there")
    truth: dict[str, list[Encounter]] = {}
    for path in paths:
        value = _read_json(path)
        if not isinstance(value, list):
            raise Malformed(f"{path}: expected a list of encounters")
        name = path.name.removesuffix(".truth.json") + ".txt"
        truth[name] = [_encounter(one, f"{path}: [{index}]", "cls") for index, one in enumerate(value)]
    return truth


def score(predictions: dict[str, list[Encounter]], truth: dict[str, list[Encounter]], tolerance: int) -> dict[str, Score]:
    """Return the score of every record of the truth; one without predictions counts as wholly missed. Raises Malformed."""
    unknown = sorted(set(predictions) - set(truth))
    if unknown:
        raise Malformed(f"record {unknown[0]}: there is no truth for it; the truth has {', '.join(sorted(truth))}")
    return {name: score_record(true, predictions.get(name, []), tolerance) for name, true in sorted(truth.items())}


def as_json(result: Score) -> dict[str, object]:
    """Return a score for machines."""
    return {
        "boundaries_exact": _tally_json(result.boundaries_exact),
        "boundaries_near": _tally_json(result.boundaries_near),
        "spans_exact": _tally_json(result.spans_exact),
        "class": {
            "matched": result.matched,
            "right": result.class_right,
            "accuracy": _share(result.class_right, result.spans_exact.truth),
        },
        "start_minutes": _errors_json(result.start_errors),
        "end_minutes": {**_errors_json(result.end_errors), "not_given": result.end_not_given},
        **{name: _tally_json(getattr(result, name)) for name in RELATIONS},
    }


def as_table(scores: dict[str, Score], total: Score, tolerance: int) -> str:
    """Return the scores for people, one column for each record and one for all."""
    rows: list[tuple[str, Callable[[Score], str]]] = [
        ("encounters: true / predicted", lambda s: f"{s.spans_exact.truth} / {s.spans_exact.predicted}"),
        ("boundary F1, exact", lambda s: f"{s.boundaries_exact.f1:.3f}"),
        ("  precision / recall", lambda s: f"{s.boundaries_exact.precision:.3f} / {s.boundaries_exact.recall:.3f}"),
        (f"boundary F1, within {tolerance} chars", lambda s: f"{s.boundaries_near.f1:.3f}"),
        ("span F1, both ends exact", lambda s: f"{s.spans_exact.f1:.3f}"),
        ("class right / true", lambda s: f"{s.class_right} / {s.spans_exact.truth}"),
        ("start time: exact", lambda s: _exact(s.start_errors)),
        ("start time: largest error", lambda s: _largest(s.start_errors)),
        ("end time: exact / given", lambda s: _exact(s.end_errors)),
        ("end time: largest error", lambda s: _largest(s.end_errors)),
        ("end time: not given", lambda s: str(s.end_not_given)),
        ("touching in time: right / true", lambda s: _pairs(s.touching_time)),
        ("overlapping in time: right / true", lambda s: _pairs(s.overlapping_time)),
        ("touching in text: right / true", lambda s: _pairs(s.touching_text)),
        ("overlapping in text: right / true", lambda s: _pairs(s.overlapping_text)),
    ]
    columns = {Path(name).stem: one for name, one in scores.items()} | {"all": total}
    widths = [max(15, len(name)) for name in columns]
    first = max(len(label) for label, _ in rows)
    lines = [" " * first + "".join(f"  {name:>{width}}" for name, width in zip(columns, widths, strict=True))]
    for label, cell in rows:
        cells = zip(columns.values(), widths, strict=True)
        lines.append(f"{label:<{first}}" + "".join(f"  {cell(one):>{width}}" for one, width in cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Score the file given; return the exit code."""
    parser = argparse.ArgumentParser(description="Score encounters.json against the truth.")
    parser.add_argument("encounters", type=Path)
    parser.add_argument("--truth", type=Path, default=Path(__file__).parent / "truth")
    parser.add_argument("--tolerance", type=int, default=3, metavar="CHARS")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        scores = score(read_predictions(given.encounters), read_truth(given.truth), given.tolerance)
    except Malformed as error:
        print(f"score: {error}", file=sys.stderr)
        return 2
    first, *others = scores.values()
    total = sum(others, first)
    if given.json:
        records = {name: as_json(one) for name, one in scores.items()}
        print(json.dumps({"tolerance": given.tolerance, "total": as_json(total), "records": records}, indent=1))
    else:
        print(as_table(scores, total, given.tolerance))
    return 0


def _last(one: Encounter) -> datetime:
    return one.start if one.end is None else one.end


def _boundaries(encounters: Iterable[Encounter], edges: tuple[int, ...]) -> list[int]:
    return sorted({offset for one in encounters for offset in (one.char_start, one.char_end)} - set(edges))


def _hits(truth: Sequence[int], found: Sequence[int], tolerance: int) -> int:
    """Count pairs of a true and a found offset at most `tolerance` apart, each used once; both lists are sorted."""
    hits = true_index = found_index = 0
    while true_index < len(truth) and found_index < len(found):
        distance = found[found_index] - truth[true_index]
        if abs(distance) <= tolerance:
            hits += 1
        true_index += distance >= -tolerance
        found_index += distance <= tolerance
    return hits


def _match(truth: Sequence[Encounter], predicted: Sequence[Encounter]) -> dict[int, int]:
    """Return which prediction stands for which true encounter, by shared text, each used once, the best first."""
    shares: list[tuple[float, int, int]] = []
    for t, true in enumerate(truth):
        for p, found in enumerate(predicted):
            shared = min(true.char_end, found.char_end) - max(true.char_start, found.char_start)
            extent = max(true.char_end, found.char_end) - min(true.char_start, found.char_start)
            if shared > 0 and shared / extent >= _SAME:
                shares.append((shared / extent, t, p))
    matches: dict[int, int] = {}
    used: set[int] = set()
    for _, t, p in sorted(shares, key=lambda share: (-share[0], share[1], share[2])):
        if t not in matches and p not in used:
            matches[t] = p
            used.add(p)
    return matches


def _related(relation: Callable[[Encounter, Encounter], bool], encounters: Sequence[Encounter]) -> set[Pair]:
    indexed = combinations(range(len(encounters)), 2)
    return {Pair(a, b) for a, b in indexed if relation(encounters[a], encounters[b])}


def _score_pairs(
    relation: Callable[[Encounter, Encounter], bool],
    truth: Sequence[Encounter],
    predicted: Sequence[Encounter],
    matches: dict[int, int],
) -> Tally:
    true_pairs, found_pairs = _related(relation, truth), _related(relation, predicted)
    right = 0
    for pair in true_pairs:
        if pair.first not in matches or pair.second not in matches:
            continue
        first, second = matches[pair.first], matches[pair.second]
        classes_agree = truth[pair.first].cls == predicted[first].cls and truth[pair.second].cls == predicted[second].cls
        right += classes_agree and Pair(min(first, second), max(first, second)) in found_pairs
    return Tally(len(true_pairs), len(found_pairs), right)


def _encounter(value: object, where: str, class_field: str) -> Encounter:
    if not isinstance(value, dict):
        raise Malformed(f"{where}: expected an object, found {value!r}")
    cls = value.get(class_field)
    if cls not in CLASSES:
        raise Malformed(f"{where}.{class_field}: expected one of {', '.join(CLASSES)}, found {cls!r}")
    start = _time(value.get("start"), f"{where}.start")
    end = None if value.get("end") is None else _time(value["end"], f"{where}.end")
    if end is not None and end < start:
        raise Malformed(f"{where}.end: before the start")
    char_start, char_end = (_offset(value.get(name), f"{where}.{name}") for name in ("char_start", "char_end"))
    if char_end <= char_start:
        raise Malformed(f"{where}.char_end: {char_end} is not after char_start {char_start}")
    sections = value.get("sections", [])
    if not isinstance(sections, list) or not all(isinstance(one, str) for one in sections):
        raise Malformed(f"{where}.sections: expected a list of headings, found {sections!r}")
    return Encounter(cls, start, end, char_start, char_end)


def _time(value: object, where: str) -> datetime:
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            # The records give no zone; a time without one is taken as the truth has it.
            return time if time.tzinfo else time.replace(tzinfo=UTC)
    raise Malformed(f"{where}: expected an ISO 8601 time such as 2025-02-13T10:18:00Z, found {value!r}")


def _offset(value: object, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise Malformed(f"{where}: expected an offset in characters, found {value!r}")


def _read_json(path: Path) -> object:
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Malformed(f"{path}: cannot be read as JSON: {error}") from error
    return value


def _minutes(found: datetime, true: datetime) -> float:
    return abs((found - true).total_seconds()) / 60


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 1.0


def _tally_json(tally: Tally) -> dict[str, float]:
    rates = {name: round(getattr(tally, name), 4) for name in ("precision", "recall", "f1")}
    return {"truth": tally.truth, "predicted": tally.predicted, "right": tally.right, **rates}


def _errors_json(errors: Sequence[float]) -> dict[str, float | None]:
    return {
        "given": len(errors),
        "exact": sum(error == 0 for error in errors),
        "median_error": round(statistics.median(errors), 2) if errors else None,
        "largest_error": round(max(errors), 2) if errors else None,
    }


def _exact(errors: Sequence[float]) -> str:
    return f"{sum(error == 0 for error in errors)} / {len(errors)}"


def _largest(errors: Sequence[float]) -> str:
    return f"{max(errors):.0f} min" if errors else "-"


def _pairs(tally: Tally) -> str:
    extra = tally.predicted - tally.right
    return f"{tally.right} / {tally.truth}" + (f" (+{extra} not so)" if extra else "")


if __name__ == "__main__":
    sys.exit(main())
