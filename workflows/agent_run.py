"""The `AgentRun` workflow: one run, from task to result.

The story is in `_work`: budget, model call, policy, tool calls, checkpoint, and over again. All that must outlive a
continue-as-new is in one place, `CarriedRun`; everything else here belongs to the step in flight.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from pydantic import JsonValue

    from contracts.activity_names import CALL_MODEL, PREPARE_RUN, RECORD_END, ErrorType, Queues
    from contracts.blob import Text
    from contracts.carried import CarriedRun
    from contracts.model import CallModelInput, CallModelResult, NewItem, UserItem
    from contracts.prepare import PrepareRunInput, RecordEndInput
    from contracts.run import (
        ArtifactList,
        RunInput,
        RunResult,
        RunState,
        RunStatus,
        StatusReport,
        StepsPage,
        StepsPageInput,
        sparse,
    )
    from contracts.usage import Budget, Usage, exceeded

from workflows import judge
from workflows.activities import call, cancellation_is_seen_to, explain_failure
from workflows.children import SIGNAL, Children
from workflows.desk import Desk, parsed, refused
from workflows.mcp import list_tools
from workflows.sandboxes import LOST
from workflows.tool_calls import Outcome, ToolCalls
from workflows.visibility import details, show_progress, show_start
from workflows.workspace import Workspace

SHOW_EVERY = timedelta(seconds=2)
"""How often search attributes follow the steps of a fast run: each time costs an event and a write of the server's index. A
change of state always shows at once."""


@workflow.defn(name="AgentRun")
class AgentRun:
    """One agent execution. The input is a RunInput as JSON; `continued` is the run's own CarriedRun, when it continues as new."""

    @workflow.init
    def __init__(self, request: JsonValue = None, continued: JsonValue = None) -> None:
        # Taken as plain JSON and checked here, because a type that does not fit would fail the workflow task for ever.
        self._wrong: ApplicationError | None = None
        carried: CarriedRun | None = None
        try:
            carried = parsed(CarriedRun, continued, "the second input") if continued is not None else None
        except ApplicationError:
            self._wrong = refused("the run's input: AgentRun takes one input, but got a second one; remove it")
        self._run_id = workflow.info().workflow_id
        self._queues = Queues(workflow.info().task_queue)
        self._desk = Desk(carried)
        self._workspace = Workspace(self._queues, self._run_id, carried, self._show)
        self._children = Children(self._run_id, self._desk, self._workspace, carried, lambda: self._run, self._spend)
        self._tools = ToolCalls(self._run_id, self._desk, self._workspace, self._children, self._enter, self._seconds_left)
        self._carried = carried
        self._state = RunState.PREPARING
        self._activity = "preparing"
        self._shown_at = workflow.now() - SHOW_EVERY
        self._answer: CallModelResult | None = None
        self._result: RunResult | None = None

    @workflow.run
    async def run(self, request: JsonValue = None, continued: JsonValue = None) -> RunResult:
        """Work to the end.

        Fails with type `BadInput` on input that cannot be used, and with `RunFailed` (its details hold the RunResult) when the
        run had to give up.
        """
        if self._wrong is not None:
            raise self._wrong
        try:
            try:
                if self._carried is None:
                    self._carried = await self._prepare(parsed(RunInput, request, "the run's input"))
                    self._carried = await list_tools(self._carried, self._run_id, self._show)
                    await self._workspace.open(self._carried.prepared)
                    self._take_workspace()
                return await self._work()
            except ActivityError as error:
                if is_cancelled_exception(error):
                    raise
                raise await self._give_up(error) from None
        except (ActivityError, asyncio.CancelledError):
            # Cancelled, wherever it was. Whatever was in flight is dead by now; what is left is to put the sandbox away.
            cancellation_is_seen_to()
            await self._conclude(RunStatus.CANCELLED, "cancelled", collect=False)
            raise

    async def _give_up(self, error: ActivityError) -> ApplicationError:
        kind, reason = explain_failure(error)
        result = await self._conclude(RunStatus.FAILED, reason, collect=kind not in LOST)
        if kind == ErrorType.BAD_INPUT:
            return ApplicationError(reason, type=ErrorType.BAD_INPUT, non_retryable=True)
        return ApplicationError(result.reason or reason, result, type=ErrorType.RUN_FAILED, non_retryable=True)

    async def _work(self) -> RunResult:
        while True:
            await self._wait_while_paused()
            run = self._spend_time()
            if self._desk.stopped_by is not None:
                return await self._conclude(RunStatus.CANCELLED, f"stopped {self._desk.stopped_by}")
            if (limit := exceeded(run.budget, run.usage.plus(self._children.reserved()))) is not None:
                return await self._conclude(RunStatus.BUDGET_EXCEEDED, limit)

            answer = await self._call_model()
            judged = judge.judge(answer, self._run.counters, more_to_say=bool(self._desk.messages))
            if judged.end is RunStatus.FAILED:
                result = await self._conclude(RunStatus.FAILED, judged.reason)
                raise ApplicationError(result.reason or "failed", result, type=ErrorType.RUN_FAILED, non_retryable=True)
            if judged.end is not None:
                return await self._conclude(judged.end, judged.reason)

            outcomes = await self._tools.carry_out(answer.calls, self._run.step, self._run.prepared)
            self._complete_step(answer, judged, outcomes)
            if await self._children.let_continue(self._show):
                await self._continue_as_new()

    async def _prepare(self, request: RunInput) -> CarriedRun:
        self._show("resolving the agent")
        prepared = await call(
            PREPARE_RUN,
            PrepareRunInput(run_id=self._run_id, chain=workflow.info().first_execution_run_id, request=sparse(request)),
            queue=self._queues.workflow,
            summary=f"prepare: {' '.join(request.task.split())}",
        )
        parent = workflow.info().parent
        show_start(prepared.agent_name, prepared.plan.sandbox.provider, parent.workflow_id if parent else None)
        if request.labels:
            workflow.upsert_memo({"labels": request.labels})
        start = prepared.start
        return CarriedRun(
            prepared=prepared,
            budget=prepared.plan.budget,
            head=start.transcript if start else None,
            items=(*(start.items if start else ()), UserItem(text=prepared.task.reference())),
            step=start.step if start else 0,
            usage=Usage(),
            started_at=workflow.info().start_time,
        )

    async def _call_model(self) -> CallModelResult:
        said: list[NewItem] = [*self._workspace.notes()]
        said += [UserItem(text=Text(inline=message)) for message in self._desk.read_messages()]
        run = self._update(items=(*self._run.items, *said))
        step = run.step + 1
        self._enter(RunState.RUNNING, f"model {run.prepared.model}, step {step}")
        answer = await call(
            CALL_MODEL,
            CallModelInput(
                key=f"{self._run_id}/{workflow.info().run_id}/{step}",
                run_id=self._run_id,
                chain=workflow.info().first_execution_run_id,
                step=step,
                agent=run.prepared.agent,
                head=run.head,
                items=run.items,
                usage=run.usage,
                snapshot=run.snapshot,
            ),
            queue=self._queues.model,
            summary=f"model {run.prepared.model} step {step}",
            seconds=run.prepared.plan.model_seconds + 60,
        )
        # From here on the answer is paid for and in the transcript, whatever becomes of its calls.
        self._answer = answer
        self._update(
            head=answer.head,
            items=(),
            step=step,
            usage=run.usage.plus_call(answer.usage),
            text=answer.text.shown()[:2000] if answer.text else run.text,
            model_label=answer.model_label,
            steps=judge.kept(run.steps, judge.summarise(answer, step, [])),
        )
        return answer

    def _complete_step(self, answer: CallModelResult, judged: judge.Judged, outcomes: list[Outcome]) -> None:
        run = self._run
        usage = run.usage.model_copy(update={"tool_calls": run.usage.tool_calls + len(outcomes)})
        summary = judge.summarise(answer, run.step, [outcome.line for outcome in outcomes])
        self._take_workspace()
        self._update(
            items=(*(outcome.item for outcome in outcomes), *judged.notes),
            usage=usage,
            counters=judged.counters,
            steps=judge.kept(run.steps[:-1], summary),
        )
        if workflow.now() - self._shown_at >= SHOW_EVERY:
            self._show_progress(RunState.RUNNING)

    async def _conclude(self, status: RunStatus, reason: str | None, *, collect: bool = True) -> RunResult:
        """Collect what was made, end the sandbox, and write the result. Nothing more is accepted from people."""
        self._desk.finished = True
        await self._children.end_all()
        self._show("collecting results")
        prepared = self._carried.prepared if self._carried else None
        artifacts, complaint = await self._workspace.close(prepared, collect=collect)
        answered = self._answer if status in (RunStatus.COMPLETED, RunStatus.REFUSED) else None
        if self._carried is not None:
            self._take_workspace()
            self._spend_time()
            complaint = await self._write_down(status, answered, artifacts) or complaint
        why = "; ".join(part for part in (reason, complaint) if part) or None
        result = judge.result_of(status, why, self._carried, answered, artifacts)
        self._result = result.model_copy(update=self._workspace.records())
        self._state = RunState.FINISHED
        self._show(f"finished: {status.value}")
        if self._carried is not None:
            self._show_progress(RunState.FINISHED)
        return self._result

    async def _write_down(self, status: RunStatus, answered: CallModelResult | None, artifacts: ArtifactList) -> str | None:
        """Write down the last checkpoint and the end, and into the transcript what no model call will take up any more."""
        given = RecordEndInput(
            run_id=self._run_id,
            chain=workflow.info().first_execution_run_id,
            checkpoint=judge.checkpoint_of(self._run),
            status=status,
            artifacts=artifacts,
            output=answered.text.blob if answered is not None and answered.text is not None else None,
            egress_log=self._workspace.egress_log,
            inputs=self._workspace.inputs,
        )
        try:
            written = await call(RECORD_END, given, queue=self._queues.workflow, summary="write down the end")
        except ActivityError as error:
            return f"the last checkpoint was not written down: {explain_failure(error)[1]}"
        self._update(head=written.checkpoint.transcript, items=written.checkpoint.items)
        return None

    def _take_workspace(self) -> None:
        self._update(**self._workspace.pack())

    async def _wait_while_paused(self) -> None:
        if not self._desk.holds():
            return
        self._enter(RunState.PAUSED, f"paused {self._desk.paused_by}")
        waiting = self._desk.wait(lambda: not self._desk.holds(), self._seconds_left)
        await self._workspace.while_waiting(self._run.prepared, waiting)
        self._take_workspace()
        self._enter(RunState.RUNNING, "resumed")

    def _spend(self, usage: Usage) -> None:
        """Count what a subagent has used. Its time ran beside that of this run."""
        self._update(usage=self._run.usage.plus(usage.model_copy(update={"wall_seconds": 0.0})))

    async def _continue_as_new(self) -> None:
        await workflow.wait_condition(workflow.all_handlers_finished)  # they only write things down: none is ever half done here
        await self._workspace.settle()
        packed = self._run.model_copy(update={**self._desk.pack(), **self._workspace.pack(), **self._children.pack()})
        workflow.continue_as_new(args=[None, packed])

    def _seconds_left(self) -> float | None:
        """How much of the wall-time budget is left, every extension counted; None without a limit."""
        run = self._spend_time()
        return None if run.budget.wall_seconds is None else run.budget.wall_seconds - run.usage.wall_seconds

    def _spend_time(self) -> CarriedRun:
        wall = round((workflow.now() - self._run.started_at).total_seconds(), 3)
        times = {"wall_seconds": wall, "sandbox_seconds": self._workspace.seconds()}
        return self._update(usage=self._run.usage.model_copy(update=times), budget=self._desk.extended(self._run.budget))

    @property
    def _run(self) -> CarriedRun:
        if self._carried is None:
            raise ApplicationError("not prepared yet", type=ErrorType.RUN_FAILED, non_retryable=True)
        return self._carried

    def _update(self, **changes: object) -> CarriedRun:
        self._carried = self._run.model_copy(update=changes)
        return self._carried

    def _enter(self, state: RunState, activity: str) -> None:
        if state is not self._state:
            self._show_progress(state)
        self._state = state
        self._show(activity)

    def _show_progress(self, state: RunState) -> None:
        self._shown_at = workflow.now()
        show_progress(state, self._run.step, self._run.usage)

    def _show(self, activity: str) -> str:
        """Let people see what the run does, and return what they saw before."""
        before, self._activity = self._activity, activity
        run = self._carried
        if run is not None:
            recent = [line for step in run.steps[-3:] for line in step.actions]
            workflow.set_current_details(details(self._state, run, activity, recent[-5:]))
        return before

    @workflow.query(description="How the run stands: state, step, usage, open approvals, sandbox, result.")
    def status(self) -> StatusReport:
        """Answer the `status` query."""
        run, state = self._carried, self._state
        if self._desk.stopped_by is not None and state is not RunState.FINISHED:
            state = RunState.STOPPING
        return StatusReport(
            run_id=self._run_id,
            temporal_run_id=workflow.info().run_id,
            state=state,
            step=run.step if run else 0,
            agent=run.prepared.agent_name if run else "",
            model=run.prepared.model if run else "",
            model_label=run.model_label if run else None,
            activity=self._activity,
            pending_approvals=tuple(self._desk.pending.values()),
            queued_messages=len(self._desk.messages),
            recoveries=self._workspace.recoveries,
            subagents=self._children.going,
            usage=run.usage if run else Usage(),
            budget=self._desk.foreseen(run.budget) if run else Budget(),
            sandbox=self._workspace.sandbox,
            checkpoint=judge.checkpoint_of(run) if run else None,
            result=self._result,
        )

    @workflow.query(description='The last steps. Argument: {"after": step number, "limit": how many}.')
    def steps(self, page: JsonValue = None) -> StepsPage:
        """Answer the `steps` query."""
        asked = parsed(StepsPageInput, page, "steps")
        known = self._carried.steps if self._carried else ()
        shown = [step for step in known if step.step > asked.after][: asked.limit]
        return StepsPage(
            steps=tuple(shown), total=self._carried.step if self._carried else 0, first_kept=known[0].step if known else 0
        )

    @workflow.signal(name=SIGNAL, description='What a parent says to a subagent: {"message": {...}} or {"stop": {...}}.')
    def from_parent(self, said: JsonValue = None) -> None:
        """Take down what the parent says, as if a person had said it; what cannot be accepted is left out."""
        self._desk.hear(said)

    @workflow.update(description='Say something to the model: {"text": "..."}.')
    def send_message(self, message: JsonValue = None) -> str:
        """Queue a message for the next model call."""
        return self._desk.take_message(message)

    @send_message.validator
    def _check_message(self, message: JsonValue = None) -> None:
        self._desk.check_message(message)

    @workflow.update(description='Hold the run before its next model call: {"by": "...", "reason": "..."}.')
    def pause(self, reason: JsonValue = None) -> str:
        """Hold the run."""
        return self._desk.pause(reason)

    @pause.validator
    def _check_pause(self, reason: JsonValue = None) -> None:
        self._desk.check_pause(reason)

    @workflow.update(description="Let a paused run go on.")
    def resume(self, reason: JsonValue = None) -> str:
        """Let the run go on."""
        return self._desk.resume(reason)

    @resume.validator
    def _check_resume(self, reason: JsonValue = None) -> None:
        self._desk.check_resume(reason)

    @workflow.update(description='End the run after this step, keeping what there is: {"by": "...", "reason": "..."}.')
    def stop(self, reason: JsonValue = None) -> str:
        """End the run after this step."""
        return self._desk.stop(reason)

    @stop.validator
    def _check_stop(self, reason: JsonValue = None) -> None:
        self._desk.check_stop(reason)

    @workflow.update(description='Add to the run\'s limits: {"steps": 10}.')
    def extend_budget(self, more: JsonValue = None) -> str:
        """Add to the budget."""
        return self._desk.extend(more)

    @extend_budget.validator
    def _check_extension(self, more: JsonValue = None) -> None:
        self._desk.check_extension(more)

    @workflow.update(description="Decide on one open approval; `status` shows its approval_id and arguments_digest.")
    def decide_approval(self, decision: JsonValue = None) -> str:
        """Grant or deny one exact call."""
        return self._desk.decide(decision)

    @decide_approval.validator
    def _check_decision(self, decision: JsonValue = None) -> None:
        self._desk.check_decision(decision)
