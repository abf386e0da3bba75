"""Asking the model endpoint through the OpenAI SDK: streamed, or in the background so that a retry can pick it up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import httpx2
from openai import APIStatusError, AsyncOpenAI, AsyncStream, OpenAIError
from openai._streaming import ServerSentEvent, SSEDecoder

from activities.heartbeat import Beat
from activities.model.errors import ReplyFault, read_error
from activities.model.shown import shortened
from activities.store.blobs import BlobStore
from contracts.base import sha256_hex
from contracts.blob import whole_characters

LABEL_HEADER = "x-caisson-model"
"""A header by which an endpoint says that it is no language model; what it says is shown with the result."""

_CONNECT_SECONDS = 10
_TAIL = 300
_LONGEST_LABEL = 200
_LOOKED_AT = 4096
_READ_OUT_SECONDS = 0.5
_POLL_SECONDS = (0.2, 0.5, 1.0, 2.0)
_PENDING = ("queued", "in_progress")
_GONE = (404, 410)
_LAST_EVENTS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
"""The events that end a stream, and the status of the response that they carry."""


@dataclass(frozen=True)
class Answer:
    """A whole response as the endpoint wrote it, and what the endpoint says of itself."""

    response: dict[str, Any]
    label: str | None


class _Decoder(SSEDecoder):
    """Leaves out events without data, such as `retry: 3000` alone: the SDK takes each for an answer that is no JSON."""

    def decode(self, line: str) -> ServerSentEvent | None:
        event = super().decode(line)
        return event if event is not None and event.data.strip() else None


class _Client(AsyncOpenAI):
    def _make_sse_decoder(self) -> SSEDecoder:
        return _Decoder()


def make_client(api_key: str, base_url: str | None) -> AsyncOpenAI:
    """Return the SDK's client. Its own retries are off: Temporal retries, and shows it."""
    return _Client(api_key=api_key, base_url=base_url, max_retries=0, timeout=_within(600))


async def ask_streaming(client: AsyncOpenAI, request: dict[str, Any], key: str, timeout: float, beat: Beat) -> Answer:
    """Stream one response to its end, in `timeout` seconds at most, however lively the connection is.

    Raises ReplyFault when it has no end: a cut stream is no answer.
    """
    try:
        async with asyncio.timeout(timeout) as limit:
            raw = await client.responses.with_raw_response.create(
                **request, stream=True, timeout=_within(timeout), extra_headers=_idempotent(key)
            )
            content_type = raw.headers.get("content-type", "").lower()
            if "application/json" in content_type:
                # Some compatible servers answer whole, whatever was asked.
                return Answer(_accept(await _object(raw.http_response)), _label(raw.headers))
            async with raw.parse(to=AsyncStream[object]) as stream:
                response = await _last(stream, content_type, beat)
                limit.reschedule(None)
                await _read_out(stream)
                return Answer(_accept(response), _label(raw.headers))
    except TimeoutError:
        raise _too_late(timeout) from None


async def _last(stream: AsyncStream[object], content_type: str, beat: Beat) -> dict[str, Any]:
    """Follow a stream, and return the response that its last event carries."""
    text, received = "", 0
    items: dict[int, Any] = {}
    # Events as plain objects: the SDK tries each against fifty types, which for a long answer costs a second of this process.
    async for data in stream:
        received += 1
        event = data if isinstance(data, dict) else {}
        kind, delta, place = str(event.get("type")), event.get("delta"), event.get("output_index")
        if kind in ("response.output_text.delta", "response.function_call_arguments.delta") and isinstance(delta, str):
            text = (text + delta)[-_TAIL:]
        beat.details = {"events": received, "tail": whole_characters(text)}
        if kind == "response.output_item.done":
            items[place if isinstance(place, int) else len(items)] = event.get("item")
        elif kind in _LAST_EVENTS:
            response = event.get("response")
            return _filled(response if isinstance(response, dict) else {}, items, _LAST_EVENTS[kind])
        elif kind == "error":
            said = read_error({name: value for name, value in event.items() if name != "type"})
            raise ReplyFault(f"the stream ended with an error: {said.words or 'it says nothing'}", *said.codes)
    form = (
        "" if "text/event-stream" in content_type else f"; its content type is {content_type or 'missing'}, not text/event-stream"
    )
    raise ReplyFault(f"the stream broke off after {received} events, before response.completed{form}")


