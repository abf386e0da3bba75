"""Runs with tools of MCP servers: real servers, and whatever becomes of them the run goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulators.mcp.http_server import HttpServer, http_server
from tests.integration.helpers import failed_tasks, last_request, outputs_of, scheduled
from tests.integration.stack import Stack, make_stack
from tests.integration.test_updates import decision
from tests.mcp_support import calls_of, program, write_servers


@pytest.fixture
def alpha() -> Iterator[HttpServer]:
    """A server that has the tool `search`."""
    with http_server("alpha") as server:
        yield server


@pytest.fixture
def beta() -> Iterator[HttpServer]:
    """Another one that has a tool of the same name."""
    with http_server("beta") as server:
        yield server


def file_of(stack: Stack) -> Path:
    """The operator's file of a stack, which is read anew for each use."""
    return stack.state / "mcp.yaml"


async def test_two_servers_with_one_tool_name_each_get_their_own_calls(stack: Stack, alpha: HttpServer, beta: HttpServer) -> None:
    """From openai/openai-agents-python#1167. The tools are listed once, before the model is asked; no sandbox is made."""
    write_servers(file_of(stack), alpha={"url": alpha.url}, beta={"url": beta.url})
    handle = await stack.start("mcp-same-name", {"tools": [], "mcp_servers": ["alpha", "beta"]})
    assert (await stack.finish(handle))["output"] == "done"
    assert dict(outputs_of(await last_request(stack, handle))) == {"call_1_1": "alpha found one", "call_1_2": "beta found two"}
    assert (alpha.calls, beta.calls) == ([("search", {"text": "one"})], [("search", {"text": "two"})])
    work = ["prepare_run", "list_mcp_tools", "call_model", "call_mcp_tool", "call_mcp_tool", "call_model", "record_end"]
    assert await scheduled(handle) == work
    assert await failed_tasks(handle) == []


async def test_approvals_are_by_server(stack: Stack, alpha: HttpServer, beta: HttpServer) -> None:
    """All tools of one server wait for a person, and those of the other do not."""
    write_servers(file_of(stack), alpha={"url": alpha.url}, beta={"url": beta.url})
    policy = {"tools": {"alpha__*": "prompt"}}
    handle = await stack.start("mcp-same-name", {"tools": [], "mcp_servers": ["alpha", "beta"], "approvals": policy})
    async with asyncio.timeout(20):
        while not beta.calls or not (await handle.query("status"))["pending_approvals"]:
            await asyncio.sleep(0.05)
    (asked,) = (await handle.query("status"))["pending_approvals"]
    assert asked["tool"] == "alpha__search"
    assert alpha.calls == []
    await handle.execute_update("decide_approval", decision(asked, True))
    assert (await stack.finish(handle))["output"] == "done"
    assert alpha.calls == [("search", {"text": "one"})]


async def test_a_server_that_ends_in_a_call_does_not_end_the_run(stack: Stack) -> None:
    """Other tools of the same step are not touched by it. From modelcontextprotocol/python-sdk#396."""
    write_servers(file_of(stack), frail=program("die"))
    handle = await stack.start("mcp-dies", {"mcp_servers": ["frail"]})
    began = time.monotonic()
    assert (await stack.finish(handle))["output"] == "done"
    assert time.monotonic() - began < 30


async def test_a_server_that_is_down_when_the_run_begins_costs_its_tools(stack: Stack, alpha: HttpServer) -> None:
    """The model is told before its first answer."""
    write_servers(file_of(stack), alpha={"url": alpha.url}, away={"url": "http://127.0.0.1:9/mcp"})
    handle = await stack.start("mcp-without", {"tools": [], "mcp_servers": ["away", {"name": "alpha", "tools": ["sea*"]}]})
    assert (await stack.finish(handle))["output"] == "done"


async def test_a_server_that_the_operator_does_not_have_is_refused_before_any_model_call(stack: Stack) -> None:
    """By field, with the names that there are."""
    write_servers(file_of(stack), other=program("plain"))
    handle = await stack.start("mcp-same-name", {"mcp_servers": ["alpha"]})
    error = await stack.failure(handle)
    assert error.type == "BadInput"
    assert "mcp_servers.0: no MCP server is named 'alpha'" in error.message
    assert "there are: other" in error.message
    assert stack.journal(handle) == []


async def test_a_long_result_leaves_history_small(stack: Stack) -> None:
    """300,000 characters are bounded and go by reference; a tool that was not listed is none."""
    write_servers(file_of(stack), long=program("long"))
    handle = await stack.start("mcp-large", {"tools": [], "mcp_servers": ["long"]})
    assert (await stack.finish(handle))["output"] == "done"
    assert await stack.history_bytes(handle) < 40_000


async def test_a_subagent_has_servers_of_its_own(stack: Stack, alpha: HttpServer) -> None:
    """Its parent has none."""
    write_servers(file_of(stack), alpha={"url": alpha.url})
    finder = {"name": "finder", "description": "Finds.", "agent": {"name": "finder", "tools": [], "mcp_servers": ["alpha"]}}
    handle = await stack.start("mcp-delegates", {"tools": [], "subagents": [finder]})
    assert (await stack.finish(handle))["output"] == "done"
    assert alpha.calls == [("search", {"text": "deep"})]
    assert "list_mcp_tools" not in await scheduled(handle)


@pytest.mark.soak
async def test_a_call_whose_worker_is_killed_is_not_made_again(tmp_path: Path) -> None:
    """The model is told that it may have been carried out. The program ends with its worker."""
    journal, file = tmp_path / "journal", tmp_path / "mcp.yaml"
    write_servers(file, frail=program("plain", journal))
    (tmp_path / "state").mkdir()
    stack = make_stack(tmp_path / "state", {"CAISSON_MCP": str(file)})
    async with stack.dev:
        handle = await stack.start("mcp-killed", {"tools": [], "mcp_servers": ["frail"]})
        async with asyncio.timeout(20):
            while not calls_of(journal):
                await asyncio.sleep(0.05)
        stack.kill("tools-worker")
        assert (await stack.finish(handle, 60))["output"] == "done"
        assert len(calls_of(journal)) == 1
