"""Carrying out the tool calls of one step: policy first, then each as an activity. A tool fault is an output for the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import ActivityError, TimeoutError, TimeoutType, is_cancelled_exception

from workflows.activities import explain_failure
from workflows.children import CHILD_TOOLS, Children
from workflows.desk import Desk
from workflows.mcp import call_tool
from workflows.policy import decide
from workflows.sandboxes import SNAPSHOT_SECONDS
from workflows.workspace import Workspace

with workflow.unsafe.imports_passed_through():
    from pydantic import JsonValue

    from contracts.activity_names import APPLY_PATCH, RUN_SHELL
    from contracts.agent import SKILL_TOOL, Verdict
    from contracts.blob import Text, preview_of, whole_characters
    from contracts.mcp import server_of
    from contracts.model import ToolCall, ToolCallInput, ToolOutputItem
    from contracts.prepare import ActivityRoute, PrepareRunResult
    from contracts.run import PendingApproval, RunState

MAX_PARALLEL = 8
"""Activity tools of one step that run at the same time."""

FETCH_TOOL = "fetch_file"
_SANDBOX_TOOLS = {"shell": RUN_SHELL, "apply_patch": APPLY_PATCH}


@dataclass(frozen=True)
class Outcome:
    """What one call gave: the item for the model, and a line for people."""

    item: ToolOutputItem
    line: str


class ToolCalls:
    """Carries out calls for one run."""

    def __init__(
        self,
        run_id: str,
        desk: Desk,
        workspace: Workspace,
        children: Children,
        enter: Callable[[RunState, str], None],
        seconds_left: Callable[[], float | None],
    ) -> None:
        self._run_id = run_id
        self._desk = desk
        self._workspace = workspace
        self._children = children
        self._enter = enter
        self._seconds_left = seconds_left

    async def carry_out(self, calls: Sequence[ToolCall], step: int, prepared: PrepareRunResult) -> list[Outcome]:
        """Return one outcome for each call, in the order of the calls.

        Calls on the workspace run one after the other, in order, since each may need what the one before it did; calls of
        activity tools and of MCP servers run beside them, a few at a time. Raises ActivityError when the sandbox or the harness
        itself fails.
        """
        outcomes: dict[int, Outcome] = {}
        slots = asyncio.Semaphore(MAX_PARALLEL)

        async def in_order(numbers: list[int]) -> None:
            for n in numbers:
                outcomes[n] = await self._one(n, calls[n], step, prepared)

        async def beside(n: int) -> None:
            async with slots:
                outcomes[n] = await self._one(n, calls[n], step, prepared)

        plan = prepared.plan
        routed = [n for n, one in enumerate(calls) if one.name in plan.activity_tools or server_of(one.name) in plan.mcp_servers]
        rest = [n for n in range(len(calls)) if n not in routed]
        lanes = [asyncio.create_task(lane) for lane in (in_order(rest), *map(beside, routed))]
        try:
            await asyncio.gather(*lanes)
        except (Exception, asyncio.CancelledError):
            # No call may go on in a run that has ended; each waits here until its activity has cleaned up. A run that only leaves
            # the worker's memory comes here with another BaseException, and must not wait.
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)
            raise
        return [outcomes[n] for n in range(len(calls))]

    async def _one(self, n: int, one: ToolCall, step: int, prepared: PrepareRunResult) -> Outcome:
        if one.fault is not None:
            return _told(one, one.fault, f"{one.name}: not run")
        denial = await self._denied(n, one, step, prepared)
        if denial is not None:
            return _told(one, denial, f"{one.summary} → not allowed")
        self._enter(RunState.RUNNING, one.summary)
        route = prepared.plan.activity_tools.get(one.name)
        if route is not None:
            return await self._activity_tool(one, route)
        job_id = f"{self._run_id}/{workflow.info().run_id}/{step}/{n}"
        if server_of(one.name) in prepared.plan.mcp_servers:
            return Outcome(*await call_tool(one, prepared, self._run_id, step, job_id))
        if one.name in CHILD_TOOLS:
            return await self._subagents(one, prepared)
        if one.name == FETCH_TOOL:
            return _told(one, await self._workspace.fetch_files(prepared, _paths(one)), one.summary)
        if one.name == SKILL_TOOL:
            output, found = await self._workspace.load_skill(_skill(one))
            return Outcome(
                ToolOutputItem(call_id=one.call_id, output=output), one.summary if found else f"{one.summary} → not there"
            )
        if not prepared.plan.needs_sandbox:
            return _told(one, f"{one.name}: this run has no sandbox", f"{one.name}: no sandbox")
        done = await self._workspace.carry_out(
            prepared,
            _SANDBOX_TOOLS[one.name],
            lambda sandbox, snapshot: ToolCallInput(
                run_id=self._run_id,
                step=step,
                job_id=job_id,
                sandbox=sandbox,
                agent=prepared.agent,
                call=one.model_copy(update={"arguments": one.arguments.reference()}),
                snapshot=snapshot,
            ),
            summary=one.summary.removeprefix("apply_patch "),
            seconds=prepared.plan.shell_seconds + SNAPSHOT_SECONDS,
        )
        self._workspace.snapshot = done.snapshot
        return Outcome(ToolOutputItem(call_id=one.call_id, output=done.output.reference()), done.summary)

    async def _denied(self, n: int, one: ToolCall, step: int, prepared: PrepareRunResult) -> str | None:
        """Return why a call may not run, or None when it may. Waiting for a person holds no worker."""
        ruling = decide(prepared.plan.approvals, one)
        match ruling.verdict:
            case Verdict.ALLOW:
                return None
            case Verdict.FORBID:
                why = f": {ruling.reason.rstrip('.')}" if ruling.reason else ""
                return f"{one.name}: forbidden by policy{why}; it was not run. Find another way, or say that it is needed"
            case Verdict.PROMPT:
                self._enter(RunState.AWAITING_APPROVAL, f"waiting for approval: {one.summary}")
                asked = PendingApproval(
                    approval_id=f"{step}.{n}",
                    step=step,
                    tool=one.name,
                    call_id=one.call_id,
                    arguments=one.arguments.shown(),
                    arguments_digest=one.arguments_digest,
                    reason=ruling.reason,
                )
                decision = await self._workspace.while_waiting(prepared, self._desk.decision_on(asked, self._seconds_left))
                if decision is None:
                    return f"{one.name}: not run, because the run ends before anybody decided"
                if decision.allow:
                    return None
                return f"{one.name}: denied by {decision.by}; it was not run. {decision.reason}".rstrip()

    async def _subagents(self, one: ToolCall, prepared: PrepareRunResult) -> Outcome:
        if one.arguments.inline is None:
            return _told(one, f"{one.name}: arguments over 64 KB; say it in fewer words", f"{one.name}: not run")
        arguments: dict[str, JsonValue] = json.loads(one.arguments.inline)
        text, is_fault = await self._children.carry_out(one.name, arguments, prepared)
        line = f"{one.name} → {'not done' if is_fault else text.splitlines()[0]}"
        return _told(one, text, line[:200])

    async def _activity_tool(self, one: ToolCall, route: ActivityRoute) -> Outcome:
        """Run somebody's activity with the call's arguments. Whatever it fails with is an output for the model."""
        if one.arguments.inline is None:
            fault = f"{one.name}: arguments over 64 KB are not given to an activity tool; pass less"
            return _told(one, fault, f"{one.name}: not run")
        arguments: JsonValue = json.loads(one.arguments.inline)
        try:
            result: RawValue = await workflow.execute_activity(
                route.activity,
                arguments,
                result_type=RawValue,
                task_queue=route.task_queue,
                summary=one.summary,
                start_to_close_timeout=timedelta(seconds=route.timeout_seconds),
                # Nobody may be there to run it: a wrong queue must reach the model, not hang the run.
                schedule_to_start_timeout=timedelta(seconds=route.queue_seconds),
                retry_policy=RetryPolicy(maximum_attempts=route.max_attempts),
                cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            return _told(one, f"{one.name}: failed: {_why(error, route)}"[:MAX_FAILURE], f"{one.summary} → failed")
        text = _text_of(result)
        if text is None:
            return _told(
                one,
                f"{one.name}: it ran, but what it returned cannot be read; its activity must return JSON or UTF-8 text",
                f"{one.summary} → unreadable",
            )
        output = Text(inline=preview_of(text, MAX_ACTIVITY_OUTPUT))
        return Outcome(ToolOutputItem(call_id=one.call_id, output=output), one.summary)


MAX_ACTIVITY_OUTPUT = 128 * 1024
"""Characters of an activity tool's result that the model is given."""

