"""The typed client, over a real Temporal client whose calls are answered before they reach the network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.client import (
    CancelWorkflowInput,
    Client,
    DescribeWorkflowInput,
    Interceptor,
    OutboundInterceptor,
    QueryWorkflowInput,
    StartWorkflowInput,
    StartWorkflowUpdateInput,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateHandle,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, CancelledError, TerminatedError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from client.sdk import (
    CaissonClient,
    RunExists,
    RunHandle,
    RunNotFound,
    RunOver,
    Unanswered,
    checked_run_id,
    new_run_id,
)
from contracts.agent import AgentSpec, ApplyPatchTool, ShellTool
from contracts.base import BadInput
from contracts.run import (
    PendingApproval,
    RunInput,
    RunResult,
    RunState,
    RunStatus,
    StatusReport,
    sparse,
)
from contracts.usage import Budget, BudgetExtension

REPORT = StatusReport(
    run_id="r", temporal_run_id="t", state=RunState.RUNNING, step=2, agent="a", model="m", activity="working"
).model_dump(mode="json")


class Answers(Interceptor):
    """Answers each call as a test says; a call that no answer was given for fails the test."""

    def __init__(self, **answers: Callable[[Any], Any]) -> None:
        self.answers = answers
        self.asked: list[Any] = []

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:
        return _Outbound(next, self)


class _Outbound(OutboundInterceptor):
    def __init__(self, next: OutboundInterceptor, given: Answers) -> None:
        super().__init__(next)
        self._given = given

    def _answer(self, kind: str, asked: Any) -> Any:
        self._given.asked.append(asked)
        assert kind in self._given.answers, f"nobody expected {kind}"
        return self._given.answers[kind](asked)

    async def start_workflow(self, input: StartWorkflowInput) -> WorkflowHandle[Any, Any]:
        return self._answer("start", input)  # type: ignore[no-any-return]

    async def query_workflow(self, input: QueryWorkflowInput) -> Any:
        return self._answer("query", input)

    async def describe_workflow(self, input: DescribeWorkflowInput) -> Any:
        return self._answer("describe", input)

    async def cancel_workflow(self, input: CancelWorkflowInput) -> None:
        self._answer("cancel", input)

    async def start_workflow_update(self, input: StartWorkflowUpdateInput) -> WorkflowUpdateHandle[Any]:
        return self._answer("update", input)  # type: ignore[no-any-return]


async def client_of(given: Answers) -> CaissonClient:
    return CaissonClient(await Client.connect("127.0.0.1:1", lazy=True, interceptors=[given]), task_queue="queue")


async def handle_of(given: Answers) -> RunHandle:
    return (await client_of(given)).handle("r")


def failing(error: Exception) -> Callable[[Any], Any]:
    def raise_it(_: Any) -> Any:
        raise error

    return raise_it


def rpc(status: RPCStatusCode, message: str = "said so") -> RPCError:
    return RPCError(message, status, b"")


def test_the_sdk_loads_neither_workers_nor_activities() -> None:
    """Other services embed it, so it may bring nothing but the contracts and Temporal's client."""
    program = (
        "import sys, client.sdk\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & "
        "{'workers', 'workflows', 'activities', 'openai', 'boto3', 'typer', 'rich', 'structlog', 'yaml', 'e2b', 'modal'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_run_is_started_as_the_design_says() -> None:
    """One attempt, an id that is never used twice, plain JSON, and a summary for the Web UI."""
    given = Answers(start=lambda _: None)
    run = await (await client_of(given)).start(RunInput(task="Count\nthe  lines. " + "ü" * 300, agent="analyst"), "my-run")
    (asked,) = given.asked
    assert run.run_id == asked.id == "my-run"
    assert (asked.workflow, asked.task_queue) == ("AgentRun", "queue")
    assert list(asked.args) == [{"task": "Count\nthe  lines. " + "ü" * 300, "agent": "analyst"}]
    assert asked.retry_policy.maximum_attempts == 1
    assert asked.id_reuse_policy is WorkflowIDReusePolicy.REJECT_DUPLICATE
    assert asked.static_summary.startswith("Count the lines. ü")
    assert len(asked.static_summary.encode()) <= 200


async def test_a_fork_says_only_where_it_starts_and_what_is_given() -> None:
    """What is left open stays the first run's, so it must not be sent; a checkpoint that none can be is refused at once."""
    given = Answers(start=lambda _: None)
    client = await client_of(given)
    run = await client.fork("first", RunInput(task="Again.", budget=Budget(steps=3)), step=12, new_id="second")
    assert run.run_id == given.asked[0].id == "second"
    assert list(given.asked[0].args) == [
        {"task": "Again.", "budget": {"steps": 3}, "from_checkpoint": {"run_id": "first", "step": 12, "chain": None}}
    ]
    assert (await client.fork("first", RunInput(task="x", agent="analyst"))).run_id.startswith("analyst-")
    with pytest.raises(BadInput, match="step: "):
        await client.fork("first", RunInput(task="x"), step=-1)
    assert len(given.asked) == 2


async def test_an_id_that_is_taken_is_refused_by_name() -> None:
    """Nothing was started, and the message says what to do."""
    client = await client_of(Answers(start=failing(WorkflowAlreadyStartedError("taken", "AgentRun"))))
    with pytest.raises(RunExists, match="'taken': a run with this id exists already, so nothing was started"):
        await client.start(RunInput(task="x"), "taken")


@pytest.mark.parametrize("run_id", ["", " a", "a\n", "a\x1bb", "a" * 201])
async def test_an_id_that_cannot_be_used_starts_nothing(run_id: str) -> None:
    """The refusal comes before the server is asked."""
    given = Answers()
    with pytest.raises(BadInput, match="must be 1 to 200 printable characters"):
        await (await client_of(given)).start(RunInput(task="x"), run_id)
    assert given.asked == []


def test_an_id_that_is_chosen_says_which_agent_it_is_and_is_unique() -> None:
    """People see it in lists."""
    assert new_run_id(RunInput(task="x", agent="analyst")).startswith("analyst-")
    assert new_run_id(RunInput(task="x", agent=AgentSpec(name="inline"))).startswith("inline-")
    assert new_run_id(RunInput(task="x")).startswith("run-")
    assert len({new_run_id(RunInput(task="x")) for _ in range(100)}) == 100
    assert checked_run_id(new_run_id(RunInput(task="x")))


def test_the_json_of_a_request_means_the_same_request() -> None:
    """Also where null is not the default: a budget without a limit on steps must not get one on the way."""
    request = RunInput(
        task="x",
        agent=AgentSpec(name="inline", tools=(ShellTool(), ApplyPatchTool()), budget=Budget(steps=None)),
        budget=Budget(steps=None, tokens=5),
        output_schema={"const": None},
        labels={"a": "b"},
    )
    assert RunInput.model_validate(sparse(request)) == request
    assert sparse(RunInput(task="x")) == {"task": "x"}


async def test_a_status_is_read_from_plain_json_and_may_be_newer_than_this_client() -> None:
    """Workers are upgraded before the services that embed the client: what it does not know is left out."""
    newer = {**REPORT, "mood": "good", "usage": {**REPORT["usage"], "joules": 5}}
    report = await (await handle_of(Answers(query=lambda _: newer))).status()
    assert (report.step, report.state) == (2, RunState.RUNNING)


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (rpc(RPCStatusCode.NOT_FOUND), RunNotFound, "there is no run 'r' in namespace 'default'"),
        (rpc(RPCStatusCode.DEADLINE_EXCEEDED), Unanswered, "no workflow worker answers"),
        (rpc(RPCStatusCode.FAILED_PRECONDITION), Unanswered, "no workflow worker answers"),
        (WorkflowQueryFailedError("broken"), Unanswered, "cannot say how it stands: broken"),
        (rpc(RPCStatusCode.PERMISSION_DENIED), RPCError, "said so"),
    ],
)
async def test_a_question_that_is_not_answered_is_told_by_kind(error: Exception, kind: type[Exception], told: str) -> None:
    """What a person can mend, what will pass, and what is the server's own word are kept apart."""
    with pytest.raises(kind, match=told):
        await (await handle_of(Answers(query=failing(error)))).status()


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (WorkflowUpdateFailedError(ApplicationError("pause: the run is paused already")), BadInput, "paused already"),
        (rpc(RPCStatusCode.NOT_FOUND, "workflow execution already completed"), RunOver, "run 'r' is over"),
        (rpc(RPCStatusCode.NOT_FOUND, "no such workflow"), RunNotFound, "there is no run 'r'"),
        (WorkflowUpdateRPCTimeoutOrCancelledError(), Unanswered, "it may still reach the run"),
    ],
)
async def test_something_said_to_a_run_that_is_not_accepted_is_told_by_kind(
    error: Exception, kind: type[Exception], told: str
) -> None:
    """A refusal is the run's own message; a run that is over is told from one that is not there."""
    with pytest.raises(kind, match=told):
        await (await handle_of(Answers(update=failing(error)))).pause(by="ada")


