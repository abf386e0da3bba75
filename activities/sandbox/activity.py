"""The activities of a sandbox worker: making and ending a sandbox, and the tools that work in one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any, cast

from temporalio import activity

from activities.agents import AgentReader
from activities.heartbeat import Beat, beating, carry_through, is_stopped_by_a_person
from activities.sandbox.egress_log import keep_egress
from activities.sandbox.native import make_image, pause, remove_image, resume
from activities.sandbox.output import decode
from activities.sandbox.port import InteractiveSandbox, Sandbox, SandboxError, SandboxProvider
from activities.sandbox.registry import ProviderRegistry, translate
from activities.sandbox.shell import ShellCall
from activities.sandbox.turns import Turns
from activities.store.blobs import BlobStore
from activities.tools.patch_activity import patch_workspace
from activities.tools.shell import read_shell
from activities.workspace.keeper import WorkspaceKeeper
from contracts.activity_names import APPLY_PATCH, CLOSE_SANDBOX, END_STRAYS, OPEN_SANDBOX, RESUME_SANDBOX, RUN_SHELL, Queues
from contracts.agent import ShellTool
from contracts.model import ToolCallInput, ToolCallResult
from contracts.sandbox import (
    NAMESPACE_LABEL,
    RUN_LABEL,
    CloseSandboxInput,
    CloseSandboxResult,
    EndStraysInput,
    EndStraysResult,
    OpenSandboxInput,
    OpenSandboxResult,
    ResumeSandboxInput,
    SandboxRef,
)
from contracts.snapshot import SnapshotRef

_PROGRESS_SECONDS = 1.0
_TAIL = 2000


@contextlib.asynccontextmanager
async def sandbox_errors() -> AsyncIterator[None]:
    """Translate sandbox failures, once, into what Temporal acts on."""
    try:
        yield
    except SandboxError as error:
        raise translate(error) from None


class SandboxActivities:
    """Works in sandboxes; holds no model key and no store credential but the blob store's."""

    def __init__(
        self,
        providers: ProviderRegistry,
        blobs: BlobStore,
        keeper: WorkspaceKeeper,
        queues: Queues,
        host: str,
        turns: Turns | None = None,
    ) -> None:
        self._turns = turns or Turns()
        self._providers = providers
        self._keeper = keeper
        self._blobs = blobs
        self._queues = queues
        self._host = host
        self._agents = AgentReader(blobs)

    @activity.defn(name=OPEN_SANDBOX.name)
    async def open_sandbox(self, wanted: OpenSandboxInput) -> OpenSandboxResult:
        """Make the run's sandbox, or find the one that an earlier attempt made."""
        async with beating(), sandbox_errors():
            provider = self._providers.get(wanted.spec.provider)
            queue = self._queues.sandbox_host(self._host) if provider.capabilities.host_bound else self._queues.sandbox
            making = provider.create(
                wanted.spec,
                wanted.key,
                environment=wanted.environment,
                labels={RUN_LABEL: wanted.run_id, NAMESPACE_LABEL: activity.info().namespace},
                queue=queue,
            )
            return OpenSandboxResult(sandbox=await carry_through(making))

    @activity.defn(name=CLOSE_SANDBOX.name)
    async def close_sandbox(self, closing: CloseSandboxInput) -> CloseSandboxResult:
        """End the sandbox and everything in it, once the record of its connections is kept; or let its provider keep it."""
        async with beating(), sandbox_errors():
            provider = self._providers.get(closing.sandbox.provider)
            # A pause may be given up: the run knows the sandbox, and ends it.
            if closing.keep and await pause(provider, closing.sandbox):
                return CloseSandboxResult(egress=closing.egress, paused=True)
            return await carry_through(self._close(provider, closing))

    @activity.defn(name=END_STRAYS.name)
    async def end_strays(self, given: EndStraysInput) -> EndStraysResult:
        """End every sandbox that the provider has of a run but the one that the run knows of."""
        async with beating(), sandbox_errors():
            provider = self._providers.get(given.provider)
            there = await provider.list({RUN_LABEL: given.run_id, NAMESPACE_LABEL: activity.info().namespace})
            strays = [ref for ref in there if given.sandbox is None or ref.id != given.sandbox.id]
            for ref in strays:
                await carry_through(provider.kill(ref))
            return EndStraysResult(ended=len(strays))

    @activity.defn(name=RESUME_SANDBOX.name)
    async def resume_sandbox(self, given: ResumeSandboxInput) -> OpenSandboxResult:
        """Let a paused sandbox go on. Doing it again changes nothing."""
        async with beating(), sandbox_errors():
            provider = self._providers.get(given.sandbox.provider)
            return OpenSandboxResult(sandbox=await carry_through(resume(provider, given.sandbox)))

    @activity.defn(name=RUN_SHELL.name)
    async def run_shell(self, given: ToolCallInput) -> ToolCallResult:
        """Run one command to its end, or start or use a session. A retry finds what an earlier attempt did."""
        async with beating() as beat, sandbox_errors(), self._turns.commands:
            tool, arguments = await self._shell(given)
            sandbox = await self._attach(given.sandbox)
            is_interactive = self._providers.get(given.sandbox.provider).capabilities.interactive
            sessions = cast("InteractiveSandbox", sandbox) if is_interactive else None
            shell = ShellCall(sandbox, sessions, given, tool, read_shell(arguments, tool))
            async with watched(sandbox, shell.job_id, beat):
                shown = await shell.carry_out()
            # The step and its snapshot are one: the model is told of nothing that a lost sandbox could take back.
            return ToolCallResult(
                output=await self._blobs.put_text(shown.text),
                summary=f"{given.call.summary} → {shown.text.splitlines()[0]}"[:200],
                failed=shown.failed,
                snapshot=await self._snapshot(sandbox, given),
            )

    @activity.defn(name=APPLY_PATCH.name)
    async def apply_patch(self, given: ToolCallInput) -> ToolCallResult:
        """Apply one patch to the workspace: all of it, or nothing."""
        async with beating(), sandbox_errors():
            patch = json.loads(await self._blobs.get_text(given.call.arguments))["patch"]
            sandbox = await self._attach(given.sandbox)
            text, failed = await patch_workspace(sandbox, self._blobs, given.job_id, patch)
            return ToolCallResult(
                output=await self._blobs.put_text(text),
                summary=given.call.summary,
                failed=failed,
                snapshot=await self._snapshot(sandbox, given),
            )

    async def _close(self, provider: SandboxProvider, closing: CloseSandboxInput) -> CloseSandboxResult:
        image = await make_image(provider, closing.sandbox) if closing.keep else None
        log = await provider.egress_log(closing.sandbox)
        egress = await keep_egress(self._blobs, closing.sandbox, log, closing.egress)
        await provider.kill(closing.sandbox)
        self._keeper.forget(closing.sandbox)
        await remove_image(provider, closing.image)
        return CloseSandboxResult(egress=egress, image=image)

    async def _snapshot(self, sandbox: Sandbox, given: ToolCallInput) -> SnapshotRef:
        policy = (await self._agents.get(given.agent)).spec.sandbox.snapshots
        return await self._keeper.snapshot(sandbox, given.snapshot, policy.exclude)

    async def _attach(self, ref: SandboxRef) -> Sandbox:
        return await self._providers.attach(ref)

    async def _shell(self, given: ToolCallInput) -> tuple[ShellTool, dict[str, Any]]:
        agent = await self._agents.get(given.agent)
        tool = next((tool for tool in agent.spec.tools if isinstance(tool, ShellTool)), ShellTool())
        return tool, json.loads(await self._blobs.get_text(given.call.arguments))