MAX_FAILURE = 4000
"""Characters of an activity tool's failure that the model is given."""


def _why(error: ActivityError, route: ActivityRoute) -> str:
    if isinstance(error.cause, TimeoutError) and error.cause.type is TimeoutType.SCHEDULE_TO_START:
        return (
            f"no worker of task queue {route.task_queue!r} has taken it for {route.queue_seconds:g} s; it was not run. "
            "Its worker is not running, or the queue's name is wrong"
        )
    kind, message = explain_failure(error)
    return f"{kind}: {message}"


def _text_of(result: RawValue) -> str | None:
    """Return what somebody's activity returned as text, or None when it is in a form that cannot be shown.

    It comes from any SDK and any language, so nothing about its form may be taken for granted: an exception here would fail the
    workflow task again and again.
    """
    encoding, data = result.payload.metadata.get("encoding", b"").decode(errors="replace"), result.payload.data
    if encoding == "binary/null":
        return "null"
    try:
        if encoding in ("json/plain", "json/protobuf"):
            value: JsonValue = json.loads(data)
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        elif encoding == "binary/plain":
            text = data.decode()
        else:
            return None
    except (ValueError, RecursionError):
        return None
    return whole_characters(text)


def _paths(one: ToolCall) -> list[str]:
    paths: list[str] = json.loads(one.arguments.inline or '{"paths": []}')["paths"]
    return paths


def _skill(one: ToolCall) -> str:
    name: str = json.loads(one.arguments.inline or '{"name": ""}')["name"]
    return name


def _told(one: ToolCall, text: str, line: str) -> Outcome:
    return Outcome(ToolOutputItem(call_id=one.call_id, output=Text(inline=text)), line)
