"""The sandbox port: what every provider offers, and the four ways a sandbox itself can fail.

"The command failed" is a result; "the sandbox failed" is an exception:

    SandboxError
    ├── SandboxGone         it will never answer again: make a new one and rehydrate
    ├── SandboxUnavailable  it may answer later: retry
    ├── SandboxQuota        the provider refuses to give more: stop and say so
    ├── SandboxAuth         the provider refuses the credential: stop and say so
    └── BadSandboxSpec      the provider cannot do what was asked: stop and name the field

A provider keeps its SDK's own retries low (Temporal retries) and translates foreign errors once, in its own file.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from contracts.sandbox import WORKSPACE, JobResult, SandboxLimits, SandboxRef, SandboxSpec

MAX_VALUE = 128_000
"""Bytes of one variable: a system takes 131,071 with its name."""
MAX_VALUES = 1_000_000
"""Bytes of all variables together: a system takes 2 MiB with the arguments of a command."""
SCRATCH = "/tmp/.caisson-"  # noqa: S108 - the sandbox's own
"""How the paths of directories begin that are the harness's own inside a sandbox, as far as a sandbox has any."""


class SandboxError(Exception):
    """The sandbox, not the command in it, failed."""


class SandboxGone(SandboxError):
    """The sandbox ended and will not come back."""


class SandboxUnavailable(SandboxError):
    """The sandbox cannot be reached now."""


class SandboxQuota(SandboxError):
    """The provider's limit on sandboxes or their size is reached."""


class SandboxAuth(SandboxError):
    """The provider refused the credential."""


class BadSandboxSpec(SandboxError):
    """The provider cannot give what the spec asks for."""


class FileFault(Exception):
    """A path in the sandbox cannot be read or written as asked; the message names it. Not a fault of the sandbox."""


class SessionFault(Exception):
    """A session cannot do what was asked; the message says why. Not a fault of the sandbox."""


LONG_LINE = (
    "a line of it is longer than the 4095 bytes that fit while the terminal collects whole lines, and the rest would be lost; "
    "type shorter lines, or write the text into a file and let the command read that"
)
"""Why a terminal refuses input."""

Network = Literal["none", "allowlist", "open"]


@dataclass(frozen=True)
class Capabilities:
    """What a provider can do."""

    host_bound: bool
    """Its sandboxes belong to one host, so their activities go to that host's task queue."""
    native_jobs: bool
    """Commands survive the caller and can be found again by job id without the portable wrapper."""
    interactive: bool = False
    """Its sandboxes are `InteractiveSandbox`es."""
    host_files: bool = False
    """Its sandboxes are `HostSandbox`es."""
    network: frozenset[Network] = frozenset({"none"})
    """Which networks it can give. The spec asks for `none` by saying nothing, for `allowlist` by naming hosts, and for `open`,
    where nothing stands between the sandbox and the internet, by the option `network: open`."""
    limits: frozenset[str] = frozenset()
    """The fields of SandboxLimits that it keeps. Another value than the default for any other field is refused."""
    lifetime: int | None = None
    """The longest life of a sandbox, in seconds, whatever the spec says; None where the provider sets no end of its own."""
    pause: bool = False
    """It is a `PausingProvider`. Without that a sandbox that nobody needs for a while is ended, and a new one made later."""
    native_snapshot: bool = False
    """It is an `ImagingProvider`. Without that, or when the image is gone, a new sandbox's workspace comes from the store."""
    images: bool = False
    """The spec may name an image."""
    options: frozenset[str] = frozenset()
    """The names in `options` of a spec that it knows."""
    listing: bool = True
    """`list` finds its sandboxes by their labels. Where it cannot, what a crash leaves ends at the end of its life only."""


@dataclass(frozen=True)
class Command:
    """A command to run: a job with an id, so that a caller that comes back finds it instead of starting it again.

    `timeout` is in seconds, enforced inside the sandbox on the whole process tree (TERM, then KILL after two seconds).
    `output_limit` is how many bytes of each stream the result carries; the middle of longer output is left out.
    With `terminal` its standard streams are one terminal of 24 rows and 80 columns, so it has no `stdin`, and all its output
    is `stdout`; only an interactive sandbox can do that.
    """

    job_id: str
    argv: Sequence[str]
    cwd: str = WORKSPACE
    env: Mapping[str, str] | None = None
    stdin: bytes | None = None
    timeout: float = 120.0
    output_limit: int = 1 << 20
    terminal: bool = False


@dataclass(frozen=True)
class SessionOutput:
    """What one read of a session gave.

    The streams of `result`, and their totals, are those of this read alone: what came since the read before it. Its state is
    RUNNING while the session goes on, and how the session ended once all of its output has been read.
    """

    result: JobResult
    terminal: bool


