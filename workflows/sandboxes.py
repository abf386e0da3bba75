"""The run's sandbox, the last snapshot of its workspace, and how the one is replaced from the other.

A sandbox may be lost at any moment. Whatever is done in it is therefore done through `carry_out`: when the sandbox is lost, a new
one is made, the last snapshot is restored into it, and only the call in flight is carried out again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

from workflows.activities import call, explain_failure

with workflow.unsafe.imports_passed_through():
    from contracts.activity_names import (
        CLOSE_SANDBOX,
        OPEN_SANDBOX,
        RESTORE_WORKSPACE,
        SNAPSHOT_WORKSPACE,
        ActivityStub,
        ErrorType,
        Queues,
    )
    from contracts.base import Contract
    from contracts.blob import BlobRef
    from contracts.carried import CarriedRun
    from contracts.prepare import (
        PrepareRunResult,
        RestoreWorkspaceInput,
        SnapshotWorkspaceInput,
    )
    from contracts.sandbox import CloseSandboxInput, OpenSandboxInput, OpenSandboxResult, SandboxRef, SandboxSpec
    from contracts.snapshot import SnapshotRef

SNAPSHOT_SECONDS = 600
"""What a call in the sandbox may take beside its command: mostly for the snapshot after it."""
MAX_LOSSES = 3
"""Sandboxes that may be lost under one call before the run gives up."""
FEW_ATTEMPTS = 5
"""At a service that does not answer, some 20 seconds, when there is another to turn to; else it is waited for, some four
minutes, as all that the run has paid for depends on it."""
FIRST_WAIT, WAIT_FACTOR = 1.0, 5.0
"""Seconds before a sandbox is replaced whose predecessor was lost as well, and by how much that grows with the next."""
END_MARGIN = (5.0, 120.0)
"""A tenth of a sandbox's lifetime, but at least and at most so many seconds before its end, the run moves to another."""

LOST = frozenset({ErrorType.SANDBOX_GONE, ErrorType.HOST_LOST, ErrorType.SANDBOX_UNAVAILABLE})
"""Failures after which a new sandbox can do what this one could not."""

Input = TypeVar("Input", bound=Contract)
Result = TypeVar("Result", bound=Contract)
T = TypeVar("T")


