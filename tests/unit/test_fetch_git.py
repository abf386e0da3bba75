"""Git entries as manifests fetch them: the commit is the pin, and the repository and its credential stay with the harness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from tests.manifest_support import Desk
from tests.unit.source_git.support import LOCAL, Repository, Server

TOKEN = "t0ken-canary-0123456789"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A git server."""
    (tmp_path / "srv").mkdir()
    server = Server(tmp_path / "srv")
    yield server
    server.close()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A tools worker that may reach it."""
    (tmp_path / "desk").mkdir()
    return Desk(tmp_path / "desk", git_reach=LOCAL)


def entry(server: Server, **fields: Any) -> dict[str, Any]:
    """The repository `r.git`."""
    return {"type": "git", "url": f"{server.url}/r.git", "ref": "main", **fields}


async def test_a_commit_s_files_come_with_pin_modes_and_links(server: Server, desk: Desk) -> None:
    """With the patterns, in the place, and with no trace of the repository or its credential."""
    repository = Repository(server.root / "r.git")
    made = repository.files({"src/run.sh!": b"x", "src/a.py": b"a", "src/to@": b"a.py", "docs/b.md": b"b"})
    server.token = TOKEN
    desk.secret("git-token", TOKEN + "\n")
    taken = entry(server, secret="git-token", exclude=["docs/"], read_only=True)
    result = await desk.fetch({"entries": {"repo": taken, "one.md": entry(server, subpath="docs/b.md", secret="git-token")}})
    tree = await desk.tree(result)
    assert tree == {
        "one.md": b"b",
        "repo": None,
        "repo/src": None,
        "repo/src/a.py": b"a",
        "repo/src/run.sh": b"x",
        "repo/src/to": b"-> a.py",
    }
    modes = await desk.modes(result)
    assert (modes["repo/src/run.sh"], modes["repo/src/a.py"], modes["repo"]) == (0o555, 0o444, 0o555)
    sources = await desk.sources(result)
    assert (sources["repo"].pin, sources["repo"].source) == (made, f"{server.url}/r.git@main")
    assert desk.spooled() == []
    stored = [path.read_bytes() for path in (desk.home / "store").rglob("*") if path.is_file()]
    assert not [data for data in stored if TOKEN.encode() in data]
    with pytest.raises(ApplicationError, match=r"manifest\.entries\.repo: secret 'other': there is no such file") as caught:
        await desk.fetch({"entries": {"repo": entry(server, secret="other")}})
    assert TOKEN not in caught.value.message


async def test_links_count_as_files(server: Server, desk: Desk) -> None:
    """Of all entries together, within the limit of the manifest."""
    Repository(server.root / "r.git").files({"a@": b"x", "b@": b"x", "back\\slash": b"x"})
    entries = {"one": entry(server), "two": entry(server)}
    with pytest.raises(ApplicationError, match=r"entries\.two: more than 5 files in all"):
        await desk.fetch({"entries": entries, "limits": {"max_files": 5}})
    result = await desk.fetch({"entries": entries, "limits": {"max_files": 6}})
    assert (await desk.tree(result))["two/back\\slash"] == b"x"


async def test_pins_keep_the_commit_though_the_branch_moves(server: Server, desk: Desk) -> None:
    """A run that is pinned is given what the first one was given."""
    repository = Repository(server.root / "r.git")
    old = repository.files({"a": b"1"})
    first = await desk.fetch({"entries": {"repo": entry(server)}})
    new = repository.files({"a": b"2"}, parent=old)
    assert first.sources is not None
    pinned = await desk.fetch({"entries": {"repo": entry(server)}, "pins": first.sources.model_dump()})
    assert (pinned.snapshot.id, pinned.sources) == (first.snapshot.id, first.sources)
    assert (await desk.sources(await desk.fetch({"entries": {"repo": entry(server)}})))["repo"].pin == new
