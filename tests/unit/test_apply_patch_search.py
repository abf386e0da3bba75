"""How `apply_patch` searches a file: what a header leads to, and in what time."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from activities.tools.patch_search import Below, Blocks, Haystack, Matching
from tests.unit.test_apply_patch import edit, refused

LINES = st.lists(st.sampled_from(["h", " h", "x", " x", "  x", "", ")", " )"]), max_size=12)


def indent(line: str) -> int:
    """Count the spaces before a line."""
    return len(line) - len(line.lstrip())


@settings(deadline=None, max_examples=300)
@given(lines=LINES)
def test_the_block_of_a_line_is_what_is_deeper(lines: list[str]) -> None:
    """It ends before the first line that is neither blank, nor deeper, nor closes a bracket at the same depth."""
    blocks = Blocks(lines)
    for at, line in enumerate(lines):
        if line:
            closing = " " * indent(line) + ")"
            ends = (
                end for end in range(at + 1, len(lines)) if lines[end] not in ("", closing) and indent(lines[end]) <= indent(line)
            )
            assert blocks.end(at) == next(ends, len(lines))
            assert blocks.filled(at) is any(lines[at + 1 : blocks.end(at)])


@settings(deadline=None, max_examples=500)
@given(lines=LINES, header=st.sampled_from(["h", " h", "x"]), wanted=st.sampled_from(["x", " x", "  x"]), strictly=st.booleans())
def test_the_first_and_the_last_place_below_a_header_are_those_it_leads_to(
    lines: list[str], header: str, wanted: str, strictly: bool
) -> None:
    """The two searches find just the matches that a header leads to, from any line on."""
    haystack = Haystack(lines, [header, wanted], str)
    anchors = list(haystack.every(haystack.needle([header])))
    matching = Matching(haystack, haystack.needle([wanted]))
    below = Below(matching, anchors, Blocks(lines), strictly)
    places = [at for at in haystack.every(haystack.needle([wanted])) if below.leads_to(at)]
    for line in range(len(lines) + 1):
        assert below.earliest(line) == min((at for at in places if at >= line), default=None)
        assert below.latest(line) == max((at for at in places if at <= line), default=None)


def test_a_large_patch_takes_well_under_a_second() -> None:
    """200 hunks for a file of 10,000 lines, each with a header, take far less than a second even where they match loosely."""
    before = "".join(f"  line {number}  \n" for number in range(10_000)).encode()
    hunks = "".join(f"@@ line {at}\n line {at + 1}\n-line {at + 2}\n+  new\n" for at in range(0, 10_000, 50))
    started = time.process_time()
    after = edit(hunks, before)
    assert time.process_time() - started < 1
    assert after.count(b"new") == 200
    assert after.count(b"\n") == 10_000


def test_nested_headers_do_not_make_the_search_quadratic() -> None:
    """The blocks of 300 lines, one in the other and all with the same 200,000 blank lines at the end, are found in a second."""
    nested = [" " * depth + text for depth in range(1, 301) for text in ("h", " z", " x", " x")]
    before = "\n".join([*nested, *[""] * 200_000, "last", ""])
    started = time.process_time()
    assert edit("@@ h\n@@ x\n-last\n+done\n", before.encode()) == before.replace("last", "done").encode()
    assert time.process_time() - started < 4


def test_the_nearest_match_of_a_header_is_searched_once() -> None:
    """However many places belong to a header, its nearest match is looked for once."""
    searches: list[int] = []

    class Counted(Matching):
        def earliest(self, at_least: int) -> int | None:
            searches.append(at_least)
            return super().earliest(at_least)

    lines = ["class A:", *["x"] * 1000]
    haystack = Haystack(lines, ["x"], str)
    below = Below(Counted(haystack, haystack.needle(["x"])), [0], Blocks(lines))
    assert [place for place in range(1, 1001) if below.leads_to(place)] == [1]
    assert searches == [0]


def test_equal_lines_do_not_make_the_search_quadratic() -> None:
    """2,000 hunks that each match 100,000 lines are refused in seconds, not hours."""
    started = time.process_time()
    assert "not unique" in refused("@@ x\n@@ x\n-x\n+y\n" * 2_000, b"x\n" * 100_000)
    assert time.process_time() - started < 10