@dataclass(frozen=True)
class JobProgress:
    """How a running command stands: the last bytes of each stream, and the true totals so far."""

    stdout_tail: bytes
    stderr_tail: bytes
    stdout_bytes: int
    stderr_bytes: int
    running_seconds: float


@dataclass(frozen=True)
class FileChange:
    """One change of a file: new content and mode, or `data=None` to remove the file.

    Parent directories are made as needed. `path` is relative to the workspace, in its normal form.
    """

    path: str
    data: bytes | None
    mode: int = 0o644


@dataclass(frozen=True)
class FileView:
    """What stands at a workspace path, the last part not followed if it is a link.

    `kind` is one of missing, file, directory, "closed directory" (one that a walk could not list), symlink, other; `data` is a
    regular file's content, or None when it is longer than the limit of the look; `target` is a link's text.
    """

    kind: str
    mode: int = 0
    size: int = 0
    data: bytes | None = None
    target: str | None = None


class Sandbox(Protocol):
    """One living sandbox. Every method raises SandboxGone or SandboxUnavailable when the sandbox fails."""

    @property
    def ref(self) -> SandboxRef:
        """The serialisable handle."""

    async def exec(self, command: Command) -> JobResult:
        """Run `command` to its end and return how it ended.

        A job id that was already started is not started again: a running one is waited for, a finished one gives its recorded
        result. Cancelling the call leaves the command running; `kill_job` ends it. Children it leaves in the background go
        on after the call and end with the sandbox.
        """

    async def progress(self, job_id: str) -> JobProgress | None:
        """Return how a running job stands, or None when it is not running."""

    async def kill_job(self, job_id: str) -> None:
        """End a job's whole process tree (TERM, then KILL) and return when it is dead. An unknown job is no error."""

    def read(self, path: str) -> AsyncIterator[bytes]:
        """Stream a regular file. `path` is absolute inside the sandbox or relative to the workspace. Raises FileFault."""

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a whole file atomically, making its parent directories. Raises FileFault."""

    async def look(self, paths: Sequence[str], max_bytes: int) -> dict[str, FileView]:
        """Look at many workspace paths in one call, each regular file up to `max_bytes` (-1: none) with its content."""

    async def change(self, changes: Sequence[FileChange]) -> None:
        """Make all `changes`, or none: new content is written beside the old and moved into place last. Raises FileFault.

        Making the same changes twice gives the same files, so that an interrupted call may be repeated.
        """

    async def walk(self, path: str) -> list[tuple[str, FileView]]:
        """List everything below a workspace path, (path, view without data) sorted by path; links are not followed.

        Raises FileFault when the path itself cannot be listed. One below it that cannot is told as a "closed directory".
        """

    async def extend(self, seconds: float) -> None:
        """Keep the sandbox alive for `seconds` more, where the provider has a lifetime; else nothing."""


class InteractiveSandbox(Sandbox, Protocol):
    """A sandbox whose commands can be talked to while they run. A session is a job; its job id names it.

    Every method raises SessionFault for a job that it does not know.
    """

    async def start(self, command: Command) -> None:
        """Start `command` and return without waiting for its end. A job id that was already started is not started again."""

    async def poll(self, job_id: str, read_id: str, wait: float, *, until_end: bool, limit: int) -> SessionOutput:
        """Return what a session has said since the read before this one, of each stream at most `limit` bytes.

        Waits up to `wait` seconds for the end, or, unless `until_end`, for output that is followed by a short silence. A read
        that was made before, by its `read_id`, is given again, and takes nothing from the next one. (Only of a flood that has
        gone on meanwhile, what is no longer kept is left out.)
        """

    async def send(self, job_id: str, input_id: str, data: bytes) -> None:
        """Type `data` (at most 64 KiB) at a session's terminal; what was typed before, by its `input_id`, is not typed again.

        Raises SessionFault when the session has ended, has no terminal, or does not take input now.
        """

    async def resize(self, job_id: str, rows: int, columns: int) -> None:
        """Set the size of a session's terminal. Raises SessionFault when it has ended or has none."""


class HostSandbox(Sandbox, Protocol):
    """A sandbox whose workspace is a directory of the worker's own host, where the harness scans and restores it directly."""

    @property
    def workspace(self) -> Path:
        """The workspace as this host sees it. Sandboxed code may change it at any moment."""

    @property
    def scratch(self) -> Path:
        """A directory, not made yet, on the file system of the workspace, that sandboxed code cannot reach; it goes with the
        sandbox."""

    @property
    def owner(self) -> tuple[int, int] | None:
        """The user and group id that files of the workspace must have, or None when those of the worker are right."""


