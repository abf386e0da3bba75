"""A sandbox worker with the emulators of both services, for runs whose sandboxes are put away."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contracts.sandbox import SandboxRef, SandboxSpec
from tests.conformance.subjects import Subject
from tests.emulators.e2b.control import Box
from tests.integration.stack import Handle, Stack, make_stack
from tests.integration.test_chaos import Crew
from tests.integration.test_durability import until
from tests.providers import e2b_support, modal_support


@dataclass
class Away:
    """A stack whose sandbox worker has the emulators of both services."""

    stack: Stack
    crew: Crew
    e2b: e2b_support.Service
    modal: modal_support.Service

    @property
    def boxes(self) -> dict[str, Box]:
        """The sandboxes at E2B, paused ones too."""
        return self.e2b.account.boxes

    def one_is_paused(self) -> bool:
        """Whether E2B has a paused sandbox."""
        return any(box.paused for box in self.boxes.values())

    def pauses(self) -> int:
        """How often E2B was asked to pause a sandbox."""
        return sum(line.endswith("/pause") for line in self.e2b.emulator.faults.requests)

    def one_is_kept(self) -> bool:
        """Whether Modal has an image of a sandbox, and no sandbox."""
        return bool(self.modal.emulator.account.kept) and not self.modal.emulator.account.running()

    def nothing_is_left(self) -> bool:
        """Whether neither service has anything of a run."""
        account = self.modal.emulator.account
        return not self.boxes and not account.kept and not account.running()


@contextlib.asynccontextmanager
async def serving_both(stack: Stack, directory: Path) -> AsyncIterator[Away]:
    """The emulators, and a sandbox worker that has both. Skips the test where they cannot be."""
    if (fault := e2b_support.missing() or modal_support.missing()) is not None:
        pytest.skip(fault)
    (directory / "modal").mkdir()
    async with (
        e2b_support.emulator_in(directory) as emulator,
        modal_support.service_in(directory / "modal") as modal,
    ):
        e2b = e2b_support.Service(emulator)

        async def kill_e2b(ref: SandboxRef) -> None:
            await e2b.outside(ref, "kill")

        async def kill_modal(ref: SandboxRef) -> None:
            await modal.emulator.kill(ref.id)

        subjects = {
            "e2b": Subject("e2b", e2b.provider, "emulator", kill_e2b, spec=SandboxSpec(provider="e2b")),
            "modal": Subject("modal-emulator", modal.provider, "emulator", kill_modal, spec=SandboxSpec(provider="modal")),
        }
        crew = Crew(stack, subjects)
        await crew.start()
        try:
            yield Away(stack, crew, e2b, modal)
        finally:
            await crew.stop()


@contextlib.asynccontextmanager
async def stack_away(state: Path, services: Path) -> AsyncIterator[Away]:
    """A stack whose only sandbox worker is the one with both emulators."""
    made = make_stack(state)
    async with made.dev:
        await made.dev.running["sandbox-worker"].stop()
        async with serving_both(made, services) as serving:
            yield serving


async def waiting(away: Away, provider: str, is_away: Callable[[], bool], run_id: str | None = None, **sandbox: Any) -> Handle:
    """Start a run that leaves a process behind and then waits for approval, and return when its sandbox is put away."""
    agent = {
        "sandbox": {"provider": provider, "idle_seconds": 1, "snapshots": {"exclude": ["cache/"]}, **sandbox},
        "approvals": {"tools": {"shell": "prompt"}},
    }
    handle = await away.stack.start("a-process-beside", agent, run_id=run_id)
    await allow(away.stack, handle, 1)
    await away.stack.until(handle, 60, step=2, state="awaiting_approval")
    await until(is_away, "the sandbox is put away", 60)
    return handle


async def allow(stack: Stack, handle: Handle, step: int) -> None:
    """Allow the call that the run waits with."""
    status = await stack.until(handle, 60, step=step, state="awaiting_approval")
    pending = status["pending_approvals"][0]
    decision = {name: pending[name] for name in ("approval_id", "arguments_digest")}
    await handle.execute_update("decide_approval", {**decision, "allow": True, "by": "ann"})
