"""The two sides of a proxied connection: reading from them, writing to them, and closing them so that nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from dataclasses import dataclass

import h11

from activities.governance.egress_policy import Refused, normal_host
from activities.governance.egress_tls import MAX_HELLO, read_client_hello

CHUNK = 16 << 10
SEND_REST = 5.0
"""Seconds that a closing side has to take what is left for it."""
LINGER = 1.0
"""Seconds that a client has to read an answer and hang up."""


@dataclass
class Stream:
    """One side of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Write, and wait while the other side is slow."""
        if data:
            self.writer.write(data)
            await self.writer.drain()

    async def close(self) -> None:
        """Close once what was written is sent, or without that when it takes long."""
        self.writer.close()
        with contextlib.suppress(OSError):
            async with asyncio.timeout(SEND_REST):
                await self.writer.wait_closed()
        self.writer.transport.abort()


async def both(first: Awaitable[None], second: Awaitable[None], *, second_ends: bool = False) -> None:
    """Run both to their end, or until one fails; with `second_ends`, until the second is done."""
    tasks = [asyncio.ensure_future(first), asyncio.ensure_future(second)]
    try:
        pending = set(tasks)
        while pending and not (second_ends and tasks[1].done()):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def next_event(conversation: h11.Connection, stream: Stream) -> object:
    """Return the next part of a message. Raises h11.RemoteProtocolError."""
    while True:
        event = conversation.next_event()
        if event is not h11.NEED_DATA:
            return event
        if conversation.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[])
            await stream.send(conversation.send(go_on) or b"")
        conversation.receive_data(await stream.reader.read(CHUNK))


async def read_hello(first: bytes, client: Stream, host: str) -> bytes:
    """Read the first message of TLS and check that it is for `host`; return the bytes read. Raises Refused and EOFError."""
    data = first
    while True:
        try:
            hello = read_client_hello(data)
        except ValueError as error:
            raise Refused(f"CONNECT to {host} is for TLS only: {error}") from error
        if hello is not None:
            break
        if len(data) > MAX_HELLO + CHUNK:
            raise Refused(f"CONNECT to {host} is for TLS only: the ClientHello is too long")
        more = await client.reader.read(CHUNK)
        if not more:
            raise EOFError
        data += more
    if hello.encrypted:
        raise Refused(f"TLS to {host} uses an encrypted ClientHello, so its real host cannot be checked; switch ECH off")
    if hello.server_name is not None and normal_host(hello.server_name) != host:
        raise Refused(f"CONNECT was to {host}, but its TLS is for {normal_host(hello.server_name)}")
    return data


async def answer(conversation: h11.Connection, client: Stream, status: int, reason: str) -> None:
    """Tell the client in words that it gets nothing, if it can still be told."""
    if conversation.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
        return
    # Many programs show the status line only, so the words are there too.
    phrase = "".join(c if c.isascii() and c.isprintable() else "?" for c in reason).strip()
    body = phrase.encode() + b"\n"
    headers = [
        ("Content-Type", "text/plain; charset=utf-8"),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
        ("X-Egress-Refusal", phrase),
    ]
    response = h11.Response(status_code=status, headers=headers, reason=phrase[:400].encode())
    with contextlib.suppress(OSError, h11.LocalProtocolError):
        await client.send(conversation.send(response) or b"")
        await client.send(conversation.send(h11.Data(data=body)) or b"")
        await linger(client)


async def linger(client: Stream) -> None:
    """Close after the client has read all: a socket that is closed with unread data resets what was sent."""
    client.writer.write_eof()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER):
            for _ in range(64):
                if not await client.reader.read(CHUNK):
                    return
