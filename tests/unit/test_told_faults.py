"""How a person is told what is wrong with an input: the place in their own words, bounded, and without their credentials."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from contracts.base import explain
from contracts.run import RunInput

KEY = "ghp_" + "a1B2" * 6


def told(**fields: Any) -> str:
    """What is said of a run's input with these fields."""
    with pytest.raises(ValidationError) as caught:
        RunInput.model_validate({"task": "x", **fields})
    return explain(caught.value, "the input")


def entry(**source: Any) -> dict[str, Any]:
    """A manifest with one entry."""
    return {"entries": {"a": source}}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"manifest": entry(type="inline", text=5)}, "manifest.entries.a.text: Input should be a valid string (found 5)"),
        ({"manifest": entry(type="s3", bucket="bbb", prefix="p", mode=5)}, "manifest.entries.a.mode: Input should be a valid"),
        ({"agent": {"tools": "shell"}}, "agent.tools: Input should be a valid list (found 'shell')"),
        ({"agent": {"tools": [{"type": "shell", "timeout_seconds": 0}]}}, "agent.tools.0.timeout_seconds: "),
        ({"agent": {"tools": [{"type": "shell", "timeout_seconds": True}]}}, "not a boolean (found True)"),
        ({"agent": {"approvals": {"rules": [{"command": [5], "verdict": "allow"}]}}}, "agent.approvals.rules.0.command.0: "),
        ({"agent": {"approvals": {"tools": {"9x": "allow"}}}}, "agent.approvals.tools.9x: "),
        ({"output_schema": {"a": {"dict": [float("nan")]}}}, "output_schema.a.dict.0: Input should be a finite number"),
        ({"output_schema": {"inline": {"x": object()}}}, "output_schema.inline.x: "),
        ({"agent": {"tools": [{"type": "activity", "int": 5}]}}, "agent.tools.0.int: unknown field"),
    ],
)
def test_a_place_is_named_as_the_input_names_it(fields: dict[str, Any], line: str) -> None:
    """Without the names that pydantic has for the branches of a type."""
    assert f"\n  {line}" in told(**fields) or line in told(**fields).partition(": ")[2]


@pytest.mark.parametrize("field", ["k{}", "k{}" + "x" * 2000, "\U0001f600" * 2000 + "{}"])
def test_of_many_faults_the_first_are_told_and_the_number_of_the_others(field: str) -> None:
    """A failure that is too large could not be reported at all, and the run would hang."""
    message = told(**{field.format(n): n for n in range(1000)})
    lines = message.splitlines()
    assert 2 < len(lines) <= 22
    assert lines[-1] == f"  and {1000 - len(lines) + 2} more"
    assert len(message) <= 8100


def test_a_long_message_keeps_its_end_where_the_remedy_stands() -> None:
    """The name is cut in its middle."""
    message = told(manifest={"environment": {"a " + "b" * 1_000_000: "x"}})
    assert len(message) < 600
    assert message.endswith("is not a valid variable name")


@pytest.mark.parametrize(
    "fields",
    [
        {"manifest": entry(type="git", url=f"ftp://x:{KEY}@host/p")},
        {"manifest": entry(type="git", url="https://host/" + "p" * 2000)},
        {"manifest": entry(type="s3", bucket="bbb", prefix="p", endpoint="hunter22://host")},
        {"manifest": entry(type="s3", bucket="bbb", prefix="p", secret="hunter22!")},
        {"manifest": {"environment": {"X": ["hunter22"]}}},
        {"manifest": {"environment": ["X=hunter22"]}},
        {"sandbox": {"options": {"account": ["hunter22"]}}},
        {"labels": {"api_key": ["hunter22"]}},
        {"labels": {"note": [f"it is {KEY}"]}},
        {"manifest": {"environment": {f"X={KEY}": "y"}}},
        {KEY: "y"},
        {"model": [f"Bearer {KEY}"]},
    ],
)
def test_what_could_be_a_credential_is_not_repeated(fields: dict[str, Any]) -> None:
    """The error is read by more people than the input."""
    message = told(**fields)
    assert "hunter22" not in message
    assert KEY not in message
    assert "pppppp" not in message


def test_half_a_surrogate_pair_can_be_told() -> None:
    """A failure is sent as UTF-8."""
    assert told(**{"\ud800\n": 1}).encode().count(b"\n") == 1


def test_a_number_of_too_many_digits_can_be_told() -> None:
    """Python itself would not write it."""
    assert "budget.steps: " in told(budget={"steps": 10**5000})
