"""Sessions with MCP servers: one for each run and server, kept between calls, so that servers with a state work.

Each has a task of its own, in which everything that it consists of is entered and left. The SDK is imported with the first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from activities.tools.mcp.flight import NOT_OF_PROTOCOL, Flight, Line, ServerFailed, flight
from activities.tools.mcp.offer import Said
from activities.tools.mcp.servers import Connection
from activities.tools.mcp.text import plain

if TYPE_CHECKING:
    from mcp import ClientSession, MCPError

    from activities.tools.mcp.results import Given

Answer = TypeVar("Answer")
IDLE_SECONDS = 60.0
OPEN_SECONDS = 10.0
"""How long a server may take to start and to shake hands."""

MAX_PAGES = 20
MAX_LISTED = 200
MAX_SESSIONS = 256
_END_SECONDS = 2.0
_CLOSE_SECONDS = 8.0
_SAID = 2000
"""Characters of what a server says of a failure."""

_log = structlog.stdlib.get_logger("caisson.mcp")


class Session:
    """A session with one server. It is over once its task is, or is to be; then another is opened in its place."""

    def __init__(self, connection: Connection, idle_seconds: float) -> None:
        self.connection = connection
        self._hide = connection.redactor()
        self._idle_seconds = idle_seconds
        self._line = Line(on_end=self._lost)
        self._closing = asyncio.Event()
        self._users = 0
        self._timer: asyncio.TimerHandle | None = None
        self._open: asyncio.Future[tuple[ClientSession, Any]] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._live(), name=f"mcp {connection.name}")

    @property
    def is_over(self) -> bool:
        """Whether it can be used no more."""
        return self._closing.is_set() or self.task.done()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked through it now."""
        return self._users == 0

    @contextlib.asynccontextmanager
    async def used(self) -> AsyncIterator[tuple[ClientSession, Any]]:
        """Keep it open meanwhile. Yields the SDK's session, and its dispatcher. Raises ServerFailed when it cannot be opened."""
        self._users += 1
        if self._timer is not None:
            self._timer.cancel()
        try:
            yield await asyncio.shield(self._open)
        finally:
            self._users -= 1
            if self._users == 0 and not self.is_over:
                self._timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._closing.set)

    def end_soon(self) -> None:
        """Have it closed, without waiting for that."""
        self._closing.set()

    async def end(self, seconds: float = _END_SECONDS) -> None:
        """Close it, and wait for it to be closed, though not for long."""
        self._closing.set()
        if not self._open.done():
            self.task.cancel()
        await asyncio.wait([self.task], timeout=seconds)

    def _lost(self) -> None:
        # The SDK wakes whoever waits for an answer; the session itself has no more use.
        if self._open.done():
            self._closing.set()

    async def _live(self) -> None:
        error: BaseException | None = None
        shake = Flight()
        flight.set(shake)
        try:
            async with contextlib.AsyncExitStack() as stack:
                streams = await stack.enter_async_context(self._streams())
                from activities.tools.mcp.dispatch import open_session

                client, dispatcher = await stack.enter_async_context(open_session(*streams, OPEN_SECONDS))
                self._open.set_result((client, dispatcher))
                await self._closing.wait()
        except asyncio.CancelledError as cancelled:
            error = cancelled
            if not self._closing.is_set() and not self._line.fault:
                raise
        except Exception as found:  # noqa: BLE001 - whatever ends a session is told to those who use it
            error = found
        finally:
            self._closing.set()
            if self._timer is not None:
                self._timer.cancel()
            if not self._open.done():
                status = f" (HTTP {shake.status})" if shake.status >= 400 else ""
                self._open.set_exception(self._failure(error, f"it does not take the session{status}", is_unsent=True))
                self._open.exception()  # nobody may be waiting any more

    def _streams(self) -> contextlib.AbstractAsyncContextManager[tuple[Any, Any]]:
        if self.connection.url is not None:
            from activities.tools.mcp.http import http_streams

            return http_streams(self.connection)
        from activities.tools.mcp.stdio import stdio_streams

        return stdio_streams(self.connection, self._line)

    def _failure(self, error: BaseException | None, else_: str, *, is_unsent: bool) -> ServerFailed:
        """Say why the session is over; `else_` is what is said when that is not known."""
        from mcp import MCPError

        from activities.tools.mcp.wire import OF_TRANSPORT

        said = ""
        causes = [error] if error is not None else []
        while causes:
            cause = causes.pop()
            if isinstance(cause, BaseExceptionGroup):
                causes.extend(cause.exceptions)
            elif isinstance(cause, MCPError) and cause.error.data == OF_TRANSPORT:
                self._line.fault = self._line.fault or cause.error.message
            elif isinstance(cause, (ValueError, RecursionError)):
                self._line.fault = self._line.fault or NOT_OF_PROTOCOL  # its words quote the answer
            elif isinstance(cause, TimeoutError):
                self._line.fault = self._line.fault or f"it did not answer within {OPEN_SECONDS:g} s"
            elif isinstance(cause, OSError) and self.connection.command:
                self._line.fault = self._line.fault or f"its program cannot be started ({cause.strerror or type(cause).__name__})"
            elif not self._line.fault and not isinstance(cause, asyncio.CancelledError):
                said = self.clean(str(cause) or type(cause).__name__)
        tail = self._line.tail().strip()
        if tail:
            said = f"{said}\n[its standard error ends with]\n{tail}".lstrip()
        return ServerFailed(self._line.fault or else_, said, is_unsent=is_unsent)

    def clean(self, text: str) -> str:
        """Return what a server said, fit to be shown: without secrets and bounded."""
        return plain(self._hide(text[: 1 << 20]), _SAID)

    async def list_tools(self) -> list[Said]:
        """Return all tools, in the server's order. Raises ServerFailed."""
        async with self.used() as (client, dispatcher):
            from activities.tools.mcp.dispatch import list_page

            found: list[Said] = []
            seen: set[str] = set()
            cursor: str | None = None
            for _ in range(MAX_PAGES):
                page, cursor = await self._asked(list_page(client, dispatcher, cursor, OPEN_SECONDS), OPEN_SECONDS)
                found += page
                if len(found) > MAX_LISTED:
                    raise ServerFailed(f"it lists more than {MAX_LISTED} tools", is_unsent=True)
                if not cursor:
                    return found
                if cursor in seen:
                    raise ServerFailed("its list of tools goes round in circles (it gives the same cursor again)", is_unsent=True)
                seen.add(cursor)
            raise ServerFailed(f"its list of tools has more than {MAX_PAGES} pages", is_unsent=True)

    async def call_tool(self, tool: str, arguments: dict[str, Any]) -> Given:
        """Call a tool. Raises ServerFailed."""
        async with self.used() as (client, _):
            from activities.tools.mcp.dispatch import call

            seconds = self.connection.seconds
            return await self._asked(call(client, tool, arguments, seconds), seconds)

    async def _asked(self, asking: Awaitable[Answer], seconds: float) -> Answer:
        """Wait for an answer, and tell every way in which it does not come."""
        from mcp import MCPError

        on_its_way = Flight()
        token = flight.set(on_its_way)
        try:
            # The SDK keeps the time itself; this is for what it does not bound.
            async with asyncio.timeout(seconds + _END_SECONDS):
                return await asking
        except TimeoutError:
            raise ServerFailed(f"it did not answer within {seconds:g} s") from None
        except MCPError as error:
            raise await self._told(error, on_its_way, seconds) from None
        except (ValueError, RecursionError):
            # What is wrong with it quotes it, cut anywhere, also within a secret.
            raise ServerFailed(NOT_OF_PROTOCOL) from None
        except RuntimeError as error:
            # A dispatcher that does not run any more, or a result of a kind that was not asked for.
            await self.end()
            raise ServerFailed("its answer is not one that can be used", self.clean(str(error))) from None
        finally:
            flight.reset(token)

    async def _told(self, error: MCPError, sent: Flight, seconds: float) -> ServerFailed:
        """Say what an error is. The SDK gives its own the codes -32000 and -32001, which servers use as well."""
        from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, REQUEST_TIMEOUT

        from activities.tools.mcp.wire import OF_SERVER, OF_TRANSPORT

        source, status = error.error.data, f" (HTTP {sent.status})" if sent.status >= 400 else ""
        if source == OF_TRANSPORT:
            return ServerFailed(error.error.message, is_unsent=sent.is_unsent)
        if source != OF_SERVER and error.code == REQUEST_TIMEOUT:
            return ServerFailed(f"it did not answer within {seconds:g} s")
        if source != OF_SERVER and (error.code == CONNECTION_CLOSED or self.is_over or self._line.fault):
            await self.end()
            return self._failure(None, "the connection was lost", is_unsent=sent.is_unsent)
        said = self.clean(error.error.message)
        if error.code != INVALID_PARAMS and _forgot(sent.status, said):
            # The server has forgotten the session, and says so before it does anything.
            await self.end()
            said = said if source == OF_SERVER else ""
            return ServerFailed(f"it has ended the session (HTTP {sent.status})", said, is_unsent=True)
        return ServerFailed(f"it answered with error {error.code}{status}", said)


