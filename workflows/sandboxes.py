"""The run's sandbox, the last snapshot of its workspace, and how the one is replaced from the other.

A sandbox may be lost at any moment. Whatever is done in it is therefore done through `carry_out`: when the sandbox is lost, a new
one is made, the last snapshot is restored into it, and only the call in flight is carried out again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

from workflows.activities import call, explain_failure
from workflows.sandbox_life import SandboxLife

with workflow.unsafe.imports_passed_through():
    from contracts.activity_names import (
        RESTORE_WORKSPACE,
        SNAPSHOT_WORKSPACE,
        ActivityStub,
        ErrorType,
        Queues,
    )
    from contracts.base import Contract
    from contracts.carried import CarriedRun
    from contracts.prepare import (
        PrepareRunResult,
        RestoreWorkspaceInput,
        SnapshotWorkspaceInput,
    )
    from contracts.sandbox import SandboxRef
    from contracts.snapshot import SnapshotRef

SNAPSHOT_SECONDS = 600
"""What a call in the sandbox may take beside its command: mostly for the snapshot after it."""
MAX_LOSSES = 3
"""Sandboxes that may be lost under one call before the run gives up."""
FIRST_WAIT, WAIT_FACTOR = 1.0, 5.0
"""Seconds before a sandbox is replaced whose predecessor was lost as well, and by how much that grows with the next."""
LOST = frozenset({ErrorType.SANDBOX_GONE, ErrorType.HOST_LOST, ErrorType.SANDBOX_UNAVAILABLE})
"""Failures after which a new sandbox can do what this one could not."""

Input = TypeVar("Input", bound=Contract)
Result = TypeVar("Result", bound=Contract)
T = TypeVar("T")


class Sandboxes(SandboxLife):
    """One run's sandboxes, one at a time."""

    def __init__(self, queues: Queues, run_id: str, carried: CarriedRun | None, show: Callable[[str], str]) -> None:
        super().__init__(queues, run_id, carried, show)
        self._lock = asyncio.Lock()
        self._used_at = workflow.now()
        self._is_from_manifest = False
        self._is_leaving = False

    async def carry_out(
        self,
        prepared: PrepareRunResult,
        stub: ActivityStub[Input, Result],
        given: Callable[[SandboxRef, SnapshotRef | None], Input],
        *,
        summary: str,
        seconds: float | None = None,
    ) -> Result:
        """Run one activity in the sandbox, one at a time; again in a new one if the sandbox is lost meanwhile.

        Raises ActivityError when it fails for another reason, or no sandbox lasts.
        """

        async def attempt() -> Result:
            sandbox = await self._ready(prepared)
            return await call(
                stub, given(sandbox, self.snapshot), queue=sandbox.queue, summary=summary, seconds=seconds, on_host=True
            )

        async with self._lock:
            try:
                return await self._trying(prepared, attempt)
            finally:
                self._used_at = workflow.now()

    async def while_waiting(self, prepared: PrepareRunResult, wait: Coroutine[Any, Any, T]) -> T:
        """Wait for people. When that takes long, the sandbox is put away, and comes back with the next call that needs it."""
        idle = prepared.plan.sandbox.idle_seconds
        if idle is None or self.sandbox is None:
            return await wait
        waiting = asyncio.create_task(wait)
        leaving = asyncio.create_task(self._put_away_after(prepared, idle, waiting))
        try:
            return await waiting
        except asyncio.CancelledError:
            leaving.cancel()  # the run ends, and its sandbox with it: nothing needs to be stored or kept any more
            raise
        finally:
            # A sandbox half put away is put away; one that is only going to be stays.
            if not self._is_leaving:
                leaving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await leaving

    # --- replacing the sandbox

    async def _trying(self, prepared: PrepareRunResult, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Attempt something until no sandbox is lost meanwhile, a bounded number of times."""
        losses = 0
        while True:
            try:
                return await attempt()
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                kind, reason = explain_failure(error)
                losses += 1
                if kind not in LOST or losses > MAX_LOSSES:
                    raise
                await self._lose(kind, reason)
                if losses == 1:
                    continue  # most losses are single ones, and the server's shortest timer is long
                await workflow.sleep(FIRST_WAIT * WAIT_FACTOR ** (losses - 2), summary="before the next sandbox")

    async def _ready(self, prepared: PrepareRunResult) -> SandboxRef:
        """Return a sandbox that holds the workspace, made anew where there is none, or its lifetime is about to end."""
        if self._is_ready and self._ends_near is not None and workflow.now() >= self._ends_near:
            self._show("moving to another sandbox, as the lifetime of this one is about to end")
            await self._put_away(prepared, "The sandbox's lifetime was about to end, so it was replaced by a new one")
        if self._is_paused:
            await self._resume()
        sandbox = self.sandbox or await self._make(prepared, prepared.plan.sandbox)
        if self._is_ready:
            return sandbox
        if self.snapshot is not None:
            self._show(f"restoring the workspace: {self.snapshot.files} files")
            restored = await call(
                RESTORE_WORKSPACE,
                RestoreWorkspaceInput(
                    run_id=self._run_id,
                    sandbox=sandbox,
                    agent=prepared.agent,
                    snapshot=self.snapshot,
                    keep=self._is_from_manifest,
                    expected=self._is_from_image,
                ),
                queue=sandbox.queue,
                summary=f"restore the workspace: {self.snapshot.files} files, {self.snapshot.total_bytes} bytes",
                on_host=True,
            )
            self.snapshot, self._is_from_manifest = restored.snapshot, False
        self._is_ready = True
        return sandbox

    async def _lose(self, kind: str, reason: str) -> None:
        """Let go of a lost sandbox, and note what the model must know of it."""
        if self.sandbox is None:
            return
        self._show("the sandbox was lost; a new one is made")
        self.recoveries += 1
        if kind == ErrorType.HOST_LOST:
            self._forget()  # nobody is there to end it; if the host comes back, its worker sweeps it
        else:
            await self.settle()
            self._closing = asyncio.create_task(self._close(self.sandbox))
            self._forget()
        self._note(f"The sandbox was lost ({reason}) and replaced by a new one; the call in flight was carried out again in it")

    async def _put_away_after(self, prepared: PrepareRunResult, idle: float, waiting: asyncio.Task[Any]) -> None:
        left = idle
        while left > 0:
            await workflow.sleep(left, summary="put the sandbox away if the run still waits")
            left = idle - (workflow.now() - self._used_at).total_seconds()
        async with self._lock:
            if waiting.done() or not self._is_ready or self._is_paused:
                return
            self._is_leaving = True
            before = self._show("putting the sandbox away")
            try:
                await self._put_away(prepared, "The sandbox was put away while the run waited for people, and is a new one now")
                self._show(f"{before} (the sandbox is {'paused' if self._is_paused else 'put away'})")
            except ActivityError as error:
                self._show(f"{before} (the sandbox could not be put away: {explain_failure(error)[1]})")
            finally:
                self._is_leaving = False

    async def _put_away(self, prepared: PrepareRunResult, why: str) -> None:
        """Store the workspace, and pause or end the sandbox. One that is lost meanwhile leaves the last snapshot."""
        sandbox = self.sandbox
        if sandbox is None:
            return
        try:
            given = SnapshotWorkspaceInput(run_id=self._run_id, sandbox=sandbox, agent=prepared.agent, snapshot=self.snapshot)
            stored = await call(SNAPSHOT_WORKSPACE, given, queue=sandbox.queue, summary="store the workspace", on_host=True)
            self.snapshot = stored.snapshot
        except ActivityError as error:
            kind, _ = explain_failure(error)
            if is_cancelled_exception(error) or kind not in LOST:
                raise
            await self._end_sandbox()
            self._note(why)
        else:
            await self._leave(prepared, why)
