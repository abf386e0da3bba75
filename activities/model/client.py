"""Asking the model endpoint through the OpenAI SDK: streamed, or in the background so that a retry can pick it up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any, cast

import httpx2
from openai import AsyncOpenAI, AsyncStream, NotFoundError, OpenAIError
from openai.types.responses import Response

from activities.heartbeat import Beat
from activities.model.errors import ReplyFault
from activities.store.blobs import BlobStore
from contracts.base import sha256_hex
from contracts.blob import whole_characters

LABEL_HEADER = "x-caisson-model"
"""A header by which an endpoint says that it is no language model; what it says is shown with the result."""

_TAIL = 300
_READ_OUT_SECONDS = 0.5
_POLL_SECONDS = (0.2, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Answer:
    """A whole response, and what the endpoint says of itself."""

    response: Response
    label: str | None


def make_client(api_key: str, base_url: str | None) -> AsyncOpenAI:
    """Return the SDK's client. Its own retries are off: Temporal retries, and shows it."""
    timeout = httpx2.Timeout(600, connect=10)
    return AsyncOpenAI(api_key=api_key, base_url=base_url, max_retries=0, timeout=timeout)


async def ask_streaming(client: AsyncOpenAI, request: dict[str, Any], key: str, timeout: float, beat: Beat) -> Answer:
    """Stream one response to its end. Raises ReplyFault when it has no end: a cut stream is no answer."""
    raw = await client.responses.with_raw_response.create(**request, stream=True, timeout=timeout, extra_headers=_idempotent(key))
    label = raw.headers.get(LABEL_HEADER)
    if "application/json" in raw.headers.get("content-type", ""):
        # Some compatible servers answer whole, whatever was asked, and leave fields out; `construct` is lenient, as in a stream.
        return Answer(_accept(Response.construct(**json.loads(await raw.http_response.aread()))), label)
    text, received = "", 0
    # Events as plain objects: the SDK tries each against fifty types, which for a long answer costs a second of this process.
    async with raw.parse(to=AsyncStream[object]) as stream:
        async for data in stream:
            event = cast("dict[str, Any]", data)
            kind = event.get("type")
            received += 1
            if kind in ("response.output_text.delta", "response.function_call_arguments.delta"):
                text = (text + event["delta"])[-_TAIL:]
            beat.details = {"events": received, "tail": whole_characters(text)}
            if kind in ("response.completed", "response.incomplete", "response.failed"):
                await _read_out(stream)
                return Answer(_accept(Response.construct(**event["response"])), label)
            if kind == "error":
                raise ReplyFault(f"the stream ended with an error: {event.get('message')}", event.get("code"))
    raise ReplyFault(f"the stream broke off after {received} events, before response.completed")


async def _read_out(stream: AsyncStream[object]) -> None:
    """Read what follows the last event, so that the connection is free for the next call, which then needs no new one.

    The answer is whole by now: whatever goes wrong here is no fault of it, and a server that keeps silent is not waited for.
    """
    with contextlib.suppress(TimeoutError, OpenAIError, httpx2.HTTPError, ValueError):
        async with asyncio.timeout(_READ_OUT_SECONDS):
            async for _ in stream:
                pass


async def ask_in_background(
    client: AsyncOpenAI, request: dict[str, Any], key: str, timeout: float, beat: Beat, blobs: BlobStore
) -> Answer:
    """Start a response on the service's side, or find the one that an earlier attempt started, and wait for its end.

    Its id is recorded as soon as it is known; so only a worker that dies between the service's answer and this record pays
    twice.
    """
    attempt = 0
    while await blobs.get_record(f"model-call/{key}/background/{attempt}/failed") is not None:
        attempt += 1
    name = f"model-call/{key}/background/{attempt}"
    known = await blobs.get_record(name)
    if known is None:
        raw = await client.responses.with_raw_response.create(
            **request, background=True, timeout=60, extra_headers=_idempotent(f"{key}/{attempt}")
        )
        started = cast("Response", raw.parse())
        known = await blobs.put_record(name, {"id": started.id, "label": raw.headers.get(LABEL_HEADER)})
    record = cast("dict[str, Any]", known)
    try:
        response = _accept(await asyncio.wait_for(_finished(client, record["id"], beat), timeout))
    except (ReplyFault, NotFoundError) as error:
        # This response will never be an answer; the next attempt asks anew instead of finding it again.
        await blobs.put_record(f"{name}/failed", {"id": record["id"]})
        raise ReplyFault(f"the background response {record['id']}: {error}", getattr(error, "code", None)) from error
    return Answer(response, record.get("label"))


async def _finished(client: AsyncOpenAI, response_id: str, beat: Beat) -> Response:
    polls = 0
    while True:
        response = await client.responses.retrieve(response_id, timeout=60)
        beat.details = {"response": response_id, "status": response.status, "polls": polls}
        if response.status not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(_POLL_SECONDS[min(polls, len(_POLL_SECONDS) - 1)])
        polls += 1


def _idempotent(key: str) -> dict[str, str]:
    # A key holds the run's id, which people choose freely; a header holds ASCII only.
    return {"Idempotency-Key": sha256_hex(key.encode("utf-8", "surrogatepass"))}


def _accept(response: Response) -> Response:
    """Return a response that is an answer; raise ReplyFault for one that failed."""
    if response.status in ("completed", "incomplete"):
        return response
    error = response.error
    reason = f"{error.code}: {error.message}" if error else f"its status is {response.status}"
    raise ReplyFault(f"the response failed: {reason}", error.code if error else None)
