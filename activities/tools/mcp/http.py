"""A server that is reached by streamable HTTP. Its headers go to the address that the operator gave, and nowhere else."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client
from mcp_types import JSONRPCError, RequestId

from activities.tools.mcp.events import Events
from activities.tools.mcp.flight import MAX_REPLY, NOT_OF_PROTOCOL, Flight, flight
from activities.tools.mcp.servers import Connection
from activities.tools.mcp.wire import OF_SERVER, fault, reply_to, written

CONNECT_SECONDS = 5.0
_HOST = re.compile(r"https?://[A-Za-z0-9.:\[\]-]{1,100}(?=/|\?|#|$)")
_JSON = "application/json"
_EVENTS = "text/event-stream"


@contextlib.asynccontextmanager
async def http_streams(connection: Connection) -> AsyncIterator[tuple[Any, Any]]:
    """Connect to a server. What goes wrong with one request is the answer to that request, and ends nothing else."""
    assert connection.url is not None  # noqa: S101 - it is of this kind
    timeout = httpx2.Timeout(CONNECT_SECONDS, read=connection.seconds + CONNECT_SECONDS, write=30)
    headers = {**dict(connection.headers), "user-agent": "caisson", "accept-encoding": "identity"}
    # With a transport of its own the client takes no proxy from the environment; without its trust no .netrc either.
    transport = _Guarded(httpx2.AsyncHTTPTransport())
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, transport=transport, trust_env=False) as client,
        streamable_http_client(connection.url, http_client=client, max_sse_event_size=2 * MAX_REPLY) as streams,
    ):
        yield streams


class _Guarded(httpx2.AsyncBaseTransport):
    """Follows no redirect, since all headers would go along; bounds and reads replies.

    The SDK ends a whole session, with all that others have asked through it, for what a request raises: so none does.
    """

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method != "POST":
            response = await self._inner.handle_async_request(request)
            return _with(response, Events(response, None) if _kind(response) == _EVENTS else _Bounded(response))
        number = _number(request)
        sent = (number is not None and flight.get()) or Flight()
        try:
            response = await self._inner.handle_async_request(request)
            sent.status = response.status_code
            return await self._answered(response, number, sent)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout):
            sent.is_unsent = True
            return _failed(request, number, "it cannot be reached")
        except httpx2.TransportError as error:
            return _failed(request, number, f"the connection failed ({type(error).__name__})")
        except httpx2.StreamError as error:
            return _failed(request, number, str(error))

    async def _answered(self, response: httpx2.Response, number: RequestId | None, sent: Flight) -> httpx2.Response:
        wrong = _fault(response)
        if wrong is not None:
            await response.aclose()
            sent.is_unsent = response.status_code >= 300  # it was turned away at the door
            return _failed(response, number, wrong)
        if number is None:
            return _with(response, _Bounded(response))
        kind, status = _kind(response), response.status_code
        is_good = status < 300 and status != HTTPStatus.ACCEPTED  # nothing follows that
        if is_good and kind == _EVENTS:
            return _with(response, Events(response, number))
        if kind == _JSON and (is_good or status >= 400):
            reply = reply_to(number, await _whole(response))
            is_told = is_good or (isinstance(reply, JSONRPCError) and reply.error.data == OF_SERVER)
            return _with(response, httpx2.ByteStream(written(reply) if is_told else b"{}"))
        if status < 300:
            await response.aclose()
            return _failed(response, number, f"{NOT_OF_PROTOCOL} (HTTP {status}, without JSON)")
        return _with(response, _Bounded(response))

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _whole(response: httpx2.Response) -> bytes:
    body = _Bounded(response)
    async with contextlib.aclosing(body):
        return b"".join([chunk async for chunk in body])


def _number(request: httpx2.Request) -> RequestId | None:
    """Return the id under which a request of the protocol is asked; None for what has no answer."""
    message = json.loads(request.content)
    number: RequestId | None = message.get("id") if "method" in message else None
    return number


def _kind(response: httpx2.Response) -> str:
    kind: str = response.headers.get("content-type", "")
    return kind.partition(";")[0].strip().lower()


def _failed(of: httpx2.Request | httpx2.Response, number: RequestId | None, brief: str) -> httpx2.Response:
    """Answer in place of the server."""
    if number is None:
        return httpx2.Response(202)
    return httpx2.Response(200, headers={"content-type": _JSON}, stream=httpx2.ByteStream(written(fault(number, brief))))


def _with(response: httpx2.Response, body: httpx2.AsyncByteStream) -> httpx2.Response:
    response.stream = body
    return response


def _fault(response: httpx2.Response) -> str | None:
    status = response.status_code
    if 300 <= status < 400:
        where = _HOST.match(response.headers.get("location", ""))
        place = f" to {where[0]}" if where else ""
        return f"it answers with a redirect{place}, which is not followed; the operator must give the address itself"
    if status in (401, 403, 407):
        return f"it answers with HTTP {status} {HTTPStatus(status).phrase}: the operator must give it a credential that it takes"
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        return "it answers in an encoding that was not asked for"
    return None


class _Bounded(httpx2.AsyncByteStream):
    """A body of bounded length. One that goes over it is a fault of this reply alone."""

    def __init__(self, response: httpx2.Response) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)  # noqa: S101 - of an asynchronous transport
        self._inner = response.stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._inner:
            size += len(chunk)
            if size > MAX_REPLY:
                raise httpx2.StreamError(f"its reply is over {MAX_REPLY >> 20} MB")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()
