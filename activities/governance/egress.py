"""The filtering proxy through which a sandbox with a network policy reaches the hosts it may, and nothing else.

It runs outside of the sandbox and accepts on a socket inside of it. It knows CONNECT for TLS, whose first message must be for
the host that was named, and plain HTTP, one request a connection. Names are resolved here, once: the addresses that were
checked are the ones connected to. What it does not do: look into TLS, limit rates, or go through a further proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import h11

from activities.governance.egress_http import (
    Target,
    check_request,
    onward_request,
    read_target,
    returned_response,
    without_data,
)
from activities.governance.egress_log import EgressLog, Entry
from activities.governance.egress_policy import EgressPolicy, Refused, normal_host
from activities.governance.egress_stream import CHUNK, Stream, answer, both, linger, next_event, read_hello
from activities.governance.egress_tls import ACCESS_DENIED

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> addresses as text; raises OSError when there are none."""

MAX_HEAD = 64 << 10


@dataclass(frozen=True)
class Limits:
    """Seconds, and connections at a time."""

    head: float = 30.0
    """For the request's head, and for TLS to begin."""
    connect: float = 10.0
    """For the name and the connection together."""
    idle: float = 600.0
    connections: int = 128


class Failed(Exception):
    """An allowed connection could not be made; with the HTTP status that fits."""

    def __init__(self, reason: str, status: int = 502) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status


