"""Ending the local sandboxes that no run needs any more: what a terminated workflow or a lost host leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

import structlog
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.service import RPCError, RPCStatusCode

from activities.sandbox.port import SandboxError
from activities.sandbox.providers.local import LocalProvider
from activities.sandbox.providers.local_inventory import Resident
from contracts.sandbox import NAMESPACE_LABEL, RUN_LABEL

EVERY_SECONDS = 600.0
YOUNGEST_SECONDS = 300.0
"""A sandbox younger than this is never ended: its run may be on its way."""
QUERY_TIMEOUT = timedelta(seconds=10)
_OPEN = (WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.CONTINUED_AS_NEW)


class Standing(StrEnum):
    """How the run of a sandbox stands."""

    OPEN = "open"
    CLOSED = "closed"
    MOVED = "elsewhere"
    """It is open, and goes on in another sandbox: it had lost this one, with the host that has come back since."""
    UNKNOWN = "unknown"
    """The namespace does not know it, or no more."""
    FOREIGN = "foreign"
    """It is of another namespace, or of no run at all, so this server cannot tell."""


@dataclass(frozen=True)
class Found:
    """A sandbox of this host, and what became of its run."""

    resident: Resident
    standing: Standing

    @property
    def run_id(self) -> str | None:
        """The run that it was made for."""
        return self.resident.labels.get(RUN_LABEL)


def to_sweep(found: Sequence[Found], now: float) -> list[Found]:
    """Return those that may be ended: of a run that is surely not open, not young, and within this process's reach. Pure."""
    return [
        one
        for one in found
        if one.standing in (Standing.CLOSED, Standing.UNKNOWN, Standing.MOVED)
        and now - one.resident.created_at >= YOUNGEST_SECONDS
        and one.resident.alive is not None
    ]


async def look(provider: LocalProvider, client: Client) -> list[Found]:
    """Find this host's sandboxes, and ask how their runs stand. Changes nothing. Raises RPCError."""
    residents = await provider.inventory()
    mine = {one.labels[RUN_LABEL] for one in residents if _is_of(client, one.labels)}
    standings = dict(zip(mine, await asyncio.gather(*(standing_of(client, run_id) for run_id in mine)), strict=True))
    found = [
        Found(one, standings[one.labels[RUN_LABEL]] if _is_of(client, one.labels) else Standing.FOREIGN) for one in residents
    ]
    return [Found(one.resident, Standing.MOVED) if await _has_moved(client, one) else one for one in found]


async def _has_moved(client: Client, one: Found) -> bool:
    """Whether the run surely has another sandbox than this one now. A run that does not answer may still need it."""
    if one.standing is not Standing.OPEN or one.run_id is None:
        return False
    try:
        # A dict, because this may be the run of another version.
        status = await client.get_workflow_handle(one.run_id).query("status", result_type=dict, rpc_timeout=QUERY_TIMEOUT)
    except (RPCError, WorkflowQueryFailedError, WorkflowQueryRejectedError):
        return False
    now = status.get("sandbox")
    mine = one.resident.ref
    return isinstance(now, dict) and (now.get("id"), now.get("nonce")) != (mine.id, mine.nonce)


def _is_of(client: Client, labels: Mapping[str, str]) -> bool:
    return RUN_LABEL in labels and labels.get(NAMESPACE_LABEL, client.namespace) == client.namespace


async def standing_of(client: Client, run_id: str) -> Standing:
    """Ask Temporal how a run stands. Raises RPCError when it cannot say."""
    try:
        described = await client.get_workflow_handle(run_id).describe()
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            return Standing.UNKNOWN
        raise
    return Standing.OPEN if described.status in _OPEN else Standing.CLOSED


@dataclass(frozen=True)
class Swept:
    """A sandbox that was to be ended; `fault` says why it could not be."""

    found: Found
    fault: str | None = None


async def sweep(provider: LocalProvider, client: Client) -> list[Swept]:
    """End what may be ended, and clear away what makers and removers that were killed left half done. Raises RPCError."""
    swept = []
    for one in to_sweep(await look(provider, client), time.time()):
        fault = None
        try:
            await provider.kill(one.resident.ref)
        except (SandboxError, OSError) as error:  # the others can still be ended
            fault = str(error)
        swept.append(Swept(one, fault))
    await provider.clear()
    return swept


@contextlib.asynccontextmanager
async def sweeping(provider: LocalProvider, client: Client, every: float = EVERY_SECONDS) -> AsyncIterator[None]:
    """Sweep at once and then every so many seconds while the block runs. A fault is logged, and the next sweep tries again."""
    log = structlog.stdlib.get_logger("caisson.sweep")

    async def once() -> None:
        for one in await sweep(provider, client):
            told = {"sandbox": one.found.resident.ref.id, "run": one.found.run_id, "run_is": one.found.standing.value}
            if one.fault is None:
                log.info("ended a sandbox that no run needs", **told)
            else:
                log.warning("a sandbox that no run needs could not be ended", error=one.fault, **told)

    async with repeating(once, every, "sandboxes could not be swept"):
        yield


@contextlib.asynccontextmanager
async def repeating(work: Callable[[], Awaitable[None]], every: float, complaint: str) -> AsyncIterator[None]:
    """Do something at once and then every so many seconds while the block runs. A fault is logged, and it is tried again."""
    log = structlog.stdlib.get_logger("caisson.sweep")

    async def forever() -> None:
        while True:
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - a sweep that fails must not end the worker
                log.warning(complaint, error=f"{type(error).__name__}: {error}")
            await asyncio.sleep(every)

    task = asyncio.create_task(forever())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
