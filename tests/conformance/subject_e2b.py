"""E2B: the real SDK against the emulator, and against the service itself for those who have a key."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from activities.sandbox.providers.e2b import E2BProvider
from contracts.sandbox import SandboxRef, SandboxSpec
from tests.conformance.subjects import NotHere, Subject
from tests.providers.e2b_support import Service, emulator_in, missing

SPEC = SandboxSpec(provider="e2b")


async def subject(tmp_path: Path) -> AsyncIterator[Subject]:
    """Yield the emulator, whose sandboxes are real ones of bubblewrap."""
    if (fault := missing()) is not None:
        raise NotHere(fault)
    async with emulator_in(tmp_path) as emulator:
        service = Service(emulator)

        async def kill_machine(ref: SandboxRef) -> None:
            await service.outside(ref, "kill")

        async def unreachable(is_so: bool) -> None:
            await (emulator.deafen() if is_so else emulator.listen())

        yield Subject("e2b", service.provider, "emulator", kill_machine, spec=SPEC, again=service.worker, unreachable=unreachable)


class _Recording(E2BProvider):
    """Remembers what it made, as the account may have other sandboxes, which are nobody's business here."""

    def __init__(self, api_key: str) -> None:
        super().__init__(api_key)
        self.made: list[SandboxRef] = []

    async def create(
        self, spec: SandboxSpec, key: str, *, environment: Mapping[str, str], labels: Mapping[str, str], queue: str
    ) -> SandboxRef:
        """See SandboxProvider."""
        ref = await super().create(spec, key, environment=environment, labels=labels, queue=queue)
        self.made.append(ref)
        return ref


async def subject_live(tmp_path: Path) -> AsyncIterator[Subject]:
    """Yield the service. Those who wrote this have never run it."""
    key = os.environ.get("E2B_API_KEY")
    if not key:
        raise NotHere("E2B_API_KEY is not set")
    provider = _Recording(key)

    async def kill_machine(ref: SandboxRef) -> None:
        from e2b import AsyncSandbox

        await AsyncSandbox.kill(ref.id, api_key=key)

    try:
        yield Subject("e2b-live", provider, "live", kill_machine, spec=SPEC, asked_for=True)
    finally:
        for ref in provider.made:
            await provider.kill(ref)