async def test_what_is_said_is_checked_before_the_run_is_asked() -> None:
    """An empty message or a decision by nobody reaches no server."""
    given = Answers()
    run = await handle_of(given)
    approval = PendingApproval(approval_id="1.0", step=1, tool="shell", call_id="c", arguments="{}", arguments_digest="a" * 64)
    with pytest.raises(BadInput, match=r"text: "):
        await run.send_message(" ")
    with pytest.raises(BadInput, match=r"by: "):
        await run.decide_approval(approval, allow=True, by="")
    assert given.asked == []


@pytest.mark.parametrize(
    ("kind", "closed", "raised", "told"),
    [
        ("AgentRun", datetime.now(UTC), RunOver, "run 'r' is over"),
        ("SomethingElse", None, BadInput, "'r' is no run .* but a workflow of type SomethingElse"),
    ],
)
async def test_only_a_run_that_still_works_is_cancelled(
    kind: str, closed: datetime | None, raised: type[Exception], told: str
) -> None:
    """Temporal takes a cancellation of either, and says nothing."""
    given = Answers(describe=lambda _: SimpleNamespace(workflow_type=kind, close_time=closed))
    with pytest.raises(raised, match=told):
        await (await handle_of(given)).cancel()
    given = Answers(describe=lambda _: SimpleNamespace(workflow_type="AgentRun", close_time=None), cancel=lambda _: None)
    await (await handle_of(given)).cancel()
    assert len(given.asked) == 2


