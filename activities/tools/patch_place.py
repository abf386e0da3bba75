"""Find where each hunk of a patch stands in a file. Pure.

All hunks are placed against the original lines, in order and without overlap, and the placement must be the only one: each
hunk's earliest possible place, given the hunks before it, must be its latest possible place, given the hunks after it.

A hunk is compared exactly first, then by each looser rule in turn, and a rule is only used where no stricter one finds a
place. A header (`@@ line`) decides between equal places: the hunk stands in the block below that line (the lines indented
deeper than it), or else at the nearest place after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from activities.tools.patch_parse import ADDED, Hunk, PatchFault, PatchLine, shown
from activities.tools.patch_search import RULES, Below, Haystack, Listed, Matching, Places

_LISTED = 6


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
        self._anchors: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        self._block_ends: dict[int, int] = {}

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
        for lines in shapes:
            for level, (how, _) in enumerate(RULES):
                places = self._places(hunk, _old(lines), headers, level)
                start = places.earliest(at_least)
                if start is not None:
                    return Placement(hunk, lines, start, how), places
        return None

    def _places(self, hunk: Hunk, old: Sequence[str], headers: tuple[str, ...], level: int) -> Places:
        anchors = self._headed(headers) if headers else []
        if headers and not anchors:
            return Listed([])
        haystack = self._haystack(level)
        needle = haystack.needle(old)
        if hunk.at_end:
            start = len(self._lines) - len(old)
            fits = start >= 0 and haystack.first(needle, start) == start and (not headers or anchors[0] <= start)
            return Listed([start] if fits else [])
        if not old:
            return Listed(anchors, offset=1) if headers else Listed([] if self._lines else [0])
        matching = Matching(haystack, needle)
        return Below(matching, anchors, self._block_end) if headers else matching

    def _haystack(self, level: int) -> Haystack:
        if level not in self._haystacks:
            wanted = [line.text for hunk in self._hunks for line in (*hunk.headers, *hunk.lines) if line.kind != ADDED]
            self._haystacks[level] = Haystack(self._lines, wanted, RULES[level][1])
        return self._haystacks[level]

    def _headed(self, headers: tuple[str, ...]) -> list[int]:
        """Return where the last of `headers` stands below the others: as it is written, else without the space around it."""
        return self._headed_by(headers, 0) or self._headed_by(headers, 2)

    def _headed_by(self, headers: tuple[str, ...], level: int) -> list[int]:
        key = (level, headers)
        if key not in self._anchors:
            haystack = self._haystack(level)
            needle = haystack.needle(headers[-1:])
            found = list(haystack.every(needle))
            if len(headers) > 1:
                above = self._headed_by(headers[:-1], level)
                below = Below(Matching(haystack, needle), above, self._block_end, strictly=True)
                found = [place for place in found if below.leads_to(place)]
            self._anchors[key] = found
        return self._anchors[key]

    def _block_end(self, start: int) -> int:
        """Return the index after the block below a line: the lines that are blank or indented deeper than it."""
        if start not in self._block_ends:
            outer, end = _indent(self._lines[start]), start + 1
            while end < len(self._lines) and (not self._lines[end].strip() or _indent(self._lines[end]) > outer):
                end += 1
            self._block_ends[start] = end
        return self._block_ends[start]

    def _fault(self, hunk: Hunk, message: str) -> PatchFault:
        return PatchFault(f"{self._path}, hunk {hunk.number} (patch line {hunk.number_in_patch}): {message}")

    def _ambiguous(self, placement: Placement, places: Places, latest: int) -> PatchFault:
        found = [placement.start]
        while len(found) <= _LISTED:
            following = places.earliest(found[-1] + 1)
            if following is None or following > latest:
                break
            found.append(following)
        numbers = ", ".join(str(start + 1) for start in found[:_LISTED]) + (" and more" if len(found) > _LISTED else "")
        what = f"matches at lines {numbers}" if _old(placement.lines) else f"could be inserted before lines {numbers}"
        ignoring = f" ({placement.how})" if placement.how else ""
        return self._fault(
            placement.hunk,
            f"its place is ambiguous, the lines are not unique: it {what}{ignoring}. Give more lines of context, or an @@ line "
            "with a line that stands only above the place meant",
        )

    def _not_found(self, hunk: Hunk, before: Sequence[Placement]) -> PatchFault:
        end = before[-1].end if before else 0
        missing = self._missing_header(hunk)
        if missing is not None:
            return self._fault(
                hunk,
                f"no line of the file{missing[1]} is {shown(missing[0].text)}, the @@ line on patch line {missing[0].number}. "
                "Give a whole line of the file after @@, or only @@",
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
            return self._fault(
                hunk,
                f"its lines match at line {elsewhere[0].start + 1}, but not below {shown(hunk.headers[-1].text)}, which its "
                "@@ line names: correct the @@ line",
            )
        return self._mismatch(hunk, end)

    def _missing_header(self, hunk: Hunk) -> tuple[PatchLine, str] | None:
        texts = tuple(line.text for line in hunk.headers)
        for count, header in enumerate(hunk.headers, 1):
            if not self._headed(texts[:count]):
                return header, f" below {shown(texts[count - 2])}" if count > 1 else ""
        return None

    def _mismatch(self, hunk: Hunk, end: int) -> PatchFault:
        """Name the first line that did not match: the one after the longest beginning of the hunk that is in the file."""
        haystack = self._haystack(len(RULES) - 1)
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


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
