"""A server that is a child process: JSON-RPC lines on its standard input and output.

The SDK's own transport hands on the worker's environment and standard error, and takes a program that has ended for one that may
still answer while a child of it holds the pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse, RequestId

from activities.tools.mcp.flight import MAX_REPLY, Line
from activities.tools.mcp.servers import Connection
from activities.tools.mcp.text import plain
from activities.tools.mcp.wire import read, written

KEPT_STDERR = 8 * 1024
_CHUNK = 64 * 1024
_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 0.5
"""How long what a program has written before its end may take to arrive, when something still holds its output open."""
_GRACE_SECONDS = 1.0
_WARNINGS = 5

Reading = MemoryObjectReceiveStream[SessionMessage | Exception]
Writing = MemoryObjectSendStream[SessionMessage]
_log = structlog.stdlib.get_logger("caisson.mcp")


@contextlib.asynccontextmanager
async def stdio_streams(connection: Connection, line: Line) -> AsyncIterator[tuple[Reading, Writing]]:
    """Start a server, and end it with all of its children. Raises OSError when it cannot be started."""
    home = tempfile.mkdtemp(prefix="caisson-mcp-")
    try:
        process = await _start(connection, home)
        server = _Server(process, connection, line)
        try:
            yield server.reading, server.writing
        finally:
            await server.close()
    finally:
        await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)


async def _start(connection: Connection, home: str) -> Process:
    environment = {"HOME": home, **dict(connection.environment)}
    program = shutil.which(connection.command[0], path=environment.get("PATH"))
    if program is None:
        raise FileNotFoundError(2, "there is no such program")
    argv = [program, *connection.command[1:]]
    # A worker that is killed takes its servers with it.
    if (guard := shutil.which("setpriv")) is not None:
        argv = [guard, "--pdeathsig", "KILL", "--", *argv]
    return await asyncio.create_subprocess_exec(
        *argv, env=environment, cwd=home, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
    )


class _Server:
    """One running server, and the tasks that move its lines."""

    def __init__(self, process: Process, connection: Connection, line: Line) -> None:
        self._process = process
        self._name = connection.name
        self._hide = connection.redactor()
        self._line = line
        self._said = bytearray()
        self._unread = 0
        self._asked: set[RequestId] = set()
        self._is_closing = False
        line.tail = self._tail
        self._into, self.reading = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        self.writing, self._from = anyio.create_memory_object_stream[SessionMessage](0)
        self._reader = asyncio.create_task(self._read())
        self._tasks = [self._reader, *map(asyncio.create_task, (self._write(), self._listen(), self._watch()))]

    async def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        buffer = bytearray()
        try:
            while chunk := await self._process.stdout.read(_CHUNK):
                first, *more = chunk.split(b"\n")
                buffer += first
                for part in more:
                    await self._deliver(bytes(buffer))
                    buffer = bytearray(part)
                if len(buffer) > MAX_REPLY:
                    self._line.fault = f"it sent a line of over {MAX_REPLY >> 20} MB, and was ended"
                    return
            await self._deliver(bytes(buffer))
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            return  # the session is gone
        finally:
            self._into.close()
            self._line.on_end()

    async def _deliver(self, data: bytes) -> None:
        if not data.strip():
            return
        messages = read(data, self._asked)
        for message in messages:
            if isinstance(message, (JSONRPCResponse, JSONRPCError)):
                self._forget(message.id)
            await self._into.send(SessionMessage(message))
        if messages:
            return
        self._unread += 1
        if self._unread <= _WARNINGS:
            # What it is may be anything, the work of a run too; how it begins helps to find who prints it.
            begins = plain(self._hide(data.decode("utf-8", "replace")[:4096]), 80)
            _log.warning("mcp_line_is_no_message", server=self._name, bytes=len(data), begins=begins)

    def _note(self, message: JSONRPCMessage) -> None:
        """Keep in mind what is asked, and what nobody waits for any more."""
        if isinstance(message, JSONRPCRequest):
            self._asked.add(message.id)
        elif isinstance(message, JSONRPCNotification) and message.method == "notifications/cancelled":
            self._forget((message.params or {}).get("requestId"))

    def _forget(self, number: RequestId | None) -> None:
        # Servers may answer 7 with "7".
        self._asked = {one for one in self._asked if str(one) != str(number)}

    async def _write(self) -> None:
        assert self._process.stdin is not None  # noqa: S101 - a pipe
        try:
            async for one in self._from:
                self._note(one.message)
                self._process.stdin.write(written(one.message) + b"\n")
                await self._process.stdin.drain()
        except OSError:
            self._into.close()
            self._line.on_end()

    async def _listen(self) -> None:
        assert self._process.stderr is not None  # noqa: S101 - a pipe
        # A secret at the edge must still be whole when it is looked for.
        kept = KEPT_STDERR + self._hide.longest
        while chunk := await self._process.stderr.read(_CHUNK):
            self._said += chunk
            del self._said[:-kept]

    async def _watch(self) -> None:
        await self._exit()
        if not self._is_closing:
            self._note_end()
        await asyncio.wait([self._reader], timeout=_LAST_WORDS_SECONDS)
        self._reader.cancel()

    async def _exit(self) -> None:
        # Process.wait also waits for the pipes, which a child of the server may hold.
        while self._process.returncode is None:  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(_POLL_SECONDS)

    def _note_end(self) -> None:
        code = self._process.returncode
        if code is not None and not self._line.fault:
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            self._line.fault = f"its program ended ({how})"

    def _tail(self) -> str:
        text = self._hide(bytes(self._said).decode("utf-8", "replace"))
        return plain(text[-KEPT_STDERR:], KEPT_STDERR)

    async def close(self) -> None:
        """End the server: by the end of its input, else by force; whatever is left in its session is killed as well."""
        has_ended, self._is_closing = self._reader.done(), True
        self.reading.close()
        self.writing.close()
        stdin = self._process.stdin
        assert stdin is not None  # noqa: S101 - a pipe
        stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._exit()
        if has_ended:
            self._note_end()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._into.close()
        self._from.close()
        # What escaped into a session of its own may hold a pipe for ever; ours are let go of.
        transport = getattr(self._process, "_transport", None)
        if transport is not None:
            transport.close()
