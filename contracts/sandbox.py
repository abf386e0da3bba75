"""Sandboxes as the control plane sees them: serialisable handles, commands and their results."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from contracts.base import Contract

WORKSPACE = "/workspace"
"""Where the workspace lies inside every sandbox."""


class SandboxSpec(Contract):
    """What a person asks of a sandbox."""

    provider: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")] = "local"


class SandboxRef(Contract):
    """A handle on one living sandbox.

    `nonce` was written into the sandbox when it was made; `attach` compares it, so that a recycled id is never mistaken for
    the sandbox that was meant. `queue` is the task queue whose workers can reach it.
    """

    provider: str
    id: str
    nonce: str
    queue: str


class JobState(StrEnum):
    """How a command stands."""

    RUNNING = "running"
    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed_out"
    KILLED = "killed"
    LOST = "lost"


class JobResult(Contract):
    """How a command ended. A non-zero exit is a result, never an error.

    `stdout` and `stderr` are whole when they are no longer than the limit asked for; else their beginning and end around
    a marker. `stdout_bytes` and `stderr_bytes` are the true totals. `exit_code` is null unless the state is `exited`.
    """

    state: JobState
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    duration_seconds: float = 0.0


class OpenSandboxInput(Contract):
    """Make the sandbox of a run. The same `key` always gives the same sandbox."""

    key: str
    run_id: str
    spec: SandboxSpec
    environment: dict[str, str] = Field(default_factory=dict)


class OpenSandboxResult(Contract):
    """The living sandbox."""

    sandbox: SandboxRef


class CloseSandboxInput(Contract):
    """End a sandbox and everything that runs in it. Closing one that is gone is no error."""

    sandbox: SandboxRef
    run_id: str


class CloseSandboxResult(Contract):
    """The sandbox is gone."""
