"""The stack that integration tests run against: the product's own dev stack, on free ports, with a scripted model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError

from activities.sandbox.providers.local import LocalProvider
from workers.dev.options import DevOptions
from workers.dev.stack import DevStack
from workers.settings import load_settings

QUEUE = "caisson"
SCENARIOS = Path(__file__).parent / "scenarios"
Handle = WorkflowHandle[Any, Any]


@dataclass
class Stack:
    """A running dev stack, and what tests ask of it."""

    dev: DevStack
    state: Path
    notices: list[str]

    async def start(
        self, scenario: str, agent: dict[str, Any] | str | None = None, *, run_id: str | None = None, **more: Any
    ) -> Handle:
        """Start a run whose task names the scenario that the scripted model plays for it."""
        request = {"task": f"Play [{scenario}].", **({"agent": agent} if agent is not None else {}), **more}
        return await self.start_raw(request, run_id or f"{scenario}-{uuid.uuid4().hex[:8]}")

    async def start_raw(self, request: Any, run_id: str | None = None) -> Handle:
        """Start a run with any input at all."""
        return await self.dev.client.start_workflow("AgentRun", request, id=run_id or uuid.uuid4().hex, task_queue=QUEUE)

    async def finish(self, handle: Handle, seconds: float = 60) -> dict[str, Any]:
        """Wait for a run's result."""
        result: dict[str, Any] = await asyncio.wait_for(handle.result(), seconds)
        return result

    async def failure(self, handle: Handle, seconds: float = 60) -> ApplicationError:
        """Wait for a run to fail, and return what it failed with."""
        try:
            result = await asyncio.wait_for(handle.result(), seconds)
        except WorkflowFailureError as error:
            assert isinstance(error.cause, ApplicationError), repr(error.cause)
            return error.cause
        raise AssertionError(f"the run did not fail: {result}")

    async def until(self, handle: Handle, seconds: float = 30, **wanted: Any) -> dict[str, Any]:
        """Wait until the `status` query shows all wanted values; `step` is that one, or a later one."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            status: dict[str, Any] = await handle.query("status")
            if all(status[name] == value or (name == "step" and status[name] > value) for name, value in wanted.items()):
                return status
            assert asyncio.get_running_loop().time() < deadline, f"never came to {wanted}: {status}"
            await asyncio.sleep(0.05)

    def journal(self, handle: Handle) -> list[dict[str, Any]]:
        """What the scripted endpoint saw of a run's model calls, in order."""
        lines = (self.state / "scripted-model.jsonl").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["conversation"] == handle.id[:64]]

    def answered(self, handle: Handle) -> list[int]:
        """The turns of a run that were answered, one entry for each answer."""
        return [entry["turn"] for entry in self.journal(handle) if entry["outcome"] == "answered"]

    def sandboxes(self) -> list[Path]:
        """The directories of living local sandboxes."""
        root = self.state / "sandboxes"
        return [path for path in root.iterdir() if (path / "state.json").exists()] if root.is_dir() else []

    async def sweep(self) -> None:
        """End the sandboxes that runs left in their middle: they outlive a stack by design."""
        provider = LocalProvider(self.state / "sandboxes")
        for ref in await provider.list({}):
            await provider.kill(ref)

    def kill(self, service: str) -> None:
        """Kill -9 one service's process. The stack starts it again."""
        pid = self.dev.running[service].pid
        assert pid is not None, f"{service} is not running"
        os.kill(pid, signal.SIGKILL)

    async def history_bytes(self, handle: Handle) -> int:
        """The size of the current Temporal run's history."""
        description = await handle.describe()
        return description.raw_description.workflow_execution_info.history_size_bytes

    async def closed_as(self, handle: Handle) -> WorkflowExecutionStatus | None:
        """How Temporal closed the workflow."""
        return (await handle.describe()).status


def free_port() -> int:
    """Return a TCP port that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def make_stack(state: Path, environ: dict[str, str] | None = None) -> Stack:
    """Describe a stack with its state in `state`; `async with stack.dev` runs it. Its model plays every file of scenarios/."""
    notices: list[str] = []
    scenario = state / "scenarios.yaml"
    every = [one for file in sorted(SCENARIOS.glob("*.yaml")) for one in yaml.safe_load(file.read_text())["scenarios"]]
    scenario.write_text(yaml.safe_dump({"scenarios": every}, sort_keys=False))
    options = DevOptions(
        file=Path("temporal-dev.yml"),
        run=Path("unused"),
        scenario=scenario,
        port=free_port(),
        ui_port=free_port(),
        state_dir=state,
    )
    environ = environ or {}
    # With a key in it the stack asks the endpoint that the environment names, and starts no scripted model.
    key: dict[str, str] = {name: environ[name] for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL") if name in environ}
    return Stack(DevStack(options, load_settings(key), environ, notices.append), state, notices)
