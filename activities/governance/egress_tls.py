"""Reading the first message of a TLS client, to see which host it is really for. Pure.

Formats: RFC 8446, 5.1 (records), 4 (handshake), 4.1.2 (ClientHello), 4.2 (extensions); RFC 6066, 3 (server name).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_HELLO = 16 << 10
MAX_RECORDS = 100
"""A ClientHello is read anew whenever a piece of it comes, so it must not come in too many."""
_HANDSHAKE, _CLIENT_HELLO = 22, 1
_MAX_RECORD = 1 << 14
_SERVER_NAME, _ENCRYPTED_HELLO = 0, 0xFE0D
ACCESS_DENIED = bytes((21, 3, 1, 0, 2, 2, 49))
"""A fatal alert, so that a TLS client says `access denied` instead of `connection reset`."""


@dataclass(frozen=True)
class ClientHello:
    """What is looked at: the server name, if the client sent one, and whether there is a second, encrypted ClientHello."""

    server_name: str | None
    encrypted: bool


class _Reader:
    """Takes bytes from the front. Raises ValueError when there are too few."""

    def __init__(self, data: bytes) -> None:
        self.left = data

    def take(self, count: int) -> bytes:
        if count > len(self.left):
            raise ValueError("a field is cut off")
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, size: int) -> bytes:
        return self.take(self.number(size))


def read_client_hello(data: bytes) -> ClientHello | None:
    """Read a ClientHello from the beginning of a stream; None when more bytes are needed. Raises ValueError when it is none."""
    message = b""
    at = 0
    for _ in range(MAX_RECORDS):
        header = data[at : at + 5]
        if (header[:1] or b"\x16") != b"\x16" or (header[1:2] or b"\x03") != b"\x03":
            raise ValueError("what was sent is not TLS")
        if len(header) < 5:
            return None
        length = int.from_bytes(header[3:5])
        if not 0 < length <= _MAX_RECORD:
            raise ValueError("a TLS record has an impossible length")
        message += data[at + 5 : at + 5 + length]
        if message and message[0] != _CLIENT_HELLO:
            raise ValueError("the first TLS message is no ClientHello")
        if len(message) >= 4:
            wanted = 4 + int.from_bytes(message[1:4])
            if wanted > MAX_HELLO:
                raise ValueError("the ClientHello is too long")
            if len(message) >= wanted:
                return _read_body(message[4:wanted])
        at += 5 + length
        if at > len(data):
            return None
    raise ValueError("the ClientHello is cut into too many TLS records")


def _read_body(body: bytes) -> ClientHello:
    reader = _Reader(body)
    reader.take(2 + 32)  # version, random
    reader.vector(1)  # session
    reader.vector(2)  # ciphers
    reader.vector(1)  # compression
    if not reader.left:
        return ClientHello(None, False)
    extensions = _Reader(reader.vector(2))
    if reader.left:
        raise ValueError("the ClientHello has bytes after its end")
    found: dict[int, bytes] = {}
    while extensions.left:
        kind, content = extensions.number(2), extensions.vector(2)
        if kind in found:
            raise ValueError("the ClientHello repeats an extension")
        found[kind] = content
    name = _read_server_name(found[_SERVER_NAME]) if _SERVER_NAME in found else None
    return ClientHello(name, _ENCRYPTED_HELLO in found)


def _read_server_name(content: bytes) -> str:
    outer = _Reader(content)
    names = _Reader(outer.vector(2))
    kind, name = names.number(1), names.vector(2)
    if outer.left or names.left or kind != 0:
        raise ValueError("the ClientHello does not name exactly one host")
    return name.decode("ascii", "strict") if name.isascii() else ascii(name)
