"""Updates that arrive together: decided the same live and in replay, whichever came first."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.update.v1 import UpdateRef
from temporalio.api.workflowservice.v1 import PollWorkflowExecutionUpdateRequest
from temporalio.service import RPCError

from tests.integration.crew import OwnCrew, replay
from tests.integration.helpers import events, gate_of
from tests.integration.stack import Handle, Stack


async def admitted(stack: Stack, handle: Handle, update: str) -> None:
    """Wait until the server holds an update, which nobody has looked at yet."""
    reference = UpdateRef(workflow_execution=WorkflowExecution(workflow_id=handle.id), update_id=update)
    request = PollWorkflowExecutionUpdateRequest(namespace=stack.dev.client.namespace, update_ref=reference)
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(RPCError):
                await stack.dev.client.workflow_service.poll_workflow_execution_update(request)
                return


@pytest.mark.parametrize("order", [("extend_budget", "decide_approval"), ("decide_approval", "extend_budget")])
async def test_two_updates_in_one_workflow_task_give_one_result_live_and_in_replay(stack: Stack, order: tuple[str, str]) -> None:
    """An extension and an approval that reach the run together both count, in either order (temporalio/sdk-python#673)."""
    crew = OwnCrew(stack)
    async with gate_of(stack) as gate, crew.model():
        gate.released.set()
        request = {"task": "Play [gate].", "agent": gate.agent, "approvals": {"default": "prompt"}, "budget": {"steps": 1}}
        async with crew.workflows():
            handle: Handle = await stack.dev.client.start_workflow(
                "AgentRun", request, id=f"order-{uuid.uuid4().hex[:8]}", task_queue=crew.queue
            )
            (asked,) = (await stack.until(handle, state="awaiting_approval"))["pending_approvals"]
        said = {
            "extend_budget": {"steps": 1},
            "decide_approval": {
                "approval_id": asked["approval_id"],
                "arguments_digest": asked["arguments_digest"],
                "allow": True,
                "by": "dr.lee",
            },
        }
        telling = []
        for update in order:
            telling.append(asyncio.create_task(handle.execute_update(update, said[update], id=update)))
            await admitted(stack, handle, update)
        async with crew.workflows():
            result = await stack.finish(handle)
            told = await asyncio.gather(*telling)
            await replay(stack, handle)
    assert (result["status"], result["output"], result["steps"]) == ("completed", "went through", 2)
    assert {text.split()[-1] for text in told} == {"extended", "granted"}
    kind = EventType.EVENT_TYPE_WORKFLOW_EXECUTION_UPDATE_ACCEPTED
    accepted = [
        event.workflow_execution_update_accepted_event_attributes for event in await events(handle) if event.event_type == kind
    ]
    assert [one.protocol_instance_id for one in accepted] == list(order)
    assert len({one.accepted_request_sequencing_event_id for one in accepted}) == 1


async def test_a_run_goes_on_where_it_was_when_its_worker_comes_back(stack: Stack) -> None:
    """A workflow worker that leaves in mid-step costs no model call and no tool call."""
    crew = OwnCrew(stack)
    async with gate_of(stack) as gate, crew.model():
        async with crew.workflows():
            handle: Handle = await stack.dev.client.start_workflow(
                "AgentRun",
                {"task": "Play [gate].", "agent": gate.agent},
                id=f"back-{uuid.uuid4().hex[:8]}",
                task_queue=crew.queue,
            )
            await gate.reached()
        gate.released.set()
        async with crew.workflows():
            assert (await asyncio.wait_for(handle.result(), 30))["output"] == "went through"
    assert stack.answered(handle) == [1, 2]
