"""The model activity over a real socket: retried, picked up, and content with servers that leave things out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.heartbeat import Beat
from activities.model.activity import ModelActivities
from activities.model.client import ask_streaming, make_client
from activities.model.prices import load_prices
from activities.model.reply import read_reply
from activities.model.transcript import TranscriptStore
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from contracts.agent import AgentSpec, ModelSettings
from contracts.blob import Text
from contracts.model import CallModelInput, CallModelResult, UserItem
from contracts.prepare import ResolvedAgent
from workers.scripted_model.scenario import parse_scenarios
from workers.scripted_model.server import ScriptedModelServer

SCENARIOS = """
scenarios:
  - name: slow
    match: {text: slow}
    turns: [{text: "the answer", delay_ms: 500}]
  - name: quick
    turns: [{text: "the answer"}]
"""
BACKGROUND = ModelSettings(store=True, background=True)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    """A store of its own."""
    return BlobStore(LocalStore(tmp_path))


@pytest.fixture
async def server() -> AsyncIterator[ScriptedModelServer]:
    """A scripted model of its own."""
    async with ScriptedModelServer(parse_scenarios(SCENARIOS, "here")) as made:
        yield made


async def given_call(blobs: BlobStore, task: str, settings: ModelSettings | None = None) -> CallModelInput:
    """The first model call of a run."""
    spec = AgentSpec(tools=(), model_settings=settings or ModelSettings())
    agent = await blobs.put_json(ResolvedAgent(spec=spec, model="gpt-5.4", instructions="").model_dump(mode="json"))
    items = (UserItem(text=Text(inline=task)),)
    return CallModelInput(key="run/1/1", run_id="run", chain="first", step=1, agent=agent, head=None, items=items)


async def attempt(blobs: BlobStore, base_url: str, call: CallModelInput) -> CallModelResult:
    """One attempt of the activity, by a worker that has just started."""
    async with make_client("key", base_url) as client:
        activities = ModelActivities(client, blobs, load_prices(None))
        result: CallModelResult = await ActivityEnvironment().run(activities.call_model, call)
        return result


async def test_a_retry_after_the_answer_was_recorded_asks_nothing(blobs: BlobStore, server: ScriptedModelServer) -> None:
    """A worker that dies just before it reports costs no second answer."""
    call = await given_call(blobs, "quick")
    first = await attempt(blobs, server.base_url, call)
    assert await attempt(blobs, server.base_url, call) == first
    assert [entry.outcome for entry in server.journal()] == ["answered"]


async def test_two_attempts_at_once_go_on_with_one_answer(blobs: BlobStore, server: ScriptedModelServer) -> None:
    """A worker that was only thought dead does not fork the transcript."""
    call = await given_call(blobs, "quick")
    one, other = await asyncio.gather(*(attempt(blobs, server.base_url, call) for _ in range(2)))
    assert one == other


async def test_a_background_response_is_picked_up_by_the_next_attempt(blobs: BlobStore, server: ScriptedModelServer) -> None:
    """An attempt that ends while the service works on costs no second create."""
    call = await given_call(blobs, "slow", BACKGROUND)
    first = asyncio.create_task(attempt(blobs, server.base_url, call))
    async with asyncio.timeout(20):
        while await blobs.get_record(f"model-call/{call.key}/background/0") is None:
            await asyncio.sleep(0.01)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    assert first.cancelled()
    result = await attempt(blobs, server.base_url, call)
    assert result.text == Text(inline="the answer")
    seen = [(entry.request, entry.outcome) for entry in server.journal()]
    assert seen == [("create", "accepted"), ("retrieve", "answered")]


async def test_a_background_response_that_the_service_forgot_is_asked_for_anew(
    blobs: BlobStore, server: ScriptedModelServer
) -> None:
    """The attempt that finds it gone fails; the next one asks again, under another idempotency key."""
    call = await given_call(blobs, "quick", BACKGROUND)
    await blobs.put_record(f"model-call/{call.key}/background/0", {"id": "resp_forgotten", "label": None})
    with pytest.raises(ApplicationError, match="resp_forgotten") as caught:
        await attempt(blobs, server.base_url, call)
    assert not caught.value.non_retryable
    assert (await attempt(blobs, server.base_url, call)).text == Text(inline="the answer")


async def test_what_was_asked_and_answered_is_in_the_transcript(blobs: BlobStore, server: ScriptedModelServer) -> None:
    """Who said what, in order."""
    result = await attempt(blobs, server.base_url, await given_call(blobs, "quick"))
    entries = await TranscriptStore(blobs).load(result.head)
    assert [(entry.step, entry.origin) for entry in entries] == [(1, "user"), (1, "model")]
    assert result.items_total == 2


@contextlib.asynccontextmanager
async def answering(body: bytes, content_type: str) -> AsyncIterator[AsyncOpenAI]:
    """A client of a server that answers everything with one body, whole, whatever was asked for."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
        await reader.readexactly(length)
        start = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(start.encode() + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, make_client("key", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1") as client:
        yield client


REQUEST: dict[str, Any] = {"model": "m", "extra_body": {"input": "hi"}}


async def test_a_whole_json_answer_to_a_streaming_request_is_accepted() -> None:
    """Compatible servers answer so, and leave out fields that the API always has."""
    part = {"type": "output_text", "text": "done"}
    body = {"id": "r", "status": "completed", "output": [{"type": "message", "role": "assistant", "content": [part]}]}
    async with answering(json.dumps(body).encode(), "application/json; charset=utf-8") as client:
        answer = await ask_streaming(client, REQUEST, "key", 10, Beat())
    assert (read_reply(answer.response, "m").text, answer.label) == ("done", None)


async def test_half_a_character_in_a_delta_does_not_stop_the_heartbeat() -> None:
    """What a heartbeat carries is always text that can be encoded."""
    delta = {"type": "response.output_text.delta", "item_id": "m", "output_index": 0, "content_index": 0, "delta": "a\ud83d"}
    done = {"type": "response.completed", "response": {"id": "r", "status": "completed", "output": []}}
    stream = b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in (delta, done))
    beat = Beat()
    async with answering(stream, "text/event-stream") as client:
        await ask_streaming(client, REQUEST, "key", 10, beat)
    json.dumps(beat.details, ensure_ascii=False).encode()