class Sandboxes:
    """One run's sandboxes, one at a time."""

    def __init__(self, queues: Queues, run_id: str, carried: CarriedRun | None, show: Callable[[str], None]) -> None:
        self._queues = queues
        self._run_id = run_id
        self._show = show
        self._lock = asyncio.Lock()
        self._used_at = workflow.now()
        self._seconds = carried.sandbox_seconds if carried else 0.0
        self._generation = carried.generation if carried else 0
        self._is_ready = carried is not None and carried.sandbox is not None
        self._is_from_manifest = False
        self._is_leaving = False
        self._closing: asyncio.Task[str | None] | None = None
        self._untold: list[str] = list(carried.untold) if carried else []
        self.sandbox: SandboxRef | None = carried.sandbox if carried else None
        self._since: datetime | None = workflow.now() if self.sandbox else None
        self._ends_near: datetime | None = _ends_near(self.sandbox) if self.sandbox else None
        self.snapshot: SnapshotRef | None = carried.snapshot if carried else None
        self.recoveries = carried.recoveries if carried else 0
        self.egress_log: BlobRef | None = carried.egress_log if carried else None
        """The record of the network connections of the sandboxes that are closed."""

    def pack(self) -> dict[str, object]:
        """What a run takes with it when it continues as new."""
        return {
            "sandbox": self.sandbox,
            "sandbox_seconds": self.seconds(),
            "snapshot": self.snapshot,
            "generation": self._generation,
            "recoveries": self.recoveries,
            "egress_log": self.egress_log,
            "untold": tuple(self._untold),
        }

    def seconds(self) -> float:
        """How long this run has had a sandbox."""
        running = (workflow.now() - self._since).total_seconds() if self._since else 0.0
        return round(self._seconds + running, 3)

    def tell(self) -> list[str]:
        """Hand out, once, what the model must know of sandboxes that were lost or put away."""
        told, self._untold = self._untold, []
        return told

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
            await self._put_away(prepared, "The sandbox's lifetime was about to end, so it was replaced by a new one")
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
                ),
                queue=sandbox.queue,
                summary=f"restore the workspace: {self.snapshot.files} files, {self.snapshot.total_bytes} bytes",
                on_host=True,
            )
            self.snapshot, self._is_from_manifest = restored.snapshot, False
        self._is_ready = True
        return sandbox

    async def _make(self, prepared: PrepareRunResult, spec: SandboxSpec) -> SandboxRef:
        self._generation += 1
        self._show(f"making a {spec.provider} sandbox")
        made: list[OpenSandboxResult] = []
        other = spec.without_first()
        try:
            await call(
                OPEN_SANDBOX,
                OpenSandboxInput(
                    key=f"{self._run_id}/{workflow.info().run_id}/{self._generation}",
                    run_id=self._run_id,
                    spec=spec,
                    environment=prepared.plan.environment,
                ),
                queue=self._queues.sandbox,
                summary=f"make a {spec.provider} sandbox",
                attempts=None if other is None else FEW_ATTEMPTS,
                keep=made.append,
            )
        except ActivityError as error:
            if is_cancelled_exception(error) or other is None or explain_failure(error)[0] == ErrorType.BAD_INPUT:
                raise
            # What the first provider cannot give, another may.
            return await self._make(prepared, other)
        finally:
            for opened in made:
                self.sandbox, self._since = opened.sandbox, workflow.now()
                self._ends_near = _ends_near(opened.sandbox)
        return made[0].sandbox

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
            if waiting.done() or not self._is_ready:
                return
            self._is_leaving = True
            try:
                await self._put_away(prepared, "The sandbox was put away while the run waited for people, and is a new one now")
            except ActivityError as error:
                self._show(f"the sandbox could not be put away: {explain_failure(error)[1]}")
            finally:
                self._is_leaving = False

    async def _put_away(self, prepared: PrepareRunResult, why: str) -> None:
        """Store the workspace and end the sandbox. A sandbox that is lost meanwhile leaves the last snapshot."""
        sandbox = self.sandbox
        if sandbox is None:
            return
        self._show("putting the sandbox away")
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

    def _note(self, what: str) -> None:
        """Tell the model once, whatever happens to how many sandboxes before it is told."""
        self._untold = [
            f"{what}. The files are as they were after the last tool call that was completed. Processes and sessions that were "
            "running, and what was in /tmp, are gone."
        ]

    async def _end_sandbox(self) -> str | None:
        """End the sandbox, and return why that could not be done, if it could not."""
        await self.settle()
        sandbox = self.sandbox
        if sandbox is None:
            return None
        try:
            return await self._close(sandbox)
        finally:
            self._forget()

    async def _close(self, sandbox: SandboxRef) -> str | None:
        closing = CloseSandboxInput(sandbox=sandbox, run_id=self._run_id, egress=self.egress_log)
        try:
            closed = await call(CLOSE_SANDBOX, closing, queue=sandbox.queue, summary="end the sandbox", on_host=True)
            self.egress_log = closed.egress
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            return explain_failure(error)[1]
        return None

    async def settle(self) -> None:
        """Return when what is left of a lost sandbox has been cleared away, which is done beside making the next."""
        if self._closing is not None:
            closing, self._closing = self._closing, None
            await asyncio.gather(closing, return_exceptions=True)

    def _forget(self) -> None:
        self._seconds, self._since, self.sandbox, self._ends_near = self.seconds(), None, None, None
        self._is_ready = False


def _ends_near(sandbox: SandboxRef) -> datetime | None:
    """Return when a run leaves a sandbox whose lifetime ends: some time before that."""
    if sandbox.expires_at is None:
        return None
    now = workflow.now()
    left = sandbox.expires_at - now.timestamp()
    least, most = END_MARGIN
    return now + timedelta(seconds=left - min(max(left / 10, least), most))
