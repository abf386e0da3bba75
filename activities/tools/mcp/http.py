"""A server that is reached by streamable HTTP. Its headers go to the address that the operator gave, and nowhere else."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from activities.tools.mcp.flight import MAX_REPLY, Line, flight
from activities.tools.mcp.servers import Connection

CONNECT_SECONDS = 5.0
_HOST = re.compile(r"https?://[A-Za-z0-9.:\[\]-]{1,100}(?=/|\?|#|$)")


class Refused(httpx2.TransportError):
    """The server, or its answer, is not taken."""


@contextlib.asynccontextmanager
async def http_streams(connection: Connection, line: Line) -> AsyncIterator[tuple[Any, Any]]:
    """Connect to a server. What goes wrong with the connection ends it, as an ExceptionGroup, with `line.fault` set."""
    assert connection.url is not None  # noqa: S101 - it is of this kind
    timeout = httpx2.Timeout(CONNECT_SECONDS, read=connection.seconds + CONNECT_SECONDS, write=30)
    headers = {**dict(connection.headers), "user-agent": "caisson", "accept-encoding": "identity"}
    # With a transport of its own the client takes no proxy from the environment; without its trust no .netrc either.
    transport = _Guarded(httpx2.AsyncHTTPTransport(), line)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, transport=transport, trust_env=False) as client,
        streamable_http_client(connection.url, http_client=client, max_sse_event_size=MAX_REPLY) as streams,
    ):
        yield streams


class _Guarded(httpx2.AsyncBaseTransport):
    """Follows no redirect, since all headers would go along; bounds replies; notes what went wrong."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, line: Line) -> None:
        self._inner = inner
        self._line = line

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        sent = flight.get()
        try:
            response = await self._inner.handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout):
            if sent is not None:
                sent.is_unsent = True
            self._line.fault = "it cannot be reached"
            raise
        except httpx2.TransportError as error:
            self._line.fault = f"the connection failed ({type(error).__name__})"
            raise
        if sent is not None:
            sent.status = response.status_code
        fault = _fault(response)
        if fault is not None and request.method == "POST":
            await response.aclose()
            self._line.fault = fault
            if sent is not None:
                sent.is_unsent = response.status_code >= 300  # it was turned away at the door
            raise Refused(fault)
        if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            assert isinstance(response.stream, httpx2.AsyncByteStream)  # noqa: S101 - of an asynchronous transport
            response.stream = _Bounded(response.stream)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


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

    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in self._inner:
            size += len(chunk)
            if size > MAX_REPLY:
                raise httpx2.StreamError(f"the reply is over {MAX_REPLY >> 20} MB")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()
