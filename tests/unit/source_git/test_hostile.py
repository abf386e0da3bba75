"""Repositories whose names, links and submodules are made to do harm (case SE03)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from activities.workspace.sources.git import MOST_MODULE_DEPTH
from activities.workspace.sources.git_access import GitReach, parse_remote
from activities.workspace.sources.git_tree import Module, link_fault, module_remote, name_fault
from contracts.base import BadInput
from tests.unit.source_git.support import (
    TOKEN,
    Repository,
    Server,
)


@pytest.mark.parametrize(
    "name",
    [
        b"..",
        b".",
        b".git",
        b".GIT",
        b".gIt",
        b"git~1",
        b"GIT~1",
        b".git ",
        b".git...",
        b".git::$INDEX_ALLOCATION",
        b"a/b",
        b"../x",
        b".g\xe2\x80\x8cit",
        b"\xef\xbb\xbf.git",
        b"x\\.git",
        b"n" * 256,
    ],
)
async def test_names_that_are_refused(repository: Repository, get: Any, name: bytes) -> None:
    """What would leave the entry, or be a repository to some system, is refused wherever it is; the message names it."""
    for inside in (False, True):
        tree = repository.tree(("100644", repository.blob(b"x"), name))
        repository.commit(repository.tree(("40000", tree, b"sub")) if inside else tree)
        with pytest.raises(BadInput, match="is refused: it has a"):
            await get()


async def test_directories_of_such_names(repository: Repository, get: Any) -> None:
    """Hooks in a directory `.git`, and two things of one name, are refused."""
    hooks = repository.tree(("40000", repository.tree(("100755", repository.blob(b"#!/bin/sh"), b"post-checkout")), b"hooks"))
    blob = repository.blob(b"x")
    for rows in (
        (("40000", hooks, b".git"),),
        (("40000", hooks, b".."),),
        (("120000", blob, b"a"), ("40000", hooks, b"a")),
        (("120000", blob, b"a"), ("100644", blob, b"a/b")),
    ):
        repository.commit(repository.tree(*rows))
        with pytest.raises(BadInput, match="is refused: it has a name"):
            await get()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a@": b"/etc/passwd"}, "is absolute"),
        ({"a@": b"../x"}, "leads out"),
        ({"d/a@": b"../../x"}, "leads out"),
        ({"d@": b".", "a@": b"d/../x"}, "leads out"),
        ({"p/d@": b"..", "p/q/x@": b"../d/../y"}, "leads out"),
        ({"d@": b"/", "a@": b"d/etc"}, "is absolute"),
    ],
)
async def test_links_that_leave(repository: Repository, get: Any, files: dict[str, bytes], said: str) -> None:
    """A link that is absolute or leads out, also by way of others, is refused and named; unless nobody wants it."""
    repository.files({**files, "plain": b"x"})
    with pytest.raises(BadInput, match=f"is a symbolic link to .* {said}.*`exclude`"):
        await get()
    got = await get(is_wanted=lambda path: path == "plain")
    assert got.content == {"plain": b"x"}
    left = {os.fsencode(path): item.target for path, item in got.found.items() if item.target}
    assert all(link_fault(path, left) is None for path in left)


async def test_links_that_stay(repository: Repository, get: Any) -> None:
    """Links inside come as links: to files, directories, to nothing, and in circles."""
    links = {"d/up@": b"../d/./x", "loop@": b"loop", "gone@": b"no/such", "dir@": b"d", "d/hooks@": b"../.git/hooks"}
    repository.files({**links, "d/x": b"x"})
    got = await get()
    assert {f"{path}@": item.target for path, item in got.found.items() if item.target} == links


async def test_a_link_of_too_many_bytes(repository: Repository, get: Any) -> None:
    """A link is not the way to have a large file read into memory."""
    repository.files({"a@": b"x" * 5000})
    with pytest.raises(BadInput, match="a symbolic link of 5000 bytes"):
        await get()


def test_link_faults_end() -> None:
    """Links that double each other are followed as far as Linux does, and no further."""
    links = {b"%d" % number: b"%d/%d" % (number + 1, number + 1) for number in range(60)}
    assert link_fault(b"0", links) is None
    assert name_fault(b".gitignore") is None and name_fault(b"") is not None


# Submodules


def modules(**sections: str) -> bytes:
    return "".join(f'[submodule "{name}"]\n\tpath = {name}\n\turl = {url}\n' for name, url in sections.items()).encode()


async def test_submodules_are_left_out(repository: Repository, get: Any) -> None:
    """Without `submodules`, they are empty directories, and a note says so."""
    repository.files({".gitmodules": modules(sub="../s.git"), "sub#": b"12" * 20, "a": b"1"})
    got = await get()
    assert got.found["sub"].open is None
    assert got.notes == ["1 submodules are empty directories: 'sub'"]


@pytest.mark.parametrize(
    "url", ["../s.git", "./../s.git", "{server}/s.git", "ssh://git@127.0.0.1:2222/s.git", "git@127.0.0.1:s.git"]
)
@pytest.mark.parametrize("speaks_v2", [True, False])
async def test_submodules_of_the_same_server(server: Server, repository: Repository, get: Any, url: str, speaks_v2: bool) -> None:
    """With `submodules`, their files come from the same server with the same credential, also those of submodules in them."""
    server.speaks_v2, server.token = speaks_v2, TOKEN
    inner, middle = Repository(server.root / "deep" / "i.git"), Repository(server.root / "s.git")
    inner_commit = inner.files({"i": b"i"})
    old = middle.files({"x/in#": inner_commit.encode(), ".gitmodules": modules(**{"x/in": "../deep/i.git"}), "m": b"old"})
    middle.files({"m": b"new"}, parent=old)
    repository.files({".gitmodules": modules(**{"d/sub": url.format(server=server.url)}), "d/sub#": old.encode(), "a": b"1"})
    got = await get(submodules=True, secret=TOKEN)
    assert {path: data for path, data in got.content.items() if not path.endswith(".gitmodules")} == {
        "a": b"1",
        "d/sub/m": b"old",
        "d/sub/x/in/i": b"i",
    }
    assert got.found["d/sub/x/in/i"].name == "d/sub/x/in/i"
    assert got.notes == []
    assert (await get(submodules=True, secret=TOKEN, subpath="d/sub")).content["m"] == b"old"


@pytest.mark.parametrize(
    "url",
    [
        "--upload-pack=touch /tmp/caisson-se03",
        "-u./x",
        "ext::sh -c 'touch /tmp/caisson-se03'",
        "file:///etc",
        "/etc",
        "git://127.0.0.1/s",
        "http://localhost/s.git",
        "https://evil.example/s.git",
        "git@evil.example:s.git",
        "../../../../s.git",
        "http://127.0.0.1:1/s.git",
        "http://u:p@127.0.0.1/s.git",
        "ssh://-oProxyCommand=x/s",
        "http://127.0.0.1",
        "{server}/../s.git",
        "{server}/%2e%2e/s.git",
        "",
    ],
)
async def test_hostile_urls_of_submodules(server: Server, repository: Repository, get: Any, url: str) -> None:
    """SE03: a submodule's URL is no option, no command, no file, no other server; the message names the submodule."""
    repository.files({".gitmodules": modules(sub=url.format(server=server.url)), "sub#": b"12" * 20})
    with pytest.raises(BadInput, match="submodule 'sub'"):
        await get(submodules=True)
    assert not Path("/tmp/caisson-se03").exists()
    assert not any("s.git" in path for path in server.asked)


