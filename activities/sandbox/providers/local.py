"""The local provider: sandboxes of bubblewrap on this Linux host, the embedded default.

A sandbox is a tree of processes that no worker is the parent of; `local_init` is its root and `<root>/<id>/` (see
`local_state`) its memory. So a worker may be killed at any moment, and another one on the same host goes on where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from activities.sandbox.port import (
    BadSandboxSpec,
    Capabilities,
    Command,
    FileChange,
    FileView,
    JobProgress,
    SandboxUnavailable,
    SessionFault,
    SessionOutput,
    check_lengths,
    refuse_what_it_cannot,
)
from activities.sandbox.providers.local_bwrap import in_memory
from activities.sandbox.providers.local_client import Client, gone
from activities.sandbox.providers.local_egress import ENVIRONMENT as PROXY_ENVIRONMENT
from activities.sandbox.providers.local_egress import Egress
from activities.sandbox.providers.local_inventory import Resident, inventory
from activities.sandbox.providers.local_output import FILES, last_output, recorded_result
from activities.sandbox.providers.local_session import poll
from activities.sandbox.providers.local_start import Tools, find_tools, start_sandbox
from activities.sandbox.providers.local_state import Record, StateDirectory
from activities.threads import to_end
from contracts.sandbox import JobResult, SandboxLimits, SandboxRef, SandboxSpec

if TYPE_CHECKING:
    from activities.sandbox.providers.local_client import Conversation
    from activities.sandbox.providers.local_wire import Change, Entry, Request

CHUNK = 1 << 20
MAX_INPUT = 64 << 10
END_GRACE = 60.0
"""Seconds after a command's own timeout until its sandbox counts as stuck: init and supervisor should have ended it long ago."""


