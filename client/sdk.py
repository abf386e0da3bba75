"""The typed client: start runs, follow them, and say something to them. For services to embed.

    client = await CaissonClient.connect()
    run = await client.start(RunInput(task="Count the lines of every CSV in inputs/", agent="analyst"))
    result = await run.result()

It imports contracts and Temporal's client only, and sends plain JSON, so it also works on a client with any JSON data converter.
The ways it can fail:

    BadInput            (contracts.base) what was given cannot be used; nothing was started or changed
    ├── RunExists       a run with this id exists already
    ├── RunNotFound     there is no run with this id
    └── RunOver         the run has ended, so nothing more can be said to it
    RunFailed           the run had to give up; `result` holds what there is
    Unanswered          no workflow worker answered in time
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Mapping
from datetime import timedelta
from typing import TypeVar

from pydantic import JsonValue, ValidationError
from temporalio.client import (
    Client,
    RPCTimeoutOrCancelledError,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowUpdateFailedError,
)
from temporalio.common import RetryPolicy, WorkflowIDReusePolicy
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.envconfig import ClientConfig
from temporalio.exceptions import (
    ApplicationError,
    CancelledError,
    TerminatedError,
    TimeoutError,
    WorkflowAlreadyStartedError,
)
from temporalio.service import RPCError, RPCStatusCode

from contracts.activity_names import ErrorType
from contracts.base import BadInput, Contract, explain
from contracts.run import (
    ApprovalDecision,
    CheckpointChoice,
    Message,
    PendingApproval,
    Reason,
    RunInput,
    RunResult,
    RunStatus,
    StatusReport,
    StepsPage,
    StepsPageInput,
    sparse,
)
from contracts.usage import BudgetExtension

Answer = TypeVar("Answer", bound=Contract)
Got = TypeVar("Got")

WORKFLOW = "AgentRun"
_MAX_ID = 200
_SUMMARY_BYTES = 200
_NO_WORKER = frozenset({RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED, RPCStatusCode.FAILED_PRECONDITION})
"""What the server answers a query with that no worker has taken."""


class RunExists(BadInput):
    """A run with this id exists already; nothing was started."""


class RunNotFound(BadInput):
    """There is no run with this id in the namespace."""


class RunOver(BadInput):
    """The run has ended, so nothing more can be said to it."""


class RunFailed(Exception):
    """The run had to give up. `result` says why, and holds what was made until then."""

    def __init__(self, run_id: str, result: RunResult) -> None:
        super().__init__(f"run {run_id} failed: {result.reason}")
        self.run_id = run_id
        self.result = result


class Unanswered(Exception):
    """No workflow worker answered in time. The run itself is not affected."""


class CaissonClient:
    """Starts and finds runs. Hold one for the life of the process, as one does with Temporal's client."""

    def __init__(self, client: Client, task_queue: str = "caisson") -> None:
        """Use a connected Temporal client. `task_queue` is the one that the workflow workers poll."""
        self.client = client
        self.task_queue = task_queue

    @classmethod
    async def connect(
        cls, address: str | None = None, *, namespace: str | None = None, task_queue: str = "caisson"
    ) -> CaissonClient:
        """Connect to Temporal. What is not given comes from TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, TEMPORAL_API_KEY,
        TEMPORAL_TLS_* or TEMPORAL_PROFILE, as for every Temporal tool. Raises RuntimeError when the server cannot be reached."""
        config = ClientConfig.load_client_connect_config()
        config.setdefault("target_host", "localhost:7233")
        if address is not None:
            config["target_host"] = address
        if namespace is not None:
            config["namespace"] = namespace
        return cls(await Client.connect(**config, data_converter=pydantic_data_converter), task_queue)

    async def start(self, request: RunInput, run_id: str | None = None) -> RunHandle:
        """Start a run and return at once. `run_id` is chosen for you when it is None.

        A run id is used once: starting it again raises RunExists also when that run has ended, so a service that repeats a
        request never runs it twice. Raises BadInput for an id that cannot be used.
        """
        run_id = new_run_id(request) if run_id is None else checked_run_id(run_id)
        try:
            await self.client.start_workflow(
                WORKFLOW,
                sparse(request),
                id=run_id,
                task_queue=self.task_queue,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                retry_policy=RetryPolicy(maximum_attempts=1),
                static_summary=_summary(request.task),
            )
        except WorkflowAlreadyStartedError as error:
            raise RunExists(
                f"run id {run_id!r}: a run with this id exists already, so nothing was started; choose another id, or follow "
                f"the one there is"
            ) from error
        return RunHandle(self.client, run_id)

    async def fork(
        self, run_id: str, request: RunInput, *, step: int | None = None, chain: str | None = None, new_id: str | None = None
    ) -> RunHandle:
        """Start a run from the checkpoint that another, `run_id`, has after `step` (None: its last), and return at once.

        It has that run's conversation and workspace, and what `request` leaves open of its agent, model and limits; the task is
        said to the model next. `chain` says which one is meant where an id was used more than once. `new_id` is chosen for you
        when it is None. Raises what `start` raises; that there is no such checkpoint is the new run's BadInput.
        """
        try:
            origin = CheckpointChoice(run_id=run_id, step=step, chain=chain)
        except ValidationError as error:
            raise BadInput(explain(error, "the checkpoint")) from error
        return await self.start(request.model_copy(update={"from_checkpoint": origin}), new_id)

    async def run(self, request: RunInput, run_id: str | None = None) -> RunResult:
        """Start a run and wait for its end. Raises what `start` and `RunHandle.result` raise."""
        return await (await self.start(request, run_id)).result()

    def handle(self, run_id: str) -> RunHandle:
        """Return the handle of a run that was started before, by anyone. Asks nothing yet."""
        return RunHandle(self.client, run_id)