async def test_a_decision_carries_the_digest_that_was_shown() -> None:
    """So it can land on no other arguments; an extension holds only what is added."""
    given = Answers(update=failing(WorkflowUpdateFailedError(ApplicationError("seen"))))
    run = await handle_of(given)
    approval = PendingApproval(approval_id="1.0", step=1, tool="shell", call_id="c", arguments="{}", arguments_digest="a" * 64)
    with pytest.raises(BadInput, match="seen"):
        await run.decide_approval(approval, allow=False, by="ada", reason="no")
    with pytest.raises(BadInput, match="seen"):
        await run.extend_budget(BudgetExtension(steps=5))
    decided, extended = given.asked
    assert decided.update == "decide_approval"
    assert decided.args[0] == {
        "approval_id": "1.0",
        "arguments_digest": "a" * 64,
        "allow": False,
        "by": "ada",
        "reason": "no",
    }
    assert (extended.update, extended.args[0]) == ("extend_budget", {"steps": 5})


FAILED = RunResult(status=RunStatus.FAILED, reason="bad key", steps=3)


@pytest.mark.parametrize(
    ("cause", "status", "reason"),
    [
        (ApplicationError("bad key", FAILED.model_dump(mode="json"), type="RunFailed"), RunStatus.FAILED, "bad key"),
        (ApplicationError("odd", type="Odd"), RunStatus.FAILED, "Odd: odd"),
        (TerminatedError("by ada"), RunStatus.FAILED, "terminated in Temporal"),
        (CancelledError("cancelled"), RunStatus.CANCELLED, "what it used cannot be asked now"),
    ],
)
async def test_every_way_to_end_becomes_a_result(cause: BaseException, status: RunStatus, reason: str) -> None:
    """Also those that the run itself could say nothing about."""
    run = await handle_of(Answers(query=failing(rpc(RPCStatusCode.DEADLINE_EXCEEDED))))
    result = await run._ended_otherwise(cause)
    assert result.status is status
    assert reason in (result.reason or "")


async def test_the_result_of_a_cancelled_run_is_asked_from_the_run() -> None:
    """Temporal itself keeps no result of a cancelled workflow."""
    ended = RunResult(status=RunStatus.CANCELLED, reason="cancelled", steps=7).model_dump(mode="json")
    run = await handle_of(Answers(query=lambda _: {**REPORT, "result": ended}))
    assert (await run._ended_otherwise(CancelledError("cancelled"))).steps == 7


async def test_refused_input_is_raised_with_the_workers_message() -> None:
    """It is the caller's to mend, like input that this client refuses itself."""
    run = await handle_of(Answers())
    with pytest.raises(BadInput, match="no agent is named 'x'"):
        await run._ended_otherwise(ApplicationError("no agent is named 'x'", type="BadInput"))


async def test_a_workflow_that_is_no_run_is_told_from_one() -> None:
    """Any workflow's id can be given; its answer must not end in a traceback."""
    with pytest.raises(BadInput, match=r"no StatusReport; is it a run \(type AgentRun\)"):
        await (await handle_of(Answers(query=lambda _: {"something": "else"}))).status()