@contextlib.asynccontextmanager
async def watched(sandbox: Sandbox, job_id: str, beat: Beat) -> AsyncIterator[None]:
    """Tell the heartbeat how the job stands while the block waits for it, and end the job when a person stops the run.

    Anything else that ends the wait (a missed heartbeat, a worker's shutdown) leaves the command for the next attempt to find.
    """

    over = asyncio.Event()

    async def follow() -> None:
        # Not by its cancellation alone: a provider may have lost it.
        while not over.is_set():
            await asyncio.sleep(_PROGRESS_SECONDS)
            # A sandbox that fails here fails the wait beside it too, with the error that counts.
            with contextlib.suppress(SandboxError):
                progress = await sandbox.progress(job_id)
                if progress is not None:
                    beat.details = {
                        "running_seconds": round(progress.running_seconds, 1),
                        "stdout_bytes": progress.stdout_bytes,
                        "stderr_bytes": progress.stderr_bytes,
                        "tail": decode((progress.stdout_tail + progress.stderr_tail)[-_TAIL:]),
                    }

    follower = asyncio.create_task(follow())
    try:
        yield
    except asyncio.CancelledError:
        if is_stopped_by_a_person():
            await sandbox.kill_job(job_id)
        raise
    finally:
        over.set()
        follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await follower
