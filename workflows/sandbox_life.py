"""The life of a run's sandbox: made, put away and brought back, ended. When that is done, `workflows.sandboxes` decides.

A sandbox is put away when its workspace is in the store. Its provider may pause it then, and it goes on later with all that ran
in it; or make an image of it, and the next one is made of that. Where neither can be, or it fails, the next one is new and gets
its workspace from the store, as after a loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

from workflows.activities import call, explain_failure

with workflow.unsafe.imports_passed_through():
    from contracts.activity_names import CLOSE_SANDBOX, END_STRAYS, OPEN_SANDBOX, RESUME_SANDBOX, ErrorType, Queues
    from contracts.blob import BlobRef
    from contracts.carried import CarriedRun
    from contracts.prepare import PrepareRunResult
    from contracts.sandbox import (
        CloseSandboxInput,
        CloseSandboxResult,
        EndStraysInput,
        KeptImage,
        OpenSandboxInput,
        OpenSandboxResult,
        ResumeSandboxInput,
        SandboxRef,
        SandboxSpec,
    )
    from contracts.snapshot import SnapshotRef

FEW_ATTEMPTS = 5
"""At a service that does not answer, some 20 seconds, when there is another to turn to; else it is waited for, some four
minutes, as all that the run has paid for depends on it."""
END_MARGIN = (5.0, 120.0)
"""A tenth of a sandbox's lifetime, but at least and at most so many seconds before its end, the run moves to another."""
NOTHING_MADE = frozenset({ErrorType.BAD_INPUT, ErrorType.SANDBOX_STOP})
"""Failures of making a sandbox after which there is none: the provider has refused it."""
TAKEN_UP = timedelta(seconds=10)
"""A run that ends waits no longer for a worker that could end what it does not even know to be there."""
PAUSED = (
    "The sandbox was paused for a while and goes on. Processes and sessions that were running are still there, but stood still "
    "meanwhile: look before you rely on them."
)


GONE = "Processes and sessions that were running, and what was in /tmp, are gone."
GONE_WITH_IMAGE = "Processes and sessions that were running are gone, and so may be what was in /tmp."


