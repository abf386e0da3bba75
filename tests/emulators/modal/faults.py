"""The emulator's gRPC services: calls by their names, the faults that a test asks for, and what was called so far."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message
from grpclib.const import Handler, Status
from grpclib.exceptions import GRPCError

Call = Callable[[Any], Awaitable[None]]
"""A call of a service, given its `grpclib.server.Stream`."""


@dataclass
class Fault:
    """What to do wrong in the next `times` calls whose name `match` finds (a regular expression)."""

    match: str
    times: int = 1
    status: Status | None = None
    """Answer with this status instead, with `message` and `details`."""
    message: str = "a fault that the test asked for"
    details: Sequence[Message] = ()
    delay: float = 0.0
    """Wait so many seconds first."""
    drop: str = ""
    """Close the connection `before` or `after` the call is carried out, and give no answer."""
    cut: int | None = None
    """Close the connection after so many messages of a stream."""


@dataclass
class Faults:
    """The faults that are still to come, and the names of all calls so far."""

    waiting: list[Fault] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def add(self, match: str, **fault: Any) -> None:
        """Ask for a fault."""
        self.waiting.append(Fault(match, **fault))

    def take(self, name: str) -> Fault | None:
        """Return the first fault for a call, if any, and count it down."""
        for fault in self.waiting:
            if re.search(fault.match, name):
                fault.times -= 1
                if fault.times <= 0:
                    self.waiting.remove(fault)
                return fault
        return None


class _Dropped(Exception):
    """The connection is closed now."""


class _Stream:
    """A stream whose connection is closed after some messages, or instead of the first."""

    def __init__(self, inner: Any, left: int) -> None:
        self._inner = inner
        self._left = left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __aiter__(self) -> Any:
        return aiter(self._inner)

    async def send_message(self, message: Message) -> None:
        """Send a message, or close the connection."""
        if self._left <= 0:
            # What was sent before is to arrive.
            await asyncio.sleep(0.05)
            self._inner._stream._transport.abort()
            raise _Dropped
        self._left -= 1
        await self._inner.send_message(message)


class Service:
    """A gRPC service with those calls of `base`, a class of the SDK's stubs, that `calls` has."""

    def __init__(self, base: Any, calls: Mapping[str, Call], check: Callable[[str, Any], None], faults: Faults) -> None:
        self._base = base
        self._calls = calls
        self._check = check
        self._faults = faults

    def __mapping__(self) -> Mapping[str, Handler]:
        """Return the calls as grpclib wants them. All others of the service are answered with UNIMPLEMENTED."""
        return dict(self._handlers())

    def _handlers(self) -> Iterator[tuple[str, Handler]]:
        for path, known in self._base.__mapping__(_Anything()).items():
            name = path.rpartition("/")[2]
            yield path, known._replace(func=self._guarded(name, self._calls.get(name, _not_here)))

    def _guarded(self, name: str, call: Call) -> Call:
        async def guarded(stream: Any) -> None:
            self._faults.calls.append(name)
            fault = self._faults.take(name)
            if fault is None:
                self._check(name, stream)
                await call(stream)
                return
            await asyncio.sleep(fault.delay)
            if fault.drop == "before":
                stream._stream._transport.abort()
                return
            if fault.status is not None:
                raise GRPCError(fault.status, fault.message, list(fault.details) or None)
            self._check(name, stream)
            left = 0 if fault.drop == "after" else fault.cut
            try:
                await call(stream if left is None else _Stream(stream, left))
            except _Dropped:
                return

        return guarded


async def _not_here(stream: Any) -> None:
    raise GRPCError(Status.UNIMPLEMENTED, "the emulator does not have this call")


class _Anything:
    """Stands for a servicer of which only the names of its calls are looked at."""

    def __getattr__(self, name: str) -> None:
        return None
