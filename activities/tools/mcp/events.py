"""A stream of events of a server, made anew: only messages of the protocol are in it, and a fault for a reply that is none."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
from mcp_types import JSONRPCError, JSONRPCResponse, RequestId

from activities.tools.mcp.flight import MAX_REPLY, NOT_OF_PROTOCOL
from activities.tools.mcp.wire import fault, fit, read, written


class Events(httpx2.AsyncByteStream):
    """The events of one response. `number` is the request that they answer; None where they answer none."""

    def __init__(self, response: httpx2.Response, number: RequestId | None) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)  # noqa: S101 - of an asynchronous transport
        self._inner = response.stream
        self._number = number
        self._is_answered = False
        self._can_go_on = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        lines: list[bytes] = []
        size = 0
        try:
            async for line in self._lines():
                size += len(line)
                if size > MAX_REPLY:
                    raise httpx2.StreamError(f"its reply is over {MAX_REPLY >> 20} MB")
                if line and not line.startswith(b":"):
                    lines.append(line)
                elif not line:
                    yield self._event(lines)
                    lines, size = [], 0
            if lines:
                yield self._event(lines)
        except httpx2.StreamError as error:
            yield self._fault(str(error))
        except httpx2.TransportError as error:
            if self._number is None or self._can_go_on:
                raise
            yield self._fault(f"the connection failed ({type(error).__name__})")
        if not self._can_go_on:
            yield self._fault("the connection was lost")

    async def _lines(self) -> AsyncIterator[bytes]:
        buffer, is_first, follows_return = bytearray(), True, False
        async for chunk in self._inner:
            # A line may end with CR, LF or both, also where a chunk ends.
            part = chunk[1:] if follows_return and chunk.startswith(b"\n") else chunk
            follows_return = chunk.endswith(b"\r")
            first, *more = part.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            buffer += first
            if len(buffer) > MAX_REPLY:
                raise httpx2.StreamError(f"its reply is over {MAX_REPLY >> 20} MB")
            for rest in more:
                yield bytes(buffer).removeprefix(b"\xef\xbb\xbf") if is_first else bytes(buffer)
                buffer, is_first = bytearray(rest), False
        if buffer:
            yield bytes(buffer)

    def _event(self, lines: list[bytes]) -> bytes:
        parts = [line.partition(b":") for line in lines]
        kind = next((value.strip() for name, _, value in reversed(parts) if name == b"event"), b"")
        data = b"\n".join(value.removeprefix(b" ") for name, _, value in parts if name == b"data")
        self._can_go_on = self._can_go_on or any(name == b"id" and value.strip() for name, _, value in parts)
        others = b"".join(b"".join(part) + b"\n" for part in parts if part[0] in (b"id", b"retry"))
        if kind not in (b"", b"message") or not data.strip():
            return others + (b"data:\n\n" if others else b"")
        messages = read(data, [] if self._number is None else [self._number])
        if not messages and self._number is not None and b'"method"' not in data:
            messages = [fault(self._number, NOT_OF_PROTOCOL)]
        self._is_answered = self._is_answered or any(isinstance(one, (JSONRPCResponse, JSONRPCError)) for one in messages)
        # The place from which a stream goes on is that after all of them.
        *before, last = [b"data: " + written(fit(message)) + b"\n\n" for message in messages] or [b"data:\n\n" if others else b""]
        return b"".join(before) + others + last

    def _fault(self, brief: str) -> bytes:
        """Stand in for an answer that does not come, if one is waited for."""
        if self._number is None or self._is_answered:
            return b""
        self._is_answered = True
        return b"data: " + written(fault(self._number, brief)) + b"\n\n"

    async def aclose(self) -> None:
        await self._inner.aclose()
