"""A server of repositories for each test, one repository on it, and the reading of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from activities.workspace.sources.git import GitSource
from activities.workspace.sources.git_access import GitReach
from activities.workspace.sources.git_process import GitLimits
from contracts.manifest import GitEntry
from tests.unit.source_git.support import (
    LOCAL,
    Got,
    Repository,
    Server,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "srv").mkdir()
    server = Server(tmp_path / "srv")
    yield server
    server.close()


@pytest.fixture
def repository(server: Server) -> Repository:
    return Repository(server.root / "r.git")


@pytest.fixture
def get(server: Server, tmp_path: Path) -> Any:
    """Read an entry of the server's `r.git`, and see that nothing stays."""

    async def run(
        secret: str | None = None,
        most: int = 1000,
        reach: GitReach = LOCAL,
        limits: GitLimits | None = None,
        expected: str = "",
        is_wanted: Callable[[str], bool] = lambda path: True,
        **fields: Any,
    ) -> Got:
        entry = GitEntry(type="git", **{"url": f"{server.url}/r.git", **fields})
        scratch = tmp_path / "scratch"
        source = GitSource(entry, secret, scratch, reach=reach, limits=limits, expected=expected, is_wanted=is_wanted)
        try:
            return Got(source, await source.find(most))
        finally:
            await source.close()
            assert not scratch.exists()

    return run
