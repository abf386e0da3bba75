"""Patterns of files to leave out, as https://git-scm.com/docs/gitignore describes them.

Sandboxed code writes them, so matching takes time in proportion to pattern and path: no pattern can hold a worker up, as one with
many stars does when it becomes a regular expression that tries every way. A line that is no pattern matches nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

_ANY_FOLDERS: Final = None
"""Stands in a path's pattern for `**`: any number of directories, or none."""
_ANYTHING: Final = re.compile(r".+", re.DOTALL)
_CLASSES: Final = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": "!-/:-@\\[-`{-~",
    "space": " \\t-\\r",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


class _NoPattern(ValueError):
    """The line says nothing that could match."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """One line. `parts` are the pattern's parts between slashes; one that has no slash is for names wherever they are."""

    parts: tuple[re.Pattern[str] | None, ...]
    is_anchored: bool
    directories_only: bool
    excludes: bool

    def matches(self, path: list[str]) -> bool:
        if not self.is_anchored:
            part = self.parts[0]
            return part is not None and part.fullmatch(path[-1]) is not None
        return _match(self.parts, path)


class Ignore:
    """Lines of patterns, the last that matches counting. What lies in a directory that is left out is not asked about."""

    def __init__(self, lines: Iterable[str]) -> None:
        rules = [rule for rule in map(_rule, lines) if rule is not None]
        self._rules = tuple(reversed(rules))

    def excludes(self, path: str, *, is_directory: bool) -> bool:
        """Whether what stands at a path from the workspace's root is left out."""
        parts = path.split("/")
        for rule in self._rules:
            if (is_directory or not rule.directories_only) and rule.matches(parts):
                return rule.excludes
        return False


def pattern_lines(text: str) -> list[str]:
    """Return the lines of a file of patterns that may say something. A byte order mark before the first is none of it."""
    lines = (line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n"))
    return [line for line in lines if line.strip() and not line.startswith("#")]


def _rule(line: str) -> _Rule | None:
    while line.endswith(" ") and not line.endswith("\\ "):
        line = line[:-1]
    excludes = not line.startswith("!")
    line = line if excludes else line[1:]
    directories_only = line.endswith("/")
    line = line.removesuffix("/")
    is_anchored = "/" in line
    line = line.removeprefix("/")
    if not line:
        return None
    try:
        # Two stars or more.
        parts = [_ANY_FOLDERS if is_anchored and len(part) > 1 and not part.strip("*") else _part(part) for part in _split(line)]
    except _NoPattern:
        return None
    if parts[-1] is _ANY_FOLDERS:
        parts.append(_ANYTHING)
    return _Rule(tuple(parts), is_anchored, directories_only, excludes)


def _split(line: str) -> list[str]:
    """Return what stands between slashes; one in brackets is among their letters, and stands for nothing in a name."""
    parts, begin, at = [""], 0, 0
    while at < len(line):
        if line[at] == "[":
            _, at = _bracket(line, at + 1)
            continue
        is_escape = line[at] == "\\"
        if line[at + is_escape : at + is_escape + 1] == "/":
            parts[-1] = line[begin:at]
            parts.append("")
            begin = at + is_escape + 1
        at += 1 + is_escape
    parts[-1] = line[begin:]
    return parts


def _part(glob: str) -> re.Pattern[str]:
    """Return one part as a regular expression in which every star takes the least that fits, and is not tried again."""
    runs: list[list[str]] = [[]]
    at = 0
    while at < len(glob):
        letter = glob[at]
        at += 1
        if letter == "*":
            runs.append([])
        elif letter == "?":
            runs[-1].append(".")
        elif letter == "[":
            text, at = _bracket(glob, at)
            runs[-1].append(text)
        else:
            if letter == "\\":
                if at == len(glob):
                    raise _NoPattern
                letter = glob[at]
                at += 1
            runs[-1].append(re.escape(letter))
    first, *middle = ("".join(run) for run in runs)
    if not middle:
        return re.compile(first, re.DOTALL)
    *between, last = middle
    text = first + "".join(f"(?>.*?{run})" for run in between if run)
    # What follows the last star is matched by looking back from the end, where it may be; so that star needs no search either.
    text += f"(?=.{{{len(runs[-1])}}}).*+(?<={last})" if last else ".*+"
    return re.compile(text, re.DOTALL)


def _bracket(glob: str, at: int) -> tuple[str, int]:
    """Return what stands in brackets from `at` on, and where it ends."""
    is_negated = glob[at : at + 1] in ("!", "^")
    at += is_negated
    text, first = "", True
    while True:
        if at >= len(glob):
            raise _NoPattern
        if glob[at] == "]" and not first:
            break
        first = False
        if glob.startswith("[:", at):
            end = glob.find("]", at + 2)
            # Without the second colon it is a bracket and a colon among others.
            if end < 0 or (glob[end - 1] == ":" and end > at + 2):
                name = glob[at + 2 : end - 1]
                if end < 0 or name not in _CLASSES:
                    raise _NoPattern
                text += _CLASSES[name]
                at = end + 1
                continue
        low, at = _letter(glob, at)
        text += re.escape(low)
        if glob.startswith("-", at) and glob[at + 1 : at + 2] not in ("", "]"):
            high, at = _letter(glob, at + 1)
            # One the wrong way round is its first letter alone.
            text += f"{re.escape(low)}-{re.escape(high)}" if low <= high else ""
    if not text:
        return ("." if is_negated else "(?!)."), at + 1
    return f"[{'^' if is_negated else ''}{text}]", at + 1


def _letter(glob: str, at: int) -> tuple[str, int]:
    if glob[at] == "\\":
        at += 1
        if at >= len(glob):
            raise _NoPattern
    return glob[at], at + 1


def _match(parts: tuple[re.Pattern[str] | None, ...], path: list[str]) -> bool:
    """Match a whole path: on a part that does not fit, only the last `**` takes one directory more."""
    at = here = 0
    retry: tuple[int, int] | None = None
    while here < len(path):
        part = parts[at] if at < len(parts) else _ANY_FOLDERS
        if at < len(parts) and part is _ANY_FOLDERS:
            at += 1
            retry = at, here
        elif part is not None and part.fullmatch(path[here]):
            at, here = at + 1, here + 1
        elif retry is not None:
            at, here = retry[0], retry[1] + 1
            retry = at, here
        else:
            return False
    return all(part is _ANY_FOLDERS for part in parts[at:])
