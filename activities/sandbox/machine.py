"""What a provider's SDK must do with one sandbox. `PortableSandbox` makes the whole sandbox port of it.

A provider whose SDK can do more than this (jobs that survive the caller, terminals) overrides single methods of `PortableSandbox`
and says so in its capabilities; what it does not override works the portable way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Protocol

from contracts.sandbox import SandboxRef

STATE = "/tmp/.caisson"  # noqa: S108 - the sandbox's own
"""Where the harness keeps jobs and their output inside a sandbox: outside of the workspace, and gone with the sandbox."""
OUTPUT_CAP = 60_000
"""Bytes of each stream that a script may be expected to bring back: the least that any provider passes on is 64 KiB."""


@contextlib.contextmanager
def cancellation_heard() -> Iterator[None]:
    """Raise CancelledError when the task is cancelled in the block, whatever the SDK in it makes of that.

    Some SDKs turn it into an error of their own, and one that is taken for a fault of the service is tried again: the task that
    was to end goes on, and who waits for its end waits for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    except Exception:
        if task is None or task.cancelling() == before:
            raise
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError


@dataclass(frozen=True)
class Ran:
    """How a script of the harness ended. A shell's number for a signal (128 and more) is an exit code here."""

    exit_code: int
    stdout: bytes
    stderr: bytes


class Machine(Protocol):
    """One living machine, reached through its provider's SDK.

    Every method raises SandboxGone when the machine has ended, SandboxUnavailable when it cannot be reached now or `timeout` is
    over, SandboxAuth and SandboxQuota as the provider says. None of them tries again by itself.
    """

    @property
    def ref(self) -> SandboxRef:
        """The serialisable handle."""

    async def run(self, script: str, *, timeout: float) -> Ran:
        """Run `sh -c script` as the sandbox's ordinary user in the workspace, without standard input, and return its end.

        `script` has up to 100 KB. What it writes stays below OUTPUT_CAP for each stream. What it leaves in the background must
        not hold up the call, and is not ended by it.
        """

    async def put(self, path: str, data: bytes) -> None:
        """Write a whole file (up to 64 MiB) at an absolute path, its directory existing, readable by the ordinary user."""

    def get(self, path: str) -> AsyncIterator[bytes]:
        """Stream a file at an absolute path. Raises FileFault when there is no such file."""

    async def extend(self, seconds: float) -> None:
        """See to it that the machine lives for `seconds` more, where its provider gives it a lifetime; else do nothing."""