class SandboxLife:
    """One run's sandbox: at most one at a time."""

    def __init__(self, queues: Queues, run_id: str, carried: CarriedRun | None, show: Callable[[str], str]) -> None:
        self._queues = queues
        self._run_id = run_id
        self._show = show
        self._seconds = carried.sandbox_seconds if carried else 0.0
        self._generation = carried.generation if carried else 0
        self._is_ready = carried is not None and carried.sandbox is not None
        self._is_paused = carried is not None and carried.sandbox_paused
        self._is_from_image = False
        self._kept: KeptImage | None = carried.kept_image if carried else None
        self._closing: asyncio.Task[str | None] | None = None
        self._strays: list[str] = []
        """Providers that may have made a sandbox of which the run was not told."""
        self._untold: list[str] = list(carried.untold) if carried else []
        self.sandbox: SandboxRef | None = carried.sandbox if carried else None
        self._since: datetime | None = workflow.now() if self.sandbox and not self._is_paused else None
        self._ends_near: datetime | None = _ends_near(self.sandbox) if self.sandbox and not self._is_paused else None
        self.snapshot: SnapshotRef | None = carried.snapshot if carried else None
        self.recoveries = carried.recoveries if carried else 0
        self.egress_log: BlobRef | None = carried.egress_log if carried else None
        """The record of the network connections of the sandboxes that are closed."""

    def pack(self) -> dict[str, object]:
        """What a run takes with it when it continues as new."""
        return {
            "sandbox": self.sandbox,
            "sandbox_seconds": self.seconds(),
            "sandbox_paused": self._is_paused,
            "kept_image": self._kept,
            "snapshot": self.snapshot,
            "generation": self._generation,
            "recoveries": self.recoveries,
            "egress_log": self.egress_log,
            "untold": tuple(self._untold),
        }

    def seconds(self) -> float:
        """How long this run has had a sandbox that was not paused."""
        running = (workflow.now() - self._since).total_seconds() if self._since else 0.0
        return round(self._seconds + running, 3)

    def tell(self) -> list[str]:
        """Hand out, once, what the model must know of sandboxes that were lost or put away."""
        told, self._untold = self._untold, []
        return told

    def _note(self, what: str, gone: str = GONE) -> None:
        """Tell the model once, whatever happens to how many sandboxes before it is told."""
        self._untold = [f"{what}. The files are as they were after the last tool call that was completed. {gone}"]

    # --- making it

    async def _make(self, prepared: PrepareRunResult, spec: SandboxSpec) -> SandboxRef:
        """Make a sandbox: of the image of the one before, as the spec says, or with the fallback."""
        kept = self._kept
        if kept is not None and not kept.used and kept.sandbox.provider == spec.provider:
            try:
                made = await self._open(prepared, spec.model_copy(update={"image": kept.image}), FEW_ATTEMPTS)
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                await self._remove_image()
            else:
                self._kept, self._is_from_image = kept.model_copy(update={"used": True}), True
                return made
        other = spec.without_first()
        try:
            made = await self._open(prepared, spec, None if other is None else FEW_ATTEMPTS)
        except ActivityError as error:
            if is_cancelled_exception(error) or other is None or explain_failure(error)[0] == ErrorType.BAD_INPUT:
                raise
            # What the first provider cannot give, another may.
            return await self._make(prepared, other)
        await self._remove_image()
        return made

    async def _open(self, prepared: PrepareRunResult, spec: SandboxSpec, attempts: int | None) -> SandboxRef:
        self._generation += 1
        self._show(f"making a {spec.provider} sandbox")
        made: list[OpenSandboxResult] = []
        self._strays.append(spec.provider)
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
                attempts=attempts,
                keep=made.append,
            )
        except ActivityError as error:
            if explain_failure(error)[0] in NOTHING_MADE:
                self._strays.remove(spec.provider)
            raise
        finally:
            for opened in made:
                self._strays.remove(spec.provider)
                self._begin(opened.sandbox)
        await self._end_strays()
        return made[0].sandbox

    async def _end_strays(self) -> None:
        """End what providers have made without an answer that reached the run. What cannot be is tried again at the end."""
        if not self._strays or not workflow.patched("end-strays"):
            return
        for provider in dict.fromkeys(self._strays):
            given = EndStraysInput(run_id=self._run_id, provider=provider, sandbox=self.sandbox)
            try:
                await call(END_STRAYS, given, queue=self._queues.sandbox, summary=f"end strays at {provider}", within=TAKEN_UP)
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
            else:
                self._strays = [other for other in self._strays if other != provider]

    def _begin(self, sandbox: SandboxRef) -> None:
        self.sandbox, self._since = sandbox, workflow.now()
        self._ends_near = _ends_near(sandbox)

    # --- putting it away, and bringing it back

    async def _leave(self, prepared: PrepareRunResult, why: str) -> None:
        """Let the sandbox be kept by its provider as far as that can be, or end it, now that its workspace is in the store."""
        await self.settle()
        sandbox = self.sandbox
        if sandbox is None:
            return
        closing = CloseSandboxInput(
            sandbox=sandbox,
            run_id=self._run_id,
            egress=self.egress_log,
            keep=prepared.plan.sandbox.snapshots.native,
            image=self._used_image(),
        )
        results: list[CloseSandboxResult] = []
        what = "put the sandbox away"
        try:
            await call(CLOSE_SANDBOX, closing, queue=sandbox.queue, summary=what, on_host=True, keep=results.append)
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            self._strays.append(sandbox.provider)  # it is not known to have ended, and the next one takes its place
        finally:
            # What it was done to is known even when the run is cancelled meanwhile.
            for closed in results:
                self._put_down(sandbox, closed)
        if not self._is_paused:
            self._forget()
            self._note(why, GONE if self._kept is None else GONE_WITH_IMAGE)

    def _put_down(self, sandbox: SandboxRef, closed: CloseSandboxResult) -> None:
        self.egress_log = closed.egress
        self._forget_used_image(closed)
        if closed.paused:
            self._seconds, self._since, self._ends_near, self._is_paused = self.seconds(), None, None, True
        elif closed.image is not None:
            self._kept = KeptImage(sandbox=sandbox, image=closed.image)

    async def _resume(self) -> None:
        """Let the paused sandbox go on. Raises ActivityError when it cannot."""
        sandbox = self.sandbox
        if sandbox is None:
            return
        self._show("resuming the sandbox")
        given, resumed = ResumeSandboxInput(sandbox=sandbox), list[OpenSandboxResult]()
        try:
            await call(
                RESUME_SANDBOX,
                given,
                queue=sandbox.queue,
                summary="resume the sandbox",
                on_host=True,
                keep=resumed.append,
            )
        finally:
            for one in resumed:
                self._begin(one.sandbox)
                self._is_paused = False
        if PAUSED not in self._untold:
            self._untold.append(PAUSED)

    # --- ending it

    async def _end_sandbox(self) -> str | None:
        """End the sandbox, and what its provider keeps of it; return why that could not be done, if it could not."""
        await self.settle()
        sandbox = self.sandbox
        if sandbox is None:
            await self._remove_image()
            await self._end_strays()
            return None
        # In a task of its own, which a cancellation does not reach: what is asked for here is wanted all the more then.
        closing = asyncio.create_task(self._close(sandbox))
        try:
            await workflow.wait([closing])
        except asyncio.CancelledError:
            await workflow.wait([closing])
            raise
        finally:
            self._forget()
        await self._end_strays()
        return closing.result()

    async def _close(self, sandbox: SandboxRef) -> str | None:
        closing = CloseSandboxInput(sandbox=sandbox, run_id=self._run_id, egress=self.egress_log, image=self._used_image())
        try:
            closed = await call(CLOSE_SANDBOX, closing, queue=sandbox.queue, summary="end the sandbox", on_host=True)
            self.egress_log = closed.egress
            self._forget_used_image(closed)
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            self._strays.append(sandbox.provider)
            return explain_failure(error)[1]
        return None

    async def _remove_image(self) -> None:
        """Have the image of a sandbox that is gone removed. One that cannot be ends by itself."""
        kept = self._kept
        if kept is None:
            return
        closing = CloseSandboxInput(sandbox=kept.sandbox, run_id=self._run_id, egress=self.egress_log, image=kept.image)
        try:
            await call(CLOSE_SANDBOX, closing, queue=kept.sandbox.queue, summary="remove the sandbox's image", on_host=True)
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
        self._kept = None

    def _used_image(self) -> str | None:
        """Return the image that the sandbox was made of, which can go with it."""
        kept = self._kept
        return kept.image if kept is not None and kept.used else None

    def _forget_used_image(self, closed: CloseSandboxResult) -> None:
        """Take note that the image that a sandbox was made of went with it."""
        if self._kept is not None and self._kept.used and not closed.paused:
            self._kept = None

    async def settle(self) -> None:
        """Return when what is left of a lost sandbox has been cleared away, which is done beside making the next."""
        if self._closing is not None:
            await workflow.wait([self._closing])  # unlike `gather`, it does not cancel what it waits for
            self._closing = None

    def _forget(self) -> None:
        self._seconds, self._since, self.sandbox, self._ends_near = self.seconds(), None, None, None
        self._is_ready = self._is_paused = self._is_from_image = False


def _ends_near(sandbox: SandboxRef) -> datetime | None:
    """Return when a run leaves a sandbox whose lifetime ends: some time before that."""
    if sandbox.expires_at is None:
        return None
    now = workflow.now()
    left = sandbox.expires_at - now.timestamp()
    least, most = END_MARGIN
    return now + timedelta(seconds=left - min(max(left / 10, least), most))
