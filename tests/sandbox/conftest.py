"""Real local sandboxes for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activities.sandbox.providers.local import LocalProvider
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
