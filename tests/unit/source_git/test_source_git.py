"""Git entries: refs, pins, contents. On the real git over real sockets."""

from __future__ import annotations

import asyncio
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from activities.workspace.sources.git import GitSource
from activities.workspace.sources.git_process import GitLimits
from activities.workspace.sources.port import TIME_OF_NO_FILE, SourceChanged
from contracts.base import BadInput
from contracts.manifest import GitEntry
from tests.unit.source_git.support import (
    LOCAL,
    Repository,
    Server,
    below,
    read,
    rss,
)


async def test_the_files_of_a_branch(repository: Repository, get: Any) -> None:
    """Paths, contents, blob ids, modes, links and the commit's time come as they are in the commit, in the order of the paths."""
    commit = repository.files({"a.txt": b"a\r\n", "bin/run!": b"#!/bin/sh\n", "bin/link@": b"../a.txt", "empty": b""})
    got = await get()
    assert got.pin == commit
    assert got.order == sorted(got.order) == ["", "a.txt", "bin", "bin/link", "bin/run", "empty"]
    assert got.content == {"a.txt": b"a\r\n", "bin/run": b"#!/bin/sh\n", "empty": b""}
    assert got.found["a.txt"].version == repository.blob(b"a\r\n")
    assert got.found["bin/run"].executable and not got.found["a.txt"].executable
    assert got.found["bin/link"].target == b"../a.txt"
    assert got.found["a.txt"].mtime == 1_700_000_000 * 10**9
    assert got.found["bin"].open is None and got.found["bin"].target is None
    assert got.notes == []


@pytest.mark.parametrize(
    "ref", ["HEAD", "main", "refs/heads/main", "side/of-it", "light", "annotated", "refs/tags/annotated", "tag-of-tag"]
)
async def test_branches_and_tags(repository: Repository, get: Any, ref: str) -> None:
    """A ref may be a branch or a tag of any kind; the pin is the commit that it stands for."""
    commit = repository.files({"a": b"1"})
    repository.git("update-ref", "refs/heads/side/of-it", commit)
    repository.git("tag", "light", commit)
    repository.git("tag", "-a", "-m", "t", "annotated", commit)
    repository.git("tag", "-a", "-m", "t", "tag-of-tag", "annotated")
    assert (await get(ref=ref)).pin == commit


@pytest.mark.parametrize("speaks_v2", [True, False])
async def test_a_commit_in_full_that_no_ref_names(server: Server, repository: Repository, get: Any, speaks_v2: bool) -> None:
    """An old commit is found, also where the server gives out refs only (protocol 0)."""
    server.speaks_v2 = speaks_v2
    old = repository.files({"a": b"old"})
    repository.files({"a": b"new"}, parent=old)
    got = await get(ref=old.upper())
    assert (got.pin, got.content["a"]) == (old, b"old")


@pytest.mark.parametrize("speaks_v2", [True, False])
async def test_an_unknown_commit(server: Server, repository: Repository, get: Any, speaks_v2: bool) -> None:
    """A commit that is not there is named."""
    server.speaks_v2 = speaks_v2
    repository.files({"a": b"1"})
    with pytest.raises(BadInput, match="has no commit 1234123412341234123412341234123412341234"):
        await get(ref="1234" * 10)


async def test_an_abbreviated_commit(repository: Repository, get: Any) -> None:
    """An abbreviated commit is refused with the remedy."""
    commit = repository.files({"a": b"1"})
    with pytest.raises(BadInput, match="give a commit in full, all 40 digits"):
        await get(ref=commit[:8])


async def test_an_unknown_ref_tells_which_there_are(repository: Repository, get: Any) -> None:
    """A misspelt branch is answered with those there are."""
    repository.files({"a": b"1"})
    with pytest.raises(BadInput, match="no branch or tag 'mian'; its branches are 'main'"):
        await get(ref="mian")


