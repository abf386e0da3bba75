"""Odd answers of MCP servers: each is told for what it is, at once, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from mcp_types import JSONRPCError, JSONRPCResponse

from activities.tools.mcp import activity, http, stdio
from activities.tools.mcp.events import Events
from activities.tools.mcp.wire import OF_SERVER, OF_TRANSPORT, read
from tests.emulators.mcp.raw_http import Reply, error, raw_server, text
from tests.mcp_support import Bench, program

SECRET = "Bearer s3cret-0123456789abcdefghijklmnopqrstuvwxyz"
MAYBE = "it may or may not have been carried out"
NOT_OF_PROTOCOL = f"its answer is not one of the protocol; {MAYBE}"
DEEP = b'{"jsonrpc":"2.0","id":%d,"result":{"content":[],"structuredContent":{"x":' + b"[" * 300 + b"]" * 300 + b"}}}"


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    """A tools worker's activities, without the waits between tries."""
    monkeypatch.setattr(activity, "LIST_DELAYS", (0.01,))
    monkeypatch.setattr(activity, "CALL_DELAYS", (0.01, 0.01))
    monkeypatch.setattr(stdio, "_GRACE_SECONDS", 0.2)
    made = Bench(tmp_path)
    made.secret("token", SECRET)
    yield made
    await made.pool.close()


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("closed", f"it answered with error -32000; {MAYBE}: the index is closed"),
        ("timeout", f"it answered with error -32001; {MAYBE}: ticket 7 not found"),
        ("null", NOT_OF_PROTOCOL),
        ("error-text", NOT_OF_PROTOCOL),
        ("deep", NOT_OF_PROTOCOL),
        ("deeper", NOT_OF_PROTOCOL),
        ("batch", "in a batch"),
        ("no-id", f"it answered with error -32700; {MAYBE}: cannot parse"),
        ("mark", "after a mark"),
        ("no-newline", "last words"),
        ("odd-parts", "hi\n[video: not shown]\n[image of unknown type, 3 bytes: not shown]\n[text: not shown]"),
        ("only-structured", '{"found": 3}'),
        ("numbers", '{"n": null, "big": null}'),
    ],
)
async def test_a_program_with_odd_answers_is_told_of_at_once(bench: Bench, mode: str, told: str) -> None:
    """What the server says is not taken for what became of the connection, and nobody waits for a reply that has come."""
    bench.servers(srv=program(f"odd-{mode}", timeout_seconds=30))
    listed, _ = await bench.listed("srv")
    async with asyncio.timeout(10):
        _, said = await bench.call(listed.agent, "srv__search")
    assert said.removeprefix("srv__search: MCP server 'srv': ") == told


async def test_one_server_that_nests_its_list_too_deeply_does_not_cost_the_others(bench: Bench) -> None:
    """It is told of in a note."""
    bench.servers(bad=program("deep-list"), good=program("plain"))
    listed, agent = await bench.listed("bad", "good")
    assert {tool.server for tool in agent.mcp_tools} == {"good"}
    assert listed.notes == ("MCP server 'bad': its answer is not one of the protocol; its tools are missing in this run.",)


