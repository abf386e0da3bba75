"""A real container engine as the tests of its provider use it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from activities.sandbox.machine import Ran
from activities.sandbox.portable import PortableSandbox
from activities.sandbox.providers.docker import DockerProvider
from contracts.sandbox import SandboxLimits, SandboxRef, SandboxSpec
from tests.providers.podman import IMAGES, PROCESSES_OF_USER, Engine, Missing, dockerd, podman

SMALL = SandboxLimits(memory_mb=128, processes=64)
ENGINES: dict[str, Callable[[Sequence[str]], AbstractContextManager[Engine]]] = {"podman": podman, "docker": dockerd}


@contextmanager
def running(kind: str) -> Iterator[Engine]:
    """A real engine with an image of BusyBox. Skips the test where there is none."""
    try:
        with ENGINES[kind](["busybox"]) as engine:
            yield engine
    except Missing as error:
        pytest.skip(str(error))


@dataclass
class Rig:
    """An engine as a test uses it."""

    engine: Engine
    provider: DockerProvider
    key: str = field(default_factory=lambda: secrets.token_hex(8))

    def worker(self, **changed: Any) -> DockerProvider:
        """Another worker's provider, that knows nothing of this one."""
        given = {"image": IMAGES["busybox"], "processes_of_user": PROCESSES_OF_USER, **changed}
        return DockerProvider(self.engine.url, **given)

    async def create(self, limits: SandboxLimits = SMALL, labels: dict[str, str] | None = None, **spec: Any) -> SandboxRef:
        """The sandbox of this test's key."""
        wanted = SandboxSpec(provider="docker", limits=limits, **spec)
        return await self.provider.create(
            wanted, self.key, environment={"COLOUR": "blue moon"}, labels=labels or {}, queue="caisson-sandbox"
        )

    async def open(self, limits: SandboxLimits = SMALL) -> PortableSandbox:
        """The sandbox of this test's key, attached to."""
        return await self.provider.attach(await self.create(limits))

    async def run(self, script: str, limits: SandboxLimits = SMALL) -> Ran:
        """How a script ends in it."""
        return await (await self.open(limits)).machine.run(script, timeout=60)

    def containers(self) -> list[dict[str, Any]]:
        """All containers of the engine."""
        found: list[dict[str, Any]] = self.engine.api.containers(all=True)
        return found

    def volumes(self) -> list[str]:
        """All volumes of the engine."""
        return [one["Name"] for one in self.engine.api.volumes()["Volumes"] or []]


@asynccontextmanager
async def rig_of(engine: Engine) -> AsyncIterator[Rig]:
    """One with an empty engine, which is emptied again."""
    made = Rig(engine, DockerProvider(engine.url, image=IMAGES["busybox"], processes_of_user=PROCESSES_OF_USER))
    yield made
    api = engine.api
    for one in made.containers():
        api.remove_container(one["Id"], force=True, v=True)
    for name in made.volumes():
        api.remove_volume(name)