class LocalSandbox:
    """One living local sandbox. It holds nothing open, so it needs no closing and works in any event loop."""

    def __init__(self, state: StateDirectory, record: Record, provider: str) -> None:
        self._record = record
        self._ref = record.ref(provider)
        self._directory = state.path(record.id)
        self._jobs = self._directory / "jobs"
        self._client = Client(state, record)

    @property
    def ref(self) -> SandboxRef:
        """The serialisable handle."""
        return self._ref

    @property
    def workspace(self) -> Path:
        """See HostSandbox."""
        return self._directory / "workspace"

    @property
    def scratch(self) -> Path:
        """See HostSandbox."""
        return self._directory / "scratch"

    @property
    def owner(self) -> tuple[int, int] | None:
        """See HostSandbox: a root worker's sandbox has a user of its own."""
        status = self.workspace.stat()
        return None if status.st_uid == os.geteuid() else (status.st_uid, status.st_gid)

    async def exec(self, command: Command) -> JobResult:
        """Run `command` to its end, or find it by its job id, and return how it ended."""
        async with self._client.converse() as conversation:
            if await self._begin(conversation, command):
                async with asyncio.timeout(command.timeout + END_GRACE):
                    await conversation.receive()
            try:
                return await asyncio.to_thread(recorded_result, self._job(command.job_id), command.output_limit)
            except (ValueError, KeyError) as error:
                raise SandboxUnavailable(f"the record of job {command.job_id} cannot be read: {error}") from error

    async def start(self, command: Command) -> None:
        """Start `command`, or find it by its job id, and return while it runs."""
        async with self._client.converse() as conversation:
            await self._begin(conversation, command)

    async def poll(self, job_id: str, read_id: str, wait: float, *, until_end: bool, limit: int) -> SessionOutput:
        """Return what a session has said since the read before this one."""
        return await poll(self._client, job_id, self._job(job_id), read_id, wait, until_end, limit)

    async def send(self, job_id: str, input_id: str, data: bytes) -> None:
        """Type `data` at a session's terminal, once for each `input_id`."""
        if len(data) > MAX_INPUT:
            raise SessionFault(f"{len(data)} bytes of input are more than the {MAX_INPUT} that are typed at once")
        await self._client.ask({"op": "type", "job": job_id, "input": input_id, "data": data.decode("latin-1")})

    async def resize(self, job_id: str, rows: int, columns: int) -> None:
        """Set the size of a session's terminal."""
        await self._client.ask({"op": "resize", "job": job_id, "rows": rows, "columns": columns})

    async def progress(self, job_id: str) -> JobProgress | None:
        """Return how a running job stands, or None when it is not running."""
        reply, _ = await self._client.ask({"op": "progress", "job": job_id})
        if not reply["running"]:
            return None
        try:
            (stdout, stdout_bytes), (stderr, stderr_bytes) = (
                last_output(self._job(job_id), stream) for stream in ("stdout", "stderr")
            )
        except FileNotFoundError as error:
            raise gone(self._record.id) from error
        return JobProgress(
            stdout_tail=stdout,
            stderr_tail=stderr,
            stdout_bytes=stdout_bytes,
            stderr_bytes=stderr_bytes,
            running_seconds=reply["seconds"],
        )

    async def kill_job(self, job_id: str) -> None:
        """End a job's whole process tree and return when it is dead. An unknown job is no error."""
        async with self._client.converse() as conversation:
            reply, _ = await self._client.put(conversation, {"op": "kill", "job": job_id})
            if reply["running"]:
                async with asyncio.timeout(END_GRACE):
                    await conversation.receive()

    async def read(self, path: str) -> AsyncIterator[bytes]:
        """Stream a regular file of the sandbox. Raises FileFault."""
        _, (fd,) = await self._client.ask({"op": "read", "path": path})
        try:
            # The sandbox's own file, opened by init behind the sandbox's mounts; it goes on when the sandbox ends.
            while data := await to_end(os.read, fd, CHUNK):
                yield data
        finally:
            os.close(fd)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Write a whole file atomically, making its parent directories. Raises FileFault."""
        await self._write("write", [FileChange(path, data, mode)])

    async def look(self, paths: Sequence[str], max_bytes: int) -> dict[str, FileView]:
        """Look at many workspace paths in one call. Raises FileFault for one that cannot be looked at."""
        reply, (fd,) = await self._client.ask({"op": "look", "paths": list(paths), "max_bytes": max_bytes})
        try:
            return await to_end(views_with_data, reply["entries"], reply["lengths"], fd)
        finally:
            os.close(fd)

    async def change(self, changes: Sequence[FileChange]) -> None:
        """Make all `changes`, or none. Raises FileFault."""
        await self._write("change", changes)

    async def walk(self, path: str) -> list[tuple[str, FileView]]:
        """List everything below a workspace path, sorted. Raises FileFault."""
        reply, _ = await self._client.ask({"op": "walk", "path": path})
        return [(entry[0], view(entry)) for entry in reply["entries"]]

    async def extend(self, seconds: float) -> None:
        """Do nothing but see that the sandbox lives: a local one has no end of its own."""
        await self._client.ask({"op": "ping"})

    async def _write(self, operation: str, changes: Sequence[FileChange]) -> None:
        items: list[Change] = [
            {"path": item.path, "length": None if item.data is None else len(item.data), "mode": item.mode} for item in changes
        ]
        fd = await to_end(in_memory, "content", b"".join(item.data or b"" for item in changes), undo=os.close)
        try:
            await self._client.ask({"op": operation, "changes": items}, [fd])
        finally:
            os.close(fd)

    async def _begin(self, conversation: Conversation, command: Command) -> bool:
        """Start a command or find it, and return whether it runs. From then on the job is init's, and needs no worker."""
        request: Request = {
            "op": "exec",
            "job": command.job_id,
            "argv": list(command.argv),
            "cwd": command.cwd,
            "env": dict(command.env or {}),
            "stdin": command.stdin is not None,
            "terminal": command.terminal,
            "timeout": command.timeout,
        }
        fds = self._open_job(self._job(command.job_id), command.stdin)
        try:
            reply, _ = await self._client.put(conversation, request, fds)
        finally:
            close(fds)
        return reply["running"]

    def _job(self, job_id: str) -> Path:
        return self._jobs / hashlib.sha256(job_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def _open_job(self, job: Path, stdin: bytes | None) -> list[int]:
        """Open a job's files. They are not emptied: when the job runs already they are in use, and init drops these."""
        fds: list[int] = []
        try:
            job.mkdir(0o700, exist_ok=True)
            for name in FILES:
                fds.append(os.open(job / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if stdin is not None:
                fds.append(in_memory("stdin", stdin))
        except FileNotFoundError as error:
            close(fds)
            raise gone(self._record.id) from error
        except OSError as error:
            close(fds)
            raise SandboxUnavailable(f"the files of a job cannot be made on this host: {error}") from error
        return fds


def close(fds: Sequence[int]) -> None:
    """Close open files."""
    for fd in fds:
        os.close(fd)


def view(entry: Entry, data: bytes | None = None) -> FileView:
    """Return what init told of one path as the port tells it."""
    _, kind, mode, size, target = entry
    return FileView(kind=kind, mode=mode, size=size, data=data, target=target)


def views_with_data(entries: Sequence[Entry], lengths: Sequence[int | None], fd: int) -> dict[str, FileView]:
    """Put the answer of a look together: `fd` holds the contents one after the other."""
    views: dict[str, FileView] = {}
    offset = 0
    for entry, length in zip(entries, lengths, strict=True):
        data = None
        if length is not None:
            data = os.pread(fd, length, offset)
            offset += length
        views[entry[0]] = view(entry, data)
    return views


class LocalProvider:
    """Makes, finds and ends the local sandboxes of this host.

    `root` is its state directory, private to the worker's user; `proxy` the command that starts the filtering proxy of a sandbox
    with a network policy (see `local_egress`), without which there are no such sandboxes.
    """

    name = "local"
    capabilities = Capabilities(
        host_bound=True,
        native_jobs=True,
        interactive=True,
        host_files=True,
        network=frozenset({"none", "allowlist"}),
        limits=frozenset(SandboxLimits.model_fields),
    )

    def __init__(self, root: Path, *, bwrap: str | None = None, proxy: Sequence[str] = ()) -> None:
        self._state = StateDirectory(root.absolute())
        self._bwrap = bwrap
        self._tools: Tools | None = None
        self._egress = Egress(self._state, proxy)

    async def create(
        self, spec: SandboxSpec, key: str, *, environment: Mapping[str, str], labels: Mapping[str, str], queue: str
    ) -> SandboxRef:
        """Make a sandbox with an empty workspace, or return the living one of `key`."""
        for name, value in environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise BadSandboxSpec(f"environment: {name!r} cannot be set; a name has no '=' and neither has a NUL byte")
        check_lengths(environment)
        refuse_what_it_cannot(self.name, self.capabilities, spec)
        self._egress.check(spec.network.allow)
        return await asyncio.to_thread(self._create, spec, key, environment, labels, queue)

    async def attach(self, ref: SandboxRef) -> LocalSandbox:
        """Reach a living sandbox and check its nonce. Raises SandboxGone."""
        record = self._find(ref)
        if record is None or not record.is_alive():
            raise gone(ref.id, record)
        sandbox = LocalSandbox(self._state, record, self.name)
        await sandbox.extend(0)
        await asyncio.to_thread(self._egress.ensure, record)
        return sandbox

    async def kill(self, ref: SandboxRef) -> None:
        """End a sandbox and remove all of it. Ending one that is gone is no error."""
        await asyncio.to_thread(self._kill, ref)

    async def list(self, labels: Mapping[str, str]) -> list[SandboxRef]:
        """List living sandboxes that carry all `labels`, after clearing away what killed workers left half done."""
        records = await asyncio.to_thread(self._list)
        return [record.ref(self.name) for record in records if labels.items() <= record.labels.items()]

    async def inventory(self) -> Sequence[Resident]:
        """Return this host's sandboxes, the dead ones too, the oldest first. Changes nothing."""
        return await asyncio.to_thread(inventory, self._state, self.name)

    async def clear(self) -> None:
        """Remove what makers and removers that were killed left half done."""
        await asyncio.to_thread(self._state.clear)

    async def egress_log(self, ref: SandboxRef) -> bytes:
        """Return the record of a sandbox's connections; its network ends with that."""
        record = self._find(ref)
        return b"" if record is None else await asyncio.to_thread(self._egress.read_log, record)

    def _find(self, ref: SandboxRef) -> Record | None:
        """Return the record of exactly the sandbox that `ref` means."""
        try:
            record = self._state.load(ref.id)
        except ValueError:
            return None
        return record if record is not None and record.nonce == ref.nonce else None

    def _create(
        self, spec: SandboxSpec, key: str, environment: Mapping[str, str], labels: Mapping[str, str], queue: str
    ) -> SandboxRef:
        if spec.network.allow:
            environment = {**PROXY_ENVIRONMENT, **environment}
        if self._tools is None:
            self._tools = find_tools(self._bwrap)
        sandbox_id = self._state.id_for(key)
        with self._state.locked(sandbox_id):
            record = self._state.load(sandbox_id)
            if record is None or not record.is_alive():
                self._state.remove(sandbox_id)
                record = start_sandbox(
                    self._state, self._tools, sandbox_id, spec.limits, environment=environment, labels=labels, queue=queue
                )
            self._egress.ensure(record, spec.network.allow)
        return record.ref(self.name)

    def _kill(self, ref: SandboxRef) -> None:
        if self._find(ref) is None:
            return
        with self._state.locked(ref.id):
            if self._find(ref) is not None:  # it may have been replaced while this waited for the lock
                self._state.remove(ref.id)

    def _list(self) -> Sequence[Record]:
        self._state.sweep()
        return self._state.records()
