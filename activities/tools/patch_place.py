"""Find where each hunk of a patch stands in a file. Pure.

All hunks are placed against the original lines, in order and without overlap, and the placement must be the only one: each
hunk's earliest possible place, given the hunks before it, must be its latest possible place, given the hunks after it.

A hunk is compared exactly first, then by each looser rule in turn, and a rule is only used where no stricter one finds a
place, not even one above the hunk before. A header (`@@ line`) decides between equal places: the hunk stands in the block below
that line (the lines indented deeper than it), or at the nearest place after a line without a block. Outside of its header's block
a hunk stands only where nothing else in the file is equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from activities.tools.patch_parse import ADDED, Hunk, PatchFault, PatchLine, shown
from activities.tools.patch_search import RULES, Below, Blocks, Either, Haystack, Listed, Matching, OnlyBelow, Places

_LISTED: Final = 6
_EXACTLY: Final = 0
_WITHOUT_INDENTATION: Final = 2
_LOOSEST: Final = len(RULES) - 1


@dataclass(frozen=True)
class _Search:
    """How places are searched: by which rule, below which headers, and whether also beyond the block of the last header."""

    level: int
    headers: tuple[str, ...] = ()
    beyond: bool = False


@dataclass(frozen=True)
class Placement:
    """A hunk's place: its old lines stand at `start` (from 0) of the file; `lines` are its lines without padding.

    `how` is empty when they matched exactly, else says what was ignored.
    """

    hunk: Hunk
    lines: tuple[PatchLine, ...]
    start: int
    how: str

    @property
    def end(self) -> int:
        """The index after its last old line."""
        return self.start + len(_old(self.lines))


def place_hunks(path: str, hunks: Sequence[Hunk], lines: Sequence[str]) -> list[Placement]:
    """Return the one placement of all `hunks` in the `lines` of a file, given without their line ends.

    Raises PatchFault when a hunk has no place, or when the hunks have more than one.
    """
    return _Placer(path, hunks, lines).place()


def _old(lines: Sequence[PatchLine]) -> list[str]:
    return [line.text for line in lines if line.kind != ADDED]


class _Placer:
    def __init__(self, path: str, hunks: Sequence[Hunk], lines: Sequence[str]) -> None:
        self._path, self._hunks, self._lines = path, hunks, lines
        self._haystacks: dict[int, Haystack] = {}
        self._anchors: dict[_Search, list[int]] = {}

    def place(self) -> list[Placement]:
        placed: list[tuple[Placement, Places]] = []
        end = 0
        for hunk in self._hunks:
            found = self._earliest(hunk, end)
            if found is None:
                raise self._not_found(hunk, [placement for placement, _ in placed])
            placed.append(found)
            end = found[0].end
        ambiguous: tuple[Placement, Places, int] | None = None
        limit = len(self._lines)
        for placement, places in reversed(placed):
            latest = places.latest(limit - len(_old(placement.lines)))
            if latest is not None and latest > placement.start:
                ambiguous, limit = (placement, places, latest), latest
            else:
                limit = placement.start
        if ambiguous is not None:
            raise self._ambiguous(*ambiguous)
        return [placement for placement, _ in placed]

    def _earliest(self, hunk: Hunk, at_least: int, with_headers: bool = True) -> tuple[Placement, Places] | None:
        headers = tuple(line.text for line in hunk.headers) if with_headers else ()
        shapes = [hunk.lines, hunk.lines[: -hunk.padding]] if hunk.padding else [hunk.lines]
        for beyond in (False, True) if headers else (False,):
            for level in range(len(RULES)):
                search = _Search(level, headers, beyond)
                too_early = False
                for lines in shapes:
                    places = self._places(hunk, lines, search)
                    start = places.earliest(at_least)
                    if start is not None:
                        placement = Placement(hunk, lines, start, RULES[level][0])
                        return self._with_rivals(placement, places, search, at_least)
                    too_early = too_early or places.latest(at_least - 1) is not None
                if too_early:
                    # The lines meant stand above the hunk before. Others that are only alike must not be taken for them.
                    return None
        return None

    def _with_rivals(self, placement: Placement, places: Places, search: _Search, at_least: int) -> tuple[Placement, Places]:
        """Add the places that are neither better nor worse, so that they make the place ambiguous.

        A shortened hunk may stand where it matches loosely with the blank lines that were left out. One that matches loosely
        in the block of its header may stand where it matches more strictly beyond.
        """
        hunk = placement.hunk
        looser = [replace(search, level=level) for level in range(search.level + 1, len(RULES))]
        stricter = [replace(search, level=level, beyond=True) for level in range(search.level)]
        if placement.lines is not hunk.lines and not hunk.at_end:
            placement, places = self._with_first(placement, places, hunk.lines, looser, at_least)
        if search.headers and not search.beyond:
            placement, places = self._with_first(placement, places, hunk.lines, stricter, at_least)
        return placement, places

    def _with_first(
        self, placement: Placement, places: Places, lines: tuple[PatchLine, ...], searches: Sequence[_Search], at_least: int
    ) -> tuple[Placement, Places]:
        """Add the places of the first of `searches` that finds any."""
        for search in searches:
            others = self._places(placement.hunk, lines, search)
            start = others.earliest(at_least)
            if start is not None:
                if start < placement.start:
                    placement = Placement(placement.hunk, lines, start, RULES[search.level][0])
                return placement, Either(places, others)
        return placement, places

    def _places(self, hunk: Hunk, lines: Sequence[PatchLine], search: _Search) -> Places:
        old, headers = _old(lines), search.headers
        anchors = self._headed(headers) if headers else []
        if headers and not anchors:
            return Listed([])
        haystack = self._haystack(search.level)
        needle = haystack.needle(old)
        if hunk.at_end:
            start = len(self._lines) - len(old)
            fits = start >= 0 and haystack.first(needle, start) == start and (not headers or anchors[0] <= start)
            return Listed([start] if fits else [])
        if not old:
            return Listed(anchors, offset=1) if headers else Listed([] if self._lines else [0])
        matching = Matching(haystack, needle)
        if not headers:
            return matching
        return OnlyBelow(matching, anchors) if search.beyond else Below(matching, anchors, self._blocks)

    def _haystack(self, level: int) -> Haystack:
        if level not in self._haystacks:
            wanted = [line.text for hunk in self._hunks for line in (*hunk.headers, *hunk.lines) if line.kind != ADDED]
            self._haystacks[level] = Haystack(self._lines, wanted, RULES[level][1])
        return self._haystacks[level]

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self._lines)

    def _headed(self, headers: tuple[str, ...]) -> list[int]:
        """Return where the last of `headers` stands below the others: as it is written, else without the space around it.

        It stands in the block of the one above it; beyond that block only where the file has no other such line.
        """
        for beyond in (False, True):
            for level in (_EXACTLY, _WITHOUT_INDENTATION):
                found = self._headed_by(_Search(level, headers, beyond))
                if found:
                    return found
        return []

    def _headed_by(self, search: _Search) -> list[int]:
        if search not in self._anchors:
            haystack = self._haystack(search.level)
            needle = haystack.needle(search.headers[-1:])
            found = list(haystack.every(needle))
            if len(search.headers) > 1:
                found = self._below_headers(search, found, Matching(haystack, needle))
            self._anchors[search] = found
        return self._anchors[search]

    def _below_headers(self, search: _Search, found: list[int], matching: Matching) -> list[int]:
        upper = replace(search, headers=search.headers[:-1], beyond=False)
        above = self._headed_by(upper) or (self._headed_by(replace(upper, beyond=True)) if search.beyond else [])
        below = Below(matching, above, self._blocks, strictly=True)
        inside = [place for place in found if below.leads_to(place)]
        alone = search.beyond and len(found) == 1 and bool(above) and above[0] < found[0]
        return inside or (found if alone else [])

    def _fault(self, hunk: Hunk, message: str) -> PatchFault:
        return PatchFault(f"{self._path}, hunk {hunk.number} (patch line {hunk.number_in_patch}): {message}")

    def _ambiguous(self, placement: Placement, places: Places, latest: int) -> PatchFault:
        numbers = _numbers(places, placement.start, latest)
        what = f"matches at {numbers}" if _old(placement.lines) else f"could be inserted before {numbers}"
        ignoring = f" ({placement.how})" if placement.how else ""
        return self._fault(
            placement.hunk,
            f"its place is ambiguous, the lines are not unique: it {what}{ignoring}. Give more lines of context, or an @@ line "
            "with a line that stands only above the place meant"
            + ("; an empty line at a hunk's end is context only with a space before it" if placement.hunk.spaced else ""),
        )

    def _not_found(self, hunk: Hunk, before: Sequence[Placement]) -> PatchFault:
        end = before[-1].end if before else 0
        missing = self._missing_header(hunk)
        if missing is not None:
            header, where, advice = missing
            return self._fault(
                hunk, f"no line {where} is {shown(header.text)}, the @@ line on patch line {header.number}. {advice}"
            )
        if not _old(hunk.lines) and not hunk.headers:
            return self._fault(
                hunk,
                "it has only '+' lines and nothing that says where they go: give lines of context, an @@ line to insert "
                "below, or *** End of File to append",
            )
        too_early = self._earliest(hunk, 0)
        if too_early is not None and before:
            return self._fault(
                hunk,
                f"it is found only at line {too_early[0].start + 1}, before the end of hunk {before[-1].hunk.number} (which "
                f"ends with line {end}): give hunks in the order of the file, and join those that overlap",
            )
        unmarked = replace(hunk, at_end=False)
        if hunk.at_end:
            anywhere = self._earliest(unmarked, 0)
            if anywhere is not None:
                return self._fault(
                    hunk,
                    f"it is marked *** End of File, but matches at line {anywhere[0].start + 1}, which is not the end: the file "
                    f"has {len(self._lines)} lines. Remove the marker, or give the last lines of the file",
                )
        elsewhere = self._earliest(unmarked, 0, with_headers=False) if hunk.headers else None
        if elsewhere is not None:
            numbers = _numbers(elsewhere[1], elsewhere[0].start, len(self._lines))
            return self._fault(
                hunk,
                f"its lines match at {numbers}, but not {self._below(hunk.headers)}, which its @@ line names: correct the @@ "
                "line",
            )
        return self._mismatch(hunk, end)

    def _missing_header(self, hunk: Hunk) -> tuple[PatchLine, str, str] | None:
        """Return the first header that leads nowhere, where it was searched, and advice."""
        texts = tuple(line.text for line in hunk.headers)
        for count, header in enumerate(hunk.headers, 1):
            if self._headed(texts[:count]):
                continue
            advice = "Give a whole line of the file after @@, or only @@"
            if count == 1:
                return header, "of the file", advice
            haystack = self._haystack(_WITHOUT_INDENTATION)
            places = Matching(haystack, haystack.needle([header.text]))
            first = places.earliest(0)
            if first is not None:
                advice = (
                    f"The file has it at {_numbers(places, first, len(self._lines))}: name the lines that stand above the place"
                )
            return header, f"of the file {self._below(hunk.headers[: count - 1])}", advice
        return None

    def _below(self, headers: Sequence[PatchLine]) -> str:
        anchors = self._headed(tuple(line.text for line in headers))
        where = "in the block of" if any(map(self._blocks.filled, anchors)) else "below"
        return f"{where} {shown(headers[-1].text)}"

    def _mismatch(self, hunk: Hunk, end: int) -> PatchFault:
        """Name the first line that did not match: the one after the longest beginning of the hunk that is in the file."""
        haystack = self._haystack(_LOOSEST)
        old = [line for line in hunk.lines if line.kind != ADDED]
        needle = haystack.needle([line.text for line in old])
        matched, tried = 0, len(old)
        while tried - matched > 1:
            middle = (matched + tried) // 2
            matched, tried = (middle, tried) if haystack.first(needle[:middle], end) is not None else (matched, middle)
        line = old[matched]
        expected = f"no match for {shown(line.text)} (patch line {line.number})"
        where = haystack.first(needle[:matched], end)
        if not self._lines:
            found = "the file is empty"
        elif not matched or where is None:
            found = "no such line in the file" + (f" after line {end}, where the hunk before it ends" if end else "")
        elif where + matched < len(self._lines):
            found = f"the lines before it match up to line {where + matched}, but line {where + matched + 1} is "
            found += shown(self._lines[where + matched])
        else:
            found = f"the lines before it match, but the file ends with line {len(self._lines)}"
        return self._fault(hunk, f"{expected}: {found}. {self._advice(hunk)}")

    def _advice(self, hunk: Hunk) -> str:
        new = [line.text for line in hunk.lines if line.kind == ADDED]
        text, part = "\n".join(["", *self._lines, ""]), "\n".join(["", *new, ""])
        at = text.find(part) if any(line.strip() for line in new) else -1
        if at >= 0:
            number = text.count("\n", 0, at) + 1
            return f"Its new lines stand at line {number}: if the change is made already, leave this hunk out"
        return "Read the file again and send the hunk with its lines as they are now"


def _numbers(places: Places, first: int, latest: int) -> str:
    """Name the first places from `first` to `latest`: `line 2`, or `lines 2, 5`."""
    found = [first]
    while len(found) <= _LISTED:
        following = places.earliest(found[-1] + 1)
        if following is None or following > latest:
            break
        found.append(following)
    numbers = ", ".join(str(start + 1) for start in found[:_LISTED])
    return f"line{'s' if len(found) > 1 else ''} {numbers}{' and more' if len(found) > _LISTED else ''}"
