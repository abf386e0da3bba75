"""Preparing a run and ending it: resolving the agent, filling the workspace, collecting artifacts."""

from __future__ import annotations

from pydantic import Field, JsonValue

from contracts.agent import AgentSpec, ApprovalPolicy
from contracts.base import Contract
from contracts.blob import BlobRef, Text
from contracts.manifest import OutputSpec
from contracts.run import ArtifactList, Checkpoint, RunStatus
from contracts.sandbox import SandboxRef, SandboxSpec
from contracts.snapshot import SnapshotRef
from contracts.usage import Budget


class ResolvedAgent(Contract):
    """An agent with everything decided: the spec after the run's overrides, the model, and its price if known.

    Stored as a blob, so that activities are given a reference and history stays small.
    """

    spec: AgentSpec
    model: str
    instructions: str = Field(description="the whole text the model is given: the harness's part, then the agent's")


class ActivityRoute(Contract):
    """Where an activity tool runs."""

    activity: str
    task_queue: str
    timeout_seconds: float
    queue_seconds: float
    max_attempts: int


class RunPlan(Contract):
    """What the workflow itself must know of its agent. The rest (instructions, schemas, entries) stays in the store."""

    budget: Budget
    approvals: ApprovalPolicy
    sandbox: SandboxSpec
    needs_sandbox: bool
    has_entries: bool
    has_schema: bool
    environment: dict[str, str]
    setup: tuple[str, ...] = Field(default=(), description="each command of the manifest's `setup`, its first line")
    setup_seconds: float = 600
    outputs: tuple[OutputSpec, ...]
    model_seconds: float = Field(description="the longest time for one model call")
    shell_seconds: float = Field(description="the longest time a command may ask for")
    activity_tools: dict[str, ActivityRoute]


class PrepareRunInput(Contract):
    """Resolve a run's agent and check everything that can be checked before money is spent.

    `request` is a valid RunInput as JSON without the fields that nobody set, since a budget overrides limit by limit.
    """

    run_id: str
    chain: str
    request: dict[str, JsonValue]


class PrepareRunResult(Contract):
    """The resolved agent and the task, by reference, and what the workflow must know of them."""

    agent: BlobRef
    agent_digest: str
    agent_name: str
    model: str
    plan: RunPlan
    task: Text
    price_known: bool
    start: Checkpoint | None = Field(default=None, description="the checkpoint of another run that this one goes on from")


class FetchManifestInput(Contract):
    """Read what the agent's manifest names into the store."""

    run_id: str
    agent: BlobRef


class FetchManifestResult(Contract):
    """What the manifest names, as a snapshot of a workspace that holds just that."""

    snapshot: SnapshotRef


class RestoreWorkspaceInput(Contract):
    """Make the workspace of a new sandbox what it was at a snapshot. With `keep`, what the provider put into it stays."""

    run_id: str
    sandbox: SandboxRef
    agent: BlobRef
    snapshot: SnapshotRef
    keep: bool = False


class RestoreWorkspaceResult(Contract):
    """What the workspace is now."""

    snapshot: SnapshotRef


class SnapshotWorkspaceInput(Contract):
    """Store what the workspace holds. `snapshot` is the run's last one."""

    run_id: str
    sandbox: SandboxRef
    agent: BlobRef
    snapshot: SnapshotRef | None


class SnapshotWorkspaceResult(Contract):
    """The new snapshot, or the last one when nothing changed."""

    snapshot: SnapshotRef


class RecordEndInput(Contract):
    """Write down a run's last checkpoint and how it ended, by which retention knows what to keep of it."""

    run_id: str
    chain: str
    checkpoint: Checkpoint
    status: RunStatus
    artifacts: ArtifactList = ArtifactList()
    output: BlobRef | None = None
    egress_log: BlobRef | None = None


class RecordEndResult(Contract):
    """The checkpoint as it was written: what no model call will take up any more is in the transcript."""

    checkpoint: Checkpoint


class RunSetupInput(Contract):
    """Run one command of the manifest's `setup`. `job_id` makes a retry find what was already started."""

    run_id: str
    job_id: str
    sandbox: SandboxRef
    agent: BlobRef
    index: int = Field(ge=0, description="which of them")
    snapshot: SnapshotRef | None


class RunSetupResult(Contract):
    """The command did well, and this is the workspace after it."""

    snapshot: SnapshotRef


class CollectOutputsInput(Contract):
    """Read the declared outputs into the store as artifacts."""

    run_id: str
    sandbox: SandboxRef
    outputs: tuple[OutputSpec, ...]


class CollectOutputsResult(Contract):
    """The artifacts."""

    artifacts: ArtifactList