def _forgot(status: int, said: str) -> bool:
    """Whether an answer says that there is no such session. By the protocol it is 404; some servers take 400 and say it."""
    return status == 404 or (status == 400 and "session" in said.lower())


class SessionPool:
    """All sessions of a worker."""

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        self._idle_seconds = idle_seconds
        self._sessions: dict[tuple[str, str], Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def session(self, run_id: str, connection: Connection) -> Session:
        """Return a run's session with a server: the one there is, or a new one when it is over or the file has changed."""
        key = (run_id, connection.name)
        known = self._sessions.get(key)
        if known is not None and not known.is_over and known.connection == connection:
            return known
        if known is not None:
            known.end_soon()
        if len(self._sessions) >= MAX_SESSIONS and (spare := next((one for one in self._sessions.values() if one.is_idle), None)):
            spare.end_soon()
        session = Session(connection, self._idle_seconds)
        self._sessions[key] = session
        session.task.add_done_callback(lambda _: self._forget(key, session))
        return session

    def _forget(self, key: tuple[str, str], session: Session) -> None:
        if self._sessions.get(key) is session:
            del self._sessions[key]

    async def drop(self, run_id: str, server: str) -> None:
        """End a run's session with a server, if there is one."""
        session = self._sessions.get((run_id, server))
        if session is not None:
            await session.end()

    async def close(self) -> None:
        """End all sessions."""
        sessions: Sequence[Session] = tuple(self._sessions.values())
        if not sessions:
            return
        await asyncio.gather(*(session.end(_CLOSE_SECONDS) for session in sessions))
        for session in sessions:
            if not session.task.done():
                _log.warning("mcp_session_does_not_end", server=session.connection.name)
                session.task.cancel()
