"""A small HTTP proxy that makes a store fail: it answers instead of the server, cuts answers off, or delays them.

One request a connection, so that what comes next always passes here too.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType

_SECONDS = 20.0


@dataclass(frozen=True)
class Answer:
    """Answered in place of the server."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """The server's answer is passed on, and the connection reset after so many bytes of its body."""

    after: int


@dataclass(frozen=True)
class Slow:
    """The request is passed on after so many seconds."""

    seconds: float


Fault = Answer | Cut | Slow


@dataclass(frozen=True)
class Request:
    """What a client asked."""

    method: str
    target: str
    headers: dict[str, str]


class Proxy:
    """In front of `upstream`, or of nothing. Each request takes the next of `faults`; then `always`; then it is passed on."""

    def __init__(self, upstream: int | None = None, faults: list[Fault] | None = None, always: Fault | None = None) -> None:
        self.upstream = upstream
        self.faults = deque(faults or [])
        self.always = always
        self.requests: list[Request] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.02)
        self.port: int = self._listener.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Proxy:
        self._threads[0].start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(_SECONDS)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._handle(connection)
            except OSError:
                return  # the client went away

    def _handle(self, connection: socket.socket) -> None:
        head, body = _head(connection)
        if not head:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.requests.append(Request(method, target, headers))
        if "expect" in headers:
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while len(body) < int(headers.get("content-length", "0")):
            received = connection.recv(1 << 20)
            if not received:
                return
            body += received
        fault = self.faults.popleft() if self.faults else self.always
        if isinstance(fault, Answer):
            connection.sendall(_answer(fault, method))
            return
        if isinstance(fault, Slow):
            self._stopped.wait(fault.seconds)
        assert self.upstream is not None, f"nothing is to answer {first}"
        kept = [line for line in lines if line.partition(":")[0].lower() not in ("connection", "expect")]
        with socket.create_connection(("127.0.0.1", self.upstream), timeout=_SECONDS) as server:
            server.sendall("\r\n".join([first, *kept, "Connection: close", "", ""]).encode("latin-1") + body)
            self._pass_on(server, connection, fault.after if isinstance(fault, Cut) else None)

    def _pass_on(self, server: socket.socket, connection: socket.socket, most: int | None) -> None:
        head, body = _head(server)
        # The server closes after this answer; some do not say so, and the client must know.
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        connection.sendall(b"\r\n".join([*lines, b"Connection: close", b"", b""]))
        sent = 0
        while body:
            if most is not None and sent + len(body) >= most:
                connection.sendall(body[: most - sent])
                time.sleep(0.05)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            connection.sendall(body)
            sent += len(body)
            body = server.recv(1 << 16)


def _head(source: socket.socket) -> tuple[bytes, bytes]:
    received = b""
    while b"\r\n\r\n" not in received:
        more = source.recv(1 << 16)
        if not more:
            return b"", b""
        received += more
    head, _, rest = received.partition(b"\r\n\r\n")
    return head, rest


def _answer(answer: Answer, method: str) -> bytes:
    headers = {**answer.headers, "Content-Length": str(len(answer.body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {answer.status} Answer", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + (b"" if method == "HEAD" else answer.body)
