"""The model client against endpoints that do what streams and HTTP allow, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.model.activity import ModelActivities
from activities.model.client import make_client
from activities.model.prices import load_prices
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from contracts.agent import AgentSpec, ModelSettings
from contracts.blob import Text
from contracts.model import CallModelInput, CallModelResult, UserItem
from contracts.prepare import ResolvedAgent

KEY = "sk-live-0123456789abcdef"
MESSAGE = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}
DONE = {"type": "response.completed", "response": {"id": "resp_1", "status": "completed", "output": [MESSAGE]}}
DEEP = json.loads("[" * 900 + "]" * 900)
BACKGROUND = ModelSettings(store=True, background=True)


def event(data: object) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def reply(body: object, status: int = 200, content_type: str = "application/json") -> bytes:
    """A whole answer: bytes as they are, anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
    return head.encode() + data


def stream(*events: bytes) -> bytes:
    """An answer that is a stream of events."""
    return reply(b"".join(events), content_type="text/event-stream")


@contextlib.asynccontextmanager
async def answering(*replies: bytes, alive: bool = False) -> AsyncIterator[str]:
    """The address of an endpoint that gives these answers in order, the last one for ever; `alive`: and never ends it."""
    left = list(replies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length")]
            await reader.readexactly(sum(lengths))
            writer.write(left.pop(0) if len(left) > 1 else left[0])
            while alive:
                writer.write(b": keep-alive\n\n")
                await writer.drain()
                await asyncio.sleep(0.02)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    """A store of its own."""
    return BlobStore(LocalStore(tmp_path))


async def attempt(blobs: BlobStore, base_url: str, settings: ModelSettings | None = None) -> CallModelResult:
    """One attempt of the first model call of a run."""
    spec = AgentSpec(model_settings=settings or ModelSettings())
    agent = await blobs.put_json(ResolvedAgent(spec=spec, model="gpt-5.4", instructions="").model_dump(mode="json"))
    items = (UserItem(text=Text(inline="hi")),)
    call = CallModelInput(key="run/1/1", run_id="run", chain="first", step=1, agent=agent, head=None, items=items)
    async with make_client(KEY, base_url) as client:
        activities = ModelActivities(client, blobs, load_prices(None))
        result: CallModelResult = await ActivityEnvironment().run(activities.call_model, call)
        return result


async def failed(blobs: BlobStore, base_url: str, settings: ModelSettings | None = None) -> ApplicationError:
    """The failure of one attempt."""
    with pytest.raises(ApplicationError) as caught:
        await attempt(blobs, base_url, settings)
    return caught.value


STREAMS: dict[str, list[bytes]] = {
    "comments": [b": keep-alive\n\n", event(DONE)],
    "reconnection time": [b"retry: 3000\n\n", event(DONE)],
    "id alone": [b"id: 1\n\n", event(DONE)],
    "comments after an id": [b"id: 1\n" + event({"type": "x"}), b": keep-alive\n\n", event(DONE)],
    "event without data": [b"event: ping\n\n", b"event: ping\ndata:\n\n", event(DONE)],
    "no objects": [event(None), event([]), event("x"), event(7), event({}), event({"type": []}), event(DONE)],
    "odd deltas": [
        event({"type": "response.output_text.delta", "delta": None}),
        event({"type": "response.output_text.delta", "delta": {"a": 1}}),
        event({"type": "response.function_call_arguments.delta"}),
        event(DONE),
    ],
    "no status": [event({"type": "response.completed", "response": {"output": [MESSAGE]}})],
    "items in events alone": [
        event({"type": "response.output_item.done", "output_index": 1, "item": MESSAGE}),
        event({"type": "response.output_item.done", "output_index": 0, "item": {"type": "reasoning", "summary": []}}),
        event({"type": "response.completed", "response": {"id": "r", "status": "completed", "output": []}}),
    ],
    "items in events, and no output": [
        event({"type": "response.output_item.done", "item": MESSAGE}),
        event({"type": "response.completed", "response": {}}),
    ],
}


@pytest.mark.parametrize("case", STREAMS)
async def test_what_a_stream_may_hold_is_no_fault(blobs: BlobStore, case: str) -> None:
    """A server that keeps a connection alive in its own way answers all the same."""
    async with answering(stream(*STREAMS[case])) as url:
        result = await attempt(blobs, url)
    assert (result.text, result.model) == (Text(inline="done"), "gpt-5.4")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (stream(event({"type": "error", "code": 502, "message": "behind me"})), "behind me"),
        (stream(event({"error": "boom"})), "boom"),
        (stream(event({"type": "response.completed"})), "its status is None"),
        (stream(event({"type": "response.failed", "response": {"status": "failed", "error": "boom"}})), "failed: boom"),
        (reply(b"<html>log in", content_type="text/html"), "its content type is text/html"),
        (reply([]), "not a JSON object"),
        (reply({"status": "completed", "output": [{"type": "x", "x": DEEP}]}), "the answer cannot be read: RecursionError"),
        (reply({"error": {"code": 7, "message": "boom"}}), "7: boom"),
    ],
    ids=["number as code", "text alone", "no response", "failed", "page", "list", "deep", "error with 200"],
)
async def test_what_is_no_answer_is_retried_and_says_what_it_was(blobs: BlobStore, answer: bytes, told: str) -> None:
    """In the endpoint's own words where it has any."""
    async with answering(answer) as url:
        failure = await failed(blobs, url)
    assert (failure.type, failure.non_retryable, told in failure.message) == ("ModelUnavailable", False, True), failure


