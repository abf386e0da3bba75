"""What `provider_calls` has done in a sandbox: by Caisson's provider in this process, and by a peer in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from activities.sandbox.port import Command, ImagingProvider, PausingProvider, Sandbox, SandboxProvider
from activities.sandbox.registry import ProviderRegistry
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.workspace.keeper import WorkspaceKeeper
from benchmarks.provider_services import Service, environment
from contracts.base import BadInput
from contracts.sandbox import SandboxRef, SandboxSpec
from contracts.snapshot import SnapshotRef

T = TypeVar("T")
OUTPUT_BYTES, READ_BYTES, WRITE_BYTES = 1_000_000, 1_000_000, 1_000
FILES, FILE_BYTES = 10_000, 2_000
OUTPUT = f"head -c {OUTPUT_BYTES // 4 * 3} /dev/urandom | base64 -w 0"
"""One long line, which nothing on the way compresses by much."""
OPERATIONS: Mapping[str, str] = {
    "create": "",
    "attach": "",
    "attach_again": "",
    "true": "",
    "output_1mb": "",
    "read_1mb": f"head -c {READ_BYTES} /dev/urandom >big",
    "write_1kb": "rm big",
    "put_in": "rm small",
    "first": "",
    "unchanged": "",
    "one_changed": f"f=$(find . -name file-77) && [ -n $f ] && head -c {FILE_BYTES} /dev/urandom >$f",
    "close": "",
}
"""The operations in their order, each with the command that is run in the sandbox before it, and not counted."""
PORTABLE, NATIVE = "away_portable", "away_native"
OWN_OPERATIONS: Mapping[str, str] = {**OPERATIONS, PORTABLE: "", NATIVE: "", "close_again": ""}
"""Those of Caisson, which also puts a sandbox away and brings it back: as it can everywhere, and as this provider can."""


class Fault(Exception):
    """An operation did not do what it should; the text says what happened."""


class Worker(Protocol):
    """Who has sandboxes do something."""

    port_calls: int
    """Of the sandbox port, so far; 0 for who has none."""

    async def do(self, operation: str) -> None:
        """Do one of OPERATIONS, or `warm_up`: make, reach and end a sandbox. Raises Fault."""

    async def run(self, script: str) -> None:
        """Run a script in the sandbox. Raises Fault."""


class CountedPort:
    """A sandbox that counts the calls of the port that the snapshots make, as the snapshots' own tests do."""

    def __init__(self, inner: Sandbox, count: Callable[[], None]) -> None:
        self._inner, self._count = inner, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def exec(self, command: Command) -> Any:
        """See Sandbox."""
        self._count()
        return await self._inner.exec(command)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See Sandbox."""
        self._count()
        await self._inner.write(path, data, mode)

    async def read(self, path: str) -> AsyncIterator[bytes]:
        """See Sandbox."""
        self._count()
        async for part in self._inner.read(path):
            yield part


@dataclass
class Ours:
    """Caisson: one worker makes the sandbox, and another, that knows nothing of it, does everything else."""

    service: Service
    root: Path
    tree: SnapshotRef
    """The files that are put in, as a snapshot in the store below `root`."""
    port_calls: int = 0
    _ref: SandboxRef | None = None
    _snapshot: SnapshotRef | None = None
    _sandbox: Sandbox | None = None
    _maker: SandboxProvider = field(init=False)
    _provider: SandboxProvider = field(init=False)

    def __post_init__(self) -> None:
        self._maker, self._provider = self.service.provider(), self.service.provider()
        self._restorer = self._keeper("tree-store")
        # A worker with a store of its own, so that the first snapshot brings everything out.
        self._store = f"store-{self.service.name}"
        self._snapshotter = self._keeper(self._store)

    def _keeper(self, store: str) -> WorkspaceKeeper:
        return WorkspaceKeeper(
            ProviderRegistry({self.service.name: lambda: self._provider}), BlobStore(LocalStore(self.root / store))
        )

    async def do(self, operation: str) -> None:
        """See Worker."""
        match operation:
            case "warm_up":
                ref = await self._create("warm-up")
                await self._true(await self._provider.attach(ref))
                await self._provider.kill(ref)
            case "create":
                self._ref = await self._create("benchmark")
            case "attach" | "attach_again":
                self._sandbox = await self._provider.attach(_have(self._ref))
            case "true":
                await self._true(_have(self._sandbox))
            case "output_1mb":
                _check(len((await self._sh(OUTPUT)).stdout), OUTPUT_BYTES)
            case "read_1mb":
                _check(sum([len(part) async for part in _have(self._sandbox).read("big")]), READ_BYTES)
            case "write_1kb":
                await _have(self._sandbox).write("small", os.urandom(WRITE_BYTES))
            case "put_in":
                _check(await self._restorer.restore(self._counted(), self.tree), FILES)
            case "first" | "unchanged" | "one_changed":
                await self._take(operation)
            case "close" | "close_again":
                await self._provider.kill(_have(self._ref))
            case "away_portable":
                self._ref = await self._create("portable")
                self._sandbox = await self._provider.attach(self._ref)
                # By a worker that knows nothing of the sandbox before, as in a run that has waited for days.
                _check(await self._keeper(self._store).restore(self._sandbox, _have(self._snapshot)), FILES)
            case "away_native":
                await self._put_away()

    async def run(self, script: str) -> None:
        """See Worker."""
        await self._sh(script)

    async def _put_away(self) -> None:
        """Let the provider keep the sandbox, and bring it back so that a command can be run in it."""
        capabilities, ref = self._provider.capabilities, _have(self._ref)
        if capabilities.pause:
            pausing = cast("PausingProvider", self._provider)
            await pausing.pause(ref)
            self._ref = await pausing.resume(ref)
            await self._provider.attach(self._ref)
        elif capabilities.native_snapshot:
            imaging = cast("ImagingProvider", self._provider)
            image = await imaging.make_image(ref)
            await self._provider.kill(ref)
            self._ref = await self._create("native", image)
            sandbox = await self._provider.attach(self._ref)
            if not await self._keeper(self._store).holds(sandbox, _have(self._snapshot)):
                raise Fault("the image does not hold what was put away")
            await imaging.remove_image(image)
        else:
            raise Fault("the provider keeps nothing of a sandbox")

    async def _create(self, key: str, image: str | None = None) -> SandboxRef:
        spec, labels = SandboxSpec(provider=self.service.name, image=image), {"caisson_run": "benchmark"}
        return await self._maker.create(spec, key, environment={}, labels=labels, queue="q")

    async def _true(self, sandbox: Sandbox) -> None:
        _check((await sandbox.exec(Command(secrets.token_hex(8), ("true",)))).exit_code, 0)

    async def _sh(self, script: str) -> Any:
        result = await _have(self._sandbox).exec(Command(secrets.token_hex(8), ("sh", "-c", script)))
        if result.exit_code != 0:
            raise Fault(f"{script!r} ended as {result}")
        return result

    def _counted(self) -> Sandbox:
        def count() -> None:
            self.port_calls += 1

        return cast("Sandbox", CountedPort(_have(self._sandbox), count))

    async def _take(self, operation: str) -> None:
        before = self._snapshot
        self._snapshot = after = await self._snapshotter.snapshot(self._counted(), before)
        _check(after.files, FILES)
        if (before == after) != (operation == "unchanged"):
            raise Fault(f"the snapshot {operation!r} is {after}, after {before}")


class Peer:
    """A peer's script, which is told what to do a line at a time, and answers each in one of JSON."""

    port_calls = 0

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, service: Service, python: Path, archive: Path) -> Peer:
        """Start the script for a service. `archive` holds the files that are put in."""
        script = Path(__file__).parent / f"peers/{service.name}_calls.py"
        return cls(
            await asyncio.create_subprocess_exec(
                *(python.absolute(), script, archive),
                env=environment(service),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    async def do(self, operation: str) -> None:
        """See Worker."""
        await self._ask({"do": operation})

    async def run(self, script: str) -> None:
        """See Worker."""
        await self._ask({"run": script})

    async def end(self) -> None:
        """End the script, whatever it does."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _ask(self, what: dict[str, Any]) -> None:
        if self._process.stdin is None or self._process.stdout is None:
            raise BadInput("the peer's script has no pipes")
        sizes = {"output": OUTPUT, "output_bytes": OUTPUT_BYTES, "read_bytes": READ_BYTES, "write_bytes": WRITE_BYTES}
        self._process.stdin.write(json.dumps({**what, **sizes, "files": FILES, "file_bytes": FILE_BYTES}).encode() + b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise BadInput("the peer's script ended; what it said is above")
        fault = json.loads(line)["fault"]
        if fault is not None:
            raise Fault(fault)


def _have(thing: T | None) -> T:
    if thing is None:
        raise Fault("an operation before it did not do well")
    return thing


def _check(found: int | None, wanted: int) -> None:
    if found != wanted:
        raise Fault(f"{found} instead of {wanted}")