class SandboxProvider(Protocol):
    """Makes, finds and ends sandboxes of one kind."""

    name: str
    capabilities: Capabilities

    async def create(
        self, spec: SandboxSpec, key: str, *, environment: Mapping[str, str], labels: Mapping[str, str], queue: str
    ) -> SandboxRef:
        """Make a sandbox with an empty workspace. The same `key` gives the same sandbox while it lives."""

    async def attach(self, ref: SandboxRef) -> Sandbox:
        """Reach a living sandbox and check its nonce. Raises SandboxGone when it is not the one `ref` means."""

    async def kill(self, ref: SandboxRef) -> None:
        """End a sandbox and remove all of it. Ending one that is gone is no error."""

    async def list(self, labels: Mapping[str, str]) -> list[SandboxRef]:
        """List living sandboxes that carry all `labels`."""

    async def egress_log(self, ref: SandboxRef) -> bytes:
        """Return the record of a sandbox's connections as JSON lines, empty where there are none; its network ends with that.

        Also of one that has died, as long as it has not been killed.
        """


class PausingProvider(SandboxProvider, Protocol):
    """A provider that can stop a sandbox and go on with it later, with its processes and what they have in memory."""

    async def pause(self, ref: SandboxRef) -> None:
        """Stop a sandbox, so that it costs little and its lifetime does not run. Pausing a paused one is no error.

        `list` still finds it, and `kill` ends it. Raises SandboxGone.
        """

    async def resume(self, ref: SandboxRef) -> SandboxRef:
        """Let a paused sandbox go on with a whole lifetime before it, and return its handle as it is from then on.

        One that runs goes on running. Raises SandboxGone.
        """


class ImagingProvider(SandboxProvider, Protocol):
    """A provider that can store what a sandbox has on its disk, and make another sandbox of that.

    Such an image only saves work: what is made of it is compared with the run's snapshot before it is used.
    """

    async def make_image(self, ref: SandboxRef) -> str:
        """Store a living sandbox's files and return the name of that, which `image` of a spec can be. Raises SandboxGone.

        An image that nobody removes ends by itself.
        """

    async def remove_image(self, image: str) -> None:
        """Remove an image. One that is gone is no error."""


def refuse_what_it_cannot(name: str, capabilities: Capabilities, spec: SandboxSpec) -> None:
    """Raise BadSandboxSpec for what a spec asks for and provider `name` cannot give, naming the field, the value and the remedy.

    Every provider calls it first in `create`, so that nothing is left out silently.
    """
    for field, value in spec.limits:
        if field not in capabilities.limits and value != SandboxLimits.model_fields[field].default:
            kept = ", ".join(sorted(capabilities.limits)) or "none"
            raise BadSandboxSpec(
                f"sandbox.limits.{field}: {value}: provider {name} does not keep this limit (it keeps: {kept}); "
                "leave the field out, or choose a provider that keeps it"
            )
    if spec.image is not None and not capabilities.images:
        raise BadSandboxSpec(f"sandbox.image: {spec.image}: provider {name} has no images; leave the field out")
    for option, chosen in spec.options.items():
        known = capabilities.options | ({"network"} if "open" in capabilities.network else set())
        if option not in known or (option == "network" and chosen != "open"):
            there = ", ".join(sorted(known)) or "none"
            raise BadSandboxSpec(f"sandbox.options.{option}: {chosen}: provider {name} has no such option; there are: {there}")
    wanted: Network = "open" if "network" in spec.options else "allowlist" if spec.network.allow else "none"
    if wanted == "open" and spec.network.allow:
        raise BadSandboxSpec("sandbox.network.allow: hosts are named, and options.network opens the network to all; choose one")
    if wanted not in capabilities.network:
        value, remedy = _NETWORK_REMEDIES[wanted]
        if wanted == "none" and "open" in capabilities.network:
            remedy += ", or accept an open network with options: {network: open}"
        raise BadSandboxSpec(f"sandbox.network.allow: {value}: provider {name} cannot {remedy}")


_NETWORK_REMEDIES = {
    "none": ("[]", "close the network of a sandbox; choose a provider that can"),
    "allowlist": ("hosts", "limit the network to some hosts; leave the field out, or choose a provider that can"),
    "open": ("[]", "open the network; name the hosts that are needed"),
}


def check_lengths(environment: Mapping[str, str]) -> None:
    """Refuse variables with which no program could be started. Raises BadSandboxSpec."""
    total = 0
    for name, value in environment.items():
        length = len(value.encode("utf-8", "surrogatepass"))
        total += length
        if length > MAX_VALUE or total > MAX_VALUES:
            raise BadSandboxSpec(
                f"environment: {name}: {length} bytes; a value has at most {MAX_VALUE} and all together {MAX_VALUES}; "
                "put what is long into a file of the workspace"
            )
