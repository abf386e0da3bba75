"""A machine made from nothing but the commands and files of a real local sandbox: what a provider's SDK gives, without one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from activities.sandbox.machine import OUTPUT_CAP, Ran
from activities.sandbox.port import Command, SandboxUnavailable, refuse_what_it_cannot
from activities.sandbox.portable import PortableSandbox, attach, prepare
from activities.sandbox.providers.local import LocalProvider, LocalSandbox
from contracts.sandbox import WORKSPACE, JobState, SandboxRef, SandboxSpec

BUSYBOX = "/tmp/bb"
NAME = "portable"


class LocalMachine:
    """One machine. `path` is where its programs are, where that is not all of the system."""

    def __init__(self, sandbox: LocalSandbox, path: str | None = None) -> None:
        self._sandbox = sandbox
        self._path = path
        self.calls: list[str] = []

    @property
    def ref(self) -> SandboxRef:
        """See Machine."""
        return self._sandbox.ref.model_copy(update={"provider": NAME})

    async def run(self, script: str, *, timeout: float) -> Ran:
        """See Machine."""
        assert len(script) <= 100_000
        self.calls.append("run")
        env = {} if self._path is None else {"PATH": self._path}
        shell = "sh" if self._path is None else f"{self._path}/sh"
        command = Command(f"sdk/{secrets.token_hex(8)}", [shell, "-c", script], WORKSPACE, env, timeout=86_400)
        try:
            async with asyncio.timeout(timeout):
                done = await self._sandbox.exec(command)
        except TimeoutError:
            raise SandboxUnavailable(f"no answer within {timeout} s") from None
        assert len(done.stdout) <= OUTPUT_CAP, len(done.stdout)
        if done.state is not JobState.EXITED:
            return Ran(128 + (done.signal or 0), done.stdout, done.stderr)
        return Ran(done.exit_code or 0, done.stdout, done.stderr[:OUTPUT_CAP])

    async def put(self, path: str, data: bytes) -> None:
        """See Machine."""
        assert len(data) <= 64 << 20
        self.calls.append("put")
        await self._sandbox.write(path, data)

    async def get(self, path: str) -> AsyncIterator[bytes]:
        """See Machine."""
        self.calls.append("get")
        async for part in self._sandbox.read(path):
            yield part

    async def extend(self, seconds: float) -> None:
        """See Machine."""
        await self._sandbox.extend(seconds)


class PortableProvider:
    """The provider that such machines make, with all of the system's programs or only those of BusyBox."""

    name = NAME

    def __init__(self, local: LocalProvider, *, busybox: bool = False) -> None:
        self.local = local
        self._busybox = busybox
        self.capabilities = replace(local.capabilities, native_jobs=False, host_files=False, network=frozenset({"none"}))

    async def create(
        self, spec: SandboxSpec, key: str, *, environment: Mapping[str, str], labels: Mapping[str, str], queue: str
    ) -> SandboxRef:
        """See SandboxProvider."""
        refuse_what_it_cannot(self.name, self.capabilities, spec)
        ref = await self.local.create(spec, key, environment={}, labels=labels, queue=queue)
        sandbox = await self.local.attach(ref)
        if self._busybox:
            script = f"mkdir -p {BUSYBOX}; for t in $(busybox --list); do ln -sf $(command -v busybox) {BUSYBOX}/$t; done"
            done = await sandbox.exec(Command("image", ["sh", "-c", script]))
            assert done.exit_code == 0, done.stderr
        machine = self._machine(sandbox)
        await prepare(machine, environment)
        return machine.ref

    async def attach(self, ref: SandboxRef) -> PortableSandbox:
        """See SandboxProvider."""
        return await attach(self._machine(await self.local.attach(ref)))

    async def kill(self, ref: SandboxRef) -> None:
        """See SandboxProvider."""
        await self.local.kill(ref)

    async def list(self, labels: Mapping[str, str]) -> list[SandboxRef]:
        """See SandboxProvider."""
        return [ref.model_copy(update={"provider": NAME}) for ref in await self.local.list(labels)]

    async def egress_log(self, ref: SandboxRef) -> bytes:
        """See SandboxProvider."""
        return b""

    def _machine(self, sandbox: LocalSandbox) -> LocalMachine:
        return LocalMachine(sandbox, BUSYBOX if self._busybox else None)
