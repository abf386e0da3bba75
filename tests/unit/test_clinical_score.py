"""The clinical example: what its scorer says of good and bad answers, and what its scripted agent's program reaches."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from activities.sandbox.port import FileView
from activities.tools.patch_parse import parse_patch
from activities.tools.patch_plan import paths_to_look_at, plan_patch
from contracts.agent import AgentSpec
from contracts.run import RunInput
from workers.scripted_model import load_scenarios
from workers.scripted_model.scenario import TurnSpec

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "clinical_records"


def _load_score() -> ModuleType:
    spec = importlib.util.spec_from_file_location("clinical_score", EXAMPLE / "score.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


score = _load_score()

# An emergency visit that becomes a stay, a clinic visit during the stay (written after it), and a later clinic visit.
TRUTH: list[dict[str, Any]] = [
    {"cls": "EMER", "start": "2025-01-01T08:00:00Z", "end": "2025-01-01T12:00:00Z", "char_start": 0, "char_end": 100},
    {"cls": "IMP", "start": "2025-01-01T12:00:00Z", "end": "2025-01-09T09:00:00Z", "char_start": 100, "char_end": 900},
    {"cls": "AMB", "start": "2025-01-05T10:00:00Z", "end": "2025-01-05T10:20:00Z", "char_start": 900, "char_end": 1000},
    {"cls": "AMB", "start": "2025-03-01T10:00:00Z", "end": "2025-03-01T10:20:00Z", "char_start": 1000, "char_end": 1100},
]


def perfect() -> list[dict[str, Any]]:
    return [{**{k: v for k, v in one.items() if k != "cls"}, "class": one["cls"], "sections": []} for one in TRUTH]


@pytest.fixture
def result_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Score predicted encounters of one record as the command does, and return the JSON for all records."""

    def run(encounters: list[dict[str, Any]], *options: str) -> dict[str, Any]:
        assert _command(tmp_path, {"records": [{"file": "a.txt", "encounters": encounters}]}, "--json", *options) == 0
        total: dict[str, Any] = json.loads(capsys.readouterr().out)["total"]
        return total

    return run


def _command(directory: Path, answer: object, *options: str) -> int:
    truth = directory / "truth"
    truth.mkdir(exist_ok=True)
    (truth / "a.truth.json").write_text(json.dumps(TRUTH))
    given = directory / "encounters.json"
    given.write_text(answer if isinstance(answer, str) else json.dumps(answer))
    code: int = score.main([str(given), "--truth", str(truth), *options])
    return code


def test_a_perfect_answer_scores_one_everywhere(result_of: Callable[..., dict[str, Any]]) -> None:
    """Every rate is 1, the touching pair and the overlapping pair are found, and no other."""
    total = result_of(perfect())
    for name in ("boundaries_exact", "boundaries_near", "spans_exact", "touching_time", "overlapping_time", "touching_text"):
        assert total[name]["f1"] == 1, name
    assert total["class"] == {"matched": 4, "right": 4, "accuracy": 1.0}
    assert total["end_minutes"] == {"given": 4, "exact": 4, "median_error": 0, "largest_error": 0, "not_given": 0}
    pairs = {name: (total[name]["truth"], total[name]["right"]) for name in ("touching_time", "overlapping_time")}
    assert pairs == {"touching_time": (1, 1), "overlapping_time": (1, 1)}
    assert (total["touching_text"]["truth"], total["overlapping_text"]["truth"]) == (3, 0)


def test_shifted_boundaries_are_near_but_not_exact(result_of: Callable[..., dict[str, Any]]) -> None:
    """Two characters off is right within a tolerance of three and wrong without."""
    shifted = perfect()
    shifted[0]["char_end"] = shifted[1]["char_start"] = 102
    total = result_of(shifted)
    assert (total["boundaries_exact"]["truth"], total["boundaries_exact"]["right"]) == (3, 2)
    assert total["boundaries_near"]["f1"] == 1
    assert total["spans_exact"]["right"] == 2
    assert result_of(shifted, "--tolerance", "1")["boundaries_near"]["right"] == 2


def test_merged_encounters_lose_a_boundary_and_their_relation(result_of: Callable[..., dict[str, Any]]) -> None:
    """One encounter for two: recall falls, precision does not, and the touching pair is not found."""
    first, second, *others = perfect()
    merged = {**second, "start": first["start"], "char_start": 0}
    total = result_of([merged, *others])
    assert (total["boundaries_exact"]["precision"], round(total["boundaries_exact"]["recall"], 2)) == (1, 0.67)
    assert total["class"]["matched"] == 3
    assert (total["touching_time"]["truth"], total["touching_time"]["right"]) == (1, 0)


