"""Reading, writing, looking, changing and walking files of a local sandbox."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from activities.sandbox.port import FileChange, FileFault, FileView, SandboxUnavailable
from activities.sandbox.providers.local import LocalSandbox
from tests.sandbox.local_support import Local, bash

ODD = os.fsdecode(b"odd \xff\n\xe2\x9c\x93 name")
"""A file name with bytes that are no UTF-8, a line feed and a blank."""


async def content(sandbox: LocalSandbox, path: str) -> bytes:
    """Return a whole file."""
    return b"".join([part async for part in sandbox.read(path)])


def names(local: Local) -> set[str]:
    """Return what stands at the top of the workspace, as the host sees it."""
    return {path.name for path in local.workspace.iterdir()} - {".home"}


@pytest.mark.parametrize("size", [0, 1, 5_000_001])
async def test_a_binary_file_comes_back_as_written(local: Local, size: int) -> None:
    """Any bytes of any length can be written and read."""
    data = os.urandom(size)
    await local.sandbox.write("data.bin", data)
    assert await content(local.sandbox, "data.bin") == data
    assert (await local.text("sha256sum data.bin")).split()[0] == hashlib.sha256(data).hexdigest()


async def test_a_big_file_is_streamed(local: Local) -> None:
    """A file is read in parts, so that its size does not matter to the worker's memory."""
    await local.sh("head -c 50000000 /dev/zero > big")
    sizes = [len(part) async for part in local.sandbox.read("big")]
    assert sum(sizes) == 50_000_000
    assert max(sizes) <= 1 << 20


async def test_written_files_belong_to_the_agent(local: Local) -> None:
    """The agent can use, change and remove what was written for it."""
    await local.sandbox.write("a/b/run.sh", b"#!/bin/sh\necho ran\n", 0o755)
    assert await local.text("a/b/run.sh; stat -c '%a %U' a a/b/run.sh; rm -r a; ls") == "ran\n755 caisson\n755 caisson\n"


async def test_write_replaces_whole_files(local: Local) -> None:
    """A reader of the old file keeps the old content, and the mode is that of the new one."""
    await local.sandbox.write("f", b"old" * 1000, 0o600)
    await local.sh("exec 3< f; (while [ ! -e go ]; do sleep 0.02; done; cat <&3 > seen; touch finished) &")
    await local.sandbox.write("f", b"new", 0o4755)
    await local.sandbox.write("go", b"")
    while "finished" not in names(local):
        await asyncio.sleep(0.02)
    assert await content(local.sandbox, "seen") == b"old" * 1000
    assert stat.S_IMODE((local.workspace / "f").stat().st_mode) == 0o755


async def test_paths_outside_the_workspace_are_the_sandboxs_own(local: Local) -> None:
    """An absolute path means the sandbox's file system, not the host's."""
    await local.sandbox.write("/tmp/x/note", b"inside")
    assert await content(local.sandbox, "/tmp/x/note") == b"inside"
    assert await content(local.sandbox, "/workspace/../tmp/x/note") == b"inside"
    assert not Path("/tmp/x/note").exists()


async def test_odd_names_work_everywhere(local: Local) -> None:
    """File names are bytes; every operation carries them unchanged."""
    await local.sandbox.write(ODD, b"1")
    await local.sandbox.change([FileChange(f"{ODD}.d/{ODD}", b"2")])
    assert await content(local.sandbox, ODD) == b"1"
    assert (await local.sandbox.look([ODD], 10))[ODD].data == b"1"
    assert {ODD, f"{ODD}.d", f"{ODD}.d/{ODD}"} <= {path for path, _ in await local.sandbox.walk("")}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing", "missing: No such file"),
        ("dir", "dir: is a directory"),
        ("fifo", "fifo: is not a regular file"),
        ("/dev/zero", "/dev/zero: is not a regular file"),
        ("secret", "secret: Permission denied"),
        ("a\0b", "NUL"),
        ("x" * 300, "name too long"),
    ],
)
async def test_what_cannot_be_read_is_a_file_fault(local: Local, path: str, words: str) -> None:
    """A path that is no readable file is told at once with its name and reason, and a FIFO never blocks."""
    await local.sh("mkdir dir; mkfifo fifo; touch secret; chmod 000 secret")
    began = time.monotonic()
    with pytest.raises(FileFault, match=words):
        await content(local.sandbox, path)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("path", ["dir", "f/below", "/usr/x", "/etc/passwd", "", "dir/", "..", "loop/x"])