def over_http(said: str, number: int, session: str) -> Reply:
    """Answer a call by its text."""
    events = "text/event-stream; charset=utf-8"
    match said:
        case "lost" | "lost-400" if session == "s0":
            return Reply(error(None, -32001, "Session not found"), 404 if said == "lost" else 400)
        case "closed":
            return Reply(error(number, -32000, "the index is closed"))
        case "timeout":
            return Reply(error(number, -32001, "ticket 7 not found"))
        case "page":
            return Reply(f"<html>{'x' * 60}{SECRET}".encode(), kind="text/html")
        case "no-json":
            return Reply(f"upstream said: bad credential {'x' * 60}{SECRET}".encode())
        case "deep":
            return Reply(DEEP % number)
        case "half":
            return Reply(text(number, "half \ud83d."))
        case "byte":
            return Reply(text(number, "caf?").replace(b"?", b"\xe9"))
        case "batch":
            return Reply(b"[" + text(number, "in a batch") + b"]")
        case "event-batch":
            return Reply(b"\xef\xbb\xbfevent: message\r\ndata: [" + text(number, "in an event") + b"]\r\n\r\n", kind=events)
        case "event-bad":
            return Reply(b"data: {" + SECRET.encode() + b"\n\n", kind=events)
        case "event-error":
            return Reply(b"data: " + error(number, -32000, "the index is closed") + b"\n\n", kind=events)
        case "event-none":
            return Reply(b": nothing\n\n", kind=events)
        case "hang":
            return Reply(text(number, "late"), after=4.0)
        case "slow":
            return Reply(text(number, f"slow in {session}"), after=0.7)
        case _:
            return Reply(text(number, f"done in {session}"))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("lost", "done in s1"),
        ("lost-400", "done in s1"),
        ("closed", f"it answered with error -32000; {MAYBE}: the index is closed"),
        ("timeout", f"it answered with error -32001; {MAYBE}: ticket 7 not found"),
        ("page", f"its answer is not one of the protocol (HTTP 200, without JSON); {MAYBE}"),
        ("no-json", NOT_OF_PROTOCOL),
        ("deep", NOT_OF_PROTOCOL),
        ("half", "half \ufffd."),
        ("byte", "caf\ufffd"),
        ("batch", "in a batch"),
        ("event-batch", "in an event"),
        ("event-bad", NOT_OF_PROTOCOL),
        ("event-error", f"it answered with error -32000; {MAYBE}: the index is closed"),
        ("event-none", f"the connection was lost; {MAYBE}"),
    ],
)
async def test_odd_answers_over_http_are_told_for_what_they_are(
    bench: Bench, caplog: pytest.LogCaptureFixture, said: str, told: str
) -> None:
    """The session goes on unless it is the session that is lost; nothing of what cannot be read is told or logged."""
    with raw_server(over_http) as web, caplog.at_level(logging.DEBUG):
        bench.servers(web={"url": web.url, "secret_headers": {"Authorization": "token"}, "timeout_seconds": 5})
        listed, _ = await bench.listed("web")
        _, output = await bench.call(listed.agent, "web__do", text=said)
        assert output.removeprefix("web__do: MCP server 'web': ") == told
        assert (await bench.call(listed.agent, "web__do", "again"))[1] == f"done in s{len(web.sessions) - 1}"
        assert len(web.sessions) == (2 if said.startswith("lost") else 1)
        assert not [record for record in caplog.records if record.name.startswith(("mcp", "client"))]
        assert "s3cret" not in output + caplog.text


async def test_a_call_that_is_given_up_costs_no_other_call_on_its_session(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection fails later, when another call is under way."""
    monkeypatch.setattr(http, "CONNECT_SECONDS", 0.2)
    with raw_server(over_http) as web:
        bench.servers(web={"url": web.url, "timeout_seconds": 2})
        listed, _ = await bench.listed("web")
        _, given_up = await bench.call(listed.agent, "web__do", "a", text="hang")
        assert "it did not answer within 2 s" in given_up
        outputs = await asyncio.gather(
            *(bench.call(listed.agent, "web__do", job, text="slow") for job in "bc"),
        )
        assert [output for _, output in outputs] == ["slow in s0"] * 2


def test_a_message_says_whether_the_server_said_it() -> None:
    """An error with a code of the SDK's own is still the server's; one that is made up here says so, too."""
    (theirs,) = read(error(7, -32001, "x"), [7])
    (ours,) = read(b'{"jsonrpc": "2.0", "id": "7", "result": 5}', [7])
    assert isinstance(theirs, JSONRPCError) and theirs.error.data == OF_SERVER
    assert isinstance(ours, JSONRPCError) and (ours.id, ours.error.data) == (7, OF_TRANSPORT)
    assert read(b'{"jsonrpc": "2.0", "id": 8, "result": 5}', [7]) == []
    assert read(b"Starting server v1.0 ...", [7]) == []


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
async def test_events_are_read_however_they_are_cut(ending: bytes, size: int) -> None:
    """With any end of lines, in pieces of any size, over several lines, and without an empty one at the end."""
    data = b"\xef\xbb\xbf: hello@id: 4@event: message@data: {@data: " + text(3, "x")[1:].replace(b", ", b",@data: ") + b"@"
    sent = data.replace(b"@", ending)

    class Body(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for n in range(0, len(sent), size):
                yield sent[n : n + size]

    made = b"".join([part async for part in Events(httpx2.Response(200, stream=Body()), 3)])
    before, _, message = made.partition(b"data: ")
    assert before == b"id: 4\n"
    (reply,) = read(message, [3])
    assert isinstance(reply, JSONRPCResponse) and reply.result["content"][0]["text"] == "x"
