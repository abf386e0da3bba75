"""The server process part: a socket, uvicorn in a thread of its own, and a clean stop."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from types import TracebackType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from workers.scripted_model.delivery import Transport
from workers.scripted_model.endpoint import ScriptedEndpoint
from workers.scripted_model.journal import Journal, JournalEntry
from workers.scripted_model.scenario import ScenarioFile, load_scenarios

_START_S = 20.0
_STOP_S = 10.0


class ScriptedModelServer:
    """The scripted model on a local socket, as a context manager, with `with` or `async with`.

    It runs in a thread of its own, so that a test's event loop may be blocked, or belong to another scope, without
    stopping the model.
    """

    def __init__(
        self,
        scenarios: ScenarioFile | Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        journal: Path | None = None,
    ) -> None:
        """Take what to play (raises ScenarioError) and bind nothing yet. Port 0 means any free one."""
        self._scenarios = load_scenarios(scenarios) if isinstance(scenarios, Path) else scenarios
        self._host = host
        self._port = port
        self._journal = Journal(journal)
        self._connections: dict[tuple[str, int], Transport] = {}
        self._server: uvicorn.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def root_url(self) -> str:
        """Return the address under which `/scripted/...` is found."""
        return f"http://{self._host}:{self._port}"

    @property
    def base_url(self) -> str:
        """Return the `base_url` for an OpenAI client."""
        return f"{self.root_url}/v1"

    def journal(self) -> list[JournalEntry]:
        """Return what became of every request so far, oldest first."""
        return self._journal.entries()

    def start(self) -> None:
        """Serve. Raises OSError when the address is taken, RuntimeError when the server does not come up."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # With the protocol named, asyncio turns Nagle's algorithm off; without it, answers wait 40 ms for an acknowledgement.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._host, self._port))
            listener.listen(512)
        except OSError:
            listener.close()
            raise
        self._port = listener.getsockname()[1]
        app = ScriptedEndpoint(self._scenarios, self._journal, self._connections).app()
        config = uvicorn.Config(
            app,
            http=_protocol(self._connections),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        ready = threading.Event()
        self._server = _AnnouncingServer(config, ready)
        self._thread = threading.Thread(target=self._run, args=(self._server, listener, ready), name="scripted-model")
        self._thread.start()
        if not ready.wait(_START_S) or not self._server.started:
            self.stop()
            raise RuntimeError(f"the scripted model did not come up on {self.root_url}")

    def stop(self) -> None:
        """Stop at once: connections are reset, responses in the making are dropped."""
        if self._server is None or self._thread is None:
            return
        self._server.should_exit = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._reset_connections)
        self._thread.join(_STOP_S)
        self._server = self._thread = None
        self._journal.close()

    def __enter__(self) -> ScriptedModelServer:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    async def __aenter__(self) -> ScriptedModelServer:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self.stop)

    def _run(self, server: uvicorn.Server, listener: socket.socket, ready: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            await server.serve(sockets=[listener])

        try:
            asyncio.run(serve())
        finally:
            # A server that does not come up must not leave its starter waiting.
            ready.set()

    def _reset_connections(self) -> None:
        for transport in list(self._connections.values()):
            transport.abort()


class _AnnouncingServer(uvicorn.Server):
    """A server that says when it has begun to serve."""

    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()


def _protocol(connections: dict[tuple[str, int], Transport]) -> type[H11Protocol]:
    """Return uvicorn's HTTP protocol, which also keeps each connection's transport by the peer's address."""

    class TrackedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if self.client is not None:
                connections[self.client] = transport

        def connection_lost(self, exc: Exception | None) -> None:
            if self.client is not None:
                connections.pop(self.client, None)
            super().connection_lost(exc)

    return TrackedProtocol
