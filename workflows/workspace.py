"""The run's sandbox: opened with the manifest's files in it, and closed with its outputs taken out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from temporalio import workflow
from temporalio.exceptions import ActivityError

from workflows.activities import call, explain_failure

with workflow.unsafe.imports_passed_through():
    from contracts.activity_names import (
        CLOSE_SANDBOX,
        COLLECT_OUTPUTS,
        FETCH_MANIFEST,
        FILL_WORKSPACE,
        OPEN_SANDBOX,
        ErrorType,
        Queues,
    )
    from contracts.blob import BlobRef
    from contracts.carried import CarriedRun
    from contracts.prepare import CollectOutputsInput, FetchManifestInput, FillWorkspaceInput, PrepareRunResult
    from contracts.run import ArtifactList
    from contracts.sandbox import CloseSandboxInput, OpenSandboxInput, SandboxRef


class Workspace:
    """Opens and closes one run's sandbox."""

    def __init__(self, queues: Queues, run_id: str, carried: CarriedRun | None) -> None:
        self._queues = queues
        self._run_id = run_id
        self.sandbox: SandboxRef | None = carried.sandbox if carried else None
        self._seconds = carried.sandbox_seconds if carried else 0.0
        self._since: datetime | None = workflow.now() if self.sandbox else None
        self.egress_log: BlobRef | None = None
        """The record of the sandbox's network connections, once it is closed."""

    def pack(self) -> dict[str, object]:
        """What a run takes with it when it continues as new."""
        return {"sandbox": self.sandbox, "sandbox_seconds": self.seconds()}

    def seconds(self) -> float:
        """How long this run has had a sandbox."""
        running = (workflow.now() - self._since).total_seconds() if self._since else 0.0
        return round(self._seconds + running, 3)

    async def open(self, prepared: PrepareRunResult, show: Callable[[str], None]) -> None:
        """Make the sandbox and fill its workspace. What the manifest names is read first: if it cannot be, nothing was made."""
        plan = prepared.plan
        if not plan.needs_sandbox or self.sandbox is not None:
            return
        tree = None
        if plan.has_entries:
            show("reading the manifest's entries")
            given = FetchManifestInput(run_id=self._run_id, agent=prepared.agent)
            tree = await call(FETCH_MANIFEST, given, queue=self._queues.tools, summary="read the manifest's entries")
        show(f"making a {plan.sandbox.provider} sandbox")
        opened = await call(
            OPEN_SANDBOX,
            OpenSandboxInput(
                key=f"{self._run_id}/{workflow.info().run_id}",
                run_id=self._run_id,
                spec=plan.sandbox,
                environment=plan.environment,
            ),
            queue=self._queues.sandbox,
            summary=f"make a {plan.sandbox.provider} sandbox",
        )
        self.sandbox, self._since = opened.sandbox, workflow.now()
        if tree is not None:
            show(f"filling the workspace: {tree.files} files")
            await call(
                FILL_WORKSPACE,
                FillWorkspaceInput(run_id=self._run_id, sandbox=self.sandbox, tree=tree.tree),
                queue=self.sandbox.queue,
                summary=f"fill the workspace: {tree.files} files, {tree.total_bytes} bytes",
                on_host=True,
            )

    def abandon(self) -> None:
        """Give up a sandbox whose host is lost: nobody is there to end it. If the host comes back, its worker sweeps it."""
        self._seconds, self._since, self.sandbox = self.seconds(), None, None

    async def close(self, prepared: PrepareRunResult | None, *, collect: bool) -> tuple[ArtifactList, str | None]:
        """Take the outputs out, if wanted, and end the sandbox.

        Returns the artifacts, and what went wrong with either: neither may hide how the run itself ended.
        """
        artifacts, complaints = ArtifactList(), []
        sandbox = self.sandbox
        if sandbox is None or prepared is None:
            return artifacts, None
        if collect and prepared.plan.outputs:
            try:
                given = CollectOutputsInput(run_id=self._run_id, sandbox=sandbox, outputs=prepared.plan.outputs)
                collected = await call(COLLECT_OUTPUTS, given, queue=sandbox.queue, summary="collect outputs", on_host=True)
                artifacts = collected.artifacts
            except ActivityError as error:
                kind, reason = explain_failure(error)
                complaints.append(f"outputs were not collected: {reason}")
                if kind == ErrorType.HOST_LOST:
                    self.abandon()
                    return artifacts, "; ".join(complaints)
        try:
            closing = CloseSandboxInput(sandbox=sandbox, run_id=self._run_id)
            closed = await call(CLOSE_SANDBOX, closing, queue=sandbox.queue, summary="end the sandbox", on_host=True)
            self.egress_log = closed.egress
        except ActivityError as error:
            complaints.append(f"the sandbox could not be ended: {explain_failure(error)[1]}")
        self.abandon()
        return artifacts, "; ".join(complaints) or None
