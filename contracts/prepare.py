"""Preparing a run and ending it: resolving the agent, filling the workspace, collecting artifacts."""

from __future__ import annotations

from pydantic import Field, JsonValue

from contracts.agent import AgentSpec, ApprovalPolicy
from contracts.base import Contract
from contracts.blob import BlobRef, Text
from contracts.manifest import OutputSpec
from contracts.run import ArtifactList
from contracts.sandbox import SandboxRef, SandboxSpec
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
    outputs: tuple[OutputSpec, ...]
    model_seconds: float = Field(description="the longest time for one model call")
    shell_seconds: float = Field(description="the longest time a command may ask for")
    activity_tools: dict[str, ActivityRoute]


class PrepareRunInput(Contract):
    """Resolve a run's agent and check everything that can be checked before money is spent.

    `request` is a valid RunInput as JSON without the fields that nobody set, since a budget overrides limit by limit.
    """

    run_id: str
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


class FetchManifestInput(Contract):
    """Read what the agent's manifest names into the store."""

    run_id: str
    agent: BlobRef


class FetchManifestResult(Contract):
    """`tree` is a blob: a JSON array of TreeEntry."""

    tree: BlobRef
    files: int
    total_bytes: int


class TreeEntry(Contract):
    """One file, directory or link of a tree. `path` is relative to the workspace; an empty directory has no content."""

    path: str
    kind: str = Field(pattern=r"^(file|directory|symlink)$")
    mode: int
    size: int = 0
    digest: str | None = None
    target: str | None = None


class FillWorkspaceInput(Contract):
    """Write a tree into a fresh sandbox's workspace."""

    run_id: str
    sandbox: SandboxRef
    tree: BlobRef


class FillWorkspaceResult(Contract):
    """What was written."""

    files: int
    total_bytes: int


class CollectOutputsInput(Contract):
    """Read the declared outputs into the store as artifacts."""

    run_id: str
    sandbox: SandboxRef
    outputs: tuple[OutputSpec, ...]


class CollectOutputsResult(Contract):
    """The artifacts."""

    artifacts: ArtifactList
