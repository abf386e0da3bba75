"""The faults that the scripted model plays, and responses in the background, as the real OpenAI SDK meets them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from workers.scripted_model import JournalEntry, ScriptedModelServer, parse_scenarios

ANSWER = """
scenarios:
  - name: answer
    turns: [{text: "A whole answer, long enough for a few deltas.", faults: [FAULT]}]
"""


def faulty(fault: str) -> str:
    return ANSWER.replace("FAULT", fault)


@asynccontextmanager
async def serving(scenario: str) -> AsyncIterator[tuple[ScriptedModelServer, AsyncOpenAI]]:
    async with (
        ScriptedModelServer(parse_scenarios(scenario, "test.yaml")) as server,
        AsyncOpenAI(api_key="k", base_url=server.base_url, max_retries=0, timeout=20) as client,
    ):
        yield server, client


async def stream_of(client: AsyncOpenAI, items: Any, **options: Any) -> list[Any]:
    stream = await client.responses.create(model="m-1", input=items, stream=True, **options)
    return [event async for event in stream]


async def stream_of_error(client: AsyncOpenAI, text: str) -> Exception:
    with pytest.raises(openai.APIError) as caught:
        await stream_of(client, text)
    return caught.value


async def settled(server: ScriptedModelServer, count: int) -> list[JournalEntry]:
    """Wait for what the server notes only after the client has seen a broken connection."""
    for _ in range(200):
        if len(server.journal()) >= count:
            break
        await asyncio.sleep(0.01)
    return server.journal()


async def test_http_faults_come_once_each_before_the_real_answer() -> None:
    """One fault for each attempt at a turn, with the headers a client must honour."""
    scenario = faulty(
        '{kind: http, status: 429, headers: {retry-after: "7"}, body: {error: {code: rate_limit, message: slow}}}, '
        "{kind: http, status: 503, retry_after_date_s: 3}"
    )
    async with serving(scenario) as (server, client):
        with pytest.raises(openai.RateLimitError) as limited:
            await stream_of(client, "x")
        assert limited.value.response.headers["retry-after"] == "7"
        with pytest.raises(openai.InternalServerError) as unavailable:
            await stream_of(client, "x")
        assert unavailable.value.response.headers["retry-after"].endswith("GMT")
        assert (await stream_of(client, "x"))[-1].type == "response.completed"
        other = await stream_of_error(client, "another conversation")
        assert isinstance(other, openai.RateLimitError)
        assert [(entry.attempt, entry.outcome) for entry in server.journal()] == [
            (1, "http"),
            (2, "http"),
            (3, "answered"),
            (1, "http"),
        ]


async def test_a_cut_stream_raises_nothing_and_lacks_its_end() -> None:
    """What the real failure looks like: only the missing response.completed tells (openclaw/openclaw#109133)."""
    async with serving(faulty("{kind: cut, after_events: 5}, {kind: cut, after_events: 999}")) as (server, client):
        events = await stream_of(client, "x")
        assert len(events) == 5
        late = await stream_of(client, "x")
        assert late[-1].type == "response.output_item.done"
        assert (await stream_of(client, "x"))[-1].type == "response.completed"
        assert [entry.outcome for entry in server.journal()] == ["cut", "cut", "answered"]


async def test_a_stream_cut_inside_an_event_ends_before_that_event() -> None:
    """Half an event is never delivered as an event."""
    async with serving(faulty("{kind: cut_mid_event, after_events: 5}")) as (server, client):
        raw = await client.responses.with_raw_response.create(model="m", input="x", stream=True)
        body = await raw.http_response.aread()
        assert body.count(b"\n\n") == 5
        assert not body.endswith(b"\n\n")
        assert [entry.outcome for entry in server.journal()] == ["cut_mid_event"]


@pytest.mark.parametrize("after_events", [0, 4])
async def test_a_disconnect_breaks_the_connection(after_events: int) -> None:
    """The connection is reset before the headers or in mid-stream."""
    async with serving(faulty(f"{{kind: disconnect, after_events: {after_events}}}")) as (server, client):
        assert isinstance(await stream_of_error(client, "x"), openai.APIConnectionError)
        assert (await stream_of(client, "x"))[-1].type == "response.completed"
        assert [entry.outcome for entry in server.journal()] == ["disconnect", "answered"]


async def test_a_hang_outlasts_an_impatient_client() -> None:
    """Nothing comes; the client's own time limit ends it, and the journal names the fault."""
    async with serving(faulty("{kind: hang, seconds: 30}, {kind: hang, seconds: 0.05}")) as (server, client):
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.3).responses.create(model="m", input="x")
        assert isinstance(await stream_of_error(client, "x"), openai.APIConnectionError)
        assert [entry.outcome for entry in await settled(server, 2)] == ["hang", "hang"]


