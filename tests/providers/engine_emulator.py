"""A container engine that answers what a test says, over a unix socket: for faults that a real one does not give on demand."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Answer:
    """What is answered to a request: a status with a JSON body or with bytes as they are, or nothing after so many seconds."""

    status: int = 200
    body: Any = None
    raw: bytes | None = None
    hang: float | None = None


CUT = Answer(raw=b"")
"""The connection is closed without a word."""


@dataclass
class EmulatedEngine:
    """Answers by the first rule whose pattern a request, such as `GET /info`, matches. Strict: one without a rule is a fault."""

    url: str
    rules: list[tuple[str, list[Answer]]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    unscripted: list[str] = field(default_factory=list)

    def on(self, pattern: str, *answers: Answer) -> None:
        """Answer so to what matches, one after the other, the last of them for ever. The latest rule counts."""
        self.rules.insert(0, (pattern, list(answers)))

    def answer(self, request: str) -> Answer:
        """Return the answer to a request."""
        self.asked.append(request)
        for pattern, answers in self.rules:
            if re.search(pattern, request):
                return answers.pop(0) if len(answers) > 1 else answers[0]
        self.unscripted.append(request)
        return Answer(500, {"message": f"unscripted: {request}"})


@contextlib.contextmanager
def emulated_engine() -> Iterator[EmulatedEngine]:
    """Run one until the block ends, and see that every request had a rule."""
    directory = tempfile.mkdtemp(prefix="ee-", dir="/tmp")
    path = f"{directory}/engine.sock"
    engine = EmulatedEngine(f"unix://{path}")
    engine.on(r"^GET /version$", Answer(body={"ApiVersion": "1.41"}))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(20)
    stopped = threading.Event()

    def accept() -> None:
        while not stopped.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(engine, connection, stopped), daemon=True).start()

    listener.settimeout(0.1)
    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield engine
    finally:
        stopped.set()
        thread.join()
        listener.close()
        shutil.rmtree(directory)
    assert engine.unscripted == []


def serve(engine: EmulatedEngine, connection: socket.socket, stopped: threading.Event) -> None:
    """Answer one request and close."""
    with connection, contextlib.suppress(OSError):
        head, _, rest = read_until(connection, b"\r\n\r\n").partition(b"\r\n\r\n")
        if not head:  # it was only seen that somebody listens
            return
        length = re.search(rb"(?i)content-length: (\d+)", head)
        while length is not None and len(rest) < int(length[1]):
            rest += connection.recv(65536)
        method, target, _ = head.split(b"\r\n")[0].decode().split(" ")
        answer = engine.answer(f"{method} {re.sub(r'^/v[0-9.]+', '', target.partition('?')[0])}")
        if answer.hang is not None:
            stopped.wait(answer.hang)
        elif answer.raw is not None:
            connection.sendall(answer.raw)
        else:
            body = json.dumps(answer.body).encode()
            connection.sendall(
                b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (answer.status, len(body)) + body
            )


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """Read until `end` has come, and what came with it."""
    data = b""
    while end not in data and (more := connection.recv(65536)):
        data += more
    return data


def frames(*parts: tuple[int, bytes]) -> bytes:
    """The output of an exec as an engine sends it: stream and bytes of each part."""
    return b"".join(bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data for stream, data in parts)


def upgraded(*parts: tuple[int, bytes]) -> Answer:
    """An exec's start with its output in the same piece as the headers, after which the connection is closed."""
    head = (
        b"HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.raw-stream\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
    )
    return Answer(raw=head + frames(*parts))


def socket_file(engine: EmulatedEngine) -> Path:
    """Where it listens."""
    return Path(engine.url.removeprefix("unix://"))
