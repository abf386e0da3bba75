"""Runs: what starts one, what it answers, and what may be said to it while it works."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue

from contracts.agent import AgentChoice, ApprovalPolicy
from contracts.base import Contract
from contracts.blob import BlobRef
from contracts.manifest import Manifest
from contracts.model import NewItem
from contracts.sandbox import SandboxRef, SandboxSpec
from contracts.snapshot import SnapshotRef
from contracts.usage import Budget, Usage

MAX_TASK = 256 * 1024
MAX_MESSAGE = 64 * 1024


def not_blank(text: str) -> str:
    """Refuse text that says nothing."""
    if not text.strip():
        raise ValueError("must not be empty; say what is to be done")
    return text


class SubagentLink(Contract):
    """What a run that is a subagent has from its parent. Written by the harness; people have no use for it."""

    parent: str = Field(description="the parent's run id")
    depth: int = Field(ge=1, le=10, description="levels below the first run")
    allowance: int = Field(ge=0, description="subagents that it may start in turn, with all below them")
    agent: BlobRef | None = Field(default=None, description="the role's spec, where it is no named agent")
    budget: Budget = Field(description="what it may spend at most; a limit that is null is its agent's own")
    snapshot: SnapshotRef | None = Field(default=None, description="of the parent's workspace, which it starts from")
    paths: tuple[str, ...] | None = Field(default=None, description="the files and directories of it; null: all")


class CheckpointChoice(Contract):
    """A checkpoint of another run, to start from."""

    run_id: str = Field(min_length=1, max_length=1000)
    step: int | None = Field(default=None, ge=0, description="after which step; null means the last one there is")
    chain: str | None = Field(
        default=None,
        min_length=1,
        description="Temporal's first run id, where one run id was used more than once; null: the latest",
    )


class RunInput(Contract):
    """What starts a run. Only `task` is required; the rest overrides what the agent says."""

    task: Annotated[str, Field(max_length=MAX_TASK), AfterValidator(not_blank)]
    agent: AgentChoice | None = Field(
        default=None, description="a name in the workers' agent directory, or a whole spec; null means the plain agent"
    )
    model: str | None = Field(default=None, min_length=1)
    manifest: Manifest | None = None
    budget: Budget | None = None
    approvals: ApprovalPolicy | None = None
    sandbox: SandboxSpec | None = None
    output_schema: dict[str, JsonValue] | None = None
    from_checkpoint: CheckpointChoice | None = Field(
        default=None, description="go on from there, with its agent unless one is given; the task is said to the model next"
    )
    subagent: SubagentLink | None = Field(default=None, description="set by the harness for subagents")
    labels: dict[str, str] = Field(default_factory=dict, description="kept with the run, for the people who look for it")


def sparse(request: RunInput) -> dict[str, JsonValue]:
    """Return a request as JSON without the fields that nobody set: an unset limit of a budget leaves the agent's as it is.

    A null that was set stays, since in a budget it means "no limit".
    """
    given: dict[str, JsonValue] = request.model_dump(mode="json", include=request.model_fields_set)
    if request.budget is not None:
        given["budget"] = request.budget.model_dump(mode="json", exclude_unset=True)
    return given


class RunStatus(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    BUDGET_EXCEEDED = "budget_exceeded"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Checkpoint(Contract):
    """Everything needed to continue a run after `step`."""

    step: int = Field(ge=0)
    transcript: BlobRef | None = None
    items: tuple[NewItem, ...] = Field(
        default=(), description="what the next model call is to be given, not yet in the transcript"
    )
    usage: Usage = Usage()
    snapshot: SnapshotRef | None = Field(default=None, description="of the workspace; null while nothing was put into it")


class Artifact(Contract):
    """A file that a run left in one of its output directories."""

    path: str
    blob: BlobRef
    media_type: str
    mode: int = 0o644


class ArtifactList(Contract):
    """A run's artifacts: the first of them, how many there are, and the whole list as a blob (a JSON array of Artifact)."""

    count: int = 0
    total_bytes: int = 0
    first: tuple[Artifact, ...] = ()
    index: BlobRef | None = None
    skipped: tuple[str, ...] = Field(default=(), description="what lies in an output directory but is no artifact, and why")


