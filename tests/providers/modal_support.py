"""The provider for Modal against the emulator, with the faults that a test asks for."""

from __future__ import annotations

import shutil
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import modal

from activities.sandbox.providers.modal import ModalMachine, ModalProvider
from contracts.sandbox import SandboxRef, SandboxSpec
from tests.emulators.modal import TOKEN_ID, TOKEN_SECRET, Emulator
from tests.emulators.modal.control import Box

APP = "caisson-tests"


def missing() -> str | None:
    """Say what the emulator lacks on this machine, if anything."""
    lacking = [tool for tool in ("bwrap", "nsenter", "setpriv") if shutil.which(tool) is None]
    return f"the emulator needs {', '.join(lacking)}" if lacking else None


class Service:
    """An emulator and providers for it."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self._workers: list[ModalProvider] = []
        self.provider = self.worker()

    def worker(self, secret: str = TOKEN_SECRET, url: str = "") -> ModalProvider:
        """Return another provider, as another worker has it."""
        worker = ModalProvider(TOKEN_ID, secret, APP, url=url or self.emulator.url)
        self._workers.append(worker)
        return worker

    async def create(
        self, key: str = "key", spec: SandboxSpec | None = None, labels: Mapping[str, str] | None = None, queue: str = "q"
    ) -> SandboxRef:
        """Make a sandbox."""
        spec = spec or SandboxSpec(provider="modal")
        return await self.provider.create(spec, key, environment={}, labels=labels or {}, queue=queue)

    async def machine(self, ref: SandboxRef | None = None) -> ModalMachine:
        """Reach a sandbox, or a new one, below the portable layer."""
        machine = (await self.provider.attach(ref or await self.create())).machine
        assert isinstance(machine, ModalMachine)
        return machine

    async def client(self) -> tuple[modal.Client, modal.App]:
        """What the SDK needs to be used directly, as somebody else of the same workspace would."""
        return await self.provider._open()

    def box(self, ref: SandboxRef) -> Box:
        """Return what the emulator has of a sandbox."""
        return self.emulator.account.boxes[ref.id]

    def asked(self, call: str) -> int:
        """How often the emulator was called so."""
        return self.emulator.calls.count(call)

    async def close(self) -> None:
        """Close all connections."""
        for worker in self._workers:
            await worker.close()


def nobodys_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@asynccontextmanager
async def service_in(directory: Path) -> AsyncIterator[Service]:
    """Run an emulator."""
    async with Emulator(directory / "modal") as emulator:
        service = Service(emulator)
        try:
            yield service
        finally:
            await service.close()