async def resolve(host: str, port: int) -> Sequence[str]:
    """Ask this machine's resolver."""
    # As bytes: text would go through a codec that is loaded from a file when first used.
    found = await asyncio.get_running_loop().getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def is_own_address(address: str, port: int) -> bool:
    """Tell whether an address is one of this machine, also a public one: then source and destination are the same."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((address, port))  # sends nothing
        return bool(probe.getsockname()[0] == address)
    return False


class Proxy:
    """Serves one sandbox."""

    def __init__(
        self, policy: EgressPolicy, log: EgressLog, *, resolver: Resolver = resolve, limits: Limits | None = None
    ) -> None:
        self._policy = policy
        self._log = log
        self._resolve = resolver
        self._limits = limits or Limits()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Begin to accept on a listening socket."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=CHUNK)

    async def stop(self) -> None:
        """Accept no more, and end what goes on, with its lines in the log."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._handle(Stream(reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, client: Stream) -> None:
        entry = Entry()
        conversation = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        try:
            if len(self._tasks) > self._limits.connections:
                raise Refused(f"there are {self._limits.connections} connections already; close some", 503)
            async with asyncio.timeout(self._limits.head):
                request = await next_event(conversation, client)
            if isinstance(request, h11.Request):
                await self._serve(entry, conversation, client, request)
        except Refused as refusal:
            self._log.refuse(entry, refusal.reason)
            await answer(conversation, client, refusal.status, refusal.reason)
        except h11.RemoteProtocolError as error:
            if not entry.allowed:
                self._log.refuse(entry, f"not a proper request: {without_data(error)}")
            await answer(conversation, client, error.error_status_hint, f"not a proper request: {error}")
        except Failed as failure:
            self._log.refuse(entry, failure.reason, "failed")
            await answer(conversation, client, failure.status, failure.reason)
        except (OSError, EOFError, h11.LocalProtocolError) as error:
            # The client is gone, or was too slow (TimeoutError is an OSError); there is nobody to tell.
            if not entry.allowed and entry.method is not None:
                self._log.refuse(entry, f"the connection broke: {type(error).__name__}", "failed")
        except asyncio.CancelledError:
            client.writer.transport.abort()
            raise
        finally:
            self._log.close(entry)
            await client.close()

    async def _serve(self, entry: Entry, conversation: h11.Connection, client: Stream, request: h11.Request) -> None:
        """Check one request and carry it out."""
        tls = request.method == b"CONNECT"
        entry.method = "CONNECT" if tls else None
        target = read_target(request)
        entry.method, entry.host, entry.port = target.method, target.host, target.port
        host = normal_host(target.host)
        entry.host = host
        check_request(request, target)
        self._policy.check_target(host, target.port, tls=tls)
        server = await self._connect(entry, host, target.port)
        try:
            if tls:
                await self._tunnel(entry, conversation, client, server, host)
            else:
                self._allow(entry)
                await self._exchange(entry, conversation, client, server, onward_request(request, target), target)
        except asyncio.CancelledError:
            server.writer.transport.abort()
            raise
        finally:
            await server.close()

    def _allow(self, entry: Entry) -> None:
        if not self._log.allow(entry):
            raise Refused("the record of this sandbox's connections is full, so no more can be made")

    async def _connect(self, entry: Entry, host: str, port: int) -> Stream:
        """Resolve a name once, check every address, and connect to one of exactly these."""
        try:
            async with asyncio.timeout(self._limits.connect) as limit:
                try:
                    addresses = await self._resolve(host, port)
                except OSError as error:
                    raise Failed(f"host {host} cannot be resolved: {error.strerror or error}") from error
                self._policy.check_addresses(host, addresses)
                fault = "it has no address"
                for address in addresses:
                    entry.address = address
                    if is_own_address(address, port) and not self._policy.is_opened(address):
                        raise Refused(f"host {host} is allowed by name, but {address} is an address of the sandbox's own host")
                    left = (limit.when() or 0.0) - asyncio.get_running_loop().time()
                    try:
                        # An address is not resolved again. Each gets its share of the time, or the first would use up all.
                        async with asyncio.timeout(max(left / 2, 1.0) if address != addresses[-1] else None):
                            reader, writer = await asyncio.open_connection(address, port, limit=CHUNK)
                        return Stream(reader, writer)
                    except OSError as error:
                        fault = error.strerror or type(error).__name__
        except TimeoutError as error:
            raise Failed(f"host {host} did not answer within {self._limits.connect:g} seconds", 504) from error
        raise Failed(f"host {host} could not be reached: {fault}")

    async def _tunnel(self, entry: Entry, conversation: h11.Connection, client: Stream, server: Stream, host: str) -> None:
        """Let TLS for `host` through."""
        # CONNECT has no body, so the end of the message is there at once, and what follows belongs to the tunnel.
        while conversation.next_event() is not h11.PAUSED:
            pass
        head = conversation.send(h11.Response(status_code=200, headers=[], reason=b"Connection established"))
        await client.send(head or b"")
        try:
            async with asyncio.timeout(self._limits.head):
                hello = await read_hello(conversation.trailing_data[0], client, host)
            self._allow(entry)
        except (Refused, TimeoutError, EOFError) as error:
            reason = error.reason if isinstance(error, Refused) else "no TLS began after CONNECT"
            self._log.refuse(entry, reason)
            with contextlib.suppress(OSError):
                await client.send(ACCESS_DENIED)
                await linger(client)
            return

        async def up() -> None:
            await server.send(hello)
            entry.up += len(hello)
            while data := await client.reader.read(CHUNK):
                limit.reschedule(loop.time() + self._limits.idle)
                await server.send(data)
                entry.up += len(data)
            server.writer.write_eof()

        async def down() -> None:
            while data := await server.reader.read(CHUNK):
                limit.reschedule(loop.time() + self._limits.idle)
                await client.send(data)
                entry.down += len(data)
            client.writer.write_eof()

        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._limits.idle) as limit:
            await both(up(), down())

    async def _exchange(
        self,
        entry: Entry,
        conversation: h11.Connection,
        client: Stream,
        server: Stream,
        request: h11.Request,
        target: Target,
    ) -> None:
        """Carry out one plain request. Both directions go on at the same time, since a server may answer early."""
        onward = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD)

        async def forward(event: h11.Event) -> None:
            data = onward.send(event) or b""
            entry.up += len(data)
            await server.send(data)

        async def back(event: h11.Event) -> None:
            data = conversation.send(event) or b""
            entry.down += len(data)
            await client.send(data)

        async def up() -> None:
            with contextlib.suppress(OSError):  # a server may answer and close without having read all
                await forward(request)
                while True:
                    event = await next_event(conversation, client)
                    limit.reschedule(loop.time() + self._limits.idle)
                    if isinstance(event, h11.Data):
                        await forward(h11.Data(data=event.data))
                    elif isinstance(event, h11.EndOfMessage):
                        await forward(h11.EndOfMessage())  # its trailers are dropped
                        return
                    else:
                        raise EOFError

        async def down() -> None:
            while True:
                try:
                    event = await next_event(onward, server)
                except h11.RemoteProtocolError as error:
                    raise ConnectionAbortedError(str(error)) from error
                limit.reschedule(loop.time() + self._limits.idle)
                if isinstance(event, h11.Response):
                    await back(returned_response(event))
                elif isinstance(event, h11.Data):
                    await back(h11.Data(data=event.data))
                elif isinstance(event, h11.EndOfMessage):
                    await back(h11.EndOfMessage())
                    return
                elif not isinstance(event, h11.InformationalResponse):
                    raise ConnectionAbortedError("it closed the connection")

        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.idle) as limit:
                await both(up(), down(), second_ends=True)
        except (OSError, h11.LocalProtocolError) as error:
            if conversation.our_state is h11.SEND_RESPONSE:
                what = "no answer in time" if isinstance(error, TimeoutError) else f"no proper answer: {error}"
                await answer(conversation, client, 502, f"host {target.host} gave {what}")
            return
        await linger(client)