def _filled(response: dict[str, Any], items: Mapping[int, Any], status: str) -> dict[str, Any]:
    """Return a response with what some servers only tell in events: the items, and which event it was."""
    output = response.get("output") or [items[place] for place in sorted(items)]
    # Without any output the event alone is no answer.
    return {**response, "output": output, "status": response.get("status") or (status if output else None)}


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
    record = cast("dict[str, Any] | None", await blobs.get_record(name))
    response: dict[str, Any] = {"status": _PENDING[0]}
    if record is None:
        raw = await client.responses.with_raw_response.create(
            **request, background=True, timeout=60, extra_headers=_idempotent(f"{key}/{attempt}")
        )
        response = await _object(raw.http_response)
        record = {"id": response.get("id"), "label": _label(raw.headers)}
        if record["id"] and isinstance(record["id"], str):
            record = cast("dict[str, Any]", await blobs.put_record(name, record))
        elif response.get("status") in _PENDING:
            raise ReplyFault("the endpoint named no id of the background response, so that nobody can ask for it")
    if response.get("status") in _PENDING:
        try:
            async with asyncio.timeout(timeout):
                response = await _finished(client, record["id"], beat)
        except TimeoutError:
            # The service goes on with it, and the next attempt waits for the same response.
            raise _too_late(timeout) from None
    try:
        return Answer(_accept(response), record.get("label"))
    except ReplyFault as fault:
        # This response will never be an answer; the next attempt asks anew instead of finding it again.
        await blobs.put_record(f"{name}/failed", {"id": record["id"]})
        raise ReplyFault(f"the background response {record['id']}: {fault}", *fault.codes) from None


async def _finished(client: AsyncOpenAI, response_id: str, beat: Beat) -> dict[str, Any]:
    """Wait for the end of a response. One that the service does not know any more has failed."""
    polls = 0
    while True:
        try:
            raw = await client.responses.with_raw_response.retrieve(response_id, timeout=60)
        except APIStatusError as error:
            if error.status_code not in _GONE:
                raise
            # Without the code: nothing is wrong with the request, and the next attempt makes it anew.
            return {"status": "failed", "error": {"message": error.message}}
        response = await _object(raw.http_response)
        beat.details = {"response": response_id, "status": str(response.get("status")), "polls": polls}
        if response.get("status") not in _PENDING:
            return response
        await asyncio.sleep(_POLL_SECONDS[min(polls, len(_POLL_SECONDS) - 1)])
        polls += 1


def _idempotent(key: str) -> dict[str, str]:
    # A key holds the run's id, which people choose freely; a header holds ASCII only.
    return {"Idempotency-Key": sha256_hex(key.encode("utf-8", "surrogatepass"))}


def _within(seconds: float) -> httpx2.Timeout:
    return httpx2.Timeout(seconds, connect=_CONNECT_SECONDS)


def _too_late(seconds: float) -> ReplyFault:
    return ReplyFault(
        f"no whole answer within {seconds:g} seconds; raise model_settings.timeout_seconds if the model needs longer"
    )


def _label(headers: Mapping[str, str]) -> str | None:
    label = headers.get(LABEL_HEADER)
    return None if label is None else shortened(label, _LONGEST_LABEL)


async def _object(reply: httpx2.Response) -> dict[str, Any]:
    """Return a reply that is one JSON object. Raises ReplyFault saying what it is instead."""
    body = await reply.aread()
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        form = reply.headers.get("content-type", "missing")
        begins = body[:_LOOKED_AT].decode(errors="replace")
        raise ReplyFault(f"the reply is not a JSON object; its content type is {form}, and it begins: {begins}")
    return value


def _accept(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response that is an answer; raise ReplyFault for one that failed."""
    status = response.get("status") or ("completed" if response.get("output") and not response.get("error") else None)
    if status in ("completed", "incomplete"):
        return {**response, "status": status}
    said = read_error(response.get("error"))
    reason = ": ".join(part for part in (*said.codes[:1], said.words) if part)
    raise ReplyFault(f"the response failed: {reason or f'its status is {status}'}", *said.codes)