async def test_a_name_of_a_branch_and_a_tag(repository: Repository, get: Any) -> None:
    """Nothing is chosen between a branch and a tag of one name that differ."""
    first = repository.files({"a": b"1"}, branch="v1")
    repository.git("tag", "v1", first)
    assert (await get(ref="v1")).pin == first
    second = repository.files({"a": b"2"}, branch="v1")
    with pytest.raises(BadInput, match="say refs/heads/v1 or refs/tags/v1"):
        await get(ref="v1")
    assert (await get(ref="refs/heads/v1")).pin == second


async def test_an_empty_repository(repository: Repository, get: Any) -> None:
    """A repository without a commit says so; an empty commit is an empty directory."""
    with pytest.raises(BadInput, match="is empty: it has no commit yet"):
        await get()
    repository.files({})
    assert (await get()).order == [""]


async def test_a_tag_of_no_commit(repository: Repository, get: Any) -> None:
    """A tag of a blob is no commit."""
    repository.git("tag", "blob", repository.blob(b"x"))
    with pytest.raises(BadInput, match="names no commit"):
        await get(ref="blob")


@pytest.mark.parametrize(
    "ref", ["--upload-pack=touch /tmp/x", "-x", "a..b", "a b", "main^", "main:x", "a*", "@{-1}", "a/-b", "x.lock"]
)
async def test_refs_that_are_no_names(server: Server, repository: Repository, get: Any, ref: str) -> None:
    """Options, revisions and patterns are refused before anybody is asked."""
    with pytest.raises(BadInput, match="ref: "):
        await get(ref=ref)
    assert server.asked == []


async def test_a_repository_of_sha256(server: Server, get: Any) -> None:
    """Repositories with SHA-256 names are read too."""
    commit = Repository(server.root / "long.git", "sha256").files({"a": b"1"})
    assert len(commit) == 64
    for ref in ("main", commit):
        got = await get(url=f"{server.url}/long.git", ref=ref)
        assert (got.pin, got.content) == (commit, {"a": b"1"})


# Pins


async def test_a_branch_that_has_moved(repository: Repository, get: Any) -> None:
    """With the commit of an earlier run, exactly that is read, though the branch was rewritten."""
    pinned = repository.files({"a": b"then"})
    repository.files({"a": b"now"})
    got = await get(ref="main", expected=pinned)
    assert (got.pin, got.content["a"]) == (pinned, b"then")


@pytest.mark.parametrize("speaks_v2", [True, False])
async def test_a_pinned_commit_that_is_gone(server: Server, repository: Repository, get: Any, speaks_v2: bool) -> None:
    """A pinned commit that the server has lost is no reason to read another."""
    server.speaks_v2 = speaks_v2
    pinned = repository.files({"a": b"then"})
    repository.files({"a": b"now"})
    repository.git("gc", "-q", "--prune=now")
    with pytest.raises(SourceChanged, match=f"the pinned commit '{pinned}' is not there any more"):
        await get(ref="main", expected=pinned)


# Contents


async def test_odd_names(repository: Repository, get: Any) -> None:
    """Newlines, tabs, quotes, other encodings, and names that look like options or patterns are names like others."""
    names = [
        "new\nline",
        "tab\t",
        "-rf",
        ":(glob)*",
        "*",
        "ü",
        os.fsdecode(b"\xff\xfe.bin"),
        "a\\b",
        '"',
        ".gitignore",
        "x" * 255,
    ]
    repository.files({f"dir/{name}": os.fsencode(name) for name in names})
    got = await get()
    assert got.content == {f"dir/{name}": os.fsencode(name) for name in names}


async def test_a_subpath(repository: Repository, get: Any) -> None:
    """Only the directory or file that is named comes, at the entry's own place; `name` keeps where it was."""
    repository.files({"src/a/x": b"x", "src/y": b"y", "src2": b"n", "-d/*": b"star", "link@": b"src"})
    got = await get(subpath="src")
    assert got.content == {"a/x": b"x", "y": b"y"}
    assert got.found["a/x"].name == "src/a/x"
    assert (await get(subpath="src/y")).content == {"": b"y"}
    assert (await get(subpath="-d/*")).content == {"": b"star"}
    with pytest.raises(BadInput, match="subpath: 'src/z' is not in"):
        await get(subpath="src/z")
    with pytest.raises(BadInput, match="is a symbolic link"):
        await get(subpath="link")


