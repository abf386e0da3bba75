"""Activities heartbeat for as long as they work, and tell a worker's shutdown from a person's stop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Mapping
from typing import Any, cast

import pytest
from temporalio.activity import ActivityCancellationDetails
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.heartbeat import Beat, beating, carry_through
from activities.sandbox.activity import SandboxActivities, watched
from activities.sandbox.port import Capabilities, Sandbox, SandboxUnavailable
from activities.sandbox.registry import ProviderRegistry
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.workspace.keeper import WorkspaceKeeper
from contracts.activity_names import ErrorType, Queues
from contracts.sandbox import OpenSandboxInput, SandboxRef, SandboxSpec


class SlowProvider:
    """A provider that takes its time to make a sandbox; anything else it is asked is a fault of the test."""

    name = "slow"
    capabilities = Capabilities(host_bound=False, native_jobs=False)

    async def create(
        self, spec: SandboxSpec, key: str, *, environment: Mapping[str, str], labels: Mapping[str, str], queue: str
    ) -> SandboxRef:
        """Take five seconds."""
        await asyncio.sleep(5)
        return SandboxRef(provider="slow", id=key, nonce="n", queue=queue)

    async def attach(self, ref: SandboxRef) -> Sandbox:
        """Not asked here."""
        raise AssertionError("attach")

    async def kill(self, ref: SandboxRef) -> None:
        """Not asked here."""
        raise AssertionError("kill")

    async def list(self, labels: Mapping[str, str]) -> list[SandboxRef]:
        """Not asked here."""
        raise AssertionError("list")

    async def egress_log(self, ref: SandboxRef) -> bytes:
        """Not asked here."""
        raise AssertionError("egress_log")


async def test_a_slow_create_heartbeats(tmp_path: Any) -> None:
    """While a sandbox is being made the server hears of it, so that nobody makes a second one meanwhile.

    From dust-tt/dust#28780, TracecatHQ/tracecat#2451 and MoonLadderStudios/MoonMind#3700.
    """
    environment = ActivityEnvironment()
    beats: list[float] = []
    environment.on_heartbeat = lambda *_: beats.append(asyncio.get_running_loop().time())
    providers, blobs = ProviderRegistry({"slow": SlowProvider}), BlobStore(LocalStore(tmp_path / "store"))
    activities = SandboxActivities(providers, blobs, WorkspaceKeeper(providers, blobs), Queues("q"), "host")
    wanted = OpenSandboxInput(key="k", run_id="r", spec=SandboxSpec(provider="slow"))
    opened = await environment.run(activities.open_sandbox, wanted)
    assert opened.sandbox.id == "k"
    assert len(beats) >= 2
    assert all(later - earlier < 5 for earlier, later in itertools.pairwise(beats))


async def test_a_workers_shutdown_becomes_a_retry_at_once() -> None:
    """The next worker takes over; the run does not notice."""
    environment = ActivityEnvironment()

    async def work() -> None:
        async with beating():
            await asyncio.sleep(60)

    running = asyncio.ensure_future(environment.run(work))
    await asyncio.sleep(0.05)
    environment.worker_shutdown()
    running.cancel()
    with pytest.raises(ApplicationError) as failed:
        await running
    assert failed.value.type == ErrorType.WORKER_SHUTDOWN
    assert not failed.value.non_retryable
    assert failed.value.next_retry_delay is not None


async def test_a_persons_stop_stays_a_cancellation() -> None:
    """The activity ends as cancelled."""
    environment = ActivityEnvironment()

    async def work() -> None:
        async with beating():
            await asyncio.sleep(60)

    running = asyncio.ensure_future(environment.run(work))
    await asyncio.sleep(0.05)
    environment.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


class Watched:
    """A sandbox that only notes which of its jobs were killed."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    async def progress(self, job_id: str) -> None:
        """Nothing is known."""

    async def kill_job(self, job_id: str) -> None:
        """Note it."""
        self.killed.append(job_id)


@pytest.mark.parametrize(
    ("why", "killed"),
    [
        ({"cancel_requested": True}, ["job"]),
        ({"not_found": True}, []),
        ({"timed_out": True}, []),
        ({"reset": True}, []),
        ({"paused": True}, []),
        ({"worker_shutdown": True}, []),
    ],
)
async def test_only_a_persons_stop_kills_the_command(why: dict[str, bool], killed: list[str]) -> None:
    """A worker that missed its heartbeats has lost the call, and not the command: the next attempt waits for that."""
    environment, sandbox = ActivityEnvironment(), Watched()

    async def work() -> None:
        async with watched(cast("Sandbox", sandbox), "job", Beat()):
            await asyncio.sleep(60)

    running = asyncio.ensure_future(environment.run(work))
    await asyncio.sleep(0.05)
    environment.cancel(cancellation_details=ActivityCancellationDetails(**why))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sandbox.killed == killed


@pytest.mark.parametrize(
    ("why", "heard"),
    [({"cancel_requested": True}, True), ({"timed_out": True}, False), ({"worker_shutdown": True}, False)],
)
async def test_what_is_being_made_is_made_and_told(why: dict[str, bool], heard: bool) -> None:
    """A person's stop does not leave something behind that nobody knows of; a lost call is for the next attempt."""
    environment = ActivityEnvironment()

    async def make() -> str:
        await asyncio.sleep(0.3)
        return "made"

    async def work() -> str:
        return await carry_through(make())

    running = asyncio.ensure_future(environment.run(work))
    await asyncio.sleep(0.05)
    environment.cancel(cancellation_details=ActivityCancellationDetails(**why))
    if heard:
        assert await running == "made"
    else:
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_failure_to_make_is_told_too() -> None:
    """What went wrong after the stop is not lost, and what does not end is given up."""
    environment = ActivityEnvironment()

    async def fail() -> str:
        await asyncio.sleep(0.2)
        raise SandboxUnavailable("no")

    ended: list[str] = []

    async def never() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("never")
        return "made"

    async def work(making: Coroutine[Any, Any, str]) -> str:
        return await carry_through(making, patience=0.5)

    for making, error in ((fail(), SandboxUnavailable), (never(), asyncio.CancelledError)):
        running = asyncio.ensure_future(environment.run(work, making))
        await asyncio.sleep(0.05)
        environment.cancel()
        with pytest.raises(error):
            await running
        environment = ActivityEnvironment()
    assert ended == ["never"]
