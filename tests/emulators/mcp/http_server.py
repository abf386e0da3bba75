"""An MCP server over streamable HTTP: the SDK's own, on a real socket, which also records what it is sent and may fail."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations
from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass
class HttpServer:
    """A running server. `mode` decides what becomes of the next requests; `seen` are their headers."""

    name: str = "emulator"
    mode: str = "plain"
    elsewhere: str = ""
    seen: list[dict[str, str]] = field(default_factory=list)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}/mcp"

    def app(self) -> ASGIApp:
        """The SDK's server, behind what records and fails."""
        server = MCPServer(self.name)

        @server.tool(annotations=ToolAnnotations(readOnlyHint=True))
        def search(text: str = "") -> str:
            """Search it."""
            self.calls.append(("search", {"text": text}))
            return f"{self.name} found {text}"

        @server.tool()
        def echo_headers() -> str:
            """Tell what was sent, which no good server does."""
            self.calls.append(("echo_headers", {}))
            return str(self.seen[-1])

        inner = server.streamable_http_app()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await inner(scope, receive, send)
                return
            self.seen.append({name.decode(): value.decode() for name, value in scope["headers"]})
            if self.mode == "plain":
                await inner(scope, receive, send)
                return
            if self.mode == "cut":
                start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
                await send(start)
                await send({"type": "http.response.body", "body": b": working\n\n", "more_body": True})
                raise ConnectionAbortedError
            status = {"401": 401, "redirect": 307, "500": 500, "404": 404, "big": 200}[self.mode]
            headers = [(b"content-type", b"application/json")]
            if self.mode == "redirect":
                headers.append((b"location", self.elsewhere.encode()))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            body = b" " * (9 << 20) if self.mode == "big" else b"{}"
            await send({"type": "http.response.body", "body": body})

        return app


class _Quiet(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def http_server(name: str = "emulator") -> Iterator[HttpServer]:
    """Run a server in a thread, on a port of its own."""
    server = HttpServer(name)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server.port = listener.getsockname()[1]
        config = uvicorn.Config(server.app(), log_level="critical", lifespan="on", timeout_graceful_shutdown=1)
        running = _Quiet(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 10
        while not running.started:
            assert time.monotonic() < deadline and thread.is_alive(), "the server does not start"
            time.sleep(0.01)
        try:
            yield server
        finally:
            running.should_exit = True
            running.force_exit = True
            thread.join(10)
