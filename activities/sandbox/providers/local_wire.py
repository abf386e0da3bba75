"""How the worker and the init of a local sandbox talk, and how one output stream lies in a host file.

Runs on both sides, so it keeps to the standard library of Python 3.9 and to modules that load quickly.

A conversation is one connection to the sandbox's control socket. Each message is a big-endian 32-bit length and a JSON
object; open files travel beside it as SCM_RIGHTS. Paths may hold any bytes: they are `surrogateescape` text, which JSON's
ASCII form carries unchanged.

A stream file keeps a bounded part of an output of any length: bytes 0 to HEAD as they came, then a ring of RING bytes that
holds the latest ones after HEAD, then two totals: how many bytes are in, and how many will be once the write in progress is
done, which tells a reader what of the ring is being overwritten. It is complete at every moment, so a reader needs no help
of the writer, and nothing is lost when the writer is killed.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct

TYPE_CHECKING = False  # importing typing would cost every sandbox five milliseconds of its start
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypedDict

    class Change(TypedDict):
        """One change of a file; `length` is null for a removal, else the size of its content in the data file."""

        path: str
        length: int | None
        mode: int

    class Limits(TypedDict):
        """contracts.sandbox.SandboxLimits as far as they are kept inside, and whether processes can be counted there."""

        memory_mb: int
        processes: int
        open_files: int
        file_mb: int
        workspace_mb: int
        workspace_files: int
        lifetime_seconds: int
        counts_processes: bool

    class Request(TypedDict, total=False):
        """What the worker asks. `version`, `nonce` and `op` are always there; the rest depends on `op`."""

        version: int
        nonce: str
        op: str
        environment: dict[str, str]
        limits: Limits
        job: str
        argv: list[str]
        cwd: str
        env: dict[str, str]
        stdin: bool
        terminal: bool
        timeout: float
        input: str
        data: str
        rows: int
        columns: int
        path: str
        paths: list[str]
        max_bytes: int
        changes: list[Change]

    Entry = tuple[str, str, int, int, str | None]
    """(path, kind, mode, size, link target), what `look` and `walk` tell of one path."""

    class Reply(TypedDict, total=False):
        """What init answers. `error` says that it could not, and which way; `message` says why in words."""

        error: str
        message: str
        known: bool
        running: bool
        terminal: bool
        seconds: float
        entries: list[Entry]
        lengths: list[int | None]


VERSION = 2
HEADER = struct.Struct("!I")
MAX_MESSAGE = 256 << 20
MAX_FDS = 16

EGRESS_PORT = 3128
"""Where a sandbox with a network policy finds its proxy, at 127.0.0.1."""

HEAD = 8 << 20
RING = 1 << 20
TOTAL_AT = HEAD + RING
TOTALS = struct.Struct("<QQ")


def encode(message: Request | Reply) -> bytes:
    """Return one message as it goes over the wire."""
    body = json.dumps(message).encode("ascii")
    return HEADER.pack(len(body)) + body


def rights(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    """Return the ancillary data that hands over `fds`."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else []


def send(connection: socket.socket, message: Request | Reply, fds: Sequence[int] = ()) -> None:
    """Send one message over a blocking connection."""
    data = memoryview(encode(message))
    sent = connection.sendmsg([data], rights(fds))
    if sent < len(data):  # sending nothing more would fail when the other side has read all and hung up
        connection.sendall(data[sent:])


class Inbox:
    """Puts the messages of one connection together, however they are cut on the way."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self._buffer = bytearray()

    def feed(self, connection: socket.socket) -> bool:
        """Take what the connection holds now; return False when the other side has closed it."""
        data, ancillary, _, _ = connection.recvmsg(1 << 18, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC)
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(raw[: len(raw) - len(raw) % received.itemsize])
                self.fds.extend(received)
        self._buffer += data
        return bool(data)

    def take(self) -> bytes | None:
        """Return the body of the next whole message, or None when more bytes are needed. Raises ValueError."""
        if len(self._buffer) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self._buffer)
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes is over the limit of {MAX_MESSAGE}")
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return body

    def close_fds(self) -> None:
        """Close the received files that nobody took over."""
        while self.fds:
            os.close(self.fds.pop())


def read_reply(body: bytes) -> Reply:
    """Decode one answer of init."""
    reply: Reply = json.loads(body)
    return reply


def read_request(body: bytes) -> Request:
    """Decode one question of the worker."""
    request: Request = json.loads(body)
    return request


def receive(connection: socket.socket, inbox: Inbox) -> Reply:
    """Wait for the next answer on a blocking connection. Raises ConnectionError when it is closed first."""
    while True:
        body = inbox.take()
        if body is not None:
            return read_reply(body)
        if not inbox.feed(connection):
            raise ConnectionResetError("the sandbox closed the connection")