async def test_what_cannot_be_written_is_a_file_fault(local: Local, path: str) -> None:
    """A refused write names the path and leaves nothing behind."""
    await local.sh("mkdir dir; touch f; ln -s loop loop")
    with pytest.raises(FileFault):
        await local.sandbox.write(path, b"x")
    assert names(local) == {"dir", "f", "loop"}


async def test_look_tells_what_stands_at_each_path(local: Local) -> None:
    """One look answers for every kind of thing, and does not follow the last link."""
    await local.sh(
        "printf hello > f; chmod 640 f; mkdir -m 750 d; ln -s /abs/target link; mkfifo fifo; head -c 9 /dev/zero > long"
    )
    views = await local.sandbox.look(["f", "d", "link", "fifo", "long", "none", "f/none", "."], 8)
    assert views["f"] == FileView("file", 0o640, 5, b"hello")
    assert views["d"] == FileView("directory", 0o750)
    assert (views["link"].kind, views["link"].target, views["link"].data) == ("symlink", "/abs/target", None)
    assert views["fifo"].kind == "other"
    assert views["long"] == FileView("file", 0o644, 9, None)
    assert views["none"] == views["f/none"] == FileView("missing")
    assert views["."].kind == "directory"


async def test_a_look_at_a_thousand_files_is_one_call(local: Local) -> None:
    """A thousand files with their content come in one answer."""
    await local.sh("for n in $(seq 1000); do echo content-$n > file-$n; done")
    began = time.monotonic()
    views = await local.sandbox.look([f"file-{n}" for n in range(1, 1001)], 100)
    assert time.monotonic() - began < 2
    assert all(views[f"file-{n}"].data == f"content-{n}\n".encode() for n in range(1, 1001))


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../b", "a//b", "./a", "a/"])
async def test_paths_that_are_not_normal_are_refused(local: Local, path: str) -> None:
    """A workspace path has one form, so no two names mean the same file."""
    with pytest.raises(FileFault, match="relative to /workspace"):
        await local.sandbox.look([path], 1)
    with pytest.raises(FileFault, match="relative to /workspace"):
        await local.sandbox.change([FileChange(path, b"x")])


async def test_changes_are_made_together(local: Local) -> None:
    """New, changed and removed files of one call are all there after it, and repeating it changes nothing."""
    await local.sh("printf old > changed; printf x > removed; mkdir d; printf y > d/removed")
    changes = [
        FileChange("new/deep/file", b"new", 0o755),
        FileChange("changed", b"changed"),
        FileChange("removed", None),
        FileChange("d/removed", None),
        FileChange("nowhere/removed", None),
    ]
    for _ in range(2):
        await local.sandbox.change(changes)
        found = {path: view.kind for path, view in await local.sandbox.walk("") if not path.startswith(".home")}
        assert found == {
            "changed": "file",
            "d": "directory",
            "new": "directory",
            "new/deep": "directory",
            "new/deep/file": "file",
        }
        assert (local.workspace / "changed").read_bytes() == b"changed"
        assert stat.S_IMODE((local.workspace / "new/deep/file").stat().st_mode) == 0o755


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (FileChange("dir", b"x"), "dir: is a directory"),
        (FileChange("dir", None), "only files can be removed"),
        (FileChange("file/below", b"x"), "file: is no directory"),
        (FileChange("link/below", b"x"), "link: is a link; name the directory itself"),
        (FileChange("link/below", None), "link: is a link"),
        (FileChange("shut/new", b"x"), "Permission denied"),
        (FileChange("shut/old", None), "not writable"),
        (FileChange("x" * 300, b"x"), "name too long"),
        (FileChange("first", b"x"), "named twice"),
        (FileChange("first/below", b"x"), "is written as a file"),
        (FileChange("", b"x"), "the workspace itself"),
    ],
)
async def test_a_change_that_cannot_be_made_undoes_all(local: Local, bad: FileChange, words: str) -> None:
    """When one change of a call is refused, none is made, and no temporary file or directory is left."""
    await local.sh("mkdir dir shut; touch shut/old; chmod 555 shut; echo 1 > file; ln -s dir link")
    before = [entry for entry in await local.sandbox.walk("") if not entry[0].startswith(".home")]
    with pytest.raises(FileFault, match=words):
        await local.sandbox.change([FileChange("first", b"1"), FileChange("a/b/c", b"2"), FileChange("file", None), bad])
    assert [entry for entry in await local.sandbox.walk("") if not entry[0].startswith(".home")] == before