class RunHandle:
    """One run. It is found by its id alone, so a handle also outlives a continue-as-new."""

    def __init__(self, client: Client, run_id: str, *, patience: timedelta = timedelta(seconds=15)) -> None:
        """`patience` is how long a question or a message waits for a workflow worker."""
        self.client = client
        self.run_id = run_id
        self.patience = patience
        # The type parameters say only that nothing is decoded here: contracts are validated below, whatever the converter.
        self._handle: WorkflowHandle[object, JsonValue] = client.get_workflow_handle(run_id)

    async def status(self) -> StatusReport:
        """How the run stands. Raises RunNotFound or Unanswered."""
        return _read(StatusReport, await self._asked(self._handle.query("status", rpc_timeout=self.patience)))

    async def steps(self, after: int = 0, limit: int = 50) -> StepsPage:
        """The summaries of the last steps, those after step number `after`. Raises RunNotFound or Unanswered."""
        page = StepsPageInput(after=after, limit=limit).model_dump()
        return _read(StepsPage, await self._asked(self._handle.query("steps", page, rpc_timeout=self.patience)))

    async def send_message(self, text: str) -> str:
        """Say something to the model before its next call; returns the run's answer. Raises BadInput when it is refused."""
        return await self._tell("send_message", Message, {"text": text})

    async def pause(self, by: str = "", reason: str = "") -> str:
        """Hold the run before its next model call."""
        return await self._tell("pause", Reason, {"by": by, "reason": reason})

    async def resume(self, by: str = "", reason: str = "") -> str:
        """Let a paused run go on."""
        return await self._tell("resume", Reason, {"by": by, "reason": reason})

    async def stop(self, by: str = "", reason: str = "") -> str:
        """End the run after the step in flight, with everything made so far."""
        return await self._tell("stop", Reason, {"by": by, "reason": reason})

    async def extend_budget(self, more: BudgetExtension) -> str:
        """Add to the run's limits."""
        return await self._tell("extend_budget", BudgetExtension, more.model_dump(exclude_none=True))

    async def decide_approval(self, approval: PendingApproval, *, allow: bool, by: str, reason: str = "") -> str:
        """Decide on one open approval, as `status` showed it: the decision counts for exactly those arguments."""
        decision: dict[str, JsonValue] = {
            "approval_id": approval.approval_id,
            "arguments_digest": approval.arguments_digest,
            "allow": allow,
            "by": by,
            "reason": reason,
        }
        return await self._tell("decide_approval", ApprovalDecision, decision)

    async def cancel(self) -> None:
        """End the run now: a command in flight is killed, its sandbox is put away, nothing more is collected.

        Raises RunOver for one that has ended, and BadInput for a workflow that is no run: Temporal itself would take either.
        """
        described = await self._asked(self._handle.describe())
        if described.workflow_type != WORKFLOW:
            raise BadInput(
                f"{self.run_id!r} is no run (type {WORKFLOW}) but a workflow of type {described.workflow_type}; correct the id, "
                "or cancel it with Temporal's own command"
            )
        if described.close_time is not None:
            raise run_over(self.run_id)
        await self._asked(self._handle.cancel())

    async def result(self) -> RunResult:
        """Wait for the end. Raises RunFailed when the run had to give up, BadInput when its input was refused, RunNotFound."""
        result = await self.outcome()
        if result.status is RunStatus.FAILED:
            raise RunFailed(self.run_id, result)
        return result

    async def outcome(self) -> RunResult:
        """Wait for the end and return the result, also of a run that failed. Raises BadInput when its input was refused."""
        try:
            return _read(RunResult, await self._asked(self._handle.result()))
        except WorkflowFailureError as error:
            return await self._ended_otherwise(error.cause)

    async def _ended_otherwise(self, cause: BaseException) -> RunResult:
        match cause:
            case ApplicationError(type=ErrorType.BAD_INPUT):
                raise BadInput(cause.message) from cause
            case ApplicationError(type=ErrorType.RUN_FAILED) if cause.details:
                return _read(RunResult, cause.details[0])
            case CancelledError():
                return await self._cancelled()
            case TerminatedError():
                why = f"terminated in Temporal ({cause.message}); what its sandbox held was not collected"
            case TimeoutError():
                why = "the workflow's own timeout ended it; what its sandbox held was not collected"
            case ApplicationError():
                why = f"{cause.type}: {cause.message}" if cause.type else cause.message
            case _:
                why = str(cause)
        return RunResult(status=RunStatus.FAILED, reason=why)

    async def _cancelled(self) -> RunResult:
        """A cancelled workflow returns nothing; what it used is known to whoever replays it."""
        try:
            report = await self.status()
        except Unanswered as error:
            return RunResult(status=RunStatus.CANCELLED, reason=f"cancelled; what it used cannot be asked now: {error}")
        return report.result or RunResult(status=RunStatus.CANCELLED, reason="cancelled before it was prepared")

    async def _tell(self, update: str, kind: type[Contract], given: Mapping[str, JsonValue]) -> str:
        try:
            checked = kind.model_validate(given)
        except ValidationError as error:
            raise BadInput(explain(error, update)) from error
        asked = self._handle.execute_update(
            update, checked.model_dump(mode="json", exclude_none=True), result_type=str, rpc_timeout=self.patience
        )
        try:
            return await self._asked(asked)
        except WorkflowUpdateFailedError as error:
            cause = error.cause
            raise BadInput(cause.message if isinstance(cause, ApplicationError) else f"{update}: {cause}") from error
        except RPCTimeoutOrCancelledError as error:
            raise Unanswered(
                f"{update}: no workflow worker answered within {self.patience.total_seconds():g} s; it may still reach the run "
                "when a worker comes back, so look at the run's status before you repeat it"
            ) from error

    async def _asked(self, question: Awaitable[Got]) -> Got:
        """Translate what the server says of a run that is not there, is over, or has no worker."""
        try:
            return await question
        except WorkflowQueryFailedError as error:
            raise Unanswered(f"run {self.run_id!r} cannot say how it stands: {error.message}") from error
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                if "already completed" in error.message:
                    raise run_over(self.run_id) from error
                raise run_not_found(self.run_id, self.client.namespace) from error
            if error.status in _NO_WORKER:
                raise Unanswered(f"run {self.run_id!r}: no workflow worker answers ({error.message}); start one") from error
            raise


