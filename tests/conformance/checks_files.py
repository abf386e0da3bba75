"""Reading, writing, looking, changing and walking files."""

from __future__ import annotations

import os

import pytest

from activities.sandbox.port import FileChange, FileFault, FileView
from tests.conformance.box import shared
from tests.conformance.subjects import Subject

ODD = os.fsdecode(b"odd \xff\n\xe2\x9c\x93 na'me")
"""A file name with bytes that are no UTF-8, a line feed, a blank and a quote."""


async def check_files_come_back_as_written(subject: Subject) -> None:
    """Any bytes of any length can be written and read, with their mode and without a set-uid bit."""
    box = await shared(subject)
    for size in (0, 1, 39_999, 40_001, 5_000_001):
        data = os.urandom(size)
        await box.sandbox.write(box.at("data.bin"), data)
        assert await box.content(box.at("data.bin")) == data
        assert (await box.text("wc -c < data.bin")).strip() == str(size)
    await box.sandbox.write(box.at("a/b/run.sh"), b"#!/bin/sh\necho ran\n", 0o4755)
    assert await box.text("a/b/run.sh; stat -c %a a a/b/run.sh; [ -O a/b/run.sh ] && rm -r a && ls a 2>/dev/null; true") == (
        "ran\n755\n755\n"
    )


async def check_write_replaces_whole_files(subject: Subject) -> None:
    """A reader of the old file keeps the old content; a link is replaced and not followed."""
    box = await shared(subject)
    await box.sandbox.write(box.at("f"), b"old" * 1000)
    await box.text(
        "ln -s f link; (exec 3< f; touch open; n=0; while [ ! -e go ] && [ $n -lt 99 ]; do sleep 0.1; n=$((n+1)); done\n"
        "cat <&3 > seen; touch end) >/dev/null 2>&1 &\nwhile [ ! -e open ]; do sleep 0.1; done"
    )
    await box.sandbox.write(box.at("f"), b"new")
    await box.sandbox.write(box.at("link"), b"own")
    await box.sandbox.write(box.at("go"), b"")
    await box.text("n=0; while [ ! -e end ] && [ $n -lt 99 ]; do sleep 0.1; n=$((n+1)); done; ls end")
    assert await box.content(box.at("seen")) == b"old" * 1000
    assert (await box.content(box.at("f")), await box.content(box.at("link"))) == (b"new", b"own")
    assert (await box.sandbox.look([box.at("link")], 0))[box.at("link")].kind == "file"


async def check_absolute_paths_are_the_sandboxs(subject: Subject) -> None:
    """An absolute path means the sandbox's file system."""
    box = await shared(subject)
    await box.sandbox.write(f"/tmp/{box.name}/note", b"inside")
    assert await box.content(f"/tmp/{box.name}/note") == b"inside"
    assert await box.content(f"/workspace/../tmp/{box.name}/note") == b"inside"
    assert await box.text(f"cat /tmp/{box.name}/note") == "inside"


async def check_odd_names_work(subject: Subject) -> None:
    """File names are bytes; every operation carries them unchanged."""
    box = await shared(subject)
    await box.sandbox.write(box.at(ODD), b"1")
    await box.sandbox.change([FileChange(box.at(f"{ODD}.d/{ODD}"), b"2")])
    assert await box.content(box.at(ODD)) == b"1"
    assert (await box.sandbox.look([box.at(ODD)], 10))[box.at(ODD)].data == b"1"
    names = {path for path, _ in await box.sandbox.walk(box.name)}
    assert {box.at(ODD), box.at(f"{ODD}.d"), box.at(f"{ODD}.d/{ODD}")} <= names


async def check_what_cannot_be_read_is_told(subject: Subject) -> None:
    """A path that is no readable file is told with its name and reason, and a FIFO never blocks."""
    box = await shared(subject)
    root = (await box.text("id -u")).strip() == "0"
    await box.text("mkdir dir; mkfifo fifo; touch secret; chmod 000 secret")
    cases = {
        box.at("missing"): "No such file",
        box.at("dir"): "is a directory",
        box.at("fifo"): "is not a regular file",
        "/dev/zero": "is not a regular file",
        "a\0b": "NUL",
        "x" * 300: "name too long",
        **({} if root else {box.at("secret"): "Permission denied"}),
    }
    for path, words in cases.items():
        with pytest.raises(FileFault, match=words):
            await box.content(path)