class Delivery(Contract):
    """What of a run's outputs went to where they were to go. Unless `complete`, no `_caisson.json` was written there."""

    complete: bool
    delivered: int = Field(default=0, description="objects that are at their destination now, whoever put them there")
    total_bytes: int = Field(default=0, description="of them")
    destinations: tuple[str, ...] = Field(default=(), description="the destinations that are complete")
    missing: tuple[str, ...] = Field(default=(), description="destination and reason of what is missing, the first 50")
    missing_count: int = 0


class RunResult(Contract):
    """How a run ended and what it made."""

    status: RunStatus
    reason: str | None = Field(default=None, description="why it ended so, unless it is completed")
    output: JsonValue = Field(default=None, description="the answer: text, or an object that satisfies the output schema")
    output_blob: BlobRef | None = Field(default=None, description="the whole answer, when `output` holds only its preview")
    artifacts: ArtifactList = ArtifactList()
    usage: Usage = Usage()
    steps: int = 0
    checkpoint: Checkpoint | None = None
    agent_digest: str | None = None
    model: str | None = None
    model_label: str | None = Field(default=None, description="what the endpoint says it is, if not a language model")
    egress_log: BlobRef | None = Field(
        default=None, description="the sandbox's network connections, as JSON lines, if it had a network"
    )
    inputs: BlobRef | None = Field(
        default=None, description="what the manifest's sources gave, file by file, pinned; `manifest.pins` of a later run"
    )
    delivery: Delivery | None = Field(default=None, description="of outputs that have a `to`")
    provenance_head: BlobRef | None = Field(default=None, description="the head of the transcript's hash chain")
    recoveries: int = Field(default=0, description="how often a sandbox was lost and the run went on in another")


class RunState(StrEnum):
    """What a run is doing."""

    PREPARING = "preparing"
    RUNNING = "running"
    AWAITING_APPROVAL = "awaiting_approval"
    PAUSED = "paused"
    STOPPING = "stopping"
    FINISHED = "finished"


class Message(Contract):
    """The argument of `send_message`: text for the model, given to it before its next call."""

    text: Annotated[str, Field(max_length=MAX_MESSAGE), AfterValidator(not_blank)]


class Reason(Contract):
    """The argument of `pause`, `resume` and `stop`: who, and why."""

    by: str = Field(default="", max_length=200)
    reason: str = Field(default="", max_length=2000)


class ApprovalDecision(Contract):
    """The argument of `decide_approval`: a person's decision on one exact tool call.

    `arguments_digest` is what the status query showed for the call, so that a decision never lands on other arguments.
    """

    approval_id: str
    arguments_digest: str
    allow: bool
    by: Annotated[str, Field(max_length=200), AfterValidator(not_blank)]
    reason: str = Field(default="", max_length=2000)


class PendingApproval(Contract):
    """One tool call that waits for a person."""

    approval_id: str
    step: int
    tool: str
    call_id: str
    arguments: str = Field(description="the arguments, or a preview of them when they are long")
    arguments_digest: str
    reason: str = Field(default="", description="why policy asks, when a rule says so")


class StatusReport(Contract):
    """What the `status` query answers."""

    run_id: str
    temporal_run_id: str
    state: RunState
    step: int
    agent: str
    model: str
    model_label: str | None = None
    activity: str = Field(description="what is going on now, one line")
    pending_approvals: tuple[PendingApproval, ...] = ()
    queued_messages: int = 0
    recoveries: int = Field(default=0, description="how often a sandbox was lost and the run went on in another")
    subagents: tuple[str, ...] = Field(default=(), description="the run ids of those that are going on")
    usage: Usage = Usage()
    budget: Budget = Budget()
    sandbox: SandboxRef | None = None
    checkpoint: Checkpoint | None = None
    result: RunResult | None = None


class StepSummary(Contract):
    """One line of the `steps` query for one tool call or answer."""

    step: int
    model_seconds: float
    tokens: int
    actions: tuple[str, ...] = ()
    text: str = ""


class StepsPageInput(Contract):
    """The argument of the `steps` query: steps after number `after`, at most `limit` of them."""

    after: int = Field(default=0, ge=0)
    limit: int = Field(default=50, gt=0, le=200)


class StepsPage(Contract):
    """A page of the last steps. Older ones than `first_kept` are in the transcript only."""

    steps: tuple[StepSummary, ...]
    total: int
    first_kept: int
