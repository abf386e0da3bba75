"""Ending the sandboxes at services and engines that no run has any more: what a crash between two calls leaves, and costs.

A service lists what was made for this namespace. Whatever no open run names as its sandbox is a suspect, and is ended when it
still is one some time later: a run that has just been given a sandbox may not have taken note of it yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

import structlog
from temporalio.client import Client

from activities.sandbox.port import SandboxError
from activities.sandbox.registry import ProviderRegistry
from contracts.sandbox import NAMESPACE_LABEL, SandboxRef
from workers.sweep import QUERY_TIMEOUT, repeating

EVERY_SECONDS = 600.0
SUSPECT_SECONDS = 540.0
"""How long a sandbox must have been nobody's before it is ended."""
_AT_ONCE = 10
_OPEN = 'WorkflowType = "AgentRun" AND ExecutionStatus = "Running"'
_Key = tuple[str, str, str]


class ServiceSweep:
    """Finds and ends what is nobody's, at the services named."""

    def __init__(self, registry: ProviderRegistry, services: Sequence[str], client: Client) -> None:
        self._registry = registry
        self._services = services
        self._client = client
        self._suspects: dict[_Key, float] = {}

    async def sweep(self, now: float) -> list[SandboxRef]:
        """End what has been nobody's for long enough, and return it. Raises RPCError if a run does not answer."""
        listed = {_key(ref): ref for name in self._services for ref in await self._list(name)}
        if not listed:
            self._suspects = {}
            return []
        wanted = await self._in_use()
        nobodys = {key for key in listed if key not in wanted}
        self._suspects = {key: self._suspects.get(key, now) for key in nobodys}
        ended = []
        for key, since in list(self._suspects.items()):
            if now - since >= SUSPECT_SECONDS:
                with contextlib.suppress(SandboxError):
                    await self._registry.get(key[0]).kill(listed[key])
                    ended.append(listed[key])
                    del self._suspects[key]
        return ended

    async def _list(self, name: str) -> list[SandboxRef]:
        try:
            return await self._registry.get(name).list({NAMESPACE_LABEL: self._client.namespace})
        except SandboxError as error:
            structlog.stdlib.get_logger("caisson.sweep").warning("sandboxes could not be listed", provider=name, error=str(error))
            return []

    async def _in_use(self) -> set[_Key]:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def ask(run_id: str, temporal_run_id: str) -> _Key | None:
            async with turns:
                handle = self._client.get_workflow_handle(run_id, run_id=temporal_run_id)
                status = await handle.query("status", result_type=dict, rpc_timeout=QUERY_TIMEOUT)
            ref = status.get("sandbox")
            return (ref["provider"], ref["id"], ref["nonce"]) if isinstance(ref, dict) else None

        runs = [ask(found.id, found.run_id) async for found in self._client.list_workflows(_OPEN)]
        return {key for key in await asyncio.gather(*runs) if key is not None}


def _key(ref: SandboxRef) -> _Key:
    return ref.provider, ref.id, ref.nonce


@contextlib.asynccontextmanager
async def sweeping_services(sweep: ServiceSweep, every: float = EVERY_SECONDS) -> AsyncIterator[None]:
    """Sweep at once and then every so many seconds while the block runs. A fault is logged, and the next sweep tries again."""
    log = structlog.stdlib.get_logger("caisson.sweep")

    async def once() -> None:
        for ref in await sweep.sweep(time.time()):
            log.info("ended a sandbox that no run has", provider=ref.provider, sandbox=ref.id)

    async with repeating(once, every, "sandboxes of services could not be swept"):
        yield
