"""What holds of `apply_patch` for any file, any edit and any text."""

from __future__ import annotations

from difflib import SequenceMatcher
from itertools import combinations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from activities.sandbox.port import FileView
from activities.tools.patch_parse import Hunk, PatchFault, PatchLine, parse_patch
from activities.tools.patch_place import place_hunks
from activities.tools.patch_plan import paths_to_look_at, plan_patch

LINE = st.text(st.characters(exclude_characters="\n\r\ufeff", exclude_categories=["Cs"]), max_size=8)
FEW_LINES = st.lists(st.sampled_from(["a", "b", "", " a"]), max_size=6).map("\n".join).map(str.encode)
PIECES = st.sampled_from(
    ["*** Begin Patch", "*** End Patch", "*** Add File: n", "*** Update File: f", "*** Update File: d/e", "*** Delete File: f",
     "*** Move to: g", "*** Move to: d", "*** End of File", "@@", "@@ a", "@@ -1,2 +1,2 @@", " a", "-a", "+b", "+a", " ", "", "-",
     "+", "- b", "```", "<<'EOF'", "EOF", "a", "*** ", "+\ufffd", "-\ufeffa", "\ud800", "+\udce9\r"]
)  # fmt: skip


def patch_of(before: list[str], after: list[str], context: int) -> str:
    """Write the difference of two lists of lines as a V4A patch with `context` lines around each change."""
    text = []
    for group in SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(context):
        text.append("@@")
        for tag, first, last, new_first, new_last in group:
            kept = tag == "equal"
            text += [(" " if kept else "-") + line for line in before[first:last]]
            text += [] if kept else ["+" + line for line in after[new_first:new_last]]
        if group[-1][2] == len(before):
            text.append("*** End of File")
    return "\n".join(["*** Begin Patch", "*** Update File: f", *text, "*** End Patch"])


@settings(deadline=None)
@given(
    before=st.lists(LINE, max_size=12),
    data=st.data(),
    ending=st.sampled_from(["\n", "\r\n"]),
    mark=st.sampled_from(["", "\ufeff"]),
    terminated=st.booleans(),
    numbered=st.booleans(),
)
def test_a_patch_gives_exactly_the_edited_bytes(
    before: list[str], data: st.DataObject, ending: str, mark: str, terminated: bool, numbered: bool
) -> None:
    """For any file and edit, a patch with unique context gives the edited file, byte for byte, and matches exactly.

    Context is unique because the lines are numbered and short context will do, or because it is the whole file.
    """
    if numbered:
        before = [f"{number}{line}" for number, line in enumerate(before)]
    after = list(before)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(after)))
        after[at : at + data.draw(st.integers(0, 2))] = data.draw(st.lists(LINE, max_size=2))
    assume(before != after)
    # An empty last line can only be told from none where it has a line end.
    terminated = terminated or not before or before[-1] == "" or after[-1:] == [""]
    # A file in which no line ends has nothing to take a line end from.
    ending = ending if len(before) > 1 or (before and terminated) else "\n"

    def content(lines: list[str]) -> bytes:
        return (mark + ending.join(lines) + (ending if terminated and lines else "")).encode()

    file = content(before)
    patch = patch_of(before, after, 1 if numbered else len(before) + 1)
    plan = plan_patch(parse_patch(patch), {"f": FileView("file", 0o644, len(file), file)})
    assert plan.changes[0].data == content(after)
    assert plan.summary == "M f"


@settings(deadline=None, max_examples=300)
@given(
    text=st.one_of(st.text(), st.lists(st.one_of(PIECES, LINE), max_size=12).map("\n".join)),
    inside=st.booleans(),
    file=st.one_of(st.binary(max_size=40), FEW_LINES),
)
def test_any_text_is_a_plan_or_a_fault(text: str, inside: bool, file: bytes) -> None:
    """No text makes anything but a plan that changes something, or a PatchFault whose message can be sent."""
    views = {"f": FileView("file", 0o644, len(file), file), "d": FileView("directory"), "d/e": FileView("symlink", target="/")}
    try:
        operations = parse_patch(f"*** Begin Patch\n*** Update File: f\n{text}\n*** End Patch" if inside else text)
        paths_to_look_at(operations)
        plan = plan_patch(operations, views)
    except PatchFault as fault:
        str(fault).encode()
    else:
        assert plan.changes
        assert all(change.data != file for change in plan.changes if change.path == "f")
        plan.summary.encode()


@settings(deadline=None, max_examples=300)
@given(
    lines=st.lists(st.sampled_from("ab"), max_size=7),
    wanted=st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=2), min_size=1, max_size=3),
)
def test_hunks_are_placed_exactly_where_there_is_one_way(lines: list[str], wanted: list[list[str]]) -> None:
    """Placing succeeds if and only if just one choice of ascending, separate places matches, and gives that choice."""
    ways = [
        starts
        for starts in combinations(range(len(lines)), len(wanted))
        if all(lines[at : at + len(old)] == old for at, old in zip(starts, wanted, strict=True))
        and all(at + len(old) <= then for at, old, then in zip(starts, wanted, starts[1:], strict=False))
    ]
    hunks = [
        Hunk(number, number, (), tuple(PatchLine("-", line, number) for line in old)) for number, old in enumerate(wanted, 1)
    ]
    try:
        placed = tuple(placement.start for placement in place_hunks("f", hunks, lines))
    except PatchFault:
        assert len(ways) != 1
    else:
        assert ways == [placed]