async def test_a_change_replaces_a_link_and_not_its_target(local: Local) -> None:
    """The last part of a path is not followed: the link itself is replaced or removed."""
    await local.sh("printf kept > target; ln -s target one; ln -s target two")
    await local.sandbox.change([FileChange("one", b"own"), FileChange("two", None)])
    assert names(local) == {"target", "one"}
    assert (local.workspace / "target").read_bytes() == b"kept"
    assert not (local.workspace / "one").is_symlink()


async def test_a_thousand_changes_are_one_call(local: Local) -> None:
    """Many files in many directories are written in one call."""
    await local.sandbox.change([FileChange(f"d{n % 100}/f{n}", b"%d" % n) for n in range(1000)])
    assert (await local.text("find d* -type f | wc -l; cat d99/f999")).split() == ["1000", "999"]


async def test_walk_lists_everything_in_order(local: Local) -> None:
    """A walk tells of all below a path, sorted, links not followed, names relative to the workspace."""
    await local.sh("mkdir -p t/b/empty; printf 12345 > t/b/f; ln -s / t/a; ln -s . t/b/self; mkfifo t/c")
    assert await local.sandbox.walk("t") == [
        ("t/a", FileView("symlink", 0o777, target="/")),
        ("t/b", FileView("directory", 0o755)),
        ("t/b/empty", FileView("directory", 0o755)),
        ("t/b/f", FileView("file", 0o644, 5)),
        ("t/b/self", FileView("symlink", 0o777, target=".")),
        ("t/c", FileView("other", 0o644)),
    ]


@pytest.mark.parametrize("path", ["none", "file", "link", "open/shut"])
async def test_a_walk_that_cannot_be_whole_fails(local: Local, path: str) -> None:
    """What is no directory, or cannot be listed, is a fault and never an empty list."""
    await local.sh("touch file; ln -s / link; mkdir -p open/shut; chmod 000 open/shut")
    with pytest.raises(FileFault, match=path):
        await local.sandbox.walk(path)


async def test_a_closed_directory_costs_a_walk_only_what_is_in_it(local: Local) -> None:
    """One directory that cannot be listed, or whose files cannot be looked at, is told as what it is; the rest is there."""
    await local.sh("mkdir -p t/shut/in t/blind t/b; touch t/shut/f t/blind/f t/b/f; chmod 000 t/shut; chmod 444 t/blind")
    assert await local.sandbox.walk("t") == [
        ("t/b", FileView("directory", 0o755)),
        ("t/b/f", FileView("file", 0o644)),
        ("t/blind", FileView("closed directory", 0o444)),
        ("t/shut", FileView("closed directory")),
    ]


async def test_a_fault_that_nobody_has_thought_of_is_a_refusal(local: Local) -> None:
    """Whatever a file request meets, the one who asked is told, and the next request is answered."""
    with pytest.raises(FileFault, match="look: UnicodeEncodeError"):
        await local.sandbox.look(["\ud800"], 1)
    assert (await local.sandbox.look(["none"], 1))["none"].kind == "missing"


async def test_a_walk_of_ten_thousand_files_works(local: Local) -> None:
    """A big workspace is listed in one call of bounded time."""
    await local.sh("mkdir t{1..100}; touch t{1..100}/{1..100}")
    began = time.monotonic()
    assert len(await local.sandbox.walk("")) == 100 * 101 + 1
    assert time.monotonic() - began < 3


async def test_a_stopped_file_request_fails_in_time(local: Local) -> None:
    """Code that stops or kills every process it can reaches no caller's patience: the request fails, the sandbox lives."""
    await local.sh("for n in $(seq 3000); do echo $n > f$n; done")
    hunter = (
        "import os, signal, time\n"
        "while True:\n"
        "    for name in os.listdir('/proc'):\n"
        "        if name.isdigit() and int(name) not in (1, os.getpid(), os.getppid()):\n"
        "            try: os.kill(int(name), signal.SIGSTOP)\n"
        "            except OSError: pass\n"
    )
    await local.sandbox.write("hunter.py", hunter.encode())
    hunting = asyncio.create_task(local.sandbox.exec(bash("hunt", "exec python3 hunter.py")))
    await asyncio.sleep(0.3)
    async with asyncio.timeout(15):
        with pytest.raises(SandboxUnavailable):
            await local.sandbox.look([f"f{n}" for n in range(1, 3001)], 100)
        await local.sandbox.kill_job("hunt")
    assert (await hunting).signal in (None, signal.SIGKILL)
    assert await content(local.sandbox, "f7") == b"7\n"
