"""Batches: many runs of one agent over many inputs, a bounded number at a time."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue, model_validator

from contracts.agent import AgentChoice
from contracts.base import Contract
from contracts.manifest import Manifest
from contracts.run import MAX_TASK, RunInput, RunState, RunStatus, not_blank
from contracts.usage import Budget, Usage

MAX_ITEMS = 1000
MAX_CONCURRENCY = 100
SHOWN_OUTPUT = 500
"""Characters of each run's answer in the batch's result. The whole answer is in the run's own."""


class BatchItem(Contract):
    """One run of a batch: its name, which ends its run id, and what differs from the other runs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    task: Annotated[str, Field(max_length=MAX_TASK), AfterValidator(not_blank)] | None = None
    manifest: Manifest | None = None
    labels: dict[str, str] = Field(default_factory=dict)


class BatchInput(Contract):
    """What starts a batch. `task`, `agent`, `model` and `budget` hold for every run; an item's own task or manifest wins."""

    items: tuple[BatchItem, ...] = Field(min_length=1, max_length=MAX_ITEMS)
    task: Annotated[str, Field(max_length=MAX_TASK), AfterValidator(not_blank)] | None = None
    agent: AgentChoice | None = None
    model: str | None = Field(default=None, min_length=1)
    budget: Budget | None = Field(default=None, description="of each run, not of all together")
    output_schema: dict[str, JsonValue] | None = None
    concurrency: int = Field(default=4, gt=0, le=MAX_CONCURRENCY, description="runs at a time")

    @model_validator(mode="after")
    def _every_item_can_run(self) -> BatchInput:
        names = [item.name for item in self.items]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"items: the name {twice[0]!r} is used more than once; each run needs its own id")
        missing = next((item.name for item in self.items if item.task is None and self.task is None), None)
        if missing is not None:
            raise ValueError(f"items: {missing!r} has no task, and the batch has none; give one of them a task")
        return self

    def request_of(self, item: BatchItem) -> RunInput:
        """Return the input of one item's run."""
        return RunInput(
            task=item.task or self.task or "",
            agent=self.agent,
            model=self.model,
            manifest=item.manifest,
            budget=self.budget,
            output_schema=self.output_schema,
            labels=item.labels,
        )


def sparse_batch(request: BatchInput) -> dict[str, JsonValue]:
    """Return a batch as JSON without the fields that nobody set; see `contracts.run.sparse`."""
    given: dict[str, JsonValue] = request.model_dump(mode="json", include=request.model_fields_set)
    if request.budget is not None:
        given["budget"] = request.budget.model_dump(mode="json", exclude_unset=True)
    return given


class BatchOutcome(Contract):
    """How one run of a batch ended."""

    name: str
    run_id: str
    status: RunStatus
    reason: str | None = None
    output: str = Field(default="", description="the answer, or its beginning")
    steps: int = 0
    artifacts: int = 0


class BatchResult(Contract):
    """How a batch ended: each run in the order of the items, how many ended how, and what they used together."""

    outcomes: tuple[BatchOutcome, ...]
    counts: dict[RunStatus, int]
    usage: Usage


class BatchStatus(Contract):
    """What a batch's `status` query answers."""

    batch_id: str
    state: RunState
    total: int
    running: tuple[str, ...]
    finished: int
    counts: dict[RunStatus, int]
    usage: Usage


class CarriedBatch(Contract):
    """What a batch takes with it when it continues as new; no run is going on then."""

    request: dict[str, JsonValue] = Field(description="the BatchInput as JSON, without the fields that nobody set")
    outcomes: tuple[BatchOutcome, ...] = ()
    usage: Usage = Usage()
    stopped_by: str | None = None
