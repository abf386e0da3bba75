"""Calling the helpers inside a sandbox that is reached through the port alone.

One call of a helper is one job: `sh -c START sh PYTHON SHELL OPERATION WORKSPACE SCRATCH RESERVED ...`. It runs the helper in
Python (the text `PYTHON`) if there is one from 3.6 on, and else that in POSIX shell. Files go to and fro in a directory below
/tmp, which every image has, whoever its user is, and which is no part of the workspace. It belongs to the agent's own user, so
all that comes from there is as hostile as the workspace itself. The only thing that a helper says is its last line, which no
provider can find too long:

    caisson-1 done python|shell WHAT-IT-KEEPS...
    caisson-1 fault TEXT
    caisson-1 lacks TOOLS...
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from activities.sandbox.port import SCRATCH, BadSandboxSpec, Command, FileFault, Sandbox, SandboxUnavailable
from contracts.sandbox import WORKSPACE, JobState

HELPERS = Path(__file__).parent / "sandbox_helper"
_PACKAGE = "activities.workspace.sandbox_helper"
_OWN_IMPORT = re.compile(rf"^from {re.escape(_PACKAGE)}\b[^\n]*? import (?:\([^)]*\)|[^\n(]*)\n", re.MULTILINE)
_OPERATIONS = {
    "look": (("common",), "look"),
    "list": (("common", "listing"), "list_workspace"),
    "pack": (("common", "packing"), "pack"),
    "unpack": (("common", "listing", "unpacking"), "unpack"),
}
"""The modules of each operation's helper in Python, and its function."""
_PROBE = "import hashlib, sys, zlib; sys.exit(sys.version_info < (3, 6))"
_START = f"""python=$1 shell=$2; shift 2; umask 077
case "$1" in list|look|clear) rm -rf "$3" ;; esac
mkdir -p "$3" && [ ! -L "$3" ] && [ -O "$3" ] || {{ printf '\\ncaisson-1 fault %s cannot be made\\n' "$3"; exit 1; }}
[ "$1" != clear ] || {{ rm -rf "$3"; printf '\\ncaisson-1 done\\n'; exit 0; }}
if python3 -I -S -c '{_PROBE}' 2>/dev/null; then exec python3 -I -S -c "$python" "$@"; fi
exec sh -c "$shell" sh "$@"
"""


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """The most that is taken from one sandbox. What it says of sizes is not believed; these hold for what really arrives."""

    entries: int = 1_000_000
    """Files, directories and links."""
    listing_bytes: int = 512 << 20
    file_bytes: int = 16 << 30
    total_bytes: int = 64 << 30
    round_bytes: int = 128 << 20
    """Of content in one bundle, which lies in the sandbox's /tmp: often memory."""
    part_bytes: int = 64 << 20
    """Of a bundle that is written, since one write is held in memory."""
    seconds: float = 1800.0
    """For one operation of a helper."""


@dataclass(frozen=True, slots=True)
class Keeps:
    """What the tools of a sandbox can keep of a workspace."""

    python: bool
    words: frozenset[str]

    @property
    def nanoseconds(self) -> bool:
        """Whether times are kept to the nanosecond, not only to the second."""
        return "ns" in self.words

    @property
    def link_times(self) -> bool:
        """Whether the times of symlinks are kept at all."""
        return "linktimes" in self.words

    @property
    def lost(self) -> str:
        """What is not kept, for people; nothing when all is."""
        if self.python:
            return ""
        times = ["times below a second"] * (not self.nanoseconds) + ["the times of links"] * (not self.link_times)
        return f"without Python in the sandbox, {', '.join([*times, 'extended attributes'])} and holes of files are not kept"


