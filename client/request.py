"""Making a run's input from what a person typed. Everything that can be checked without a worker is checked here, at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from contracts.base import BadInput, GivenTwice, explain, no_duplicates
from contracts.run import RunInput

STDIN = "-"


def run_input(task: str | None, file: Path | None, agent: str | None, model: str | None, labels: Sequence[str]) -> RunInput:
    """Return the input of a run: that of the JSON `file`, with what else was given put over it.

    Raises BadInput naming the file with line and column, or the field, and what to do.
    """
    raw = read_json_object(file) if file is not None else {}
    raw |= {name: value for name, value in (("task", task), ("agent", agent), ("model", model)) if value is not None}
    if labels:
        known = raw.get("labels", {})
        if not isinstance(known, dict):
            raise BadInput(f'labels: must be an object such as {{"team": "claims"}}, but {file} has {_kind(known)}')
        raw["labels"] = {**known, **parse_labels(labels)}
    if "task" not in raw:
        where = f'add "task" to {file}' if file is not None else 'caisson run "Count the lines of ..."'
        raise BadInput(f"task: required, but missing; say what is to be done: {where}")
    try:
        return RunInput.model_validate(raw)
    except ValidationError as error:
        raise BadInput(explain(error, str(file) if file is not None else "the run's input")) from error


def read_json_object(file: Path) -> dict[str, Any]:
    """Read one JSON object from a file, or from standard input for `-`. Raises BadInput with line and column."""
    name = "standard input" if str(file) == STDIN else str(file)
    try:
        data = sys.stdin.buffer.read() if str(file) == STDIN else file.read_bytes()
    except OSError as error:
        raise BadInput(f"{name}: cannot be read: {error.strerror}") from error
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=no_duplicates, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise BadInput(f"{name}: is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise BadInput(f"{name}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise BadInput(f"{name}: is nested too deeply") from error
    except (_NotJson, GivenTwice) as error:
        raise BadInput(f"{name}: {error}") from error
    except ValueError as error:
        # Python reads no whole number of more digits than its own limit.
        raise BadInput(f"{name}: holds a number that is too long: {error}; write fewer digits") from error
    if not isinstance(value, dict):
        raise BadInput(f'{name}: must hold a JSON object such as {{"task": "..."}}, but holds {_kind(value)}')
    return value


def parse_labels(labels: Sequence[str]) -> dict[str, str]:
    """Return `key=value` labels as a mapping. Raises BadInput naming the one that is none."""
    parsed: dict[str, str] = {}
    for label in labels:
        key, equals, value = label.partition("=")
        if not equals or not key.strip():
            raise BadInput(f"--label {label!r}: must be key=value, for example --label team=claims")
        if key in parsed:
            raise BadInput(f"--label {label!r}: {key!r} is given twice; a label has one value")
        parsed[key] = value
    return parsed


class _NotJson(ValueError):
    pass


def _no_constant(name: str) -> Any:
    raise _NotJson(f"{name} is no JSON value")


def _kind(value: object) -> str:
    kinds: dict[type, str] = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
