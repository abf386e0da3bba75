"""Checking what Caisson needs on this machine and around it, and saying how to mend what is not right."""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import secrets
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, DescribeTaskQueueRequest, GetSystemInfoRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.agents import AgentDirectory, resolve
from activities.model.prices import load_prices
from activities.sandbox.port import BadSandboxSpec
from activities.sandbox.providers.local_cgroup import CONTROLLERS, enforcement, find_groups
from activities.sandbox.providers.local_seccomp import system_call_filter
from activities.store.port import StoreError
from client.doctor_mcp import check_mcp
from client.finding import Finding, State
from contracts.activity_names import Queues
from contracts.base import BadInput
from contracts.run import RunInput
from workers.connect import connect, open_blobs
from workers.process import check_search_attributes
from workers.settings import Role, Settings

_PYTHON = (3, 11)
_LITTLE_DISK, _NO_DISK = 2 * 10**9, 200 * 10**6
_PROBE_SECONDS = 10.0
_PROBE = ("--unshare-all", "--ro-bind", "/", "/", "true")
_OPENAI = "https://api.openai.com/v1"


async def examine(settings: Settings) -> AsyncIterator[Finding]:
    """Do every check, in the order in which a newcomer would mend things."""
    yield check_python(sys.version_info[:3])
    yield check_packages()
    yield await check_bubblewrap()
    yield check_limits()
    yield await _check_store(settings)
    place = settings.store_place
    yield check_disk(Path(place.bucket) if place.kind == "local" else settings.store_cache)
    yield check_agents(settings)
    yield check_prices(settings)
    yield await check_model(settings)
    async for finding in check_mcp(settings):
        yield finding
    async for finding in check_temporal(settings):
        yield finding


def check_python(version: Sequence[int]) -> Finding:
    """Whether this Python is new enough."""
    found = ".".join(map(str, version))
    if tuple(version[:2]) < _PYTHON:
        return Finding("Python", State.FAIL, found, f"use Python {'.'.join(map(str, _PYTHON))} or newer")
    return Finding("Python", State.OK, found)


