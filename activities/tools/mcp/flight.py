"""What becomes of connections and requests, as transports see it and sessions tell it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

MAX_REPLY = 8 << 20
"""Bytes of one reply of a server."""

NOT_OF_PROTOCOL = "its answer is not one of the protocol"


@dataclass
class Flight:
    """One request on its way. `is_unsent`: for certain nothing of it has reached the server, or it was turned away there."""

    is_unsent: bool = False
    status: int = 0


flight: ContextVar[Flight | None] = ContextVar("flight", default=None)
"""The request that a transport is sending. The SDK carries the caller's context to where its request is sent."""


@dataclass
class Line:
    """A connection to a program, as its transport sees it.

    `fault` says in Caisson's own words why it ended, and `tail` what the program last wrote on standard error.
    """

    fault: str = ""
    tail: Callable[[], str] = field(default=lambda: "")
    on_end: Callable[[], None] = field(default=lambda: None)


class ServerFailed(Exception):
    """A server could not do what was asked.

    `brief` is Caisson's own account, fit for a note of the harness; the message also has what the server said. `is_unsent`:
    nothing was asked of it, so asking again does no harm.
    """

    def __init__(self, brief: str, said: str = "", *, is_unsent: bool = False) -> None:
        super().__init__(f"{brief}: {said}" if said else brief)
        self.brief = brief
        self.is_unsent = is_unsent
