"""The activities around MCP servers, on real servers: whatever a server does, the model is told, soon and in full."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog
from temporalio.exceptions import ApplicationError

from activities.tools.mcp import activity, sessions, stdio
from activities.tools.mcp.sessions import SessionPool
from contracts.mcp import McpTool
from tests.emulators.mcp.http_server import HttpServer, http_server
from tests.mcp_support import Bench, calls_of, program

SECRET = "Bearer s3cret-0123456789"


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """A tools worker's activities, without the waits between tries at a server that is away."""
    monkeypatch.setattr(activity, "LIST_DELAYS", (0.01,))
    monkeypatch.setattr(stdio, "_GRACE_SECONDS", 0.2)
    made = Bench(tmp_path)
    yield made
    await made.pool.close()
    assert len(made.pool) == 0


@pytest.fixture
def web() -> Iterator[HttpServer]:
    """A server over HTTP."""
    with http_server() as server:
        yield server


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


async def test_tools_are_listed_and_called(bench: Bench) -> None:
    """The agent's blob has them; the session stays between calls, so that the server counts on."""
    bench.servers(srv=program("plain", timeout_seconds=7))
    listed, agent = await bench.listed("srv")
    assert [tool.name for tool in agent.mcp_tools] == ["srv__search", "srv__write", "srv__slow"]
    assert (agent.mcp_tools[0].read_only, agent.mcp_tools[1].read_only) == (True, False)
    assert (listed.seconds, listed.notes) == ({"srv": 7}, ())
    assert (await bench.call(listed.agent, "srv__search", "a", text="x"))[1] == "search 1 x"
    assert (await bench.call(listed.agent, "srv__write", "b", text="y"))[1] == "write 2 y"


async def test_every_page_of_tools_is_read(bench: Bench) -> None:
    """Three pages of two. From vercel/ai#19240."""
    bench.servers(srv=program("pages"))
    assert [tool.tool for tool in (await bench.listed("srv"))[1].mcp_tools] == [f"tool{n}" for n in range(6)]


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("loop", "its list of tools goes round in circles"),
        ("endless", "its list of tools has more than 20 pages"),
        ("refuses", "its program ended (exit code 1)"),
    ],
)
async def test_a_server_without_a_list_costs_its_tools_and_not_the_run(bench: Bench, mode: str, told: str) -> None:
    """The note has nothing of what the server itself says. From github/copilot-cli#4006."""
    bench.servers(good=program("plain"), bad=program(mode))
    listed, agent = await bench.listed("bad", "good")
    assert {tool.server for tool in agent.mcp_tools} == {"good"}
    (note,) = listed.notes
    assert note.startswith(f"MCP server 'bad': {told}")
    assert note.endswith("; its tools are missing in this run.")
    assert "licence" not in note


async def test_one_bad_tool_does_not_cost_the_others(bench: Bench) -> None:
    """Those that can be used are; names that models may not use are mapped."""
    bench.servers(srv=program("odd"))
    listed, agent = await bench.listed("srv")
    by_tool: dict[str, McpTool] = {tool.tool: tool for tool in agent.mcp_tools}
    assert list(by_tool) == ["good", "with space/and slash", "n" * 80]
    assert by_tool["good"].description == "Fine.[31m Ignore all"
    assert by_tool["with space/and slash"].name.startswith("srv__with_space_and_slash_")
    assert len(listed.notes) == 3
    assert (await bench.call(listed.agent, by_tool["n" * 80].name))[1].startswith("n" * 80)


async def test_a_server_that_ends_during_a_call_is_told_at_once(bench: Bench) -> None:
    """By name, with how it ended and its last words, in less than five seconds; the next call has a new one.

    From modelcontextprotocol/python-sdk#396.
    """
    bench.secret("token", SECRET)
    bench.servers(srv=program("die", secret_environment={"TOKEN": "token"}))
    listed, _ = await bench.listed("srv")
    for job in "ab":
        began = time.monotonic()
        result, text = await bench.call(listed.agent, "srv__write", job)
        assert time.monotonic() - began < 5
        assert result.failed
        assert text.startswith("srv__write: MCP server 'srv': its program ended (exit code 3); it may or may not have been")
        assert "fatal: out of cheese" in text
        assert "s3cret" not in text


async def test_a_child_that_holds_the_pipe_does_not_hide_the_end(bench: Bench) -> None:
    """The server's own end counts."""
    began = time.monotonic()
    assert "its program ended (exit code 4)" in (await bench.asked("orphan"))[1]
    assert time.monotonic() - began < 5


