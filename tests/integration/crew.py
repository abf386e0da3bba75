"""Workers of Caisson inside the test's own process, on a task queue of their own, so that a test may stop and start them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator

from temporalio.worker import Replayer

from activities.model.activity import ModelActivities
from activities.model.client import make_client
from activities.model.prices import load_prices
from contracts.activity_names import Queues
from tests.integration.stack import Handle, Stack
from workers.compose import Crew, crews
from workers.connect import data_converter
from workers.process import make_worker, workflow_runner
from workers.settings import Role, load_settings


class OwnCrew:
    """A workflow worker that can be stopped, and a model worker. For agents without a sandbox."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.queue = f"own-{uuid.uuid4().hex[:8]}"
        self._settings = load_settings({"CAISSON_TASK_QUEUE": self.queue})

    @contextlib.asynccontextmanager
    async def workflows(self) -> AsyncIterator[None]:
        """Serve the workflows while the block runs."""
        (crew,) = crews(Role.WORKFLOW, self._settings, self._stack.dev.blobs)
        async with make_worker(self._stack.dev.client, crew):
            yield

    @contextlib.asynccontextmanager
    async def model(self) -> AsyncIterator[None]:
        """Serve model calls while the block runs; afterwards no connection to the model is left."""
        base = self._stack.dev.services["model-worker"].environment["OPENAI_BASE_URL"]
        async with make_client("scripted", base) as client:
            activities = ModelActivities(client, self._stack.dev.blobs, load_prices(None))
            async with make_worker(self._stack.dev.client, Crew(Queues(self.queue).model, [activities.call_model])):
                yield


async def replay(stack: Stack, handle: Handle) -> None:
    """Replay a run's history against the code as it is. Raises on the first difference."""
    from workflows.agent_run import AgentRun

    replayer = Replayer(workflows=[AgentRun], workflow_runner=workflow_runner(), data_converter=data_converter(stack.dev.blobs))
    await replayer.replay_workflow(await handle.fetch_history())