def test_split_encounters_lose_precision(result_of: Callable[..., dict[str, Any]]) -> None:
    """Two encounters for one: every true boundary is found, and one that is none."""
    first, second, *others = perfect()
    halves = [{**second, "char_end": 500}, {**second, "char_start": 500}]
    total = result_of([first, *halves, *others])
    assert (total["boundaries_exact"]["precision"], total["boundaries_exact"]["recall"]) == (0.75, 1)
    assert total["spans_exact"]["predicted"] == 5


def test_a_missing_record_counts_as_wholly_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer without a record is scored, not forgiven."""
    assert _command(tmp_path, {"records": []}, "--json") == 0
    total = json.loads(capsys.readouterr().out)["total"]
    assert total["boundaries_exact"]["recall"] == 0
    assert total["class"] == {"matched": 0, "right": 0, "accuracy": 0.0}


def test_wrong_classes_and_times_are_counted(result_of: Callable[..., dict[str, Any]]) -> None:
    """A wrong class, a late start and a wrong end each show, and a pair with a wrong class is not right."""
    wrong = perfect()
    wrong[0] |= {"class": "AMB", "start": "2025-01-01T09:30:00Z", "end": "2025-01-01T11:00:00+00:00"}
    total = result_of(wrong)
    assert total["class"]["right"] == 3
    assert total["start_minutes"]["largest_error"] == 90
    assert total["end_minutes"]["largest_error"] == 60
    assert total["touching_time"]["right"] == 0


def test_an_end_that_is_not_given_is_not_an_error(result_of: Callable[..., dict[str, Any]]) -> None:
    """Null is counted apart; a visit without an end still lies in the stay around it."""
    honest = perfect()
    honest[2]["end"] = honest[3]["end"] = None
    total = result_of(honest)
    assert (total["end_minutes"]["given"], total["end_minutes"]["not_given"]) == (2, 2)
    assert total["overlapping_time"]["right"] == 1


def test_predicted_overlaps_that_are_none_cost_precision(result_of: Callable[..., dict[str, Any]]) -> None:
    """A stay that is made too long overlaps what it should not, and text that is claimed twice is told."""
    greedy = perfect()
    greedy[1] |= {"end": "2025-04-01T00:00:00Z", "char_end": 950}
    total = result_of(greedy)
    assert (total["overlapping_time"]["predicted"], total["overlapping_time"]["right"]) == (2, 1)
    assert (total["overlapping_text"]["truth"], total["overlapping_text"]["predicted"]) == (0, 1)


def test_the_table_has_a_column_for_each_record_and_one_for_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """People get the same numbers as machines."""
    assert _command(tmp_path, {"records": [{"file": "records/a.txt", "encounters": perfect()}]}) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["a", "all"]
    assert rows[0].split()[-3:] == ["4", "/", "4"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"class": "AMBU"}, "records[0] (a.txt).encounters[1].class: expected one of AMB, EMER, IMP, found 'AMBU'"),
        ({"start": "yesterday"}, "encounters[1].start"),
        ({"start": None}, "encounters[1].start"),
        ({"end": 5}, "encounters[1].end"),
        ({"end": "2024-01-01T00:00:00Z"}, "encounters[1].end: before the start"),
        ({"char_start": True}, "encounters[1].char_start"),
        ({"char_end": 100}, "encounters[1].char_end: 100 is not after char_start 100"),
        ({"sections": "PLAN"}, "encounters[1].sections"),
    ],
)
def test_a_malformed_encounter_is_refused_with_record_and_field(
    change: dict[str, object], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong field is named; nothing is scored."""
    encounters = perfect()
    encounters[1] |= change
    assert _command(tmp_path, {"records": [{"file": "a.txt", "encounters": encounters}]}) == 2
    out, err = capsys.readouterr()
    assert (field in err, out) == (True, "")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("{", "cannot be read as JSON"),
        ([], "`records`"),
        ({"records": [3]}, "records[0]: expected an object"),
        ({"records": [{"encounters": []}]}, "records[0].file"),
        ({"records": [{"file": "a.txt"}]}, "records[0] (a.txt).encounters"),
        ({"records": [{"file": "a.txt", "encounters": [1]}]}, "encounters[0]: expected an object"),
        ({"records": [{"file": "b.txt", "encounters": []}]}, "record b.txt: there is no truth for it"),
        ({"records": [{"file": "a.txt", "encounters": []}] * 2}, "a.txt is there twice"),
    ],
)
def test_a_malformed_file_is_refused(answer: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not JSON, not the shape, an unknown or a repeated record: exit code 2 and a reason."""
    assert _command(tmp_path, answer) == 2
    assert message in capsys.readouterr().err


def _scenario_turns() -> list[TurnSpec]:
    (scenario,) = (one for one in load_scenarios(EXAMPLE / "scenario.yaml").scenarios if one.name == "clinical-records")
    return [turn for turn in scenario.turns if isinstance(turn, TurnSpec)]


def _apply(patch: str, workspace: Path) -> None:
    operations = parse_patch(patch)
    views = {}
    for name in paths_to_look_at(operations):
        path = workspace / name
        views[name] = FileView("file", 0o644, path.stat().st_size, path.read_bytes()) if path.is_file() else FileView("missing")
    for change in plan_patch(operations, views).changes:
        assert change.data is not None
        (workspace / change.path).write_bytes(change.data)


def _program_score(workspace: Path) -> Any:
    subprocess.run([sys.executable, "segment.py"], cwd=workspace, check=True, stdout=subprocess.DEVNULL, timeout=60)
    found = score.score(score.read_predictions(workspace / "outputs" / "encounters.json"), score.read_truth(EXAMPLE / "truth"), 0)
    first, *others = found.values()
    return sum(others, first)


def test_the_scripted_program_is_wrong_first_and_right_after_its_correction(tmp_path: Path) -> None:
    """The program of the scenario's two patches, run on the records, reaches what the README says of it."""
    patches = [
        call.arguments["patch"]
        for turn in _scenario_turns()
        for call in turn.calls
        if call.name == "apply_patch" and isinstance(call.arguments, dict)
    ]
    assert len(patches) == 2
    shutil.copytree(EXAMPLE / "records", tmp_path / "inputs" / "records")
    _apply(str(patches[0]), tmp_path)
    before = _program_score(tmp_path)
    _apply(str(patches[1]), tmp_path)
    after = _program_score(tmp_path)
    assert before.boundaries_exact.f1 < 1
    assert before.touching_time.right == 0
    assert (after.boundaries_exact.f1, after.spans_exact.f1) == (1, 1)
    assert after.class_right == after.spans_exact.truth == 72
    assert (after.touching_time.right, after.touching_time.truth) == (11, 11)
    assert (after.overlapping_time.right, after.overlapping_time.truth) == (4, 5)
    assert max(after.end_errors) == 0


def test_the_truth_stays_out_of_the_sandbox_and_of_the_scenario() -> None:
    """The manifest reaches only the records, and no offset, time or id of the truth stands in the scenario."""
    run = RunInput.model_validate_json((EXAMPLE / "run.json").read_text())
    assert run.manifest is not None
    (entry,) = run.manifest.entries.values()
    assert entry.type == "local"
    given = (ROOT / entry.path).resolve()
    assert given == EXAMPLE / "records"
    assert sorted(path.suffix for path in given.iterdir()) == [".txt"] * 3
    scenario = (EXAMPLE / "scenario.yaml").read_text()
    for path in (EXAMPLE / "truth").iterdir():
        assert path.name.removesuffix(".truth.json") not in scenario
        for encounter in json.loads(path.read_text()):
            assert encounter["id"] not in scenario
            assert encounter["start"][:16] not in scenario
            assert encounter["char_start"] == 0 or f"{encounter['char_start']}" not in scenario


def test_the_truth_fits_the_records() -> None:
    """Offsets count characters: the encounters cover each record, and each begins at a note."""
    truth = score.read_truth(EXAMPLE / "truth")
    for name, encounters in truth.items():
        with (EXAMPLE / "records" / name).open(encoding="utf-8", newline="") as file:
            text = file.read()
        assert [one.char_start for one in encounters] == [0, *(one.char_end for one in encounters[:-1])]
        assert encounters[-1].char_end == len(text)
        assert all(text[one.char_start : one.char_start + 2] == "20" for one in encounters)


def test_the_agent_is_a_valid_spec_with_a_strict_schema() -> None:
    """The agent file is an AgentSpec, and every field of its answer is required."""
    spec = AgentSpec.model_validate(yaml.safe_load((ROOT / "agents" / "clinical-records.yaml").read_text()))
    assert (spec.name, spec.model) == ("clinical-records", None)
    schema: Any = spec.output_schema
    assert sorted(schema["properties"]) == sorted(schema["required"])
    assert schema["additionalProperties"] is False
