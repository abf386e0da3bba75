"""Comparing two trees: every path that differs is told, nothing else, and what is equal is not read."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.workspace.tree import DIRECTORY, FILE, HARD_LINK, SYMLINK, Directory, Entry, node_digest, walk
from client.trees import Node, TerminalText, as_json, compare, kind_of, shown_mode, shown_name, shown_path, shown_time, visible

_FILES = st.builds(
    lambda content, mode, mtime: Entry(FILE, mode, mtime, len(content), content.ljust(32, b".")),
    st.sampled_from([b"", b"a", b"bb"]),
    st.sampled_from([0o644, 0o755]),
    st.integers(0, 2),
)
_LINKS = st.builds(
    lambda kind, target: Entry(kind, target=target), st.sampled_from([SYMLINK, HARD_LINK]), st.sampled_from([b"a", b"b"])
)
_NAMES = st.sampled_from([b"a", b"b", b"a-", b"\xff", b"x\n"])
_NODES = st.recursive(
    _FILES | _LINKS,
    lambda inner: st.builds(
        lambda mode, children: Directory(mode, children=children),
        st.sampled_from([0o755, 0o700]),
        st.dictionaries(_NAMES, inner, max_size=4),
    ),
    max_leaves=12,
)
_TREES = st.dictionaries(_NAMES, _NODES, max_size=4).map(lambda children: stored(Directory(children=children)))


def stored(directory: Directory) -> Directory:
    """Give a tree the digests that a stored one has."""
    for child in directory.children.values():
        if isinstance(child, Directory):
            stored(child)
    directory.digest = node_digest(directory)
    return directory


class Reader:
    """Says which directories were asked for. The trees of these tests are whole already."""

    def __init__(self) -> None:
        self.asked: list[Directory] = []

    async def fill(self, directories: Iterable[Directory]) -> None:
        self.asked += directories


def seen(node: Node) -> tuple[object, ...]:
    """What a person is to see of something: all but its times and, of a directory, what it holds."""
    if isinstance(node, Directory):
        return DIRECTORY, node.mode
    return node.kind, node.mode, node.size, node.digest, node.target


@given(_TREES, _TREES)
async def test_the_changes_turn_one_tree_into_the_other(before: Directory, after: Directory) -> None:
    """Taking away what is removed, putting in what is added or changed gives the other tree; and no path is told in vain."""
    changes = await compare(before, after, Reader().fill)
    made = {path: seen(node) for path, node in walk(before)}
    for change in changes:
        old = made.pop(change.path, None)
        assert old == (None if change.before is None else seen(change.before))
        if change.after is not None:
            made[change.path] = seen(change.after)
            assert old != made[change.path]
    assert made == {path: seen(node) for path, node in walk(after)}
    paths = [change.path.split(b"/") for change in changes]
    assert paths == sorted(paths), "each directory before what it holds"


@given(_TREES, _TREES)
async def test_the_way_back_is_the_same_way(before: Directory, after: Directory) -> None:
    """Comparing the other way round tells the same paths, with added for removed."""
    there, back = await compare(before, after, Reader().fill), await compare(after, before, Reader().fill)
    assert [(c.path, c.before, c.after) for c in there] == [(c.path, c.after, c.before) for c in back]


@given(_TREES)
async def test_a_tree_is_all_added_to_nothing(tree: Directory) -> None:
    """A workspace that nothing was put into is compared like any other."""
    changes = await compare(None, tree, Reader().fill)
    assert {change.path for change in changes} == {path for path, _ in walk(tree)}
    assert {change.kind for change in changes} <= {"added"}
    assert await compare(tree, tree, Reader().fill) == []


async def test_what_is_equal_is_not_read() -> None:
    """Beside a changed file may lie a million others: only the directories on the way to it are asked for."""

    def tree(content: bytes) -> Directory:
        big = Directory(children={b"%d" % number: Entry(FILE, size=1, digest=b"x" * 32) for number in range(100)})
        deep = Directory(children={b"file": Entry(FILE, size=1, digest=content * 32)})
        return stored(Directory(children={b"big": big, b"way": Directory(children={b"deep": deep})}))

    reader, before, after = Reader(), tree(b"1"), tree(b"2")
    (change,) = await compare(before, after, reader.fill)
    assert (change.path, change.aspects) == (b"way/deep/file", ("content",))
    assert len(reader.asked) == 6
    assert before.children[b"big"] not in reader.asked


async def test_a_touched_file_is_no_change() -> None:
    """Times differ all the time, and say nothing."""
    before, after = (stored(Directory(children={b"f": Entry(FILE, 0o644, time, 1, b"x" * 32)})) for time in (1, 2))
    assert before.digest != after.digest
    assert await compare(before, after, Reader().fill) == []


async def test_each_aspect_has_its_name() -> None:
    """Type, content, target, mode and attributes; the workspace's own directory too."""
    before = Directory(
        0o755, children={b"a": Entry(FILE, 0o644, 0, 1, b"x"), b"l": Entry(SYMLINK, target=b"a"), b"t": Entry(FILE)}
    )
    after = Directory(
        0o700,
        children={
            b"a": Entry(FILE, 0o600, 0, 2, b"y", xattrs=((b"user.n", b"v"),)),
            b"l": Entry(SYMLINK, target=b"b"),
            b"t": Directory(),
        },
    )
    stored(before), stored(after)
    changes = await compare(before, after, Reader().fill)
    assert [(change.path, change.kind, change.aspects) for change in changes] == [
        (b"", "changed", ("mode",)),
        (b"a", "changed", ("content", "mode", "attributes")),
        (b"l", "changed", ("target",)),
        (b"t", "changed", ("type",)),
    ]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (b"outputs/a.md", "outputs/a.md"),
        (b"a\x1b[2Jb", "a␛[2Jb"),
        (b"a\nb\tc\rd", "a␊b␉c␍d"),
        (b"\xff", "\\xff"),
        ("ü".encode(), "ü"),
        ("a\u202eb".encode(), "a\ufffdb"),
    ],
)
def test_a_path_cannot_write_to_the_terminal(path: bytes, shown: str) -> None:
    """Sandboxed code chose it; it stays on its line and hides nothing."""
    assert shown_path(path) == shown


