"""What several integration tests need: a tool that a test holds open, a look into history, and the `temporal` command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import urllib.parse
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from temporalio import activity
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.worker import Worker

from tests.integration.stack import Handle, Stack


def activity_tool(queue: str, name: str = "gate", **more: Any) -> dict[str, Any]:
    """Describe an activity tool of the same name, which takes any object."""
    return {
        "type": "activity",
        "name": name,
        "description": "A tool of the tests.",
        "parameters": {"type": "object"},
        "activity": name,
        "task_queue": queue,
        **more,
    }


class Gate:
    """A tool that stays open until the test lets it go: a place where a run surely stands while something is said to it."""

    def __init__(self) -> None:
        self.queue = f"gate-{uuid.uuid4().hex[:8]}"
        self.entered = asyncio.Event()
        self.released = asyncio.Event()

    @property
    def agent(self) -> dict[str, Any]:
        """An agent whose only tool is this gate, so that it needs no sandbox."""
        return {"tools": [activity_tool(self.queue)]}

    @activity.defn(name="gate")
    async def pass_through(self, given: dict[str, Any]) -> str:
        """The tool."""
        self.entered.set()
        await self.released.wait()
        return "the gate is open"

    async def reached(self) -> None:
        """Wait until the run stands at the gate."""
        await asyncio.wait_for(self.entered.wait(), 30)


@contextlib.asynccontextmanager
async def gate_of(stack: Stack) -> AsyncIterator[Gate]:
    """Serve a gate, and let whoever still stands at it go."""
    gate = Gate()
    async with serving(stack, gate.queue, [gate.pass_through]):
        try:
            yield gate
        finally:
            gate.released.set()


@contextlib.asynccontextmanager
async def serving(stack: Stack, queue: str, activities: Sequence[Callable[..., Any]]) -> AsyncIterator[None]:
    """Serve activities on a task queue of the test's own, as another team's worker would."""
    async with Worker(stack.dev.client, task_queue=queue, activities=activities):
        yield


async def events(handle: Handle) -> list[HistoryEvent]:
    """Return a run's whole history."""
    return [event async for event in handle.fetch_history_events()]


async def failed_tasks(handle: Handle) -> list[str]:
    """Return why workflow tasks of a run failed: nothing but a defect makes one fail."""
    kind = EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED
    return [
        event.workflow_task_failed_event_attributes.failure.message for event in await events(handle) if event.event_type == kind
    ]


async def scheduled(handle: Handle) -> list[str]:
    """Return the activities of a run by name, in the order in which they were scheduled."""
    kind = EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
    return [
        event.activity_task_scheduled_event_attributes.activity_type.name
        for event in await events(handle)
        if event.event_type == kind
    ]


async def last_request(stack: Stack, handle: Handle) -> list[dict[str, Any]]:
    """Return the input items of a run's last model call, as they came over the wire."""
    base = stack.dev.services["model-worker"].environment["OPENAI_BASE_URL"].removesuffix("/v1")
    url = f"{base}/scripted/last?conversation={urllib.parse.quote(handle.id[:64])}"
    body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read())
    items: list[dict[str, Any]] = json.loads(body)["input"]
    return items


def outputs_of(items: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (call id, output) of every tool output among a request's items."""
    return [(item["call_id"], item["output"]) for item in items if item.get("type") == "function_call_output"]


async def temporal(stack: Stack, *arguments: str) -> str:
    """Run the `temporal` command against the stack's server and return what it printed; fail with its complaint."""
    process = await asyncio.create_subprocess_exec(
        str(Path(sys.executable).parent / "temporal"),
        *arguments,
        "--address",
        stack.dev.address,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, complaint = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, complaint.decode()
    return out.decode()


def sandboxes_of(stack: Stack, run_id: str) -> list[Path]:
    """The directories of a run's sandboxes that are not removed."""
    found = []
    for path in stack.sandboxes():
        with contextlib.suppress(OSError, ValueError):  # it is being removed
            if json.loads((path / "state.json").read_text())["labels"]["caisson_run"] == run_id:
                found.append(path)
    return found


def kill(sandbox: Path) -> None:
    """Kill -9 a sandbox with all that runs in it."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(json.loads((sandbox / "state.json").read_text())["pid"], signal.SIGKILL)
