"""A run whose sandbox dies goes on with any provider, from the last snapshot of any other, with the same result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from temporalio.worker import Worker

from activities.sandbox.activity import SandboxActivities
from activities.sandbox.port import Capabilities, Sandbox, SandboxProvider, SandboxQuota
from activities.sandbox.registry import ProviderRegistry
from activities.workspace.activity import WorkspaceActivities
from activities.workspace.keeper import WorkspaceKeeper
from contracts.activity_names import Queues
from contracts.sandbox import SandboxRef, SandboxSpec
from tests.conformance.subjects import NotHere, Subject, subjects
from tests.integration.helpers import failed_tasks
from tests.integration.stack import QUEUE, Stack, make_stack
from tests.integration.test_durability import artifact, started

KINDS = {"local": "local", "docker": "docker", "e2b": "e2b", "modal": "modal-emulator"}
HOST = "here"


class GivesOne:
    """A provider that gives one sandbox to each run and then says that there are no more. Otherwise it is another provider."""

    def __init__(self, provider: SandboxProvider) -> None:
        self._provider = provider
        self._given: set[str] = set()
        self.name = f"one-{provider.name}"

    @property
    def capabilities(self) -> Capabilities:
        """Those of the provider behind it."""
        return self._provider.capabilities

    async def create(
        self, spec: SandboxSpec, key: str, *, environment: Mapping[str, str], labels: Mapping[str, str], queue: str
    ) -> SandboxRef:
        """One for each run; the same again for the same key."""
        run_id, _, generation = key.rpartition("/")
        if generation != "1":
            raise SandboxQuota(f"{run_id}: no more sandboxes are given")
        own = spec.model_copy(update={"provider": self._provider.name})
        return await self._provider.create(own, key, environment=environment, labels=labels, queue=queue)

    async def attach(self, ref: SandboxRef) -> Sandbox:
        """See SandboxProvider."""
        return await self._provider.attach(ref)


@dataclass
class Park:
    """A stack with a sandbox worker that has all the providers that are here."""

    stack: Stack
    subjects: dict[str, Subject]


@pytest.fixture(scope="module")
async def park(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Park]:
    """All of them at once, and one worker in this process."""
    made = make_stack(tmp_path_factory.mktemp("park"))
    found: dict[str, Subject] = {}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(made.dev)
        await made.dev.running["sandbox-worker"].stop()
        for kind, name in KINDS.items():
            with contextlib.suppress(NotHere):
                where = tmp_path_factory.mktemp(kind)
                found[kind] = await stack.enter_async_context(subjects()[name](where))
        for queue in (Queues(QUEUE).sandbox, Queues(QUEUE).sandbox_host(HOST)):
            worker = Worker(made.dev.client, task_queue=queue, activities=activities(made, found))
            await stack.enter_async_context(worker)
        yield Park(made, found)


def _same(provider: Any) -> Any:
    return provider


def activities(stack: Stack, found: Mapping[str, Subject]) -> list[Any]:
    """What a sandbox worker does, with these providers, and each of them once more as one that gives one sandbox."""
    everyone: dict[str, Any] = {kind: subject.provider for kind, subject in found.items()}
    everyone |= {f"one-{kind}": GivesOne(subject.provider) for kind, subject in found.items()}
    registry = ProviderRegistry({name: partial(_same, provider) for name, provider in everyone.items()})
    blobs = stack.dev.blobs
    keeper = WorkspaceKeeper(registry, blobs)
    sandbox = SandboxActivities(registry, blobs, keeper, Queues(QUEUE), HOST)
    workspace = WorkspaceActivities(registry, blobs, keeper)
    return [
        sandbox.open_sandbox,
        sandbox.close_sandbox,
        sandbox.resume_sandbox,
        sandbox.end_strays,
        sandbox.run_shell,
        sandbox.apply_patch,
        workspace.restore_workspace,
        workspace.snapshot_workspace,
        workspace.collect_outputs,
    ]


async def move(park: Park, first: str, second: str) -> None:
    """Kill the first provider's sandbox in the middle of a command, and let the run end with the second one's."""
    sandbox = {"provider": f"one-{first}", "fallback": second}
    handle = await park.stack.start("moves", {"sandbox": sandbox})
    await park.stack.until(handle, 60, step=2)
    await started(park.stack, handle, "run_shell")
    await asyncio.sleep(1.0)
    ref = SandboxRef.model_validate((await handle.query("status"))["sandbox"])
    await park.subjects[first].kill_machine(ref)
    result = await park.stack.finish(handle, 100)
    assert (result["status"], result["output"], result["recoveries"]) == ("completed", "moved", 1), (first, second, result)
    assert await artifact(park.stack, result, "outputs/log") == b"first\nsecond\n", (first, second)
    assert await artifact(park.stack, result, "outputs/tree") == TREE, (first, second)
    assert park.stack.answered(handle) == [1, 2, 3], (first, second)
    assert await failed_tasks(handle) == []


TREE = b"dir/empty\ndir/exec 755\ndir/link -> exec\ndir/one 640\ndir/same 640\n"


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("first", list(KINDS))
async def test_a_run_goes_on_with_any_provider(park: Park, first: str) -> None:
    """From each provider to each, itself included."""
    if first not in park.subjects:
        pytest.skip(f"{first} is not here")
    await asyncio.gather(*(move(park, first, second) for second in park.subjects))


def test_the_scratch_paths_are_not_shared(tmp_path: Path) -> None:
    """The names of the kinds are those of subjects, so that none is left out by a slip."""
    assert set(KINDS.values()) <= set(subjects())