def test_a_text_in_pieces_is_shown_as_one() -> None:
    """Characters that are cut in two between pieces are whole, and bytes that are none are told."""
    text = TerminalText()
    data = "ü\r\n\x1b[1m".encode() + b"\xff\xc3"
    assert b"".join(text(data[at : at + 1]) for at in range(len(data))) + text(b"", final=True) == "ü␍\n␛[1m\\xff\\xc3".encode()
    assert TerminalText()(b"a\r\nb") == b"a\nb"
    assert visible("a\x7f") == "a␡"


def test_things_are_told_as_people_know_them() -> None:
    """Modes as `ls` has them, times in UTC also before 1970, links with where they lead."""
    directory, link = Directory(0o750, -1), Entry(SYMLINK, 0o777, target=b"/etc/passwd")
    assert (shown_mode(directory), shown_mode(link)) == ("drwxr-x---", "lrwxrwxrwx")
    assert shown_time(-1) == "1969-12-31 23:59:59Z"
    assert shown_time((1 << 63) - 1) == "2262-04-11 23:47:16Z"
    assert shown_name(b"", directory) == "."
    assert shown_name(b"d", directory) == "d/"
    assert shown_name(b"l", link) == "l -> /etc/passwd"
    assert shown_name(b"h", Entry(HARD_LINK, target=b"a")) == "h (same file as a)"
    assert as_json(link) == {"type": "symlink", "mode": "0777", "target": "/etc/passwd", "mtime": "1970-01-01T00:00:00Z"}
    assert kind_of(directory) == DIRECTORY
