"""Container engines for the conformance suite: a real Podman in both flavours of image, and a real Docker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from activities.sandbox.providers.docker import DockerProvider
from contracts.sandbox import SandboxRef, SandboxSpec
from tests.conformance.subjects import NotHere, Subject
from tests.providers.podman import IMAGES, PROCESSES_OF_USER, Engine, Missing, dockerd, podman


async def subject(tmp_path: Path) -> AsyncIterator[Subject]:
    """Podman with Debian and Python."""
    async for one in _on(podman, "docker", "debian-python"):
        yield one


async def subject_busybox(tmp_path: Path) -> AsyncIterator[Subject]:
    """Podman with BusyBox alone."""
    async for one in _on(podman, "docker-busybox", "busybox"):
        yield one


async def subject_dockerd(tmp_path: Path) -> AsyncIterator[Subject]:
    """Docker's own engine with Debian and Python."""
    async for one in _on(dockerd, "docker-dockerd", "debian-python"):
        yield one


async def _on(
    engine_of: Callable[[Sequence[str]], AbstractContextManager[Engine]], name: str, image: str
) -> AsyncIterator[Subject]:
    making = engine_of([image])
    try:
        engine = await asyncio.to_thread(making.__enter__)
    except Missing as error:
        raise NotHere(str(error)) from error

    def provider() -> DockerProvider:
        return DockerProvider(engine.url, image=IMAGES[image], processes_of_user=PROCESSES_OF_USER)

    async def kill_machine(ref: SandboxRef) -> None:
        await asyncio.to_thread(engine.api.kill, ref.id)

    async def unreachable(is_so: bool) -> None:
        await asyncio.to_thread(engine.stop if is_so else engine.start)

    try:
        yield Subject(
            name,
            provider(),
            "real engine",
            kill_machine,
            spec=SandboxSpec(provider="docker"),
            image="busybox" if image == "busybox" else "python",
            again=provider,
            unreachable=unreachable,
        )
    finally:
        await asyncio.to_thread(making.__exit__, None, None, None)