async def check_what_cannot_be_written_is_told(subject: Subject) -> None:
    """A refused write names the path and leaves nothing behind."""
    box = await shared(subject)
    await box.text("mkdir dir; touch f")
    for path in (box.at("dir"), box.at("f/below"), "/proc/x", "", box.at("dir/"), ".."):
        with pytest.raises(FileFault):
            await box.sandbox.write(path, b"x")
    assert (await box.text("ls -A")).split() == [".keep", "dir", "f"]


async def check_look_tells_what_stands_there(subject: Subject) -> None:
    """One look answers for every kind of thing, and does not follow the last link."""
    box = await shared(subject)
    await box.text(
        "printf hello > f; chmod 640 f; mkdir -m 750 d; ln -s /abs/target link; mkfifo fifo; head -c 9 /dev/zero > long; : > e"
    )
    names = ["f", "d", "link", "fifo", "long", "none", "f/none", "e"]
    found = await box.sandbox.look([box.at(name) for name in names], 8)
    views = {name: found[box.at(name)] for name in names}
    assert views["f"] == FileView("file", 0o640, 5, b"hello")
    assert views["d"] == FileView("directory", 0o750)
    assert views["link"] == FileView("symlink", 0o777, target="/abs/target")
    assert views["fifo"].kind == "other"
    assert views["long"] == FileView("file", 0o644, 9, None)
    assert views["e"] == FileView("file", 0o644, 0, b"")
    assert views["none"] == views["f/none"] == FileView("missing")
    assert (await box.sandbox.look(["."], 8))["."].kind == "directory"


async def check_paths_have_one_form(subject: Subject) -> None:
    """Workspace paths that are not in normal form are refused, so no two names mean the same file."""
    box = await shared(subject)
    for path in ("/etc/passwd", "../x", "a/../b", "a//b", "./a", "a/"):
        with pytest.raises(FileFault, match="relative to /workspace"):
            await box.sandbox.look([path], 1)
        with pytest.raises(FileFault, match="relative to /workspace"):
            await box.sandbox.change([FileChange(path, b"x")])


async def check_changes_are_made_together(subject: Subject) -> None:
    """New, changed and removed files of one call are all there after it, and repeating it changes nothing."""
    box = await shared(subject)
    await box.text("printf old > changed; printf x > removed; mkdir d; printf y > d/removed; ln -s changed link")
    changes = [
        FileChange(box.at("new/deep/file"), b"new", 0o755),
        FileChange(box.at("changed"), b"changed"),
        FileChange(box.at("empty"), b""),
        FileChange(box.at("removed"), None),
        FileChange(box.at("d/removed"), None),
        FileChange(box.at("nowhere/removed"), None),
        FileChange(box.at("link"), None),
    ]
    for _ in range(2):
        await box.sandbox.change(changes)
        found = {path.removeprefix(f"{box.name}/"): view for path, view in await box.sandbox.walk(box.name)}
        kinds = {path: view.kind for path, view in found.items()}
        assert kinds == dict.fromkeys((".keep", "changed", "empty", "new/deep/file"), "file") | dict.fromkeys(
            ("d", "new", "new/deep"), "directory"
        )
        assert found["new/deep/file"].mode == 0o755
        assert await box.content(box.at("changed")) == b"changed"


