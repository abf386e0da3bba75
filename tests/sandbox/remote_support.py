"""A sandbox that is reached through its port alone, as one at a provider is, with counts and faults for the snapshot tests."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from activities.sandbox.port import Capabilities, Command, FileChange, FileView, JobProgress, Sandbox
from activities.sandbox.registry import ProviderRegistry
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.workspace.keeper import WorkspaceKeeper
from contracts.sandbox import JobResult, SandboxRef
from tests.sandbox.local_support import Local

STDOUT_CAP = 64 << 10
"""What some providers keep of a command's output."""


class PortOnly:
    """Exposes the methods of the port and nothing else, counts calls and bytes, and lets a test change what passes."""

    def __init__(self, inner: Sandbox) -> None:
        self._inner = inner
        self.path: str | None = None
        """Where commands look for programs, if not where the sandbox says."""
        self.calls: list[str] = []
        self.received = 0
        self.sent = 0
        self.on_read: Callable[[str, bytes], bytes] | None = None
        """Is given the name of a file and its whole content, and returns what the harness gets."""
        self.on_write: Callable[[str, bytes], bytes] | None = None
        self.greeting = b""
        """What a login shell says before the command."""
        self.before_call: Callable[[str], None] | None = None

    @property
    def ref(self) -> SandboxRef:
        """The handle, of a provider that is not the local one."""
        return self._inner.ref.model_copy(update={"provider": "remote"})

    def _count(self, what: str) -> None:
        if self.before_call is not None:
            self.before_call(what)
        self.calls.append(what)

    async def exec(self, command: Command) -> JobResult:
        """See Sandbox."""
        self._count(command.job_id.split("/")[1])
        argv = list(command.argv)
        if self.path is not None:
            argv = [f"{self.path}/{argv[0]}", *argv[1:]]
            command = dataclasses.replace(command, argv=argv, env={"PATH": self.path})
        result = await self._inner.exec(command)
        return result.model_copy(
            update={"stdout": (self.greeting + result.stdout)[:STDOUT_CAP], "stderr": result.stderr[:STDOUT_CAP]}
        )

    async def progress(self, job_id: str) -> JobProgress | None:
        """See Sandbox."""
        return await self._inner.progress(job_id)

    async def kill_job(self, job_id: str) -> None:
        """See Sandbox."""
        await self._inner.kill_job(job_id)

    async def read(self, path: str) -> AsyncIterator[bytes]:
        """See Sandbox."""
        name = path.rpartition("/")[2]
        self._count(f"read {name}")
        if self.on_read is not None:
            data = self.on_read(name, b"".join([part async for part in self._inner.read(path)]))
            for start in range(0, len(data), 100_000):
                yield data[start : start + 100_000]
            return
        async for part in self._inner.read(path):
            self.received += len(part)
            yield part

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See Sandbox."""
        name = path.rpartition("/")[2]
        self._count(f"write {name}")
        self.sent += len(data)
        await self._inner.write(path, data if self.on_write is None else self.on_write(name, data), mode)

    async def look(self, paths: Sequence[str], max_bytes: int) -> dict[str, FileView]:
        """See Sandbox."""
        raise AssertionError("a snapshot does not look at files one by one")

    async def change(self, changes: Sequence[FileChange]) -> None:
        """See Sandbox."""
        raise AssertionError("a restore does not write files one by one")

    async def walk(self, path: str) -> list[tuple[str, FileView]]:
        """See Sandbox."""
        raise AssertionError("a snapshot lists the workspace itself")

    async def extend(self, seconds: float) -> None:
        """See Sandbox."""
        self._count("extend")
        await self._inner.extend(seconds)

    def start(self) -> None:
        """Count from here."""
        self.calls, self.received, self.sent = [], 0, 0


class RemoteProvider:
    """What the keeper asks of a provider whose sandboxes have no host."""

    name = "remote"
    capabilities = Capabilities(host_bound=False, native_jobs=False)


def keeper_at(root: Path) -> WorkspaceKeeper:
    """A worker's keeper that knows nothing yet, over a store that others have as well."""
    providers = ProviderRegistry({"remote": RemoteProvider, "local": LocalLike, "portable": RemoteProvider})  # type: ignore[dict-item]
    return WorkspaceKeeper(providers, BlobStore(LocalStore(root / "store")))


class LocalLike:
    """What the keeper asks of a provider whose sandboxes lie on this host."""

    name = "local"
    capabilities = Capabilities(host_bound=True, native_jobs=True, host_files=True)


TOOLS = "sh find xargs stat readlink sha256sum tar cat cut date touch chmod mkdir mv rm ln tr wc sleep gzip ls env"


async def only_gnu(local: Local) -> str:
    """Make a directory of the system's tools without Python in a sandbox, and return it."""
    done = await local.sh(f'mkdir /tmp/gnu; for t in {TOOLS}; do ln -s "$(command -v $t)" /tmp/gnu/$t; done')
    assert done.exit_code == 0, done.stderr
    return "/tmp/gnu"


async def only_busybox(local: Local) -> str:
    """Make a directory of BusyBox's tools in a sandbox, and return it."""
    done = await local.sh("mkdir /tmp/bb; for t in $(busybox --list); do ln -s $(command -v busybox) /tmp/bb/$t; done")
    assert done.exit_code == 0, done.stderr
    return "/tmp/bb"


def forged(**sections: bytes) -> bytes:
    """A listing with the given sections, the others empty but for a good workspace."""
    rows = b".//41ed 2 1 4096 1700000000000000000 1700000000000000000 1\n"
    names = ("now", "ignore", "rows", "links", "faults", "attributes", "digests", "end")
    parts = dict.fromkeys(names, b"") | {"now": b"1800000000000000000"} | sections
    parts["rows"] = rows + parts["rows"]
    return zlib.compress(b"".join(b"%s %d\n%s" % (name.encode(), len(data), data) for name, data in parts.items()), 1, 31)
