"""The commands that an engine runs in a container, as bytes of their two streams.

Source: docs.docker.com/reference/api/engine, "Exec" and "Attach to a container" (the frames of a multiplexed stream).
"""

from __future__ import annotations

import selectors
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from activities.sandbox.machine import OUTPUT_CAP, Ran
from activities.sandbox.port import SandboxUnavailable
from contracts.sandbox import WORKSPACE

_HEADER = 8
_PIECE, _BATCH = 64 << 10, 512 << 10
_IDLE, _LONGEST_IDLE, _DRAIN = 0.2, 2.0, 0.3
"""Seconds of silence: the first and the longest before the engine is asked for the end, and those that are the end then."""
_SHORTLY = 5.0
"""Seconds that an engine may take to know the end of an exec whose output has ended."""
_BUSY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Exec:
    """One command in a container. All methods block; `stopped` may be set by another thread, and ends the wait."""

    def __init__(self, api: Callable[[], Any], container: str, user: str, argv: Sequence[str], stdin: bytes | None) -> None:
        self._api = api
        self._container = container
        self._user = user
        self._argv = list(argv)
        self._stdin = stdin
        self._id = ""
        self._stream: Any = None
        self.stopped = False

    def collect(self, deadline: float) -> Ran:
        """Run to the end and return it. Raises SandboxUnavailable at the deadline, in seconds of the monotonic clock."""
        streams = {1: bytearray(), 2: bytearray()}
        try:
            for stream, data in self.frames(deadline):
                kept = streams.get(stream)
                if kept is not None and len(kept) < 2 * OUTPUT_CAP:
                    kept += data
            return Ran(self.exit_code(), bytes(streams[1]), bytes(streams[2]))
        finally:
            self.close()

    def frames(self, deadline: float) -> Iterator[tuple[int, bytes]]:
        """Start it, feed it its input, and yield (1 for stdout or 2 for stderr, bytes) until it ends.

        It has ended when the stream has, or when the engine says so and nothing more comes: what it left in the background may
        hold the stream open for ever.
        """
        sock, buffer = self._start()
        unsent = memoryview(self._stdin or b"")
        idle, over = _IDLE, False
        with selectors.DefaultSelector() as selector:
            while True:
                while (frame := _take(buffer)) is not None:
                    yield frame
                if self.stopped or time.monotonic() > deadline:
                    raise SandboxUnavailable("a command of the harness did not end in time")
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
                selector.register(sock, events)
                wait = _DRAIN if over else min(idle, max(0.0, deadline - time.monotonic()))
                ready = _pending(sock) or sum(event for _, event in selector.select(wait))
                selector.unregister(sock)
                if not ready:
                    if over:
                        return
                    over = not self._inspect()["Running"]
                    idle = min(2 * idle, _LONGEST_IDLE)
                if ready & selectors.EVENT_WRITE:
                    unsent = unsent[_send(sock, unsent[:_PIECE]) :]
                if ready & selectors.EVENT_READ:
                    try:
                        data = sock.recv(_PIECE)
                    except _BUSY:
                        continue
                    if not data:
                        return
                    buffer += data
                    idle = _IDLE

    def exit_code(self) -> int:
        """Return how it ended. Raises SandboxUnavailable when the engine does not say."""
        until = time.monotonic() + _SHORTLY
        while True:
            found = self._inspect()
            if not found["Running"] and found.get("ExitCode") is not None:
                return int(found["ExitCode"])
            if time.monotonic() > until:
                # The stream was cut while the command goes on.
                raise SandboxUnavailable("the engine closed the output of a command that has not ended")
            time.sleep(0.05)

    def close(self) -> None:
        """Let go of the connection. The command goes on if it has not ended."""
        if self._stream is not None:
            sock = getattr(self._stream, "_sock", None)  # the SDK leaves it to the garbage collector
            self._stream._response.close()
            self._stream.close()
            if sock is not None:
                sock.close()
            self._stream = None

    def _start(self) -> tuple[Any, bytearray]:
        api = self._api()
        self._id = api.exec_create(
            self._container, self._argv, user=self._user, workdir=WORKSPACE, stdin=self._stdin is not None
        )["Id"]
        self._stream = stream = api.exec_start(self._id, socket=True)
        sock = getattr(stream, "_sock", stream)  # with TLS the SDK gives the socket itself
        sock.setblocking(False)
        # What came in one piece with the headers is in the buffer that the SDK passes by.
        reader = stream._response.raw._fp.fp
        return sock, bytearray((reader.peek() if reader is not None else b"") or b"")

    def _inspect(self) -> dict[str, Any]:
        found: dict[str, Any] = self._api().exec_inspect(self._id)
        return found


def batch_of(frames: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Return the next frames, half a megabyte together unless the end comes first; none at the end."""
    batch: list[tuple[int, bytes]] = []
    size = 0
    while size < _BATCH and (frame := next(frames, None)) is not None:
        batch.append(frame)
        size += len(frame[1])
    return batch


def _take(buffer: bytearray) -> tuple[int, bytes] | None:
    """Take one whole frame from the beginning of `buffer`: a byte for the stream, three of nothing, four for the length, data."""
    if len(buffer) < _HEADER:
        return None
    end = _HEADER + int.from_bytes(buffer[4:_HEADER], "big")
    if len(buffer) < end:
        return None
    frame = buffer[0], bytes(buffer[_HEADER:end])
    del buffer[:end]
    return frame


def _send(sock: Any, data: memoryview) -> int:
    """Send what goes now and return how much is dealt with. A command that reads no more needs no more."""
    try:
        return int(sock.send(data))
    except _BUSY:
        return 0
    except (BrokenPipeError, ConnectionResetError):
        return len(data)


def _pending(sock: Any) -> int:
    """Whether TLS has decrypted bytes that the selector does not see."""
    return selectors.EVENT_READ if isinstance(sock, ssl.SSLSocket) and sock.pending() else 0