async def check_a_refused_change_changes_nothing(subject: Subject) -> None:
    """When one change of a call is refused, none is made, and no temporary file or directory is left."""
    box = await shared(subject)
    root = (await box.text("id -u")).strip() == "0"
    await box.text("mkdir dir shut; touch shut/old; chmod 555 shut; echo 1 > file; ln -s dir link")
    before = await box.sandbox.walk(box.name)
    cases: dict[str, FileChange] = {
        "dir: is a directory": FileChange(box.at("dir"), b"x"),
        "only files can be removed": FileChange(box.at("dir"), None),
        "file: is no directory": FileChange(box.at("file/below"), b"x"),
        "link: is a link; name the directory itself": FileChange(box.at("link/below"), b"x"),
        "link: is a link": FileChange(box.at("link/gone"), None),
        "name too long": FileChange(box.at("x" * 300), b"x"),
        "named twice": FileChange(box.at("first"), b"x"),
        "is written as a file": FileChange(box.at("first/below"), b"x"),
        "the workspace itself": FileChange("", b"x"),
    }
    if not root:
        cases |= {"Permission denied": FileChange(box.at("shut/new"), b"x"), "not writable": FileChange(box.at("shut/old"), None)}
    for words, bad in cases.items():
        others = [FileChange(box.at("first"), b"1"), FileChange(box.at("a/b/c"), b"2"), FileChange(box.at("file"), None)]
        with pytest.raises(FileFault, match=words):
            await box.sandbox.change([*others, bad])
        assert await box.sandbox.walk(box.name) == before, words


async def check_many_files_are_one_call(subject: Subject) -> None:
    """Hundreds of files are changed, looked at and listed together."""
    box = await shared(subject)
    paths = [box.at(f"d{n % 20}/f{n}") for n in range(200)]
    await box.sandbox.change([FileChange(path, b"content of %d\n" % n) for n, path in enumerate(paths)])
    views = await box.sandbox.look(paths, 100)
    assert all(views[path].data == b"content of %d\n" % n for n, path in enumerate(paths))
    listed = await box.sandbox.walk(box.name)
    assert len(listed) == 221
    assert [path for path, _ in listed] == sorted(path for path, _ in listed)


async def check_walk_lists_everything(subject: Subject) -> None:
    """A walk tells of all below a path, sorted, links not followed, names relative to the workspace."""
    box = await shared(subject)
    await box.text("mkdir -p t/b/empty; printf 12345 > t/b/f; ln -s / t/a; ln -s . t/b/self; mkfifo t/c")
    assert await box.sandbox.walk(box.at("t")) == [
        (box.at("t/a"), FileView("symlink", 0o777, target="/")),
        (box.at("t/b"), FileView("directory", 0o755)),
        (box.at("t/b/empty"), FileView("directory", 0o755)),
        (box.at("t/b/f"), FileView("file", 0o644, 5)),
        (box.at("t/b/self"), FileView("symlink", 0o777, target=".")),
        (box.at("t/c"), FileView("other", 0o644)),
    ]


async def check_a_walk_that_cannot_be_whole_fails(subject: Subject) -> None:
    """What is no directory, or cannot be listed, is a fault and never an empty list; below the top it is told as closed."""
    box = await shared(subject)
    root = (await box.text("id -u")).strip() == "0"
    await box.text(
        "touch file; ln -s / link; mkdir -p open/shut/in open/blind; touch open/shut/in/f open/blind/f open/seen\n"
        "chmod 000 open/shut; chmod 444 open/blind"
    )
    for name in ("none", "file", "link", *(() if root else ("open/shut", "open/blind"))):
        with pytest.raises(FileFault, match=name):
            await box.sandbox.walk(box.at(name))
    if not root:
        assert await box.sandbox.walk(box.at("open")) == [
            (box.at("open/blind"), FileView("closed directory", 0o444)),
            (box.at("open/seen"), FileView("file", 0o644)),
            (box.at("open/shut"), FileView("closed directory")),
        ]
    await box.text("chmod 700 open/shut open/blind")


async def check_a_path_of_many_parts_costs_nothing_else(subject: Subject) -> None:
    """A path as deep as the system takes is like any other, one that is deeper is refused, and the sandbox goes on."""
    box = await shared(subject)
    deep, deeper = ("/".join(["d"] * parts) + "/f" for parts in (1200, 2500))
    await box.sandbox.change([FileChange(box.at(f"a/{deep}"), b"1")])
    await box.sandbox.write(box.at(f"b/{deep}"), b"2")
    assert await box.content(box.at(f"a/{deep}")) == b"1"
    for call in (box.sandbox.change([FileChange(box.at(deeper), b"x")]), box.sandbox.write(box.at(deeper), b"x")):
        with pytest.raises(FileFault, match="name too long"):
            await call
    assert len(await box.sandbox.walk(box.at("a"))) == 1201
    await box.text("rm -rf a b")