def check_packages(distribution: str = "caisson") -> Finding:
    """Whether the installed packages are of the versions that Caisson declares."""
    try:
        declared = [Requirement(line) for line in importlib.metadata.requires(distribution) or []]
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", State.WARN, f"{distribution} is not installed as a package", "pip install -e .")
    needed = [one for one in declared if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = [f"{one.name} {_version(one.name)} (wanted {one.specifier})" for one in needed if not _fits(one)]
    if wrong:
        return Finding("packages", State.FAIL, ", ".join(wrong), "pip install -e . -c constraints.txt")
    return Finding("packages", State.OK, f"{len(needed)} needed packages, temporalio {_version('temporalio')}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _fits(needed: Requirement) -> bool:
    found = _version(needed.name)
    return found != "missing" and needed.specifier.contains(found, prereleases=True)


async def check_bubblewrap(program: str = "bwrap") -> Finding:
    """Whether the local sandbox provider can make its namespaces here."""
    if platform.system() != "Linux":
        return Finding(
            "bubblewrap", State.FAIL, f"this is {platform.system()}", "local sandboxes need Linux; run the sandbox worker there"
        )
    path = shutil.which(program)
    if path is None:
        return Finding("bubblewrap", State.FAIL, "not installed", "apt-get install bubblewrap (or your system's package)")
    code, output = await _run(path, *_PROBE)
    if code != 0:
        return Finding(
            "bubblewrap",
            State.FAIL,
            f"{path} cannot make namespaces: {output}",
            "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1 or "
            "kernel.apparmor_restrict_unprivileged_userns=0); in a container: --security-opt seccomp=unconfined and "
            "--cap-add SYS_ADMIN",
        )
    return Finding("bubblewrap", State.OK, (await _run(path, "--version"))[1])


def check_limits(proc: Path = Path("/proc/self")) -> Finding:
    """Whether the kernel itself holds local sandboxes to their limits, and can filter their system calls."""
    try:
        system_call_filter()
        groups = find_groups(proc)
    except (BadSandboxSpec, OSError) as error:
        return Finding("sandbox limits", State.FAIL, str(error), "local sandboxes refuse to start without it")
    held = enforcement(groups)
    found = "; ".join(f"{name}: {held[name]}" for name in ("memory_mb", "processes", "cpus"))
    if set(groups.places) == set(CONTROLLERS):
        return Finding("sandbox limits", State.OK, found)
    return Finding(
        "sandbox limits",
        State.WARN,
        found,
        "give the sandbox worker control groups: `systemd-run --user --scope -p Delegate=yes caisson worker --role sandbox`, or "
        "in a unit of systemd Delegate=yes with DelegateSubgroup=worker; or run it as root",
    )


async def _run(*argv: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _PROBE_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
        return 1, f"no answer within {_PROBE_SECONDS:g} s"
    return process.returncode or 0, " ".join(output.decode(errors="replace").split())[:300]


async def _check_store(settings: Settings) -> Finding:
    key = f"staging/doctor-{secrets.token_hex(8)}"
    try:
        objects = open_blobs(settings).objects
        await objects.put(key, b"doctor")
        same = await objects.get(key) == b"doctor"
        await objects.delete(key)
    except (StoreError, BadInput) as error:
        remedy = "make it writable, or set CAISSON_STORE"
        if settings.store_place.kind != "local":
            remedy = "do what the message says; docs/stores.md tells what each store needs"
        return Finding("blob store", State.FAIL, f"{settings.store}: {error}", remedy)
    if not same:
        return Finding(
            "blob store", State.FAIL, f"{settings.store}: gives back other bytes than it was given", "use another disk"
        )
    return Finding("blob store", State.OK, f"{settings.store} can be written and read")


def check_disk(directory: Path) -> Finding:
    """Whether there is room for blobs and sandboxes."""
    existing = next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    found = f"{free / 10**9:.1f} GB free for {directory}"
    if free < _LITTLE_DISK:
        return Finding("disk", State.FAIL if free < _NO_DISK else State.WARN, found, "make room, or set CAISSON_STORE")
    return Finding("disk", State.OK, found)


def check_agents(settings: Settings) -> Finding:
    """Whether every agent of the directory can be used."""
    directory, faults = AgentDirectory(settings.agents), []
    names = directory.names()
    for name in names:
        try:
            resolve(RunInput(task="check", agent=name), directory, settings.model)
        except BadInput as error:
            faults.append(str(error))
    if faults:
        return Finding("agents", State.FAIL, "\n".join(faults), f"correct them in {settings.agents}")
    if not names:
        return Finding(
            "agents", State.WARN, f"none in {settings.agents}", "write one, or set CAISSON_AGENTS; runs may do without"
        )
    return Finding("agents", State.OK, f"{settings.agents}: {', '.join(names)}")


def check_prices(settings: Settings) -> Finding:
    """Whether the price table can be read and knows the default model."""
    try:
        table = load_prices(settings.prices)
    except BadInput as error:
        return Finding("prices", State.FAIL, str(error), "correct it, or unset CAISSON_PRICES")
    if table.of(settings.model) is None:
        return Finding(
            "prices",
            State.WARN,
            f"no price for the default model {settings.model}: its cost is unknown, and budget.cost_usd is refused",
            "add it to a price file and set CAISSON_PRICES",
        )
    return Finding("prices", State.OK, f"{len(table.prices)} models, among them the default {settings.model}")


async def check_model(settings: Settings) -> Finding:
    """Whether a model key is set (it is never shown) and its endpoint can be reached."""
    key = settings.openai_api_key
    if key is None or not key.get_secret_value():
        return Finding(
            "model",
            State.WARN,
            "OPENAI_API_KEY is not set here",
            "only the model worker needs it; `caisson dev` does without",
        )
    url = urlsplit(settings.openai_base_url or _OPENAI)
    secure = url.scheme == "https"
    port = url.port or (443 if secure else 80)
    place = f"{url.hostname}:{port}"
    try:
        opening = asyncio.open_connection(url.hostname, port, ssl=secure)
        _, writer = await asyncio.wait_for(opening, _PROBE_SECONDS)
        writer.close()
    except (OSError, TimeoutError) as error:
        return Finding(
            "model",
            State.WARN,
            f"OPENAI_API_KEY is set; {place} cannot be reached directly: {error or 'no answer'}",
            "check OPENAI_BASE_URL and the network; behind a proxy this may be as it should",
        )
    return Finding("model", State.OK, f"OPENAI_API_KEY is set; {place} can be reached")


async def check_temporal(settings: Settings) -> AsyncIterator[Finding]:
    """Whether Temporal is there, with the namespace, the search attributes and a worker on each task queue."""
    try:
        client = await connect(settings)
        info = await client.workflow_service.get_system_info(GetSystemInfoRequest())
    except (BadInput, RPCError) as error:
        first, _, rest = str(error).partition("\n")
        yield Finding("Temporal", State.FAIL, first, rest or "see the server's log")
        return
    yield Finding("Temporal", State.OK, f"{client.service_client.config.target_host}, server {info.server_version}")
    namespace = await _checked("namespace", lambda: _check_namespace(client))
    yield namespace
    if namespace.state is State.FAIL:
        return
    yield await _checked("search attributes", lambda: _check_attributes(client))
    queues = Queues(settings.task_queue)
    for role in Role:
        yield await _checked(f"{role} worker", partial(_check_pollers, client, role, getattr(queues, role.value)))


async def _checked(check: str, work: Callable[[], Awaitable[Finding]]) -> Finding:
    try:
        return await work()
    except RPCError as error:
        denied = error.status is RPCStatusCode.PERMISSION_DENIED
        remedy = "this key may not look; ask for read access" if denied else "see the server's log"
        return Finding(check, State.WARN if denied else State.FAIL, error.message, remedy)


async def _check_namespace(client: Client) -> Finding:
    try:
        found = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=client.namespace))
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        remedy = f"temporal operator namespace create --namespace {client.namespace}, or set TEMPORAL_NAMESPACE"
        return Finding("namespace", State.FAIL, f"{client.namespace} does not exist", remedy)
    days = found.config.workflow_execution_retention_ttl.ToTimedelta().total_seconds() / 86400
    return Finding(
        "namespace", State.OK, f"{client.namespace}, finished runs are kept for {days:g} day{'' if days == 1 else 's'}"
    )


async def _check_attributes(client: Client) -> Finding:
    try:
        await check_search_attributes(client)
    except BadInput as error:
        first, _, commands = str(error).partition("\n")
        return Finding("search attributes", State.FAIL, first, commands)
    return Finding("search attributes", State.OK, "all there")


async def _check_pollers(client: Client, role: Role, queue: str) -> Finding:
    kinds = [TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY]
    if role is Role.WORKFLOW:
        kinds.append(TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW)
    found = []
    for kind in kinds:
        request = DescribeTaskQueueRequest(namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind)
        found.append({poller.identity for poller in (await client.workflow_service.describe_task_queue(request)).pollers})
    workers = set.intersection(*found)
    if not workers:
        return Finding(f"{role} worker", State.WARN, f"nobody polls task queue {queue}", f"caisson worker --role {role.value}")
    return Finding(f"{role} worker", State.OK, f"{len(workers)} on task queue {queue}")
