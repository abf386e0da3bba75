"""Real local sandboxes for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from activities.sandbox.providers.local import LocalProvider
from tests.sandbox.egress_support import Authority, Site, make_authority, serve
from tests.sandbox.local_support import Local, make


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The state directory of a host."""
    return tmp_path / "state"


@pytest.fixture
async def provider(root: Path) -> AsyncIterator[LocalProvider]:
    """A provider whose sandboxes end with the test."""
    provider = LocalProvider(root)
    yield provider
    for ref in await provider.list({}):
        await provider.kill(ref)


@pytest.fixture
async def local(provider: LocalProvider, root: Path) -> Local:
    """One running sandbox."""
    return Local(provider, await provider.attach(await make(provider)), root)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """A certificate for the names of the network tests."""
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def secure(authority: Authority) -> Iterator[Site]:
    """A server with TLS, outside of the sandbox."""
    with serve(authority.server()) as site:
        yield site


@pytest.fixture
def plain() -> Iterator[Site]:
    """A server without TLS, outside of the sandbox."""
    with serve() as site:
        yield site
