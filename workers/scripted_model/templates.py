"""Templates in a scenario's strings: the turn's number, and what a tool really returned.

`${turn}` is the number of the turn. `${output:REGEX}` is the first group of REGEX (the whole match when it has none) in the
newest tool output in which it is found. `$${` keeps a template as it is, and any other `${name}`, such as a shell variable, is
left alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from pydantic import JsonValue

_TEMPLATE = re.compile(r"(\$?)\$\{(?:(turn)\}|output:)")

_JsonT = TypeVar("_JsonT", bound=JsonValue)


class ExpectationFailed(Exception):
    """The scenario demanded something that the harness did not send: the fault of the test or of the harness."""


def render(text: str, turn: int, outputs: Sequence[str]) -> str:
    """Fill the templates of `text` from the `turn` number and the tool `outputs`, oldest first.

    Raises ExpectationFailed when a template's regular expression is found in no output.
    """
    parts: list[str] = []
    position = 0
    while match := _TEMPLATE.search(text, position):
        parts.append(text[position : match.start()])
        position = match.end()
        if match.group(2) is None:
            position = _closing_brace(text, position) + 1
        if match.group(1):
            parts.append(text[match.start() + 1 : position])
        elif match.group(2):
            parts.append(str(turn))
        else:
            parts.append(_from_output(text[match.end() : position - 1], outputs))
    parts.append(text[position:])
    return "".join(parts)


def render_json(value: JsonValue, turn: int, outputs: Sequence[str]) -> JsonValue:
    """Fill the templates in every string of a JSON value; the names of fields are left as they are."""
    if isinstance(value, str):
        return render(value, turn, outputs)
    if isinstance(value, list):
        return [render_json(part, turn, outputs) for part in value]
    if isinstance(value, dict):
        return {key: render_json(part, turn, outputs) for key, part in value.items()}
    return value


def check_templates(value: _JsonT) -> _JsonT:
    """Return `value` when every template in its strings is whole and a regular expression. Raises ValueError."""
    if isinstance(value, str):
        position = 0
        while match := _TEMPLATE.search(value, position):
            position = match.end()
            if match.group(2) is None:
                position = _closing_brace(value, position) + 1
                try:
                    re.compile(value[match.end() : position - 1])
                except re.error as error:
                    raise ValueError(f"template at character {match.start()}: {error}") from error
    elif isinstance(value, list):
        for part in value:
            check_templates(part)
    elif isinstance(value, dict):
        for part in value.values():
            check_templates(part)
    return value


def _closing_brace(text: str, start: int) -> int:
    # A regular expression may itself hold braces, as in \d{4}: the template ends at the brace that balances.
    depth = 0
    index = start
    while index < len(text):
        if text[index] == "\\":
            index += 1
        elif text[index] == "{":
            depth += 1
        elif text[index] == "}":
            if depth == 0:
                return index
            depth -= 1
        index += 1
    raise ValueError(f"template at character {start}: no closing brace")


def _from_output(pattern: str, outputs: Sequence[str]) -> str:
    for output in reversed(outputs):
        if match := re.search(pattern, output):
            return match.group(1) if match.re.groups else match.group(0)
    raise ExpectationFailed(f"${{output:{pattern}}} was found in none of the {len(outputs)} tool outputs")