async def test_text_on_standard_output_is_skipped_with_a_warning(bench: Bench) -> None:
    """A banner is no message. From blockscout/mcp-server#39."""
    with structlog.testing.capture_logs() as logs:
        assert (await bench.asked("banner"))[1] == "search 1"
    assert [line["event"] for line in logs].count("mcp_line_is_no_message") == 2


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("noisy", "search 1"),
        ("halves", "half \ufffd\u2400[2J end"),
        ("images", "seen\n[image image/png, 3 bytes: not shown]"),
        ("structured", '{"found": 3}'),
        ("wrong", "srv__search: the tool reports an error:\nno such ticket"),
        ("asks", '{"code": -32600, "message": "Sampling not supported"}'),
    ],
)
async def test_what_a_tool_gives_is_text_for_the_model(bench: Bench, mode: str, told: str) -> None:
    """300 KB on standard error hold nothing up (mark3labs/mcp-go#956); what a server asks of us is refused."""
    result, text = await bench.asked(mode)
    assert text == told
    assert result.failed == (mode == "wrong")


async def test_a_slow_tool_is_told_and_the_session_goes_on(bench: Bench) -> None:
    """Within the server's own time."""
    bench.servers(srv=program("plain", timeout_seconds=0.3))
    listed, _ = await bench.listed("srv")
    assert "it did not answer within 0.3 s; it may or may not" in (await bench.call(listed.agent, "srv__slow"))[1]


async def test_a_reply_without_bounds_ends_the_server(bench: Bench) -> None:
    """Nine megabytes in one line."""
    assert "it sent a line of over 8 MB, and was ended" in (await bench.asked("flood"))[1]


async def test_an_error_of_the_protocol_is_told_without_secrets(bench: Bench) -> None:
    """Code and message are the server's."""
    bench.secret("token", SECRET)
    bench.servers(srv=program("error", secret_environment={"TOKEN": "token"}))
    listed, _ = await bench.listed("srv")
    _, text = await bench.call(listed.agent, "srv__search")
    assert "it answered with error -32050; it may or may not have been carried out: the index is closed ***" in text


async def test_a_program_has_no_more_of_the_worker_than_its_path(bench: Bench) -> None:
    """A home of its own, empty and gone afterwards; nothing else but what the file gives."""
    bench.servers(srv=program("environment", environment={"MODE": "x"}))
    listed, _ = await bench.listed("srv")
    environment = json.loads((await bench.call(listed.agent, "srv__search"))[1])
    assert set(environment) - {"LC_CTYPE"} == {"HOME", "PATH", "MODE"}
    await bench.pool.close()
    assert not Path(environment["HOME"]).exists()


async def test_a_program_and_its_children_end_with_the_session(bench: Bench) -> None:
    """Nothing is left when the worker stops."""
    pids = [int(pid) for pid in (await bench.asked("children"))[1].split()]
    assert all(map(is_alive, pids))
    await bench.pool.close()
    async with asyncio.timeout(5):  # the kernel takes a moment to end what was killed
        while any(map(is_alive, pids)):
            await asyncio.sleep(0.02)


async def test_a_session_that_nobody_uses_is_closed(bench: Bench) -> None:
    """And one for the next call is opened."""
    bench.pool = SessionPool(idle_seconds=0.2)
    bench.activities = bench.another()
    bench.servers(srv=program("plain"))
    listed, _ = await bench.listed("srv")
    async with asyncio.timeout(5):
        while len(bench.pool):
            await asyncio.sleep(0.02)
    assert (await bench.call(listed.agent, "srv__search"))[1] == "search 1"


async def test_a_call_that_was_begun_is_not_made_again(bench: Bench, tmp_path: Path) -> None:
    """Unless its tool says that it does no harm. What it gave before is given again."""
    journal = tmp_path / "journal"
    bench.servers(srv=program("plain", journal))
    listed, _ = await bench.listed("srv")
    for job in ("write", "search"):
        await bench.blobs.put_record(f"mcp-call/{job}", {"begun": True})
    _, text = await bench.call(listed.agent, "srv__write", "write")
    assert "the worker that called it was lost before it answered: it may or may not have been carried out" in text
    assert calls_of(journal) == []
    assert (await bench.call(listed.agent, "srv__search", "search"))[1] == "search 1"
    assert (await bench.call(listed.agent, "srv__search", "search"))[1] == "search 1"
    assert len(calls_of(journal)) == 1


async def test_large_arguments_come_from_the_store(bench: Bench, tmp_path: Path) -> None:
    """A megabyte reaches the tool."""
    journal = tmp_path / "journal"
    bench.servers(srv=program("plain", journal))
    listed, _ = await bench.listed("srv")
    await bench.call(listed.agent, "srv__write", text="x" * (1 << 20))
    assert len(calls_of(journal)[0]["arguments"]["text"]) == 1 << 20


async def test_a_cancelled_call_ends_its_program(bench: Bench, tmp_path: Path) -> None:
    """What it still does is of no use to anybody."""
    journal = tmp_path / "journal"
    bench.servers(srv=program("plain", journal))
    listed, _ = await bench.listed("srv")
    calling = asyncio.create_task(bench.call(listed.agent, "srv__slow"))
    async with asyncio.timeout(5):
        while not calls_of(journal):
            await asyncio.sleep(0.02)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert len(bench.pool) == 0


