"""Differences between two texts as people read them: unified diffs, bounded in time and length."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from client.trees import decoded

CONTEXT = 3
_MOST_PRODUCT = 4_000_000
"""Lines of one side times lines of the other, up to which they are compared line by line: `difflib` may take their product in
steps, and a sandbox chooses the texts."""
_LOOK = 8000
_HEADER = re.compile(r"@@ -(\d+)(,\d+)? \+(\d+)(,\d+)? @@\n")
_NO_END = "\\ No newline at end of file\n"


def is_binary(data: bytes) -> bool:
    """Whether bytes are no text: a NUL among the first 8,000, as git has it."""
    return b"\0" in data[:_LOOK]


def unified(before: bytes, after: bytes) -> Iterator[str]:
    """Yield the lines of a unified diff, without the two that name the files. Each ends with a newline; equal texts give none.

    What is not UTF-8 is shown as `\\xff`. Control characters are still in it.
    """
    old, new = _lines(before), _lines(after)
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    start, ends = max(head - CONTEXT, 0), max(tail - CONTEXT, 0)
    # Most of two versions of a file is the same; only the rest is worth the slow way.
    old, new = old[start : len(old) - ends], new[start : len(new) - ends]
    is_small = (len(old) - CONTEXT) * (len(new) - CONTEXT) <= _MOST_PRODUCT
    hunks = difflib.unified_diff(old, new, n=CONTEXT) if is_small else _replaced(old, new)
    for number, line in enumerate(hunks):
        if number < 2:
            continue  # the names of the files
        found = _HEADER.fullmatch(line)
        if found:
            line = f"@@ -{int(found[1]) + start}{found[2] or ''} +{int(found[3]) + start}{found[4] or ''} @@\n"
        yield line if line.endswith("\n") else line + "\n"
        if not line.endswith("\n"):
            yield _NO_END


def _replaced(old: list[str], new: list[str]) -> Iterator[str]:
    """All of one text out and all of the other in: a true diff, if not the shortest."""
    yield from ("---\n", "+++\n", f"@@ -1,{len(old)} +1,{len(new)} @@\n")
    yield from ("-" + line for line in old)
    yield from ("+" + line for line in new)


def _lines(data: bytes) -> list[str]:
    lines = [decoded(line) + "\n" for line in data.split(b"\n")]
    # What follows the last newline: nothing, or a line that lacks one.
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines
