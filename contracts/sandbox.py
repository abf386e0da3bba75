"""Sandboxes as the control plane sees them: serialisable handles, commands and their results."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, field_validator

from contracts.base import Contract
from contracts.blob import BlobRef
from contracts.snapshot import SnapshotPolicy

WORKSPACE = "/workspace"
"""Where the workspace lies inside every sandbox."""

RUN_LABEL, NAMESPACE_LABEL = "caisson_run", "caisson_namespace"
"""The labels of a sandbox that say for which run, in which Temporal namespace, it was made."""


HostPattern = Annotated[str, Field(pattern=r"^(\*\.)?([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9]$")]
"""A host name in lower case, or `*.` before one for every name below it. No addresses: a name can be explained to an auditor."""


class SandboxLimits(Contract):
    """The most that one sandbox may use. Each has a default, and none can be switched off."""

    memory_mb: int = Field(default=2048, ge=64, le=1_048_576, description="of all its processes and its /tmp together")
    processes: int = Field(default=512, ge=16, le=65_536, description="processes and threads")
    cpus: float = Field(default=2.0, gt=0, le=1024, description="processor cores' worth of time")
    open_files: int = Field(default=4096, ge=64, le=1_048_576, description="of one process")
    file_mb: int = Field(default=4096, ge=1, le=1_048_576, description="the largest file a command may write")
    workspace_mb: int = Field(default=10_240, ge=1, le=16_777_216, description="of all files in the workspace")
    workspace_files: int = Field(
        default=1_000_000, ge=16, le=100_000_000, description="files, directories and links in the workspace"
    )
    lifetime_seconds: int = Field(default=24 * 3600, ge=10, le=30 * 24 * 3600, description="after which the sandbox is ended")


class NetworkPolicy(Contract):
    """Which hosts a sandbox may reach, through a filtering proxy outside of it. The default is none: no network at all."""

    allow: tuple[HostPattern, ...] = Field(default=(), max_length=200)


ProviderName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]


class Fallback(Contract):
    """The provider to go on with when the first cannot give a sandbox. Limits and network stay as they are asked for."""

    provider: ProviderName
    image: str | None = Field(default=None, max_length=512, description="null: the provider's own")
    options: dict[str, Annotated[str, Field(max_length=1024)]] = Field(default_factory=dict, max_length=32)


class SandboxSpec(Contract):
    """What a person asks of a sandbox."""

    provider: ProviderName = "local"
    fallback: Fallback | None = Field(default=None, description="a provider's name, or that with an image and options of its own")
    image: str | None = Field(
        default=None, max_length=512, description="the image or template of the provider to make it of; null: the provider's own"
    )
    options: dict[str, Annotated[str, Field(max_length=1024)]] = Field(
        default_factory=dict, max_length=32, description="what only this provider knows, by the provider's own names"
    )
    limits: SandboxLimits = SandboxLimits()
    network: NetworkPolicy = NetworkPolicy()
    snapshots: SnapshotPolicy = SnapshotPolicy()
    idle_seconds: float | None = Field(
        default=900,
        ge=1,
        description="how long a run may wait for people before its sandbox is put away until it goes on; null: never",
    )

    @field_validator("fallback", mode="before")
    @classmethod
    def _fallback_by_name(cls, given: Any) -> Any:
        return {"provider": given} if isinstance(given, str) else given

    def without_first(self) -> SandboxSpec | None:
        """Return what is asked of the fallback, or None when there is none."""
        if self.fallback is None:
            return None
        return self.model_copy(update={**dict(self.fallback), "fallback": None})


class SandboxRef(Contract):
    """A handle on one living sandbox.

    `nonce` was written into the sandbox when it was made; `attach` compares it, so that a recycled id is never mistaken for
    the sandbox that was meant. `queue` is the task queue whose workers can reach it.
    """

    provider: str
    id: str
    nonce: str
    queue: str
    expires_at: float | None = Field(
        default=None,
        description="when its lifetime ends, in seconds since 1970; null when it has none, or it is extended in time",
    )


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
    `note` is what the harness has to say about it, such as the limit that ended it and how to live with that.
    """

    state: JobState
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    duration_seconds: float = 0.0
    note: str = ""


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
    """End a sandbox and everything that runs in it. Closing one that is gone is no error.

    With `keep` its provider may pause it instead, or make an image of it first, if it can do that. `image` is one that its
    provider made before and nobody needs once this sandbox has ended.
    """

    sandbox: SandboxRef
    run_id: str
    egress: BlobRef | None = Field(
        default=None, description="the record of the run's earlier sandboxes, which this one's is added to"
    )
    keep: bool = False
    image: str | None = None


class CloseSandboxResult(Contract):
    """The sandbox is gone, or `paused`. `egress` is the record of its connections as JSON lines, if it had a network.

    `image` is what its provider made of it: a sandbox made of that has the files that this one had.
    """

    egress: BlobRef | None = None
    paused: bool = False
    image: str | None = None


class EndStraysInput(Contract):
    """End what a provider has of a run beside `sandbox`: what was made for it by calls that ended without an answer."""

    run_id: str
    provider: str
    sandbox: SandboxRef | None = None


class EndStraysResult(Contract):
    """How many were ended."""

    ended: int


class ResumeSandboxInput(Contract):
    """Let a paused sandbox go on, with all that ran in it."""

    sandbox: SandboxRef


class KeptImage(Contract):
    """An image that a provider made of a sandbox when it was put away. `used`: a sandbox has been made of it."""

    sandbox: SandboxRef
    image: str
    used: bool = False
