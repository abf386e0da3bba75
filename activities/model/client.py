"""Asking the model endpoint through the OpenAI SDK: streamed, or in the background so that a retry can pick it up."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any, cast

import httpx2
from openai import AsyncOpenAI, AsyncStream, NotFoundError
from openai.types.responses import Response, ResponseStreamEvent

from activities.heartbeat import Beat
from activities.model.errors import ReplyFault
from activities.store.blobs import BlobStore

LABEL_HEADER = "x-caisson-model"
"""A header by which an endpoint says that it is no language model; what it says is shown with the result."""

_TAIL = 300
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
    stream = cast(
        "AsyncStream[ResponseStreamEvent]",
        await client.responses.create(**request, stream=True, timeout=timeout, extra_headers={"Idempotency-Key": key}),
    )
    label = stream.response.headers.get(LABEL_HEADER)
    if "application/json" in stream.response.headers.get("content-type", ""):
        # Some compatible servers answer whole, whatever was asked.
        return Answer(_accept(Response.model_validate(json.loads(await stream.response.aread()))), label)
    text, received = "", 0
    async with stream:
        async for event in stream:
            received += 1
            if event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
                text = (text + event.delta)[-_TAIL:]
            beat.details = {"events": received, "tail": text}
            if event.type in ("response.completed", "response.incomplete", "response.failed"):
                return Answer(_accept(event.response), label)
            if event.type == "error":
                raise ReplyFault(f"the stream ended with an error: {event.message}", event.code)
    raise ReplyFault(f"the stream broke off after {received} events, before response.completed")


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
            **request, background=True, timeout=60, extra_headers={"Idempotency-Key": f"{key}/{attempt}"}
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


def _accept(response: Response) -> Response:
    """Return a response that is an answer; raise ReplyFault for one that failed."""
    if response.status in ("completed", "incomplete"):
        return response
    error = response.error
    reason = f"{error.code}: {error.message}" if error else f"its status is {response.status}"
    raise ReplyFault(f"the response failed: {reason}", error.code if error else None)
