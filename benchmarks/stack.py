"""The stack that benchmarks run on: the product's own dev stack, and plain Temporal workers on the same server beside it."""

from __future__ import annotations

import contextlib
import json
import tempfile
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHandle

from activities.sandbox.providers.local import LocalProvider
from benchmarks.bare.__main__ import ROLES
from benchmarks.bare.workflows import QUEUE
from contracts.activity_names import Queues
from workers.dev.composefile import Service
from workers.dev.options import DevOptions
from workers.dev.stack import DevStack
from workers.dev.supervisor import Supervised
from workers.settings import load_settings

COMPOSE_FILE = Path(__file__).parent.parent / "temporal-dev.yml"
Handle = WorkflowHandle[Any, Any]
WORKERS = ("workflow-worker", "model-worker", "sandbox-worker", "tools-worker")


@dataclass(frozen=True)
class BenchStack:
    """What a benchmark works with. `bare` speaks to the same server with Temporal's default data converter."""

    dev: DevStack
    bare: Client
    baselines: dict[str, Supervised]

    async def run(self, scenario: str, steps: int) -> Handle:
        """Do one run of `steps` tool steps and a last answer. Raises RuntimeError if it did not complete."""
        handle = await self.start(scenario, steps)
        await self.finish(handle, steps)
        return handle

    async def start(self, scenario: str, steps: int) -> Handle:
        """Start such a run."""
        return await self.dev.client.start_workflow(
            "AgentRun",
            {"task": f"Play [{scenario}].", "budget": {"steps": steps + 10}},
            id=f"{scenario}-{uuid.uuid4().hex[:8]}",
            task_queue=Queues(load_settings({}).task_queue).workflow,
        )

    async def finish(self, handle: Handle, steps: int) -> dict[str, Any]:
        """Wait for its result. Raises RuntimeError if it did not complete."""
        result: dict[str, Any] = await handle.result()
        if result["status"] != "completed" or result["steps"] != steps + 1:
            raise RuntimeError(f"{handle.id} is {result['status']} after {result['steps']} steps: {result['reason']}")
        return result

    async def run_bare(self, workflow: str, *arguments: Any) -> Handle:
        """Do one run of a baseline workflow."""
        handle = await self.bare.start_workflow(
            workflow, args=arguments, id=f"{workflow}-{uuid.uuid4().hex[:8]}", task_queue=QUEUE
        )
        await handle.result()
        return handle

    def resident_bytes(self) -> dict[str, int]:
        """Return the memory of each worker process, the product's and the baselines'."""
        every = {**{name: self.dev.running[name] for name in WORKERS}, **self.baselines}
        return {name: _resident(one.pid) for name, one in every.items() if one.pid is not None}

    def model_url(self) -> str:
        """Return the base URL of the scripted model."""
        return self.dev.services["model-worker"].environment["OPENAI_BASE_URL"]


def shell_steps(name: str, steps: int, command: str) -> dict[str, Any]:
    """Return a scenario: `steps` turns that each run `command`, and an answer."""
    turn = {"calls": [{"name": "shell", "arguments": {"command": command}}]}
    return {
        "name": name,
        "match": {"text": rf"\[{name}\]"},
        "turns": [{"repeat": {"times": steps, "turn": turn}}, {"text": "done"}],
    }


@contextlib.asynccontextmanager
async def bench_stack(scenarios: list[dict[str, Any]]) -> AsyncIterator[BenchStack]:
    """Start the whole stack with its state in a temporary directory, and the baselines' workers; stop it all at the end."""
    with tempfile.TemporaryDirectory(prefix="caisson-bench-") as directory:
        state = Path(directory)
        scenario = state / "scenarios.yaml"
        scenario.write_text(json.dumps({"scenarios": scenarios}))
        # A `run` lets the stack choose free ports where the usual ones are taken.
        options = DevOptions(file=COMPOSE_FILE, run=Path("unused"), scenario=scenario, state_dir=state)
        notices: list[str] = []
        dev = DevStack(options, load_settings({}), {}, notices.append)
        async with dev:
            notices.clear()  # a service that could not start at once has done no harm yet
            baselines = {f"bare-{role}": _worker(role, dev) for role in ROLES}
            for baseline in baselines.values():
                baseline.start()
            try:
                yield BenchStack(dev, await Client.connect(dev.address), baselines)
            finally:
                for baseline in baselines.values():
                    await baseline.stop()
                # Those of runs that did not come to their end: sandboxes outlive a stack by design.
                await _end_sandboxes(state / "sandboxes")
        if notices:
            # A process that died in the middle makes every figure worthless.
            raise RuntimeError("; ".join(notices))


async def _end_sandboxes(root: Path) -> None:
    provider = LocalProvider(root)
    for ref in await provider.list({}):
        await provider.kill(ref)


def _worker(role: str, dev: DevStack) -> Supervised:
    command = ("python", "-m", "benchmarks.bare", "--address", dev.address, "--role", role)
    return Supervised(Service(f"bare-{role}", command, {}, frozenset()), dev.logs, lambda name, code: None)


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
