"""Any workspace comes back as it was, and any edits between snapshots give what a look with fresh eyes gives."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from activities.store.local import LocalStore
from activities.workspace.ignore import Ignore, pattern_lines
from tests.snapshot_support import Picture, Room, picture

_NAMES = ["a", "b", "c", os.fsdecode(b"\xff"), "e\u0301", "-n\n"]
_NAME = st.sampled_from(_NAMES)
_PATH = st.lists(_NAME, min_size=1, max_size=3).map("/".join)
_SIZES = [0, 1, 5, 3000, (1 << 20) + 7, 3 << 20]
_CONTENT = st.tuples(st.sampled_from([0, 1, 5, 5, 5, 3000]), st.integers(0, 3)) | st.tuples(
    st.sampled_from(_SIZES), st.integers(0, 1)
)
_EDIT = st.one_of(
    st.tuples(st.just("write"), _PATH, _CONTENT),
    st.tuples(st.just("write secretly"), _PATH, st.integers(0, 9)),
    st.tuples(st.just("append"), _PATH, _CONTENT),
    st.tuples(st.just("punch"), _PATH, st.integers(0, 3)),
    st.tuples(st.just("remove"), _PATH),
    st.tuples(st.just("mkdir"), _PATH),
    st.tuples(st.just("symlink"), _PATH, st.sampled_from(["a", "/nowhere/at/all", "nowhere", "../.."])),
    st.tuples(st.just("link"), _PATH, _PATH),
    st.tuples(st.just("rename"), _PATH, _PATH),
    st.tuples(st.just("chmod"), _PATH, st.sampled_from([0o600, 0o755, 0o444, 0o500, 0o4711])),
    st.tuples(st.just("utime"), _PATH, st.integers(-(10**9), 4 * 10**18)),
    st.tuples(st.just("xattr"), _PATH, st.sampled_from([b"", b"one", b"two"])),
    st.tuples(st.just("fifo"), _PATH),
)
_PATTERNS = ["a", "b/", "/a/b", "*", "!c", "!a/", "a/*", "**/c", "a/**", "[ab]", "!*\u0301", "# a"]
_ODD = ["[[:a]", "[[:alpha:]]", "/*/[!/]/*", "[b-a]", "[c-b]ab", "a/****", "****/c", "/***/b", "a\\/c"]
_IGNORE = st.tuples(st.just("ignore"), st.lists(st.sampled_from(_PATTERNS), max_size=3))


@contextmanager
def a_room() -> Iterator[Room]:
    """Places on the disk, and a store in memory, since a hundred examples need no durable one."""
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory(dir="/dev/shm") as store:
        yield Room(Path(root), LocalStore(Path(store)))


_THROUGH = ("write", "write secretly", "append", "punch", "chmod", "xattr")


def _is_plain(path: Path) -> bool:
    return not path.is_symlink() and (path.is_file() or path.is_dir() or not path.exists())


def apply(root: Path, edit: tuple[object, ...]) -> None:
    """Make one edit; one that cannot be made changes nothing."""
    kind, *rest = edit
    if kind == "ignore":
        (root / ".caissonignore").write_text("\n".join(rest[0]))  # type: ignore[arg-type]
        return
    path = root / str(rest[0])
    # Never through a link, which may lead out of the test's own directory.
    if not os.path.realpath(path.parent).startswith(str(root)) or (kind in _THROUGH and not _is_plain(path)):
        return
    with contextlib.suppress(OSError):
        _edit(root, str(kind), path, rest[1] if len(rest) > 1 else None)


def _edit(root: Path, kind: str, path: Path, value: object) -> None:
    if kind not in ("remove", "rename", "chmod", "utime", "xattr", "append", "punch", "write secretly"):
        path.parent.mkdir(parents=True, exist_ok=True)
    match kind, value:
        case "write", (int(size), int(seed)):
            path.write_bytes(_bytes(size, seed))
        case "write secretly", int(seed):
            # The same size and the same time as before: only the kernel's own time of the change tells.
            status = path.lstat()
            with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "wb") as file:
                file.write(_bytes(status.st_size, seed + 10))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        case "append", (int(size), int(seed)):
            with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW), "wb") as file:
                file.write(_bytes(size, seed))
        case "punch", int(megabytes):
            with open(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "wb") as file:
                file.truncate(megabytes << 20)
        case "remove", _:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        case "mkdir", _:
            path.mkdir()
        case "symlink", str(target):
            path.symlink_to(target)
        case "link", str(other):
            os.link(root / other, path, follow_symlinks=False)
        case "rename", str(other):
            path.rename(root / other)
        case "chmod", int(mode):
            path.chmod(mode | 0o700 if path.is_dir() else mode)
        case "utime", int(when):
            os.utime(path, ns=(0, when), follow_symlinks=False)
        case "xattr", bytes(data):
            os.setxattr(path, "user.x", data, follow_symlinks=False)
        case _:
            os.mkfifo(path)


def _bytes(size: int, seed: int) -> bytes:
    return (bytes([seed]) + os.fsencode(f"{seed}-content") * (size // 10 + 1))[:size]


def restorable(found: Picture) -> Picture:
    """A picture without what no snapshot holds, and without set-uid."""
    kept: Picture = {}
    for path, what in found.items():
        if what[0] in ("file", "directory"):
            what = (what[0], int(str(what[1])) & 0o777, *what[2:])
        if what[0] != "other":
            kept[path] = what
    return kept


@settings(max_examples=60, deadline=None)
@example([("write", "a/a", (1, 0)), ("punch", "a/a", 1)])
@given(st.lists(_EDIT, max_size=25))
async def test_any_tree_survives(edits: list[tuple[object, ...]]) -> None:
    """Snapshot, restore elsewhere: the same to a walker of the test's own, and the same id when it is looked at again."""
    with a_room() as room:
        source = room.place()
        for edit in edits:
            apply(source.workspace, edit)
        ref = await room.save(source)
        target = await room.restore(ref)
        assert picture(target.workspace) == restorable(picture(source.workspace))
        assert (await room.save_anew(target)).id == ref.id
        assert await room.save(target, ref) == ref.model_copy(update={"skipped": 0}) or ref.skipped


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(_EDIT | _IGNORE, max_size=6), min_size=2, max_size=6), st.booleans())
async def test_snapshots_one_after_the_other_are_as_good_as_fresh_ones(
    rounds: list[list[tuple[object, ...]]], starts_restored: bool
) -> None:
    """After every round of edits, without a pause: the id, the counts and the tree of a scan that remembers nothing."""
    with a_room() as room:
        place, ref = room.place(), None
        for n, edits in enumerate(rounds):
            for edit in edits:
                apply(place.workspace, edit)
            ref = await room.save(place, ref)
            anew = await room.save_anew(place)
            assert (ref.id, ref.files, ref.total_bytes, ref.skipped) == (anew.id, anew.files, anew.total_bytes, anew.skipped)
            if n == 0 and starts_restored:
                place = await room.restore(ref)
        assert ref is not None
        target = await room.restore(ref)
        if not (place.workspace / ".caissonignore").exists():
            assert picture(target.workspace) == restorable(picture(place.workspace))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.lists(
            st.sampled_from([*_PATTERNS, "?", "b*b", "*a*b*", "a/**/b", "/*/b", "[!a]", "a\\", "[", "\\*", *_ODD]), max_size=4
        ),
        min_size=8,
    )
)
def test_patterns_mean_what_they_mean_to_git(files: list[list[str]]) -> None:
    """Of every file of a small tree, git itself and Caisson leave out the same ones."""
    paths = [f"{x}/{y}/{z}" for x in ("a", "b", "ab") for y in ("a", "c", "bab") for z in ("a", "b", "c", "aab", "*")]
    with tempfile.TemporaryDirectory() as root:
        subprocess.run(["git", "init", "-q", root], check=True)
        for path in paths:
            (Path(root) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(root) / path).touch()
        for lines in files:
            (Path(root) / ".git/info/exclude").write_text("\n".join(lines) + "\n")
            listed = subprocess.run(
                ["git", "-C", root, "ls-files", "-oz", "--exclude-standard"], capture_output=True, text=True, check=True
            )
            ignore = Ignore(pattern_lines("\n".join(lines)))
            kept = [path for path in paths if not _is_left_out(ignore, path)]
            assert sorted(listed.stdout.split("\0")[:-1]) == sorted(kept), lines


def _is_left_out(ignore: Ignore, path: str) -> bool:
    parts = path.split("/")
    return any(ignore.excludes("/".join(parts[:n]), is_directory=n < len(parts)) for n in range(1, len(parts) + 1))
