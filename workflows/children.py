"""Subagents of one run: each is an `AgentRun` child workflow. Whatever becomes of one is an output for its parent's model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    FailureError,
    WorkflowAlreadyStartedError,
    is_cancelled_exception,
)

from workflows.activities import explain_failure
from workflows.desk import Desk
from workflows.workspace import Workspace

with workflow.unsafe.imports_passed_through():
    from pydantic import JsonValue, ValidationError

    from contracts.activity_names import TAKE_RESULTS, ErrorType
    from contracts.base import explain
    from contracts.carried import CarriedRun, ChildReport
    from contracts.prepare import PrepareRunResult, RolePlan, TakeResultsInput, TakeResultsResult
    from contracts.run import RunInput, RunResult, RunStatus, SubagentLink, sparse
    from contracts.usage import Budget, Usage

CHILD_TOOLS = frozenset({"spawn_agents", "subagents"})
TOLD_CHARS = 64 * 1024
"""Characters of all answers together that one call tells; each has an equal part."""
SIGNAL = "from_parent"
MOST_REASON = 2000
"""Characters of a reason that a subagent takes: one with more would go unheard."""
MOST_ID = 1000
"""Bytes of a run's id. Temporal refuses a longer one again and again, and the run would hang."""
EVENT_CAP = 10_000
"""Events after which a run continues as new even if the server does not suggest it (the server's limit is 51,200)."""
MOST_EVENTS = 35_000
"""Events after which a run with subagents waits for them, so that it can continue as new."""


@dataclass
class Child:
    """A subagent that is going on."""

    name: str
    role: RolePlan
    run_id: str
    budget: Budget
    ask: dict[str, Any]
    link: SubagentLink
    task: asyncio.Task[None] | None = None
    is_stopping: bool = False


