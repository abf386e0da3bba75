"""One stack for all tests that leave it as they found it; tests that kill things make their own."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.stack import Stack, make_stack


@pytest.fixture(scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """The shared stack. Its `local` entries may be read from the `shared` directory of its state, and its MCP servers are
    those that a test writes into `mcp.yaml` there."""
    state = tmp_path_factory.mktemp("stack")
    (state / "shared").mkdir()
    environ = {
        "CAISSON_LOCAL_ROOTS": str(state / "shared"),
        "CAISSON_AGENTS": str(_agents(state)),
        "CAISSON_MCP": str(state / "mcp.yaml"),
    }
    made = make_stack(state, environ)
    async with made.dev:
        yield made
    await made.sweep()


@pytest.fixture
async def own_stack(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack of the test's own, whose processes it may kill."""
    made = make_stack(tmp_path)
    async with made.dev:
        yield made
    await made.sweep()


def _agents(state: Path) -> Path:
    agents = state / "agents"
    shutil.copytree("agents", agents)
    (agents / "plain.yaml").write_text("description: A plain agent.\nmodel: gpt-5.4-mini\nbudget: {steps: 7}\n")
    (agents / "broken.yaml").write_text("instructions: Hello\ntoolz: [shell]\n")
    return agents


@pytest.fixture
async def crewless(tmp_path: Path) -> AsyncIterator[Stack]:
    """A stack whose sandbox worker is the test's own."""
    made = make_stack(tmp_path)
    async with made.dev:
        await made.dev.running["sandbox-worker"].stop()
        yield made
