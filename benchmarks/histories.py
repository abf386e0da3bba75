"""Reading what steps cost out of Temporal histories: the server's own clock, and the events' own bytes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, WorkflowHandle


@dataclass(frozen=True)
class StepCost:
    """One step: from the scheduling of its first activity to that of the next step's first."""

    milliseconds: float
    bytes: int


@dataclass(frozen=True)
class RunCost:
    """A whole workflow with all that it continued as. `total_bytes` is what the server counts."""

    steps: list[StepCost]
    total_bytes: int


async def run_cost(client: Client, handle: WorkflowHandle[Any, Any], first_activity: str) -> RunCost:
    """Read a closed workflow. Each step begins with an activity of type `first_activity`.

    The last step has no successor and is left out of `steps`.
    """
    events: list[HistoryEvent] = []
    total = 0
    run_id = handle.first_execution_run_id
    while run_id:
        part = client.get_workflow_handle(handle.id, run_id=run_id)
        total += (await part.describe()).raw_description.workflow_execution_info.history_size_bytes
        events += (await part.fetch_history()).events
        # Empty, unless the workflow continued as new.
        run_id = events[-1].workflow_execution_continued_as_new_event_attributes.new_execution_run_id
    return RunCost(_steps(events, first_activity), total)


def _steps(events: list[HistoryEvent], first_activity: str) -> list[StepCost]:
    starts = [
        n for n, event in enumerate(events) if event.activity_task_scheduled_event_attributes.activity_type.name == first_activity
    ]
    return [
        StepCost(
            milliseconds=(events[end].event_time.ToNanoseconds() - events[start].event_time.ToNanoseconds()) / 1e6,
            bytes=sum(event.ByteSize() for event in events[start:end]),
        )
        for start, end in pairwise(starts)
    ]
