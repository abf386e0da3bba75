"""The record of a sandbox's connections: JSON lines, bounded, and no connection without its line.

at          when, UTC
connection  a random name; the lines `allowed` and `closed` of one connection share it
verdict     allowed (written before the first byte goes out), closed, refused, failed (allowed, but it could not be made)
reason      for refused and failed, in words
method, host, port, address      as far as they were known; never a path, a header or a body
up, down, seconds                with closed: bytes to and from the server, and how long it took
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

LIMIT = 16 << 20
"""Bytes of the whole record."""
FOR_REFUSED = LIMIT // 2
"""From here on refused connections are no longer listed one by one: a program that asks in a loop must not use up the rest."""
PER_CONNECTION = 2048
"""More than the lines of one connection take."""


@dataclass
class Entry:
    """What is known of one connection so far."""

    connection: str = field(default_factory=lambda: secrets.token_hex(4))
    began: float = field(default_factory=time.monotonic)
    method: str | None = None
    host: str | None = None
    port: int | None = None
    address: str | None = None
    up: int = 0
    down: int = 0
    allowed: bool = False


class EgressLog:
    """Appends to an open file. Another process may have written to it before."""

    def __init__(self, fd: int, limit: int = LIMIT, for_refused: int = FOR_REFUSED) -> None:
        self._fd = fd
        self._size = os.fstat(fd).st_size
        self._limit = limit
        self._for_refused = for_refused
        self._open = 0

    def allow(self, entry: Entry) -> bool:
        """Record that a connection is made; False when there is no room left, and so it must not be."""
        if self._size + (self._open + 1) * PER_CONNECTION > self._limit:
            return False
        self._open += 1
        entry.allowed = True
        self._write(entry, "allowed")
        return True

    def close(self, entry: Entry) -> None:
        """Record the end of an allowed connection, for which there is always room."""
        if entry.allowed:
            self._open -= 1
            seconds = round(time.monotonic() - entry.began, 3)
            self._write(entry, "closed", up=entry.up, down=entry.down, seconds=seconds)

    def refuse(self, entry: Entry, reason: str, verdict: str = "refused") -> None:
        """Record that a connection is not made."""
        if self._size > self._for_refused:
            return
        self._write(entry, verdict, reason=reason[:500])
        if self._size > self._for_refused:
            self._write(Entry(), "refused", reason="many connections were refused; those that follow are not listed")

    def _write(self, entry: Entry, verdict: str, **more: object) -> None:
        line = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "connection": entry.connection,
            "verdict": verdict,
            "method": entry.method,
            "host": entry.host[:253] if entry.host else None,
            "port": entry.port,
            "address": entry.address,
            **more,
        }
        data = json.dumps({name: value for name, value in line.items() if value is not None}).encode("ascii") + b"\n"
        os.write(self._fd, data)  # one write to a file opened for appending: lines of two processes do not mix
        self._size += len(data)
