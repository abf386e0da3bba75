"""Calls and bytes that an operation of a sandbox costs at each provider, beside openai-agents' own adapters for it.

Everything is counted between the SDK and its service, by a proxy and by the emulators' own logs, the same way for both (`wire`):

- A **request** is one HTTP request, or one RPC of Modal's gRPC, whatever it is for.
- A **call of the SDK** is a request that begins a command in the sandbox, or moves a file in or out: what `Machine` (run, put,
  get) and docs/providers.md mean by it. Those that follow it up are none, such as asking how a command ended, reading what it
  said, or looking at its container. At E2B there are none of those, so that calls are requests.
- A **call of the port** is one of `exec`, `read` and `write` of the sandbox port, of which the snapshots' tests allow five. It
  takes one or two calls of the SDK.
- **Bytes** are those of the connections in both directions, with headers, without TLS.

The bound of the product: 10,000 files in, or a snapshot with one file changed out, in at most five calls.

The local provider has no SDK. Docker is a real Podman; E2B and Modal are the tests' emulators with the vendors' SDKs.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.provider_services import SERVICES, NotHere, Service
from benchmarks.provider_work import FILE_BYTES, FILES, NATIVE, OPERATIONS, OWN_OPERATIONS, PORTABLE, Fault, Ours, Peer, Worker
from benchmarks.registry import Say
from benchmarks.report import Metric
from benchmarks.sandbox_start import PEER, PEERS, peers_python
from benchmarks.workspaces import Bench, command, make_tree, room
from contracts.base import BadInput
from contracts.snapshot import SnapshotRef

OPENAI_AGENTS, NOBODY, OURS_AT_E2B, OURS_PORTABLE = "openai_agents", "none", "ours_at_e2b", "ours_portable"
MOST_CALLS = 5
BOUNDED = ("put_in", "one_changed")
RPCS_A_CALL, OTHER_FRAMES = 3, 1.1
"""What Modal may take of what E2B does: a command's start, input and output are RPCs of their own there, and frames differ."""


@dataclass(frozen=True)
class Cost:
    """What one operation took."""

    requests: int
    calls: int
    port_calls: int
    bytes: int


Costs = Mapping[str, Cost]


@dataclass(frozen=True)
class Beside:
    """Whose figures stand beside ours, and how many times as much as theirs ours may be."""

    baseline: str
    costs: Costs
    requests: float = 1
    bytes: float = 1


async def measure(say: Say) -> dict[str, Metric]:
    """Measure, in two to three minutes; the first time a little longer, for the peer's environment."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is not None:
        # An engine has a session of its own, so that it would outlive this process.
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await _providers(say)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _providers(say: Say) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    python = await asyncio.to_thread(_python)
    at_e2b: Costs = {}
    with room() as root:
        tree = await _make_files(root)
        for name, running in SERVICES.items():
            try:
                async with running() as service:
                    ours, peers = await _measure(service, root, tree, python, say)
            except NotHere as error:
                say(f"{name}: not measured: {error}")
                continue
            if name == "e2b":
                at_e2b = ours
            beside = Beside(OPENAI_AGENTS, peers) if service.peer else Beside(OURS_AT_E2B, at_e2b, RPCS_A_CALL, OTHER_FRAMES)
            metrics |= metrics_of(name, ours, beside)
    if not metrics:
        raise BadInput("no provider can be measured here; what each lacks is said above")
    return metrics


def metrics_of(name: str, ours: Costs, beside: Beside) -> dict[str, Metric]:
    """Return a provider's metrics. An operation that has nothing to stand beside has only those with a bound of their own."""
    metrics: dict[str, Metric] = {}
    for operation, cost in ours.items():
        other = beside.costs.get(operation) if operation in OPERATIONS else None
        label = f"{name}_{operation}"
        if operation in BOUNDED:
            theirs = None if other is None else other.calls
            metrics[f"{label}_calls"] = _metric(cost.calls, "calls", MOST_CALLS, beside.baseline, theirs)
            metrics[f"{label}_port_calls"] = _metric(cost.port_calls, "calls", MOST_CALLS, NOBODY, None)
        if other is not None:
            most = beside.requests * other.requests
            metrics[f"{label}_requests"] = _metric(cost.requests, "requests", most, beside.baseline, other.requests)
            most = beside.bytes * other.bytes / 1e3
            metrics[f"{label}_bytes"] = _metric(cost.bytes / 1e3, "KB", most, beside.baseline, other.bytes / 1e3)
    if NATIVE in ours and PORTABLE in ours:
        # What a provider can do of its own is used for no other reason than that it takes less.
        native, portable = ours[NATIVE], ours[PORTABLE]
        requests, kilobytes = portable.requests + ours["close"].requests, (portable.bytes + ours["close"].bytes) / 1e3
        metrics[f"{name}_away_requests"] = _metric(native.requests, "requests", requests, OURS_PORTABLE, requests)
        metrics[f"{name}_away_bytes"] = _metric(native.bytes / 1e3, "KB", kilobytes, OURS_PORTABLE, kilobytes)
    return metrics