def run_over(run_id: str) -> RunOver:
    """Say that a run has ended."""
    return RunOver(f"run {run_id!r} is over, so nothing more can be said to it")


def run_not_found(run_id: str, namespace: str) -> RunNotFound:
    """Say that nothing has this id."""
    return RunNotFound(f"there is no run {run_id!r} in namespace {namespace!r}; correct the id or the namespace")


def new_run_id(request: RunInput, inherited: str = "run") -> str:
    """Choose a run id that says which agent it is and that nobody else has. `inherited` is the agent of a request without one."""
    agent = request.agent if isinstance(request.agent, str) else request.agent.name if request.agent else inherited
    return f"{agent}-{uuid.uuid4().hex[:12]}"


def checked_run_id(run_id: str) -> str:
    """Return a run id that people gave; refuse one that would be hard to type, show or find. Raises BadInput."""
    if not run_id or run_id != run_id.strip() or not run_id.isprintable() or len(run_id) > _MAX_ID:
        raise BadInput(f"run id {run_id[:80]!r}: must be 1 to {_MAX_ID} printable characters, without white space around them")
    return run_id


def _read(kind: type[Answer], value: JsonValue) -> Answer:
    # Workers may be newer than the service that embeds this client: what it does not know yet is left out, not an error.
    try:
        return kind.model_validate(value, extra="ignore")
    except ValidationError as error:
        raise BadInput(
            explain(error, f"the workflow's answer is no {kind.__name__}; is it a run (type {WORKFLOW}) of this version? It")
        ) from error


def _summary(task: str) -> str:
    line = " ".join(task.split())
    return line.encode()[:_SUMMARY_BYTES].decode(errors="ignore")
