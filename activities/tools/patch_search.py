"""Search lines within lines: the rules by which lines may count as equal, and the places that headers leave. Pure."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

_PLAIN: Final = str.maketrans(
    dict.fromkeys("\u2018\u2019\u201a\u201b", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
    | dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " ")
    | {"\ufeff": ""}
)
_UNDECODABLE: Final = re.compile("[\udc80-\udcff\ufffd]+")
_CLOSES: Final = re.compile(r"[\]})]*[\])]")


def _exactly(line: str) -> str:
    return line


def _plainly(line: str) -> str:
    # A tool that shows a file in another encoding shows U+FFFD for what it cannot decode, and the model sends that back.
    return _UNDECODABLE.sub("\ufffd", line.translate(_PLAIN)).strip()


RULES: Final[tuple[tuple[str, Callable[[str], str]], ...]] = (
    ("", _exactly),
    ("ignoring trailing white space", str.rstrip),
    ("ignoring leading and trailing white space", str.strip),
    ("ignoring the kind of quotes, dashes and spaces", _plainly),
)


class Haystack:
    """The file's lines as a string of one character a line, equal lines (by a rule) having equal characters.

    Searching such a string takes linear time even where thousands of lines are the same.
    """

    def __init__(self, lines: Sequence[str], wanted: Sequence[str], rule: Callable[[str], str]) -> None:
        self._rule = rule
        self._codes: dict[str, str] = {}
        for line in wanted:
            self._codes.setdefault(rule(line), chr(len(self._codes) + 1))
        self._text = "".join(self._codes.get(rule(line), "\0") for line in lines)
        self._backwards = self._text[::-1]

    def needle(self, lines: Sequence[str]) -> str:
        return "".join(self._codes[self._rule(line)] for line in lines)

    def first(self, needle: str, at_least: int = 0) -> int | None:
        found = self._text.find(needle, at_least)
        return None if found < 0 else found

    def last(self, needle: str, at_most: int) -> int | None:
        # str.rfind may take quadratic time where str.find does not.
        spare = len(self._text) - len(needle)
        found = self._backwards.find(needle[::-1], max(0, spare - at_most)) if at_most >= 0 else -1
        return None if found < 0 else spare - found

    def every(self, needle: str) -> Iterator[int]:
        found = self.first(needle)
        while found is not None:
            yield found
            found = self.first(needle, found + 1)


class Places(Protocol):
    """The places a hunk may have, ascending."""

    def earliest(self, at_least: int) -> int | None: ...

    def latest(self, at_most: int) -> int | None: ...


class Listed:
    """Places known beforehand: `offset` lines after each of `lines`."""

    def __init__(self, lines: Sequence[int], offset: int = 0) -> None:
        self._lines, self._offset = lines, offset

    def earliest(self, at_least: int) -> int | None:
        index = bisect_left(self._lines, at_least - self._offset)
        return self._lines[index] + self._offset if index < len(self._lines) else None

    def latest(self, at_most: int) -> int | None:
        index = bisect_right(self._lines, at_most - self._offset)
        return self._lines[index - 1] + self._offset if index else None


class Matching:
    """Wherever the old lines match."""

    def __init__(self, haystack: Haystack, needle: str) -> None:
        self._haystack, self._needle = haystack, needle

    def earliest(self, at_least: int) -> int | None:
        return self._haystack.first(self._needle, at_least)

    def latest(self, at_most: int) -> int | None:
        return self._haystack.last(self._needle, at_most)


class Either:
    """The places of both."""

    def __init__(self, one: Places, other: Places) -> None:
        self._both = (one, other)

    def earliest(self, at_least: int) -> int | None:
        return min((it for places in self._both if (it := places.earliest(at_least)) is not None), default=None)

    def latest(self, at_most: int) -> int | None:
        return max((it for places in self._both if (it := places.latest(at_most)) is not None), default=None)


class Blocks:
    """The block below each line: the lines that are blank or indented deeper than it.

    A line such as `) -> int:`, which closes what the line above the block opened, and what is indented below it, belong to the
    block too.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self._ends = array("q", range(1, len(lines) + 1))
        self._filled = bytearray(len(lines))
        open_: list[tuple[int, int]] = []
        for at, line in enumerate(lines):
            text = line.lstrip()
            if not text:
                continue
            indent = len(line) - len(text)
            closes = _CLOSES.match(text) is not None
            while open_ and (open_[-1][0] > indent or (open_[-1][0] == indent and not closes)):
                self._ends[open_.pop()[1]] = at
            if open_:
                self._filled[open_[-1][1]] = 1
            open_.append((indent, at))
        for _, at in open_:
            self._ends[at] = len(lines)

    def end(self, line: int) -> int:
        """Return the index after the block."""
        return self._ends[line]

    def filled(self, line: int) -> bool:
        """Say whether the block has a line that is not blank."""
        return bool(self._filled[line])


class Below:
    """Where the old lines match below a header, which stands at each of `anchors`.

    An anchor leads to every match in its block, unless one follows the anchor directly, which then is the place. An anchor
    without a block leads to the nearest match. Matches belong to the last anchor before them. The lines may begin with the
    header's own line, repeated, unless `strictly`.
    """

    def __init__(self, matching: Matching, anchors: Sequence[int], blocks: Blocks, strictly: bool = False) -> None:
        self._matches, self._anchors, self._blocks, self._skipped = matching, anchors, blocks, int(strictly)
        self._nearest: dict[int, int | None] = {}

    def earliest(self, at_least: int) -> int | None:
        found = self._matches.earliest(at_least)
        while found is not None and not self.leads_to(found):
            # No later match of the same anchor is a place either.
            following = bisect_right(self._anchors, found - self._skipped)
            if following == len(self._anchors):
                return None
            found = self._matches.earliest(self._anchors[following] + self._skipped)
        return found

    def latest(self, at_most: int) -> int | None:
        found = self._matches.latest(at_most)
        while found is not None and not self.leads_to(found):
            anchor, nearest = self._from_anchor(found)
            if anchor is None or nearest is None:
                return None
            if nearest == anchor + 1 or not self._blocks.filled(anchor):
                return nearest
            found = self._matches.latest(min(found, self._blocks.end(anchor)) - 1)
        return found

    def leads_to(self, match: int) -> bool:
        """Say whether a match is one of the places."""
        anchor, nearest = self._from_anchor(match)
        if anchor is None:
            return False
        if match == nearest and (nearest == anchor + 1 or not self._blocks.filled(anchor)):
            return True
        return nearest != anchor + 1 and match < self._blocks.end(anchor)

    def _from_anchor(self, match: int) -> tuple[int | None, int | None]:
        """Return the anchor that a match belongs to, and the nearest match after it."""
        index = bisect_right(self._anchors, match - self._skipped)
        if not index:
            return None, None
        anchor = self._anchors[index - 1]
        if anchor not in self._nearest:
            self._nearest[anchor] = self._matches.earliest(anchor + self._skipped)
        return anchor, self._nearest[anchor]


class OnlyBelow:
    """Where the old lines match below the first of `anchors`, if they match nowhere else in the file."""

    def __init__(self, matching: Matching, anchors: Sequence[int]) -> None:
        first = matching.earliest(0)
        alone = first is not None and first >= anchors[0] and matching.earliest(first + 1) is None
        self._place = first if alone else None

    def earliest(self, at_least: int) -> int | None:
        return self._place if self._place is not None and self._place >= at_least else None

    def latest(self, at_most: int) -> int | None:
        return self._place if self._place is not None and self._place <= at_most else None
