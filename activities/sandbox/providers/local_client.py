"""One conversation with the init of a local sandbox, from the worker's event loop."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from activities.sandbox.port import LONG_LINE, FileFault, SandboxGone, SandboxUnavailable, SessionFault
from activities.sandbox.providers.local_start import open_directory, socket_path
from activities.sandbox.providers.local_state import Record, StateDirectory
from activities.sandbox.providers.local_wire import VERSION, Inbox, encode, read_reply, rights

if TYPE_CHECKING:
    from activities.sandbox.providers.local_wire import Reply, Request

ANSWER_WITHIN = 120.0
"""Seconds until a request that does not wait for a command counts as lost."""
DEATH_SHOWS_WITHIN = 1.0
"""Seconds that a dying sandbox may take from closing its connections to being seen as dead."""

SESSION_FAULTS = {
    "unknown": "there is no such session in this sandbox",
    "ended": "its command has ended",
    "no terminal": "it has no terminal, so its input is closed; start the command with one",
    "line": LONG_LINE,
    "busy": "its command does not read what was typed before; look at its output, interrupt it, or kill it",
}
"""What init answers, in words."""


def gone(sandbox_id: str, record: Record | None = None) -> SandboxGone:
    """Return the error for a sandbox that has ended."""
    why = " at the end of its lifetime (sandbox.limits.lifetime_seconds)" if record and record.is_past_its_time() else ""
    return SandboxGone(f"the local sandbox {sandbox_id} has ended{why}; make a new one and restore the last snapshot into it")


class Conversation:
    """One open connection. Only one task uses it at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._inbox = Inbox()

    async def send(self, request: Request, fds: Sequence[int]) -> None:
        """Send one request and the open files that go with it."""
        data = memoryview(encode(request))
        sent = self._connection.sendmsg([data[:4]], rights(fds))  # four bytes always fit into the fresh connection
        await asyncio.get_running_loop().sock_sendall(self._connection, data[sent:])

    async def receive(self) -> tuple[Reply, list[int]]:
        """Wait for the next answer and the open files that came with it, which are now the caller's."""
        while True:
            body = self._inbox.take()
            if body is not None:
                fds, self._inbox.fds = self._inbox.fds, []
                return read_reply(body), fds
            try:
                is_open = self._inbox.feed(self._connection)
            except BlockingIOError:
                await self._readable()
                continue
            if not is_open:
                raise ConnectionResetError("the sandbox closed the connection")

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not ready.done():  # it may run once more before it is removed
                ready.set_result(None)

        loop.add_reader(self._connection, wake)
        try:
            await ready
        finally:
            loop.remove_reader(self._connection)

    def close(self) -> None:
        """Hang up."""
        self._inbox.close_fds()
        self._connection.close()


class Client:
    """Puts requests to one sandbox, and turns every way in which they can fail into the errors of the port."""

    def __init__(self, state: StateDirectory, record: Record) -> None:
        self._directory = state.path(record.id)
        self._record = record

    @asynccontextmanager
    async def converse(self) -> AsyncIterator[Conversation]:
        """Open a connection. Errors of the connection inside the block become SandboxGone or SandboxUnavailable."""
        connection = socket.socket(socket.AF_UNIX)
        conversation = Conversation(connection)
        try:
            connection.setblocking(False)
            held = open_directory(self._directory)
            try:
                await asyncio.get_running_loop().sock_connect(connection, socket_path(held))
            finally:
                os.close(held)
            yield conversation
        except (ConnectionError, FileNotFoundError, BlockingIOError, TimeoutError) as error:
            raise await self._explain(error) from error
        finally:
            conversation.close()

    async def put(self, conversation: Conversation, request: Request, fds: Sequence[int] = ()) -> tuple[Reply, list[int]]:
        """Send one request in an open conversation and return its first answer.

        Raises FileFault, SessionFault and SandboxError.
        """
        request["version"], request["nonce"] = VERSION, self._record.nonce
        async with asyncio.timeout(ANSWER_WITHIN):
            await conversation.send(request, fds)
            reply, received = await conversation.receive()
        fault = reply.get("error")
        if fault == "file":
            raise FileFault(reply["message"])
        if fault == "session":
            raise SessionFault(SESSION_FAULTS[reply["message"]])
        if fault == "nonce":
            raise gone(self._record.id)
        if fault == "version":
            raise SandboxGone(f"the local sandbox {self._record.id} was made by another version of Caisson: {reply['message']}")
        if fault is not None:
            raise SandboxUnavailable(f"the local sandbox {self._record.id} could not do it: {reply['message']}")
        return reply, received

    async def ask(self, request: Request, fds: Sequence[int] = ()) -> tuple[Reply, list[int]]:
        """Put one request that is answered at once."""
        async with self.converse() as conversation:
            return await self.put(conversation, request, fds)

    async def _explain(self, error: Exception) -> SandboxGone | SandboxUnavailable:
        for _ in range(20):
            if not self._record.is_alive():
                return gone(self._record.id, self._record)
            await asyncio.sleep(DEATH_SHOWS_WITHIN / 20)
        return SandboxUnavailable(f"the local sandbox {self._record.id} lives but did not answer ({error}); try again")