async def test_the_key_is_in_no_failure(blobs: BlobStore) -> None:
    """Some endpoints repeat the key that they refuse, and failures are kept in history."""
    async with answering(reply({"error": {"message": f"Incorrect API key provided: {KEY}"}}, 401)) as url:
        failure = await failed(blobs, url)
    assert "Incorrect API key provided: ***" in failure.message


async def test_an_answer_that_is_only_kept_alive_ends_at_its_timeout(blobs: BlobStore) -> None:
    """Comments are signs of life, and no answer."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    async with answering(head, alive=True) as url, asyncio.timeout(5):
        failure = await failed(blobs, url, ModelSettings(timeout_seconds=0.3))
    assert (failure.non_retryable, "no whole answer within 0.3 seconds" in failure.message) == (False, True)


@pytest.mark.parametrize("status", [404, 410])
async def test_a_background_response_that_is_gone_is_asked_for_anew(blobs: BlobStore, status: int) -> None:
    """Whatever the service calls it: the next attempt starts another."""
    gone = reply({"error": {"message": "gone", "code": "response_not_found"}}, status)
    done = reply({"id": "resp_2", "status": "completed", "output": [MESSAGE]})
    async with answering(
        reply({"id": "resp_1", "status": "queued"}), gone, reply({"id": "resp_2", "status": "queued"}), done
    ) as url:
        assert not (await failed(blobs, url, BACKGROUND)).non_retryable
        assert (await attempt(blobs, url, BACKGROUND)).response_id == "resp_2"


async def test_a_background_response_that_is_done_at_once_is_taken(blobs: BlobStore) -> None:
    """Some servers know no background; nothing can be asked of them later."""
    async with answering(reply(DONE["response"]), reply({}, 404)) as url:
        assert (await attempt(blobs, url, BACKGROUND)).text == Text(inline="done")


async def test_a_background_response_that_takes_too_long_is_waited_for_again(blobs: BlobStore) -> None:
    """The failure says why, and the next attempt finds the same response."""
    queued, waits = reply({"id": "resp_1", "status": "queued"}), BACKGROUND.model_copy(update={"timeout_seconds": 0.1})
    async with answering(queued, queued, reply(DONE["response"])) as url:
        assert "no whole answer within 0.1 seconds" in (await failed(blobs, url, waits)).message
        assert (await attempt(blobs, url, waits)).response_id == "resp_1"


async def test_a_poll_that_gives_no_answer_gives_nothing_up(blobs: BlobStore) -> None:
    """A page of a proxy says nothing of the response behind it."""
    page = reply(b"<html>", content_type="text/html")
    async with answering(reply({"id": "resp_1", "status": "queued"}), page, reply(DONE["response"])) as url:
        await failed(blobs, url, BACKGROUND)
        assert (await attempt(blobs, url, BACKGROUND)).response_id == "resp_1"
