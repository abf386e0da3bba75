"""Writing a response to a connection, with the faults a scenario asks for, and knowing what arrived.

The ASGI server gives no way to reset a connection or to learn that bytes left the process, and both matter here: a model call
counts as answered only when `response.completed` was written. So the transport itself is used for these two.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, MutableMapping
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from workers.scripted_model.generation import Generation
from workers.scripted_model.replies import TERMINAL_EVENTS, encode_event
from workers.scripted_model.scenario import ConnectionFault, CutFault, CutMidEventFault, DisconnectFault, Fault, HangFault

_FLUSH_LOOK_S = 0.002
_NOTICE_S = 1.0


class Transport(Protocol):
    """What is needed of an asyncio transport."""

    def abort(self) -> None:
        """Reset the connection."""

    def is_closing(self) -> bool:
        """Tell whether the connection is closed or closing."""

    def get_write_buffer_size(self) -> int:
        """Return how many bytes have not left the process."""


# By the peer's address: what the ASGI scope tells of the connection.
Connections = MutableMapping[tuple[str, int], Transport]


class Delivery(Response):
    """An answer that follows a generation: as a stream from event number `first` on, or as one JSON body at its end."""

    def __init__(
        self,
        generation: Generation,
        connections: Connections,
        settle: Callable[[str], None],
        *,
        stream: bool,
        first: int = 0,
        fault: Fault | None = None,
    ) -> None:
        super().__init__()
        self._generation = generation
        self._connections = connections
        self._tell = settle
        self._settled = False
        self._stream = stream
        self._first = first
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = _Wire(send, self._connections[tuple(scope["client"])], "text/event-stream" if self._stream else "application/json")
        sending = asyncio.create_task(self._send(wire))
        watching = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait([sending, watching], return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                # A client that leaves while a fault is being played, such as a hang, has met the fault.
                self._settle(self._fault.kind if self._fault is not None and wire.fault_played else "aborted_by_client")
        finally:
            if wire.gone:
                # The server complains of an unfinished answer unless it has noticed that the connection is broken.
                await asyncio.wait([watching], timeout=_NOTICE_S)
            for task in (sending, watching):
                task.cancel()
            await asyncio.wait([sending, watching])
            if not self._generation.background:
                await self._generation.cancel()
        if not sending.cancelled():
            sending.result()

    def _settle(self, outcome: str) -> None:
        # A client may leave between the last event and the end of the body: the first outcome is the true one.
        if not self._settled:
            self._settled = True
            self._tell(outcome)

    async def _send(self, wire: _Wire) -> None:
        outcome = await (self._send_stream(wire) if self._stream else self._send_body(wire))
        # Settled before the end of the body is sent: whoever has read the whole answer finds it in the journal.
        self._settle(outcome)
        if not wire.gone:
            await wire.end()

    async def _send_stream(self, wire: _Wire) -> str:
        sent = 0
        async for event in self._generation.follow(self._first):
            terminal = event["type"] in TERMINAL_EVENTS
            # A fault comes before the terminal event at the latest, or it would be no fault.
            if self._fault_is_due(sent, terminal):
                return await self._play(wire, encode_event(event))
            await wire.write(encode_event(event))
            sent += 1
            if terminal:
                return await self._outcome(wire, str(event["type"]))
        return "cancelled"

    async def _send_body(self, wire: _Wire) -> str:
        kind = "cancelled"
        async for event in self._generation.follow():
            kind = str(event["type"])
            if self._fault_is_due(0, True):
                break
        body = json.dumps(self._generation.response).encode()
        if self._fault_is_due(0, True):
            return await self._play(wire, body)
        if kind == "error" and not self._generation.background:
            wire.status = 500
            body = json.dumps({"error": {**_error_of(self._generation), "type": "server_error", "param": None}}).encode()
        await wire.write(body)
        return await self._outcome(wire, kind)

    def _fault_is_due(self, sent: int, last: bool) -> bool:
        return isinstance(self._fault, ConnectionFault) and (last or sent >= self._fault.after_events)

    async def _play(self, wire: _Wire, due: bytes) -> str:
        """Play a fault of the connection where the bytes `due` were to be sent."""
        fault = self._fault
        wire.fault_played = True
        if isinstance(fault, CutMidEventFault) or (isinstance(fault, CutFault) and not self._stream):
            await wire.write(due[: len(due) // 2])
        elif isinstance(fault, CutFault):
            await wire.write(b"")
        elif isinstance(fault, HangFault):
            await asyncio.sleep(fault.seconds)
            wire.abort()
        elif isinstance(fault, DisconnectFault):
            await wire.flushed()
            wire.abort()
        return "" if fault is None else fault.kind

    async def _outcome(self, wire: _Wire, kind: str) -> str:
        if not await wire.flushed():
            return "aborted_by_client"
        return {"response.completed": "answered", "response.incomplete": "answered", "error": "error_event"}.get(
            kind, "failed" if kind == "response.failed" else "cancelled"
        )


class _Wire:
    """One answer on one connection."""

    def __init__(self, send: Send, transport: Transport, media_type: str) -> None:
        self.status = 200
        self.fault_played = False
        self._send = send
        self._transport = transport
        self._media_type = media_type
        self._started = False

    @property
    def gone(self) -> bool:
        return self._transport.is_closing()

    async def write(self, data: bytes) -> None:
        if not self._started:
            self._started = True
            headers = [(b"content-type", self._media_type.encode()), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": self.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def flushed(self) -> bool:
        """Wait until every byte has left the process; return False when the connection broke before."""
        while not self.gone:
            if self._transport.get_write_buffer_size() == 0:
                return True
            await asyncio.sleep(_FLUSH_LOOK_S)
        return False

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def abort(self) -> None:
        self._transport.abort()


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error_of(generation: Generation) -> dict[str, object]:
    error = generation.response.get("error")
    return error if isinstance(error, dict) else {}
