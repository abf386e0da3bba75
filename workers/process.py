"""A worker process: connect, check, work, and on SIGTERM finish what is in flight or hand it on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import structlog
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from activities.store.blobs import BlobStore
from contracts.base import BadInput
from workers.compose import Crew, crews, provider_factories
from workers.connect import connect, open_blobs
from workers.logs import LogInterceptor, configure_logs
from workers.settings import Role, Settings, check_role

SEARCH_ATTRIBUTES: dict[str, str] = {
    "CaissonAgent": "Keyword",
    "CaissonState": "Keyword",
    "CaissonStep": "Int",
    "CaissonTokens": "Int",
    "CaissonCostUsd": "Double",
    "CaissonProvider": "Keyword",
    "CaissonAwaitingApproval": "Bool",
    "CaissonParent": "Keyword",
}
"""Every search attribute that runs set, with its type as the Temporal CLI spells it."""

_THREADS = 32
_THROTTLE = timedelta(seconds=1)


def workflow_runner() -> SandboxedWorkflowRunner:
    """Temporal's sandbox for workflow code. Contracts are shared with it; the workflows' own modules are guarded by it."""
    shared = SandboxRestrictions.default.with_passthrough_modules("contracts", "pydantic", "pydantic_core", "annotated_types")
    return SandboxedWorkflowRunner(restrictions=shared)


def make_worker(client: Client, crew: Crew) -> Worker:
    """Build the Temporal worker of one crew."""
    return Worker(
        client,
        task_queue=crew.queue,
        activities=crew.activities,
        workflows=crew.workflows,
        workflow_runner=workflow_runner(),
        interceptors=[LogInterceptor()],
        max_concurrent_activities=crew.slots,
        graceful_shutdown_timeout=crew.grace,
        # A running command's tail travels in heartbeat details; with the SDK's own throttle it would be a minute old.
        max_heartbeat_throttle_interval=_THROTTLE,
        default_heartbeat_throttle_interval=_THROTTLE,
    )


async def serve(roles: frozenset[Role], settings: Settings) -> None:
    """Work in `roles` until SIGTERM or SIGINT. Raises BadInput when the environment or the server does not fit."""
    check_role(settings, roles)
    configure_logs(settings, "+".join(sorted(roles)))
    log = structlog.stdlib.get_logger("caisson.worker")
    blobs = open_blobs(settings)
    client = await connect(settings, blobs)
    if Role.WORKFLOW in roles:
        await check_search_attributes(client)
    gathered = _crews(roles, settings, blobs)
    workers = [make_worker(client, crew) for crew in gathered]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Waiting for disks and stores, mostly; the default is a handful on a small machine.
    loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="worker"))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        for crew in gathered:
            if crew.close is not None:
                stack.push_async_callback(crew.close)
        for worker in workers:
            await stack.enter_async_context(worker)
        if Role.SANDBOX in roles:
            await stack.enter_async_context(_sweeping(client, settings))
            await stack.enter_async_context(_sweeping_services(client, settings))
        calm_collector()
        log.info("worker ready", queues=[worker.task_queue for worker in workers], namespace=client.namespace)
        await stop.wait()
        log.info("worker draining")
    log.info("worker stopped")


def calm_collector() -> None:
    """Have the garbage collector look at what stays less often: at modules never again, and at the trees of snapshots seldom.

    Left as it is, it goes through hundreds of thousands of objects again and again while a large workspace is read.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10, 10)


def _sweeping(client: Client, settings: Settings) -> contextlib.AbstractAsyncContextManager[None]:
    from activities.sandbox.providers.local import LocalProvider
    from workers.sweep import sweeping

    return sweeping(LocalProvider(settings.sandbox_dir), client)


def _sweeping_services(client: Client, settings: Settings) -> contextlib.AbstractAsyncContextManager[None]:
    from activities.sandbox.registry import ProviderRegistry
    from workers.sweep_services import ServiceSweep, sweeping_services

    registry = ProviderRegistry(provider_factories(settings))
    return sweeping_services(ServiceSweep(registry, settings.services(), client))


def _crews(roles: frozenset[Role], settings: Settings, blobs: BlobStore) -> list[Crew]:
    return [crew for role in sorted(roles) for crew in crews(role, settings, blobs)]


async def check_search_attributes(client: Client) -> None:
    """Refuse to work where runs could not be started: a missing search attribute would stop each at its first task."""
    try:
        known = await client.operator_service.list_search_attributes(ListSearchAttributesRequest(namespace=client.namespace))
    except RPCError as error:
        structlog.stdlib.get_logger("caisson.worker").warning("search attributes could not be checked", error=str(error))
        return
    wrong = [
        f"temporal operator search-attribute create --namespace {client.namespace} --name {name} --type {kind}"
        for name, kind in SEARCH_ATTRIBUTES.items()
        if known.custom_attributes.get(name) != _indexed(kind)
    ]
    if wrong:
        raise BadInput("the namespace lacks search attributes that runs set; create them first:\n  " + "\n  ".join(wrong))


def _indexed(kind: str) -> int:
    return IndexedValueType.Value(f"INDEXED_VALUE_TYPE_{kind.upper()}")
