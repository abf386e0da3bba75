"""Where `provider_calls` finds sandboxes: a real Podman, and the emulators of E2B and Modal, each behind a wire that counts."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from activities.sandbox.port import SandboxProvider
from activities.sandbox.providers.docker import DockerProvider
from activities.sandbox.providers.e2b import E2BProvider
from activities.sandbox.providers.modal import ModalProvider
from benchmarks.wire import Wire
from contracts.base import BadInput
from tests.emulators.e2b.server import API_KEY
from tests.emulators.modal import TOKEN_ID, TOKEN_SECRET
from tests.emulators.modal import Emulator as ModalEmulator
from tests.providers import e2b_support, modal_support
from tests.providers.podman import IMAGES, PROCESSES_OF_USER, Missing, podman

IMAGE = "debian-python"
"""A minimal Debian with Python, which the tests make of Debian's packages."""


class NotHere(Exception):
    """A service cannot be run on this machine; the text says what is missing."""


@dataclass(frozen=True)
class Spent:
    """What passed until now, or in between two moments."""

    requests: tuple[str, ...]
    sent: int
    received: int
    connections: int

    def since(self, before: Spent) -> Spent:
        """Return what passed after `before`."""
        return Spent(
            self.requests[len(before.requests) :],
            self.sent - before.sent,
            self.received - before.received,
            self.connections - before.connections,
        )


@dataclass(frozen=True)
class Service:
    """A running service, and what it takes to use it."""

    name: str
    wires: Sequence[Wire]
    log: Callable[[], Sequence[str]]
    """The requests so far."""
    begins: re.Pattern[str]
    """Finds the requests that begin a command, or move a file: the calls that a `Machine` makes of the SDK."""
    provider: Callable[[], SandboxProvider]
    """Makes the provider as another worker has it."""
    peer: Mapping[str, str] = field(default_factory=dict)
    """The environment of the peer's script; without one there is no peer."""

    def spent(self) -> Spent:
        """Return what has passed so far."""
        sent, received = sum(wire.sent for wire in self.wires), sum(wire.received for wire in self.wires)
        return Spent(tuple(self.log()), sent, received, sum(wire.connections for wire in self.wires))

    async def quiet(self) -> None:
        """Wait until nothing passes any more."""
        for wire in self.wires:
            await wire.quiet()


@asynccontextmanager
async def docker() -> AsyncIterator[Service]:
    """Podman's service with storage of its own, as the tests run it. All containers go with it. Raises NotHere."""
    making = podman([IMAGE])
    try:
        engine = await asyncio.to_thread(making.__enter__)
    except Missing as error:
        raise NotHere(str(error)) from error
    try:
        async with Wire(engine.socket, engine.directory / "wire.sock") as wire:
            yield Service(
                "docker",
                [wire],
                lambda: wire.requests,
                re.compile(r"POST \S*/containers/[^/]+/exec|(GET|PUT) \S*/containers/[^/]+/archive"),
                lambda: DockerProvider(wire.url, image=IMAGES[IMAGE], processes_of_user=PROCESSES_OF_USER),
                peer={"DOCKER_HOST": wire.url, "SANDBOX_IMAGE": IMAGES[IMAGE]},
            )
    finally:
        await asyncio.to_thread(making.__exit__, None, None, None)


@asynccontextmanager
async def e2b() -> AsyncIterator[Service]:
    """The emulator of E2B. What it was asked must be what passed on the wire, else it raises BadInput. Raises NotHere."""
    if (lacking := e2b_support.missing()) is not None:
        raise NotHere(lacking)
    with _room() as directory:
        async with e2b_support.emulator_in(Path(directory)) as emulator, Wire(_port(emulator.url)) as wire:
            yield Service(
                "e2b",
                [wire],
                lambda: emulator.faults.requests,
                re.compile(r"POST /(process\.Process/Start|filesystem\.Filesystem/\w+)$|(GET|POST) /files$"),
                lambda: E2BProvider(API_KEY, api_url=wire.url, sandbox_url=wire.url),
                peer={"E2B_API_KEY": API_KEY, "E2B_API_URL": wire.url, "E2B_SANDBOX_URL": wire.url},
            )
            if wire.requests != emulator.faults.requests:
                raise BadInput(f"{len(wire.requests)} requests passed, and the emulator saw {len(emulator.faults.requests)}")


@asynccontextmanager
async def modal() -> AsyncIterator[Service]:
    """The emulator of Modal: its control plane and its worker, each behind a wire of its own. Raises NotHere."""
    if (lacking := modal_support.missing()) is not None:
        raise NotHere(lacking)
    providers: list[ModalProvider] = []
    with _room() as directory:
        async with (
            ModalEmulator(Path(directory)) as emulator,
            Wire(emulator.control.port, http=False) as control,
            Wire(emulator.worker.port, http=False) as worker,
        ):
            emulator.account.worker_url = worker.url

            def make() -> ModalProvider:
                providers.append(ModalProvider(TOKEN_ID, TOKEN_SECRET, "caisson-benchmark", url=control.url))
                return providers[-1]

            try:
                yield Service("modal", [control, worker], lambda: emulator.calls, re.compile(r"TaskExecStart$"), make)
            finally:
                for provider in providers:
                    await provider.close()


SERVICES: Mapping[str, Callable[[], AbstractAsyncContextManager[Service]]] = {"docker": docker, "e2b": e2b, "modal": modal}


def _room() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="caisson-benchmark-", ignore_cleanup_errors=True)


def _port(url: str) -> int:
    port = urlsplit(url).port
    if port is None:
        raise BadInput(f"{url} has no port")
    return port


def environment(service: Service) -> dict[str, str]:
    """Return what a peer's script is started with: nothing of this process but where programs are."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", **service.peer}
