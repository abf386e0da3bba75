"""Preparing a run and ending it: resolving the agent, filling the workspace, collecting artifacts."""

from __future__ import annotations

from pydantic import Field, JsonValue

from contracts.agent import AgentSpec, ApprovalPolicy
from contracts.base import Contract
from contracts.blob import BlobRef, Text
from contracts.manifest import OutputSpec
from contracts.mcp import McpTool
from contracts.run import ArtifactList, Checkpoint, Delivery, RunStatus
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
    mcp_tools: tuple[McpTool, ...] = Field(default=(), description="of its MCP servers, as they were when the run began")


class ActivityRoute(Contract):
    """Where an activity tool runs."""

    activity: str
    task_queue: str
    timeout_seconds: float
    queue_seconds: float
    max_attempts: int


class RolePlan(Contract):
    """What a run must know of a kind of subagent. `agent` is the role's spec as a blob, unless `agent_name` names one."""

    name: str
    agent_name: str | None = None
    agent: BlobRef | None = None
    workspace: str
    task_queue: str | None = None
    budget_share: float


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
    mcp_servers: dict[str, float] = Field(
        default_factory=dict, description="MCP servers whose tools may be called, with the seconds that a call may take"
    )
    roles: tuple[RolePlan, ...] = ()
    depth: int = Field(default=0, description="levels below the first run")
    depth_left: int = Field(default=0, description="levels that there may be below this run")
    subagents_left: int = Field(default=0, description="that the run may start, with all below them")
    parallel_subagents: int = 10


class PrepareRunInput(Contract):
    """Resolve a run's agent and check everything that can be checked before money is spent.

    `request` is a valid RunInput as JSON without the fields that nobody set, since a budget overrides limit by limit.
    """

    run_id: str
    chain: str
    request: dict[str, JsonValue]


class Guidance(Contract):
    """What the files of a workspace tell the model to begin with, and the skills that it can load from then on."""

    text: Text | None = Field(default=None, description="AGENTS.md files, which skills there are, and what is wrong with others")
    skills: BlobRef | None = Field(default=None, description="JSON: a list of the skills, each with name, directory and body")


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
    guidance: Guidance = Field(default=Guidance(), description="of the workspace at `start`")


class FetchManifestInput(Contract):
    """Read what the agent's manifest names into the store."""

    run_id: str
    agent: BlobRef
    chain: str = Field(default="", description="Temporal's first run id of the run, by which a retry finds what is there already")


class FetchManifestResult(Contract):
    """What the manifest names, as a snapshot of a workspace that holds just that."""

    snapshot: SnapshotRef
    sources: BlobRef | None = Field(
        default=None, description="JSON: every entry's source, and each file's path, name there, version, size and SHA-256"
    )
    listing: str = Field(default="", description="what lies where, for the model: at most 4 KiB and 60 lines")
    lazy: BlobRef | None = Field(default=None, description="JSON: what is needed to fetch each file of `lazy` entries")
    guidance: Guidance = Guidance()


class RestoreWorkspaceInput(Contract):
    """Make the workspace of a new sandbox what it was at a snapshot. With `keep`, what the provider put into it stays.

    With `expected` it should be that already, as the sandbox was made of an image of the one before.
    """

    run_id: str
    sandbox: SandboxRef
    agent: BlobRef
    snapshot: SnapshotRef
    keep: bool = False
    expected: bool = False


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
    inputs: BlobRef | None = None


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


class TakeResultsInput(Contract):
    """Bring what a subagent made into its parent's workspace: its artifacts to `subagents/<name>/`, or its changes of a fork.

    `base` and `theirs` are the snapshots between which it changed the workspace; null where nothing is to be merged.
    """

    run_id: str
    name: str
    sandbox: SandboxRef
    agent: BlobRef
    snapshot: SnapshotRef | None
    artifacts: BlobRef | None = None
    base: SnapshotRef | None = None
    theirs: SnapshotRef | None = None


class TakeResultsResult(Contract):
    """What was brought, and the workspace after it. Of a merge with conflicts nothing was brought."""

    snapshot: SnapshotRef
    files: int = 0
    merged: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    fault: str | None = Field(default=None, description="why the artifacts were not brought")


class CollectOutputsInput(Contract):
    """Read the declared outputs into the store as artifacts."""

    run_id: str
    sandbox: SandboxRef
    outputs: tuple[OutputSpec, ...]


class CollectOutputsResult(Contract):
    """The artifacts."""

    artifacts: ArtifactList


class DeliverOutputsInput(Contract):
    """Put artifacts where the outputs that have a `to` say. `artifacts` is the index of them: a JSON array of Artifact."""

    run_id: str
    artifacts: BlobRef
    outputs: tuple[OutputSpec, ...]


class DeliverOutputsResult(Delivery):
    """What was delivered."""


class LoadSkillInput(Contract):
    """Read one skill. `skills` is what Guidance said of them."""

    run_id: str
    skills: BlobRef
    name: str


class LoadSkillResult(Contract):
    """What the skill says, or why there is none of that name, as the model is told it."""

    output: Text
    found: bool


class FetchFilesInput(Contract):
    """Read the content of files that were only listed so far. `lazy` is what FetchManifestResult said of them."""

    run_id: str
    agent: BlobRef
    lazy: BlobRef
    paths: tuple[str, ...]


class FetchedFile(Contract):
    """One of them, by its place in the workspace."""

    path: str
    blob: BlobRef


class FetchFilesResult(Contract):
    """The files that could be read, and for the others the reason, as the model is told it."""

    files: tuple[FetchedFile, ...] = ()
    faults: tuple[str, ...] = ()


class WriteFilesInput(Contract):
    """Put files into the workspace. Repeating it gives the same files."""

    run_id: str
    sandbox: SandboxRef
    agent: BlobRef
    snapshot: SnapshotRef | None
    files: tuple[FetchedFile, ...]


class WriteFilesResult(Contract):
    """The workspace with them, or why one could not be written."""

    snapshot: SnapshotRef
    fault: str | None = None