def _metric(value: float, unit: str, target: float, baseline: str, baseline_value: float | None) -> Metric:
    if baseline_value is None:
        baseline, baseline_value = NOBODY, 0
    return Metric(value=value, unit=unit, target=target, baseline=baseline, baseline_value=baseline_value)


async def _make_files(root: Path) -> SnapshotRef:
    """Make the files that are put in: as a snapshot in a store, and as an archive."""
    bench = Bench(root)
    try:
        sandbox = await bench.sandbox()
        await asyncio.to_thread(make_tree, sandbox.workspace, FILES, FILE_BYTES)
        await command("tar", "-cf", root / "tree.tar", "-C", sandbox.workspace, ".")
        return await bench.worker("tree-store").snapshot(sandbox, None)
    finally:
        await bench.close()


async def _measure(service: Service, root: Path, tree: SnapshotRef, python: Path, say: Say) -> tuple[Costs, Costs]:
    ours = await _costs(service, Ours(service, root, tree), "caisson", say)
    if not service.peer:
        return ours, {}
    peer = await Peer.start(service, python, root / "tree.tar")
    try:
        return ours, await _costs(service, peer, OPENAI_AGENTS, say)
    finally:
        await peer.end()


async def _costs(service: Service, worker: Worker, who: str, say: Say) -> Costs:
    """Have all operations done, and return what each took. One that fails is said, and is not among them."""
    costs: dict[str, Cost] = {}
    try:
        await worker.do("warm_up")
    except Fault as fault:
        say(f"{service.name}: {who}: not measured: {fault}")
        return costs
    for operation, before in (OWN_OPERATIONS if isinstance(worker, Ours) else OPERATIONS).items():
        try:
            if before:
                await worker.run(before)
            await service.quiet()
            start, port_calls = service.spent(), worker.port_calls
            await worker.do(operation)
            await service.quiet()
        except Fault as fault:
            say(f"{service.name}: {who}: {operation}: not measured: {fault}")
            continue
        spent = service.spent().since(start)
        calls = sum(service.begins.search(request) is not None for request in spent.requests)
        costs[operation] = cost = Cost(len(spent.requests), calls, worker.port_calls - port_calls, spent.sent + spent.received)
        say(
            f"{service.name}: {who}: {operation}: {cost.requests} requests, {cost.calls} calls, {spent.connections} connections, "
            f"{spent.sent} bytes out, {spent.received} back"
        )
    return costs


def _python() -> Path:
    """Return the peers' Python, with the SDKs that the peer's adapters want in just the versions they want."""
    python = peers_python()
    has_all = subprocess.run([python, "-c", "import docker, e2b, e2b_code_interpreter"], capture_output=True, check=False)
    if has_all.returncode != 0:
        name, _, version = PEER.partition("==")
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", f"{name}[docker,e2b]=={version}"], check=False)
        if done.returncode != 0:
            raise BadInput(f"the peer cannot be installed; remove {PEERS} to have it installed anew")
    return python
