"""Modal for the conformance suite: the emulator, and the service itself for those who have a token."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from activities.sandbox.providers.modal import ModalProvider
from contracts.sandbox import SandboxRef, SandboxSpec
from tests.conformance.subjects import NotHere, Subject
from tests.providers.modal_support import missing, service_in

SPEC = SandboxSpec(provider="modal")


@asynccontextmanager
async def subject_emulator(tmp_path: Path) -> AsyncIterator[Subject]:
    """The real SDK, and real sandboxes of bubblewrap behind the emulated protocol."""
    if lacking := missing():
        raise NotHere(lacking)
    async with service_in(tmp_path) as service:
        emulator = service.emulator

        async def kill_machine(ref: SandboxRef) -> None:
            await emulator.kill(ref.id)

        async def unreachable(is_so: bool) -> None:
            await (emulator.deafen() if is_so else emulator.listen())

        yield Subject(
            name="modal-emulator",
            provider=service.provider,
            where="emulator",
            kill_machine=kill_machine,
            spec=SPEC,
            again=service.worker,
            unreachable=unreachable,
        )


class _Recording(ModalProvider):
    """Remembers what it made, as the app may have other sandboxes, which are nobody's business here."""

    made: list[SandboxRef]

    async def create(
        self, spec: SandboxSpec, key: str, *, environment: Mapping[str, str], labels: Mapping[str, str], queue: str
    ) -> SandboxRef:
        """See SandboxProvider."""
        ref = await super().create(spec, key, environment=environment, labels=labels, queue=queue)
        self.made.append(ref)
        return ref


@asynccontextmanager
async def subject_live(tmp_path: Path) -> AsyncIterator[Subject]:
    """The service. It has never been run by those who wrote this."""
    token = os.environ.get("MODAL_TOKEN_ID"), os.environ.get("MODAL_TOKEN_SECRET")
    if not token[0] or not token[1]:
        raise NotHere("MODAL_TOKEN_ID and MODAL_TOKEN_SECRET are not set")
    provider = _Recording(token[0], token[1], "caisson-conformance")
    provider.made = []

    async def kill_machine(ref: SandboxRef) -> None:
        sandbox = await provider.find(ref.id)
        await sandbox.terminate.aio(wait=True)

    try:
        yield Subject(name="modal-live", provider=provider, where="live", kill_machine=kill_machine, spec=SPEC, asked_for=True)
    finally:
        for ref in provider.made:
            await provider.kill(ref)
        await provider.close()