class Helper:
    """Runs the helpers in one sandbox."""

    def __init__(self, sandbox: Sandbox, limits: RemoteLimits) -> None:
        self._sandbox = sandbox
        self._limits = limits
        ref = sandbox.ref
        name = hashlib.sha256(f"{ref.id} {ref.nonce}".encode()).hexdigest()[:16]
        self.reserved = f".caisson-{name}"
        """A name at the top of the workspace that is no part of it: there a restore is prepared, on the same file system."""
        self.scratch = f"{SCRATCH}{name}"

    async def call(self, operation: str, *given: str) -> Keeps:
        """Run one operation. Raises SandboxError, saying what the helper said."""
        python = _python_text(operation) if operation in _OPERATIONS else ""
        words = [python, _shell_text(), operation, WORKSPACE, self.scratch, self.reserved, *given]
        job = f"caisson/{operation}/{secrets.token_hex(8)}"
        command = Command(job, ["sh", "-c", _START, "sh", *words], timeout=self._limits.seconds, output_limit=16 << 10)
        try:
            result = await self._sandbox.exec(command)
        except asyncio.CancelledError:
            await self._sandbox.kill_job(job)
            raise
        said = result.stdout[-4096:].decode("utf-8", "replace").strip().rpartition("\n")[2].split(" ")
        if result.state is JobState.EXITED and said[0] == "caisson-1" and len(said) > 1:
            match said[1]:
                case "done":
                    return Keeps(said[2:3] == ["python"], frozenset(said[3:]))
                case "fault":
                    raise SandboxUnavailable(f"{WORKSPACE}: {' '.join(said[2:])[:500]}")
                case "lacks":
                    tools = " ".join(said[2:])[:200]
                    raise BadSandboxSpec(f"the image of the sandbox lacks {tools}, which a snapshot needs; or give it Python 3")
        tail = (result.stderr or result.stdout)[-300:].decode("utf-8", "replace")
        raise SandboxUnavailable(f"the snapshot helper in the sandbox ended without a word ({result.state}): {tail!r}")

    async def write(self, name: str, data: bytes) -> None:
        """Write one file for the helper."""
        try:
            await self._sandbox.write(f"{self.scratch}/{name}", data, 0o600)
        except FileFault as fault:
            raise SandboxUnavailable(f"the snapshot helper's files cannot be written: {fault}") from fault

    async def read(self, name: str, most: int) -> AsyncIterator[bytes]:
        """Stream a file that the helper wrote. Raises SandboxUnavailable when there is more of it than `most` bytes."""
        total = 0
        try:
            async for data in self._sandbox.read(f"{self.scratch}/{name}"):
                total += len(data)
                if total > most:
                    raise SandboxUnavailable(f"the sandbox sent more than {most} bytes where no more was asked for")
                yield data
        except FileFault as fault:
            raise SandboxUnavailable(f"what the snapshot helper wrote cannot be read: {fault}") from fault


def escaped(data: bytes) -> str:
    """Return bytes as `printf %b` reads them, in letters that no shell and no encoding touches."""
    return "".join(chr(byte) if (chr(byte).isalnum() and byte < 128) or byte in b"./_-" else f"\\0{byte:03o}" for byte in data)


@cache
def _python_text(operation: str) -> str:
    modules, function = _OPERATIONS[operation]
    parts: list[str] = []
    for name in modules:
        # Its lines keep their numbers.
        text = (HELPERS / f"{name}.py").read_text()
        parts.append(_OWN_IMPORT.sub(lambda found: "\n" * found[0].count("\n"), text))
    return "".join(parts) + f"\nrun({function}, sys.argv[2:])\n"


@cache
def _shell_text() -> str:
    return (HELPERS / "helper.sh").read_text()


def split(items: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return (start, count) of runs of sizes that are together at most `most`, or one alone."""
    runs: list[tuple[int, int]] = []
    start = total = 0
    for number, size in enumerate(items):
        if number > start and total + size > most:
            runs.append((start, number - start))
            start, total = number, 0
        total += size
    if len(items) > start:
        runs.append((start, len(items) - start))
    return runs
