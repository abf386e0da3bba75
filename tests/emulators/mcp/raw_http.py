"""An MCP server over HTTP, without the SDK, whose every answer to a call is what the test says, byte for byte."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

JSON = "application/json"


@dataclass
class Reply:
    """One answer."""

    body: bytes
    status: int = 200
    kind: str = JSON
    after: float = 0.0


@dataclass
class RawServer:
    """A running server. `answer` is given the text of a call, its id and its session, and says what to send."""

    answer: Callable[[str, int, str], Reply]
    port: int = 0
    sessions: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}/mcp"

    def reply(self, message: dict[str, Any], session: str) -> tuple[Reply, str]:
        """Answer one message; also returns the session that is begun with it."""
        number, method = message.get("id"), message.get("method")
        if method == "initialize":
            self.sessions.append(f"s{len(self.sessions)}")
            info = {"serverInfo": {"name": "raw", "version": "0"}, "capabilities": {"tools": {}}}
            return Reply(result(number, {"protocolVersion": "2025-06-18", **info})), self.sessions[-1]
        if number is None:
            return Reply(b"", 202), ""
        if method == "tools/list":
            return Reply(result(number, {"tools": [{"name": "do", "inputSchema": {"type": "object"}}]})), ""
        return self.answer(message["params"]["arguments"].get("text", ""), number, session), ""


def result(number: Any, value: Any) -> bytes:
    """A reply of the protocol."""
    return json.dumps({"jsonrpc": "2.0", "id": number, "result": value}).encode()


def error(number: Any, code: int, message: str) -> bytes:
    """An error of the protocol."""
    return json.dumps({"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}).encode()


def text(number: Any, said: str) -> bytes:
    """A call's result of text."""
    return result(number, {"content": [{"type": "text", "text": said}]})


@contextlib.contextmanager
def raw_server(answer: Callable[[str, int, str], Reply]) -> Iterator[RawServer]:
    """Run a server in threads, on a port of its own."""
    server = RawServer(answer)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            """There is no stream of its own."""
            self._send(Reply(b"", 405), "")

        def do_DELETE(self) -> None:
            """A session is not ended."""
            self._send(Reply(b"", 405), "")

        def do_POST(self) -> None:
            """Take a message."""
            message = json.loads(self.rfile.read(int(self.headers["content-length"])))
            reply, session = server.reply(message, self.headers.get("mcp-session-id", ""))
            time.sleep(reply.after)
            with contextlib.suppress(OSError):
                self._send(reply, session)

        def _send(self, reply: Reply, session: str) -> None:
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.kind)
            self.send_header("Content-Length", str(len(reply.body)))
            if session:
                self.send_header("Mcp-Session-Id", session)
            self.end_headers()
            self.wfile.write(reply.body)

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = False
    server.port = listening.server_port
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join(5)