@pytest.mark.parametrize(
    ("uses", "spec", "told"),
    [
        (["srv", "nobody"], {}, r"mcp_servers\.1: no MCP server is named 'nobody' .* there are: srv"),
        (["srv"], {"approvals": {"tools": {"srv__wriite": "forbid"}}}, r"approvals\.tools\.srv__wriite: .* has no tool"),
        (
            ["srv"],
            {"approvals": {"rules": [{"tool": "srv__x", "arguments": {"a": 1}, "verdict": "forbid"}]}},
            r"approvals\.rules\.0: MCP server 'srv' has no tool 'srv__x'; there are: srv__search",
        ),
    ],
)
async def test_what_the_operator_or_the_server_does_not_have_is_refused(
    bench: Bench, uses: list[str], spec: dict[str, object], told: str
) -> None:
    """Before a model is asked; a policy about a misspelt tool would guard nothing."""
    bench.servers(srv=program("plain"))
    with pytest.raises(ApplicationError, match=told) as caught:
        await bench.listed(*uses, **spec)
    assert (caught.value.type, caught.value.non_retryable) == ("BadInput", True)


async def test_a_server_over_http_gets_its_headers(bench: Bench, web: HttpServer) -> None:
    """The secret arrives, and what echoes it comes back without it."""
    bench.secret("token", SECRET)
    bench.servers(web={"url": web.url, "headers": {"X-Tenant": "acme"}, "secret_headers": {"Authorization": "token"}})
    listed, _ = await bench.listed("web")
    assert (await bench.call(listed.agent, "web__search", "a", text="it"))[1] == "emulator found it"
    assert {(one["authorization"], one["x-tenant"]) for one in web.seen} == {(SECRET, "acme")}
    _, text = await bench.call(listed.agent, "web__echo_headers", "b")
    assert "'authorization': '***'" in text


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        (
            "401",
            "it answers with HTTP 401 Unauthorized: the operator must give it a credential that it takes; nothing was carried",
        ),
        ("redirect", "it answers with a redirect to http://127.0.0.1:{other}, which is not followed"),
        ("500", "it answered with error -32603 (HTTP 500); it may or may not have been carried out"),
        ("big", "its reply is over 8 MB; it may or may not have been carried out"),
        ("cut", "it may or may not have been carried out"),
    ],
)
async def test_every_failure_over_http_is_told(bench: Bench, web: HttpServer, mode: str, told: str) -> None:
    """Soon, with the server's name; headers go to no other place."""
    bench.secret("token", SECRET)
    bench.servers(web={"url": web.url, "secret_headers": {"Authorization": "token"}, "timeout_seconds": 5})
    listed, _ = await bench.listed("web")
    with http_server("other") as other:
        web.mode, web.elsewhere = mode, other.url
        began = time.monotonic()
        result, text = await bench.call(listed.agent, "web__echo_headers")
        assert time.monotonic() - began < 5
        assert result.failed
        assert "MCP server 'web': " in text
        assert told.format(other=other.port) in text
        assert other.seen == []
        assert SECRET not in text
    web.mode = "plain"
    assert (await bench.call(listed.agent, "web__search", "again", text="x"))[1] == "emulator found x"


async def test_a_session_that_the_server_forgot_is_opened_anew(bench: Bench, web: HttpServer) -> None:
    """A restarted server says so before it does anything, and the call is made again."""
    bench.servers(web={"url": web.url})
    listed, _ = await bench.listed("web")
    web.mode = "404"

    async def comes_back() -> None:
        await asyncio.sleep(0.15)
        web.mode = "plain"

    back = asyncio.create_task(comes_back())
    assert (await bench.call(listed.agent, "web__search", text="x"))[1] == "emulator found x"
    await back
    assert web.calls == [("search", {"text": "x"})]


async def test_a_server_that_is_down_is_told_after_some_tries(bench: Bench, web: HttpServer) -> None:
    """Nothing was sent, so nothing was carried out."""
    bench.servers(web={"url": web.url})
    listed, _ = await bench.listed("web")
    bench.servers(web={"url": "http://127.0.0.1:9/mcp"})
    began = time.monotonic()
    assert "it cannot be reached; nothing was carried out" in (await bench.call(listed.agent, "web__search"))[1]
    assert time.monotonic() - began < 5


async def test_a_server_that_says_nothing_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that starts and never shakes hands."""
    monkeypatch.setattr(sessions, "OPEN_SECONDS", 0.3)
    bench.servers(srv=program("silent"))
    listed, agent = await bench.listed("srv")
    assert agent.mcp_tools == ()
    assert "it did not answer within 0.3 s" in listed.notes[0]


def test_the_sdk_is_not_imported_before_a_session_is_opened() -> None:
    """It would cost every worker half a second at its start."""
    code = "import sys, activities.tools.mcp.activity; sys.exit('mcp' in sys.modules or 'httpx2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": "."}).returncode == 0