async def test_limits_come_before_contents(repository: Repository, get: Any) -> None:
    """Too many files are seen in the list; nothing is read."""
    repository.files({f"f{number}": b"x" for number in range(11)})
    with pytest.raises(BadInput, match="more than 10 files"):
        await get(most=10)
    assert len((await get(most=11)).content) == 11


async def test_trees_that_name_each_other(repository: Repository, get: Any) -> None:
    """A repository of some bytes that stands for 10^10 files, or directories, is left off early."""
    for row in (("100644", repository.blob(b"x"), b"f"), ("40000", repository.tree(), b"d")):
        tree = repository.tree(row)
        for _ in range(10):
            tree = repository.tree(*(("40000", tree, b"%d" % number) for number in range(10)))
        repository.commit(tree)
        started = time.monotonic()
        with pytest.raises(BadInput, match="more than"):
            await get(most=1000)
        assert time.monotonic() - started < 10


async def test_a_large_file_in_bounded_memory(repository: Repository, server: Server, tmp_path: Path) -> None:
    """50 MB go through this process and through git in pieces."""
    data = os.urandom(50 << 20)
    repository.files({"big": data})
    source = GitSource(GitEntry(type="git", url=f"{server.url}/r.git"), None, tmp_path / "scratch", reach=LOCAL)
    try:
        found = {item.path: item for item in await source.find(10)}
        open_big = found["big"].open
        assert open_big is not None
        tracemalloc.start()
        content = open_big()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        resident = max(rss(pid) for pid in below(tmp_path / "scratch"))
        with os.fdopen(content.fd, "rb") as file:
            assert file.read() == data
        assert peak < 8 << 20
        assert resident < 40 << 20
    finally:
        await source.close()


async def test_more_than_may_be_downloaded(repository: Repository, get: Any) -> None:
    """A pack that grows over the limit ends the transfer."""
    repository.files({"big": os.urandom(8 << 20)})
    with pytest.raises(BadInput, match="sends more than 1000000 bytes"):
        await get(limits=GitLimits(download_bytes=1_000_000))


async def test_pointers_of_lfs_are_counted(repository: Repository, get: Any) -> None:
    """A pointer comes as it is, and a note says that it is no content."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"
    repository.files({"scan.pdf": pointer, "about": b"version https://git-lfs"})
    got = await get()
    assert got.content["scan.pdf"] == pointer
    assert got.notes == ["1 files are pointers of Git LFS, not the content that they stand for"]


@pytest.mark.parametrize("when", ["@0 +0000", "@999999999999 +0000"])
async def test_times_that_archives_cannot_hold(repository: Repository, get: Any, when: str) -> None:
    """A commit of 1970 or of a far future gives the time of what has none."""
    repository.commit(repository.tree(("100644", repository.blob(b"x"), b"f")), when=when)
    assert (await get()).found["f"].mtime == TIME_OF_NO_FILE


async def test_contents_are_read_by_threads_at_once(repository: Repository, server: Server, tmp_path: Path) -> None:
    """Threads that read at the same time get their own file's content."""
    files = {f"{number}": os.urandom(number * 37) for number in range(200)}
    repository.files(files)
    source = GitSource(GitEntry(type="git", url=f"{server.url}/r.git"), None, tmp_path / "scratch", reach=LOCAL)
    try:
        found = [item for item in await source.find(1000) if item.open]
        contents = await asyncio.gather(*(asyncio.to_thread(read, item) for item in found))
        assert {item.path: data for item, data in zip(found, contents, strict=True)} == files
    finally:
        await source.close()
