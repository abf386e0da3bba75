"""Asking Temporal how the runs that a store knows stand: a sweep of the store must know which of them go on."""

from __future__ import annotations

from pydantic import ValidationError
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities.store.checkpoints import RunStart
from contracts.activity_names import ErrorType
from contracts.base import BadInput, explain
from contracts.run import RunResult

_OPEN = (WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.CONTINUED_AS_NEW)
_OPEN_RUNS = "ExecutionStatus = 'Running' AND WorkflowType = 'AgentRun'"


class TemporalStandings:
    """Standings in one namespace. A run that the namespace does not know, or no more, does not go on."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def open_ids(self) -> set[str]:
        """See Standings."""
        return {found.id async for found in self._client.list_workflows(_OPEN_RUNS)}

    async def is_open(self, start: RunStart) -> bool:
        """See Standings. Raises RPCError when Temporal cannot say."""
        try:
            described = await self._client.get_workflow_handle(start.run_id).describe()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return False
            raise
        # A run id may have been used again: only one run of it can be open, the latest.
        is_latest = described.raw_description.workflow_execution_info.first_run_id == start.chain
        return is_latest and described.status in _OPEN

    async def result_of(self, start: RunStart) -> RunResult | None:
        """See Standings. Raises RPCError when Temporal cannot say, and BadInput for a result that this version cannot read."""
        handle: WorkflowHandle[object, object] = self._client.get_workflow_handle(start.run_id, run_id=start.chain)
        try:
            found: object = await handle.result()
        except WorkflowFailureError as error:
            cause = error.cause
            if not isinstance(cause, ApplicationError) or cause.type != ErrorType.RUN_FAILED or not cause.details:
                return None
            found = cause.details[0]
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                return None
            raise
        try:
            return RunResult.model_validate(found)
        except ValidationError as error:
            raise BadInput(explain(error, f"the result of run {start.run_id!r}")) from error