class Children:
    """Starts and follows the subagents of one run."""

    def __init__(
        self,
        run_id: str,
        desk: Desk,
        workspace: Workspace,
        carried: CarriedRun | None,
        run: Callable[[], CarriedRun],
        spend: Callable[[Usage], None],
    ) -> None:
        self._run_id = run_id
        self._desk = desk
        self._workspace = workspace
        self._run = run
        self._spend = spend
        self._left: int | None = carried.subagents_left if carried else None
        self._names: list[str] = list(carried.subagent_names) if carried else []
        self._ended: dict[str, ChildReport] = {report.name: report for report in carried.reports} if carried else {}
        self._going: dict[str, Child] = {}

    @property
    def going(self) -> tuple[str, ...]:
        """The run ids of those that are going on."""
        return tuple(child.run_id for child in self._going.values())

    def pack(self) -> dict[str, object]:
        """What a run takes with it when it continues as new: then none is going on."""
        return {"subagents_left": self._left, "subagent_names": tuple(self._names), "reports": tuple(self._ended.values())}

    def reserved(self) -> Usage:
        """What those that are going on may still spend, which nobody else may."""
        reserved = Usage()
        for child in self._going.values():
            budget = child.budget
            reserved = reserved.plus(
                Usage(model_calls=budget.steps or 0, input_tokens=budget.tokens or 0, cost_usd=budget.cost_usd or 0.0)
            )
        return reserved

    async def carry_out(self, name: str, arguments: dict[str, Any], prepared: PrepareRunResult) -> tuple[str, bool]:
        """Do what a call asks. Returns the output for the model, and whether it is a fault."""
        if name == "spawn_agents":
            fault = self._fault_of(arguments["agents"], prepared)
            if fault is not None:
                return f"spawn_agents: nobody was started. {fault}", True
            started = await self._start(arguments["agents"], prepared)
            if arguments.get("wait", True):
                return await self._tell(prepared, started, every=True), False
            return f"started: {', '.join(started)}. Use the tool `subagents` to wait for them.", False
        return await self._manage(arguments, prepared)

    def stop_all(self, why: str) -> None:
        """Let all that are going on end after their step."""
        for child in self._going.values():
            self._signal_stop(child, why)

    async def end_all(self) -> None:
        """Cancel all that are going on, and return when they are over: no subagent outlives its parent."""
        tasks = [child.task for child in self._going.values() if child.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def let_continue(self, show: Callable[[str], object]) -> bool:
        """Whether it is time to continue as new. Not while subagents go on, if that can be: the server would end them."""
        length = workflow.info().get_current_history_length()
        if not workflow.info().is_continue_as_new_suggested() and length <= EVENT_CAP:
            return False
        if self._going and length > MOST_EVENTS:
            show(f"waiting for {len(self._going)} subagents, because the history is full")
            await workflow.wait_condition(lambda: not self._going)
        return not self._going

    # --- starting

    def _fault_of(self, asked: Sequence[dict[str, Any]], prepared: PrepareRunResult) -> str | None:
        plan, left = prepared.plan, self._allowance(prepared)
        names = [one["name"] for one in asked]
        twice = [name for name in names if name in self._names or names.count(name) > 1]
        if twice:
            return f"The name {twice[0]!r} is used already; give each subagent a name of its own"
        if any(len(f"{self._run_id}/{name}".encode()) > MOST_ID for name in names):
            return f"A subagent's run id, which is this run's with its name, would be over {MOST_ID} bytes; take shorter names"
        if plan.depth_left == 0:
            return "subagent_limits.depth: this run may start no subagents; do the work yourself"
        if len(asked) > left:
            return f"subagent_limits.total: {left} more may be started, and {len(asked)} were asked for; do more of it yourself"
        if len(asked) + len(self._going) > plan.parallel_subagents:
            room = plan.parallel_subagents - len(self._going)
            return f"subagent_limits.parallel: {room} more may go on at this time; wait for some first"
        for one in asked:
            role = _role(prepared, one["role"])
            if role.workspace != "own" and self._workspace.snapshot is None:
                return f"{one['name']!r}: there is nothing in the workspace yet that it could be given"
        short = self._too_little(prepared, asked)
        return None if short is None else f"budget.{short}: too little is left for {len(asked)} subagents; do the work yourself"

    def _too_little(self, prepared: PrepareRunResult, asked: Sequence[dict[str, Any]]) -> str | None:
        for one in asked:
            budget = self._share(_role(prepared, one["role"]), len(asked))
            if budget is None:
                return "steps, tokens or cost_usd"
        return None

    def _allowance(self, prepared: PrepareRunResult) -> int:
        return prepared.plan.subagents_left if self._left is None else self._left

    def _share(self, role: RolePlan, count: int) -> Budget | None:
        """Return what one of `count` subagents may spend, or None when a limit has nothing left to share."""
        run, part = self._run(), min(role.budget_share, 1 / count)
        taken = run.usage.plus(self.reserved())
        steps, tokens, cost, wall = run.budget.steps, run.budget.tokens, run.budget.cost_usd, run.budget.wall_seconds
        shared_steps = None if steps is None else int((steps - taken.model_calls) * part)
        shared_tokens = None if tokens is None else int((tokens - taken.tokens) * part)
        shared_cost = None if cost is None else (cost - (taken.cost_usd or 0.0)) * part
        shared_wall = None if wall is None else wall - run.usage.wall_seconds
        if any(one is not None and one < 1 for one in (shared_steps, shared_tokens)):
            return None
        if any(one is not None and one <= 0 for one in (shared_cost, shared_wall)):
            return None
        return Budget(steps=shared_steps, tokens=shared_tokens, cost_usd=shared_cost, wall_seconds=shared_wall)

    async def _start(self, asked: Sequence[dict[str, Any]], prepared: PrepareRunResult) -> list[str]:
        plan, count = prepared.plan, len(asked)
        left = self._allowance(prepared) - count
        each = left // count if plan.depth_left > 1 else 0
        self._left = left - each * count
        shares = [self._share(_role(prepared, one["role"]), count) for one in asked]
        for one, budget in zip(asked, shares, strict=True):
            role = _role(prepared, one["role"])
            link = SubagentLink(
                parent=self._run_id,
                depth=plan.depth + 1,
                allowance=each,
                agent=role.agent,
                budget=budget or Budget(),
                snapshot=None if role.workspace == "own" else self._workspace.snapshot,
                paths=tuple(one["inputs"]) if role.workspace == "inputs" else None,
            )
            child = Child(one["name"], role, f"{self._run_id}/{one['name']}", link.budget, one, link)
            self._names.append(child.name)
            self._going[child.name] = child
            child.task = asyncio.create_task(self._follow(child))
        return [one["name"] for one in asked]

    async def _follow(self, child: Child) -> None:
        try:
            request = RunInput(task=child.ask["task"], agent=child.role.agent_name, subagent=child.link)
            result = await workflow.execute_child_workflow(
                "AgentRun",
                sparse(request),
                id=child.run_id,
                result_type=RunResult,
                task_queue=child.role.task_queue or workflow.info().task_queue,
                static_summary=f"{child.name} ({child.role.name}): {' '.join(child.ask['task'].split())[:150]}",
                parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
                cancellation_type=workflow.ChildWorkflowCancellationType.WAIT_CANCELLATION_COMPLETED,
            )
        except WorkflowAlreadyStartedError:
            result = RunResult(status=RunStatus.FAILED, reason=f"a run with the id {child.run_id} is going on already")
        except ChildWorkflowError as error:
            result = _result_of(error)
        except ValidationError as error:
            # Nobody waits for this task: what it raised would be lost, and its parent would wait for ever.
            result = RunResult(status=RunStatus.FAILED, reason=explain(error, "what it was given"))
        finally:
            self._going.pop(child.name, None)
        self._spend(result.usage)
        self._ended[child.name] = _report(child, result)

    # --- waiting, telling

    async def _manage(self, arguments: dict[str, Any], prepared: PrepareRunResult) -> tuple[str, bool]:
        said = arguments.get("message")
        waits = arguments.get("wait_for")
        named = [*([said["name"]] if said else []), *arguments.get("stop", ()), *(waits if isinstance(waits, list) else ())]
        unknown = [name for name in named if name not in self._going and name not in self._ended]
        if unknown:
            known = ", ".join([*self._going, *self._ended]) or "none"
            return (
                f"subagents: {unknown[0]!r} is not going on, or was told of already (there are: {known}); nothing was done",
                True,
            )
        if said is not None and said["name"] in self._going:
            await self._signal(self._going[said["name"]], {"message": {"text": said["text"]}})
        for name in arguments.get("stop", ()):
            if name in self._going:
                self._signal_stop(self._going[name], "by its parent")
        if waits is None:
            return self._standing(), False
        names = list(dict.fromkeys(waits)) if isinstance(waits, list) else [*self._ended, *self._going]
        return await self._tell(prepared, names, every=waits != "any"), False

    def _standing(self) -> str:
        lines = [f"{name} ({child.role.name}): going on" for name, child in self._going.items()]
        lines += [
            f"{name} ({report.role}): {report.status.value}; wait for it to be told" for name, report in self._ended.items()
        ]
        return "\n".join(lines) or "no subagents are going on"

    async def _tell(self, prepared: PrepareRunResult, names: Sequence[str], *, every: bool) -> str:
        """Wait, then bring home and tell what those of `names` that have ended have made."""

        def is_enough() -> bool:
            over = [name for name in names if name not in self._going]
            return len(over) == len(names) or (not every and bool(over))

        def is_stopped() -> bool:
            return self._desk.stopped_by is not None

        if names:
            waiting = workflow.wait_condition(lambda: is_enough() or is_stopped())
            await self._workspace.while_waiting(prepared, waiting)
            if is_stopped() and not is_enough():
                self.stop_all(f"with its parent, {self._desk.stopped_by}")
                await workflow.wait_condition(lambda: all(name not in self._going for name in names))
        reports = [self._ended[name] for name in names if name in self._ended]
        part = TOLD_CHARS // max(len(reports), 1)
        told = []
        for report in reports:
            told.append(_told(report, await self._bring(report, prepared), part))
            self._ended.pop(report.name, None)
        told += [f"subagent {name}: going on" for name in names if name in self._going]
        return "\n\n".join(told) or "no subagents are going on"

    async def _bring(self, report: ChildReport, prepared: PrepareRunResult) -> TakeResultsResult | str | None:
        """Bring artifacts and changes into the workspace, or return why that failed; None when there was nothing to bring."""
        artifacts = report.artifacts.index if report.collect and report.artifacts.count else None
        theirs = report.snapshot if report.merge and report.base is not None else None
        if (artifacts is None and theirs is None) or not prepared.plan.needs_sandbox:
            return None
        try:
            taken = await self._workspace.carry_out(
                prepared,
                TAKE_RESULTS,
                lambda sandbox, snapshot: TakeResultsInput(
                    run_id=self._run_id,
                    name=report.name,
                    sandbox=sandbox,
                    agent=prepared.agent,
                    snapshot=snapshot,
                    artifacts=artifacts,
                    base=report.base if theirs is not None else None,
                    theirs=theirs,
                ),
                summary=f"take in what {report.name} made",
            )
        except ActivityError as error:
            kind, reason = explain_failure(error)
            if is_cancelled_exception(error) or kind != ErrorType.BAD_INPUT:
                raise
            return reason
        self._workspace.snapshot = taken.snapshot
        return taken

    # --- talking to one

    def _signal_stop(self, child: Child, why: str) -> None:
        if not child.is_stopping:
            child.is_stopping = True
            workflow.logger.debug("stopping subagent %s", child.name)
            said: JsonValue = {"stop": {"by": "its parent", "reason": why[:MOST_REASON]}}
            asyncio.create_task(self._signal(child, said))  # noqa: RUF006

    async def _signal(self, child: Child, said: JsonValue) -> None:
        try:
            await workflow.get_external_workflow_handle(child.run_id).signal(SIGNAL, said)
        except FailureError:
            return  # it has ended meanwhile


def _role(prepared: PrepareRunResult, name: str) -> RolePlan:
    return next(role for role in prepared.plan.roles if role.name == name)


def _result_of(error: ChildWorkflowError) -> RunResult:
    """A failed run's own result, which its failure carries; or one that says why there is none."""
    cause = error.cause
    if is_cancelled_exception(error):
        return RunResult(status=RunStatus.CANCELLED, reason="cancelled")
    if isinstance(cause, ApplicationError):
        if cause.type == ErrorType.RUN_FAILED and cause.details:
            return RunResult.model_validate(cause.details[0])
        return RunResult(status=RunStatus.FAILED, reason=cause.message)
    return RunResult(status=RunStatus.FAILED, reason=str(cause or error))


def _report(child: Child, result: RunResult) -> ChildReport:
    output = result.output
    text = output if isinstance(output, str) else "" if output is None else json.dumps(output, ensure_ascii=False)
    return ChildReport(
        name=child.name,
        role=child.role.name,
        run_id=child.run_id,
        status=result.status,
        reason=result.reason[:2000] if result.reason else None,
        output=text[: TOLD_CHARS // 2],
        steps=result.steps,
        tokens=result.usage.tokens,
        artifacts=result.artifacts.model_copy(update={"first": (), "skipped": ()}),
        base=child.link.snapshot,
        snapshot=result.checkpoint.snapshot if result.checkpoint else None,
        collect=bool(child.ask.get("collect", True)),
        merge=child.ask.get("merge") == "patch",
    )


def _told(report: ChildReport, brought: TakeResultsResult | str | None, part: int) -> str:
    """Say how a subagent ended. One that has no answer never looks like one that has."""
    lines = [f"subagent {report.name} ({report.role}): {report.status.value} after {report.steps} steps"]
    if report.status is not RunStatus.COMPLETED:
        lines[0] += f", so its work is incomplete: {report.reason or 'no reason was given'}"
    if report.output:
        shown = report.output if len(report.output) <= part else f"{report.output[:part]}\n[... cut ...]"
        lines.append(("answer:" if report.status is RunStatus.COMPLETED else "the last it said:") + f"\n{shown}")
    else:
        lines.append("it gave no answer")
    if isinstance(brought, str):
        lines.append(f"what it made could not be taken in: {brought}")
    elif brought is not None:
        if brought.files:
            lines.append(f"{brought.files} output files are in subagents/{report.name}/")
        if brought.fault:
            lines.append(f"its outputs are not in your workspace: {brought.fault}")
        if brought.conflicts:
            lines.append("nothing of its changes was merged, because of conflicts in:\n" + "\n".join(brought.conflicts[:50]))
        elif brought.merged:
            lines.append("merged its changes of:\n" + "\n".join(brought.merged[:50]))
        elif report.merge:
            lines.append("it changed nothing in the workspace that was to be merged")
    elif report.artifacts.count:
        lines.append(f"it left {report.artifacts.count} output files, which were not brought here")
    return "\n".join(lines)
