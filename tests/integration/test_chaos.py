"""Chaos between worker and sandbox: the result is exact, in bounded time, and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from httpx import HTTPStatusError
from temporalio.worker import Worker

from activities.sandbox.port import SandboxError
from activities.sandbox.registry import ProviderRegistry
from contracts.activity_names import Queues
from contracts.sandbox import SandboxRef, SandboxSpec
from tests.conformance.subjects import Subject
from tests.integration.helpers import failed_tasks
from tests.integration.stack import QUEUE, Handle, Stack
from tests.integration.test_any_provider import HOST, activities
from tests.integration.test_durability import artifact
from tests.providers.e2b_support import Service, emulator_in, missing
from workers.sweep_services import SUSPECT_SECONDS, ServiceSweep

SEEDS = (1, 2, 3)
BOUND = 240.0


class Crew:
    """A sandbox worker that can be replaced at any moment, before what it does is done: the next delivers it again."""

    def __init__(self, stack: Stack, subjects: dict[str, Subject]) -> None:
        self._stack = stack
        self._subjects = subjects
        self._workers: contextlib.AsyncExitStack | None = None

    async def start(self) -> None:
        """Serve both queues with a memory of its own."""
        self._workers = contextlib.AsyncExitStack()
        for queue in (Queues(QUEUE).sandbox, Queues(QUEUE).sandbox_host(HOST)):
            worker = Worker(self._stack.dev.client, task_queue=queue, activities=activities(self._stack, self._subjects))
            await self._workers.enter_async_context(worker)

    async def stop(self) -> None:
        """Leave; what is going on is cut off as by the shutdown of a worker."""
        if self._workers is not None:
            workers, self._workers = self._workers, None
            await workers.aclose()


@contextlib.asynccontextmanager
async def serving_e2b(stack: Stack, directory: Path) -> AsyncIterator[tuple[Service, Crew]]:
    """The emulator of E2B, and a sandbox worker that has it. Skips the test where the emulator cannot be."""
    if (fault := missing()) is not None:
        pytest.skip(fault)
    async with emulator_in(directory) as emulator:
        service = Service(emulator)
        kill = lambda ref: service.outside(ref, "kill")  # noqa: E731
        crew = Crew(stack, {"e2b": Subject("e2b", service.provider, "emulator", kill, spec=SandboxSpec(provider="e2b"))})
        await crew.start()
        try:
            yield service, crew
        finally:
            await crew.stop()


async def sandbox_of(handle: Handle) -> SandboxRef | None:
    """The sandbox that a run has at this moment."""
    ref = (await handle.query("status"))["sandbox"]
    return None if ref is None else SandboxRef.model_validate(ref)


async def mischief(dice: random.Random, service: Service, crew: Crew, handle: Handle, done: list[str]) -> None:
    """Do one harm after the other, each at a random moment."""
    while True:
        await asyncio.sleep(dice.uniform(0.5, 4.0))
        what = dice.choice(("kill", "delay", "drop", "cut", "busy", "worker", "away"))
        done.append(what)
        if what == "kill":
            ref = await sandbox_of(handle)
            if ref is not None:
                with contextlib.suppress(HTTPStatusError):  # another harm was quicker
                    await service.outside(ref, "kill")
        elif what == "delay":
            await service.fault(".*", delay=dice.uniform(0.2, 1.5), times=dice.randint(1, 6))
        elif what == "drop":
            await service.fault(".*", drop=dice.choice(("before", "after")), times=dice.randint(1, 3))
        elif what == "cut":
            await service.fault("process", cut=dice.randint(0, 2), times=dice.randint(1, 3))
        elif what == "busy":
            status = dice.choice((429, 500, 502, 503))
            body = {"code": status, "message": "busy"}
            await service.fault(".*", status=status, body=body, times=dice.randint(1, 4))
        elif what == "worker":
            await crew.stop()
            await crew.start()
        else:
            await service.emulator.deafen()
            await asyncio.sleep(dice.uniform(0.2, 1.0))
            await service.emulator.listen()
        # A service recovers by itself, however seldom it is asked meanwhile.
        await asyncio.sleep(1.0)
        service.emulator.faults.waiting.clear()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
async def test_thirty_steps_of_chaos(crewless: Stack, tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Latency, cut and refused connections, workers that leave in mid-call, machines that die: thirty steps, each once."""
    dice = random.Random(seed)
    async with serving_e2b(crewless, tmp_path_factory.mktemp("e2b")) as (service, crew):
        emulator = service.emulator
        handle = await crewless.start("thirty-steps", {"sandbox": {"provider": "e2b"}})
        done: list[str] = []
        harm = asyncio.create_task(mischief(dice, service, crew, handle, done))
        try:
            result = await crewless.finish(handle, BOUND)
        finally:
            harm.cancel()
            with contextlib.suppress(asyncio.CancelledError, SandboxError):
                await harm
            emulator.faults.waiting.clear()
            with contextlib.suppress(OSError):
                await emulator.listen()
        print(f"seed {seed}: {len(done)} harms ({', '.join(sorted(set(done)))}), {result['recoveries']} sandboxes lost")
        assert result["status"] == "completed", result["reason"]
        assert await artifact(crewless, result, "outputs/log") == "".join(f"{n}\n" for n in range(1, 31)).encode()
        assert crewless.answered(handle) == list(range(1, 32))
        assert await failed_tasks(handle) == []
        assert len(done) >= 5
        # What an answer that was lost has left is swept.
        sweep = ServiceSweep(ProviderRegistry({"e2b": service.worker}), ("e2b",), crewless.dev.client)
        await sweep.sweep(0.0)
        await sweep.sweep(SUSPECT_SECONDS)
        assert await service.worker().list({}) == [], "a sandbox that nobody has"
