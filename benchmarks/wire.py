"""A proxy between a client and a service, on TCP or a unix socket, that counts what passes and changes nothing.

Bytes are those of the connections, headers and protocol included, as the client writes and reads them; what TCP, IP and TLS add
is not in it. Requests are read from HTTP/1.1 as it passes. After a request that asks for an upgrade (Docker's "exec start") a
connection carries raw bytes only, until one side ends it. HTTP/2 is not read: only its bytes are counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_PIECE = 64 << 10
_HEAD = re.compile(rb"([A-Z]+) (\S+) HTTP/1\.[01]\r\n")
_QUIET_SECONDS, _LONGEST_SECONDS = 0.5, 30.0

Address = Path | int
"""A unix socket, or a port of this host."""


class HttpRequests:
    """Reads the requests of one HTTP/1.1 connection as they pass."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._left = 0
        self._is_chunked = False
        self.is_raw = False

    def feed(self, data: bytes) -> list[str]:
        """Take bytes, and return the requests that began in them: "METHOD /path", without the query."""
        found: list[str] = []
        self._buffer += data
        while self._buffer and not self.is_raw:
            if self._left:
                skipped = min(self._left, len(self._buffer))
                del self._buffer[:skipped]
                self._left -= skipped
            elif self._is_chunked:
                if not self._take_chunk():
                    return found
            elif (end := self._buffer.find(b"\r\n\r\n")) < 0:
                return found
            else:
                found.append(self._take_head(bytes(self._buffer[: end + 4])))
                del self._buffer[: end + 4]
        self._buffer.clear()
        return found

    def _take_head(self, head: bytes) -> str:
        line = _HEAD.match(head)
        if line is None:
            raise ValueError(f"this is no request of HTTP/1.1: {head[:80]!r}")
        fields = {}
        for field in head.split(b"\r\n")[1:]:
            name, _, value = field.partition(b":")
            fields[name.strip().lower()] = value.strip().lower()
        self.is_raw = b"upgrade" in fields.get(b"connection", b"")
        self._is_chunked = fields.get(b"transfer-encoding") == b"chunked"
        self._left = int(fields.get(b"content-length", b"0"))
        return f"{line[1].decode()} {line[2].decode().partition('?')[0]}"

    def _take_chunk(self) -> bool:
        size, _, _ = self._buffer.partition(b"\r\n")
        if len(size) == len(self._buffer):
            return False
        length = int(size.partition(b";")[0], 16)
        if length == 0 and len(self._buffer) < len(size) + 4:
            return False
        self._left = len(size) + 2 + (length + 2 if length else 2)  # no client here sends trailers
        self._is_chunked = length > 0
        return True


class Wire:
    """The proxy, while the block runs. It listens at `own`, or at a port of its own, and passes on to `service`."""

    def __init__(self, service: Address, own: Path | None = None, *, http: bool = True) -> None:
        self._service = service
        self._own = own
        self._http = http
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._raw: set[HttpRequests] = set()
        self._last = 0.0
        self.connections = 0
        self.sent = 0
        """Bytes from clients to the service."""
        self.received = 0
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        """Where clients find it."""
        if self._own is not None:
            return f"unix://{self._own}"
        if self._server is None:
            raise RuntimeError("it does not listen yet")
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def quiet(self) -> None:
        """Wait until nothing has passed for a while and no upgraded connection is open: a client may still tidy up."""
        begun = time.monotonic()
        until = begun + _LONGEST_SECONDS
        while (now := time.monotonic()) < until and (self._raw or now < max(begun, self._last) + _QUIET_SECONDS):
            await asyncio.sleep(_QUIET_SECONDS / 10)

    async def __aenter__(self) -> Self:
        if self._own is not None:
            self._server = await asyncio.start_unix_server(self._take, self._own, limit=_PIECE)
        else:
            self._server = await asyncio.start_server(self._take, "127.0.0.1", 0, limit=_PIECE)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._server is not None:
            self._server.close()
        while self._writers:
            for writer in self._writers:
                writer.transport.abort()
            await asyncio.sleep(0.01)

    async def _take(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self.connections += 1
        reader = HttpRequests() if self._http else None
        writers = {to_client}
        self._writers |= writers
        try:
            if isinstance(self._service, Path):
                service, to_service = await asyncio.open_unix_connection(self._service, limit=_PIECE)
            else:
                service, to_service = await asyncio.open_connection("127.0.0.1", self._service, limit=_PIECE)
            writers.add(to_service)
            self._writers |= writers
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(client, to_service, reader, is_sent=True))
                both.create_task(self._pass(service, to_client, reader, is_sent=False))
        except* OSError:
            pass  # one of the two has gone; the other sees its connection end
        finally:
            for writer in writers:
                writer.close()
            self._writers -= writers

    async def _pass(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, reader: HttpRequests | None, *, is_sent: bool
    ) -> None:
        """Pass on one direction to its end, and that it has ended."""
        try:
            while data := await source.read(_PIECE):
                self._last = time.monotonic()
                if not is_sent:
                    self.received += len(data)
                else:
                    self.sent += len(data)
                    if reader is not None:
                        self.requests += reader.feed(data)
                        if reader.is_raw:
                            self._raw.add(reader)
                target.write(data)
                await target.drain()
            with contextlib.suppress(OSError):
                target.write_eof()
        finally:
            if reader is not None:
                self._raw.discard(reader)
        if not is_sent:
            # What a client still sends after its service's end goes nowhere.
            target.close()
