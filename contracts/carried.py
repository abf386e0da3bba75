"""What a run takes with it when it continues as new: its checkpoint, and what people have said to it meanwhile."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from contracts.base import Contract
from contracts.blob import BlobRef
from contracts.model import NewItem
from contracts.prepare import PrepareRunResult
from contracts.run import ArtifactList, RunStatus, StepSummary
from contracts.sandbox import KeptImage, SandboxRef
from contracts.snapshot import SnapshotRef
from contracts.usage import Budget, Usage

KEPT_STEPS = 30
"""Step summaries kept for the `steps` query. Older steps are in the transcript."""


class Counters(Contract):
    """How often in this run the model's answer could not be used, by kind. Each kind has its bound."""

    schema_faults: int = 0
    empty_or_cut: int = 0
    unknown_tools: int = 0


class ChildReport(Contract):
    """How a subagent ended, as long as its parent's model was not told of it."""

    name: str
    role: str
    run_id: str
    status: RunStatus
    reason: str | None = None
    output: str = ""
    steps: int = 0
    tokens: int = 0
    artifacts: ArtifactList = ArtifactList()
    base: SnapshotRef | None = None
    snapshot: SnapshotRef | None = None
    collect: bool = True
    merge: bool = False


class CarriedRun(Contract):
    """The whole state of a run between two steps. Of constant size, however long the run."""

    prepared: PrepareRunResult
    budget: Budget = Field(description="with every extension that people gave")
    head: BlobRef | None
    items: tuple[NewItem, ...] = Field(description="what the next model call is given")
    step: int
    usage: Usage
    started_at: datetime
    sandbox: SandboxRef | None = None
    sandbox_paused: bool = False
    kept_image: KeptImage | None = None
    snapshot: SnapshotRef | None = None
    generation: int = Field(default=0, description="how many sandboxes the run has asked for")
    recoveries: int = 0
    egress_log: BlobRef | None = None
    inputs: BlobRef | None = None
    lazy: BlobRef | None = None
    skills: BlobRef | None = None
    untold: tuple[str, ...] = Field(default=(), description="what became of a sandbox that the model was not told yet")
    sandbox_seconds: float = 0.0
    messages: tuple[str, ...] = ()
    paused_by: str | None = None
    stopped_by: str | None = None
    counters: Counters = Counters()
    subagents_left: int | None = None
    subagent_names: tuple[str, ...] = ()
    reports: tuple[ChildReport, ...] = Field(default=(), description="of subagents that the model was not told of yet")
    steps: tuple[StepSummary, ...] = ()
    text: str = ""
    model_label: str | None = None