@pytest.mark.parametrize(
    "text",
    [
        b'[submodule "../../x"]\n\tpath = sub\n\turl = ../s.git\n',
        b'[submodule "x"]\n\tpath = ../sub\n\turl = ../s.git\n',
        b'[submodule "x"]\n\tpath = .git/hooks\n\turl = ../s.git\n',
        b'[submodule "x"]\n\tpath = .GIT\n\turl = ../s.git\n',
        b'[submodule "x"]\n\tpath = -sub\n\turl = ../s.git\n',
        b'[submodule "x"]\n\tpath = /sub\n\turl = ../s.git\n',
        b'[submodule "x"]\n\tpath = sub\n\turl = ../s.git\n\turl = ../t.git\n',
        b'[submodule "x"]\n\tpath = sub\n\turl = a\n[submodule "y"]\n\tpath = sub\n\turl = b\n',
        b"[submodule\n",
    ],
)
async def test_hostile_gitmodules(repository: Repository, get: Any, text: bytes) -> None:
    """SE03: names and paths in .gitmodules that could lead anywhere else are refused."""
    repository.files({".gitmodules": text, "sub#": b"12" * 20})
    with pytest.raises(BadInput, match=r"\.gitmodules"):
        await get(submodules=True)


async def test_gitmodules_that_is_a_link(repository: Repository, get: Any) -> None:
    """A .gitmodules that is a symbolic link is not read."""
    repository.files({".gitmodules@": b"other", "other": modules(sub="../s.git"), "sub#": b"12" * 20})
    with pytest.raises(BadInput, match=r"\.gitmodules is no plain file"):
        await get(submodules=True)


async def test_gitmodules_includes_nothing(repository: Repository, get: Any, tmp_path: Path) -> None:
    """What .gitmodules includes is not read; a submodule that nothing speaks of is an empty directory, with a note."""
    (tmp_path / "included").write_bytes(modules(sub="../s.git"))
    repository.files({".gitmodules": f"[include]\n\tpath = {tmp_path}/included\n".encode(), "sub#": b"12" * 20})
    assert (await get(submodules=True)).notes == ["1 submodules are empty directories: 'sub'"]


async def test_submodules_have_a_depth(server: Server, repository: Repository, get: Any) -> None:
    """A chain of submodules ends."""
    commit = Repository(server.root / "m0.git").files({"x": b"x"})
    for number in range(1, MOST_MODULE_DEPTH + 1):
        made = Repository(server.root / f"m{number}.git")
        commit = made.files({".gitmodules": modules(s=f"../m{number - 1}.git"), "s#": commit.encode()})
    repository.files({".gitmodules": modules(s=f"../m{MOST_MODULE_DEPTH}.git"), "s#": commit.encode()})
    with pytest.raises(BadInput, match=r"deeper than 5 levels; give it an entry of its own"):
        await get(submodules=True)


def test_a_submodule_keeps_the_way_of_its_parent() -> None:
    """Only the path of a submodule's URL counts: scheme, user and port are those of the entry."""
    parent = parse_remote("https://Example.com/a/b.git", GitReach())
    for url in ("git@example.com:c/d.git", "ssh://git@example.com:7999/c/d.git", "http://example.com/c/d.git", "../../c/d.git"):
        assert module_remote(parent, Module(b"s", url)).url == "https://example.com/c/d.git"
