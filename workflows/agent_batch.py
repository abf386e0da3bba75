"""The `AgentBatch` workflow: many runs of one agent, a bounded number at a time. One run's failure never ends the others."""

from __future__ import annotations

import asyncio
from collections import Counter

from temporalio import workflow
from temporalio.exceptions import ApplicationError, ChildWorkflowError, WorkflowAlreadyStartedError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from pydantic import JsonValue, ValidationError

    from contracts.activity_names import ErrorType
    from contracts.base import canonical_json
    from contracts.batch import (
        SHOWN_OUTPUT,
        BatchInput,
        BatchItem,
        BatchOutcome,
        BatchResult,
        BatchStatus,
        CarriedBatch,
        sparse_batch,
    )
    from contracts.run import Reason, RunResult, RunState, RunStatus, sparse
    from contracts.usage import Usage

from workflows.desk import parsed, refused, who
from workflows.visibility import show_batch


@workflow.defn(name="AgentBatch")
class AgentBatch:
    """Many runs. The input is a BatchInput as JSON; `continued` is the batch's own, when it continues as new."""

    @workflow.init
    def __init__(self, request: JsonValue = None, continued: JsonValue = None) -> None:
        self._request = request
        self._continued = continued
        self._batch: BatchInput | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._done: dict[str, BatchOutcome] = {}
        self._usage = Usage()
        self._stopped_by: str | None = None
        self._state = RunState.PREPARING

    @workflow.run
    async def run(self, request: JsonValue = None, continued: JsonValue = None) -> BatchResult:
        """Run every item. Fails with type `BadInput` at once on input that cannot be used."""
        batch = self._adopt()
        self._state = RunState.RUNNING
        waiting = [item for item in batch.items if item.name not in self._done]
        try:
            while waiting and self._stopped_by is None:
                if workflow.info().is_continue_as_new_suggested():
                    await self._continue_as_new(batch)
                while waiting and len(self._running) < batch.concurrency:
                    item = waiting.pop(0)
                    self._running[item.name] = asyncio.create_task(self._one(batch, item))
                self._show(batch)
                await self._something_happens(len(self._done))
            await workflow.wait_condition(lambda: not self._running)
        except asyncio.CancelledError:
            # Each run gets the cancellation, and is waited for until it has put its sandbox away.
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            raise
        for item in waiting:
            self._done[item.name] = BatchOutcome(
                name=item.name,
                run_id=self._run_id(item),
                status=RunStatus.CANCELLED,
                reason=f"not started: the batch was stopped {self._stopped_by}",
            )
        self._state = RunState.FINISHED
        self._show(batch)
        outcomes = tuple(self._done[item.name] for item in batch.items)
        return BatchResult(outcomes=outcomes, counts=self._counts(), usage=self._usage)

    async def _something_happens(self, finished: int) -> None:
        await workflow.wait_condition(lambda: len(self._done) > finished or self._stopped_by is not None)

    async def _one(self, request: BatchInput, item: BatchItem) -> None:
        run_id = self._run_id(item)
        try:
            result = await workflow.execute_child_workflow(
                "AgentRun",
                sparse(request.request_of(item)),
                id=run_id,
                result_type=RunResult,
                static_summary=f"{item.name}: {(item.task or request.task or '')[:150]}",
                parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
                cancellation_type=workflow.ChildWorkflowCancellationType.WAIT_CANCELLATION_COMPLETED,
            )
        except WorkflowAlreadyStartedError:
            reason = f"a run with the id {run_id} is going on already; give the batch another id, or the item another name"
            result = RunResult(status=RunStatus.FAILED, reason=reason)
        except ChildWorkflowError as error:
            if is_cancelled_exception(error):
                result = RunResult(status=RunStatus.CANCELLED, reason="cancelled")
            else:
                result = _result_of_failure(error)
        finally:
            self._running.pop(item.name, None)
        self._usage = self._usage.plus(result.usage)
        self._done[item.name] = BatchOutcome(
            name=item.name,
            run_id=run_id,
            status=result.status,
            reason=result.reason[:1000] if result.reason else None,
            output=_shown(result.output)[:SHOWN_OUTPUT],
            steps=result.steps,
            artifacts=result.artifacts.count,
        )

    def _adopt(self) -> BatchInput:
        if self._continued is not None:
            try:
                carried = CarriedBatch.model_validate(self._continued)
            except ValidationError:
                raise refused("the batch's input: AgentBatch takes one input, but got a second one; remove it") from None
            self._done = {outcome.name: outcome for outcome in carried.outcomes}
            self._usage, self._stopped_by = carried.usage, carried.stopped_by
            self._request = carried.request
        self._batch = parsed(BatchInput, self._request, "the batch's input")
        return self._batch

    async def _continue_as_new(self, batch: BatchInput) -> None:
        # A run reports only to the execution that started it, so those that are going on are waited for first.
        await workflow.wait_condition(lambda: not self._running and workflow.all_handlers_finished())
        carried = CarriedBatch(
            request=sparse_batch(batch),
            outcomes=tuple(self._done.values()),
            usage=self._usage,
            stopped_by=self._stopped_by,
        )
        workflow.continue_as_new(args=[None, carried])

    def _run_id(self, item: BatchItem) -> str:
        return f"{workflow.info().workflow_id}/{item.name}"

    def _counts(self) -> dict[RunStatus, int]:
        return dict(Counter(outcome.status for outcome in self._done.values()))

    def _show(self, batch: BatchInput) -> None:
        agent = batch.agent
        name = agent if isinstance(agent, str) else agent.name if agent else "default"
        counts = ", ".join(f"{count} {status.value}" for status, count in self._counts().items()) or "none"
        line = f"{len(self._done)} of {len(batch.items)} runs finished ({counts}), {len(self._running)} going on"
        show_batch(name, self._state, len(self._done), self._usage, line)

    @workflow.query(description="How the batch stands.")
    def status(self) -> BatchStatus:
        """Answer the `status` query."""
        return BatchStatus(
            batch_id=workflow.info().workflow_id,
            state=self._state,
            total=len(self._batch.items) if self._batch else 0,
            running=tuple(self._running),
            finished=len(self._done),
            counts=self._counts(),
            usage=self._usage,
        )

    @workflow.update(description='Start no more runs, let those that are going on finish: {"by": "...", "reason": "..."}.')
    def stop(self, reason: JsonValue = None) -> str:
        """Start no more runs."""
        self._stopped_by = who(parsed(Reason, reason, "stop"))
        return "no more runs are started; the batch ends when those that are going on have finished"

    @stop.validator
    def _check_stop(self, reason: JsonValue = None) -> None:
        parsed(Reason, reason, "stop")
        if self._stopped_by is not None or self._state is RunState.FINISHED:
            raise refused("stop: the batch is stopping or finished already")


def _shown(output: JsonValue) -> str:
    if output is None:
        return ""
    return output if isinstance(output, str) else canonical_json(output).decode()


def _result_of_failure(error: ChildWorkflowError) -> RunResult:
    """A failed run's own result, which its failure carries; or one that says why there is none."""
    cause = error.cause
    if isinstance(cause, ApplicationError):
        if cause.type == ErrorType.RUN_FAILED and cause.details:
            return RunResult.model_validate(cause.details[0])
        return RunResult(status=RunStatus.FAILED, reason=cause.message)
    return RunResult(status=RunStatus.FAILED, reason=str(cause or error))
