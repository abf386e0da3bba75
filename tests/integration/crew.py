"""Workers of Caisson inside the test's own process, on a task queue of their own, so that a test may stop and start them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator

from temporalio.worker import Replayer

from contracts.activity_names import Queues
from tests.integration.stack import Handle, Stack
from workers.compose import crews
from workers.connect import data_converter
from workers.process import make_worker, workflow_runner
from workers.settings import Role, load_settings


class OwnCrew:
    """A workflow worker that can be stopped, beside a model worker that goes on. For agents without a sandbox."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.queue = f"own-{uuid.uuid4().hex[:8]}"
        model = stack.dev.services["model-worker"].environment
        self._settings = load_settings({name: model[name] for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL")})

    @contextlib.asynccontextmanager
    async def working(self, role: Role) -> AsyncIterator[None]:
        """Serve one role while the block runs."""
        settings = self._settings.model_copy(update={"task_queue": self.queue})
        (crew,) = crews(role, settings, self._stack.dev.blobs)
        assert crew.queue in (Queues(self.queue).workflow, Queues(self.queue).model)
        async with make_worker(self._stack.dev.client, crew):
            yield


async def replay(stack: Stack, handle: Handle) -> None:
    """Replay a run's history against the code as it is. Raises on the first difference."""
    from workflows.agent_run import AgentRun

    replayer = Replayer(workflows=[AgentRun], workflow_runner=workflow_runner(), data_converter=data_converter(stack.dev.blobs))
    await replayer.replay_workflow(await handle.fetch_history())