async def test_error_events_and_failed_responses_reach_the_client() -> None:
    """An error event ends a stream; a failed response carries its error; without streaming the first is a 500."""
    faults = "{kind: error_event, message: upstream}, {kind: failed, code: server_error}, {kind: error_event}"
    async with serving(faulty(faults)) as (server, client):
        assert (await stream_of(client, "x"))[-1].type == "error"
        failed = (await stream_of(client, "x"))[-1]
        assert failed.type == "response.failed"
        assert failed.response.error.code == "server_error"
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="m", input="x")
        assert [entry.outcome for entry in server.journal()] == ["error_event", "failed", "error_event"]


async def test_incomplete_and_refusal_turns() -> None:
    """An incomplete response says why; a refusal is a refusal part."""
    scenario = """
scenarios:
  - {name: short, match: {text: short}, turns: [{text: half, status: incomplete}]}
  - {name: unwilling, turns: [{text: I will not., status: refusal}]}
"""
    async with serving(scenario) as (_, client):
        short = (await stream_of(client, "short"))[-1]
        assert short.type == "response.incomplete"
        assert short.response.incomplete_details.reason == "max_output_tokens"
        events = await stream_of(client, "x")
        assert events[-1].response.output[0].content[0].refusal == "I will not."
        assert any(event.type == "response.refusal.done" for event in events)


async def test_a_background_response_outlives_its_connection() -> None:
    """After the first connection broke, the same response is retrieved whole, also from where the stream stopped."""
    scenario = faulty("{kind: disconnect, after_events: 4}").replace("{text:", "{chunk_delay_ms: 20, text:")
    async with serving(scenario) as (server, client):
        seen: list[Any] = []
        with pytest.raises(openai.APIConnectionError):
            stream = await client.responses.create(model="m", input="x", stream=True, background=True)
            async for event in stream:
                seen.append(event)
        assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        response_id = seen[0].response.id
        rest = await client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number)
        numbers = [event.sequence_number async for event in rest]
        assert numbers[0] == seen[-1].sequence_number + 1
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        whole = await client.responses.retrieve(response_id)
        assert (whole.status, whole.output_text) == ("completed", "A whole answer, long enough for a few deltas.")
        journal = server.journal()
    assert [(entry.request, entry.outcome) for entry in journal] == [
        ("create", "disconnect"),
        ("retrieve", "answered"),
        ("retrieve", "answered"),
    ]
    assert {entry.response_id for entry in journal} == {response_id}


async def test_a_background_response_can_be_polled_and_cancelled() -> None:
    """Without streaming the create call returns at once; polling sees the end; cancelling stops it."""
    scenario = "scenarios: [{name: slow, turns: [{text: done, delay_ms: 150}]}]"
    async with serving(scenario) as (_, client):
        queued = await client.responses.create(model="m", input="x", background=True)
        assert queued.status == "queued"
        while (seen := await client.responses.retrieve(queued.id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
        assert seen.output_text == "done"
        other = await client.responses.create(model="m", input="y", background=True)
        assert (await client.responses.cancel(other.id)).status == "cancelled"
        assert (await client.responses.retrieve(other.id)).status == "cancelled"
        assert (await client.responses.cancel(queued.id)).status == "completed"


async def test_what_the_real_api_refuses_about_background_is_refused() -> None:
    """Background needs the store; only background responses are cancelled or streamed again; unknown ids are 404."""
    async with serving(faulty("")) as (_, client):
        with pytest.raises(openai.BadRequestError, match="store"):
            await client.responses.create(model="m", input="x", background=True, store=False)
        done = await client.responses.create(model="m", input="x")
        with pytest.raises(openai.BadRequestError, match="synchronous"):
            await client.responses.cancel(done.id)
        with pytest.raises(openai.BadRequestError, match="background=true"):
            await client.responses.retrieve(done.id, stream=True)
        unstored = await client.responses.create(model="m", input="x", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unstored.id)


async def test_a_client_that_leaves_is_not_answered() -> None:
    """`answered` means that the end was written; a call broken off by the client is aborted_by_client."""
    scenario = "scenarios: [{name: slow, turns: [{text: done, delay_ms: 20000}]}]"
    async with serving(scenario) as (server, client):
        stream = await client.responses.create(model="m", input="x", stream=True)
        assert (await anext(aiter(stream))).type == "response.created"
        await stream.close()
        assert [entry.outcome for entry in await settled(server, 1)] == ["aborted_by_client"]
