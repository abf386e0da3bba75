"""What a model's answer means for its run. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pydantic import JsonValue

from contracts.blob import Text
from contracts.carried import KEPT_STEPS, CarriedRun, Counters
from contracts.model import CallModelResult, NoteItem
from contracts.run import ArtifactList, Checkpoint, RunResult, RunStatus, StepSummary
from contracts.usage import Usage

MAX_SCHEMA_FAULTS = 1
"""Answers that do not satisfy the output schema and are sent back to be corrected."""
MAX_EMPTY_OR_CUT = 3
"""Answers in a row that are empty, or cut at the output limit, before the run gives up."""
MAX_UNKNOWN_TOOLS = 3
"""Answers in a row that call only tools which do not exist, before the run gives up."""


@dataclass(frozen=True)
class Judged:
    """What to do with an answer: end the run (`end` and why), or go on with `notes` for the model."""

    counters: Counters
    end: RunStatus | None = None
    reason: str | None = None
    notes: tuple[NoteItem, ...] = ()


def judge(answer: CallModelResult, counters: Counters, *, more_to_say: bool) -> Judged:
    """Decide whether an answer ends the run. `more_to_say`: people have said something that the model has not seen yet."""
    match answer.finish:
        case "tools":
            return _tools(answer, counters)
        case "refused":
            text = answer.text.shown() if answer.text else ""
            return Judged(counters, RunStatus.REFUSED, f"the model declined: {text[:500]}" if text else "the model declined")
        case "incomplete":
            fault = f"Your last answer was cut off ({answer.incomplete_reason or 'a limit'}). Nothing in it was carried out."
            reason = f"the answer was cut off: {answer.incomplete_reason}"
            return _nudge(counters, fault + " Go on in smaller pieces.", reason, "raise max_output_tokens")
        case "final":
            if answer.text is None:
                note = "Your last answer held neither text nor a tool call. Call a tool, or answer with the result."
                remedy = "check the agent's model and instructions"
                return _nudge(counters, note, "the model gave empty answers", remedy)
            if answer.schema_fault is not None:
                return _schema_fault(answer.schema_fault, counters)
            # A good answer ends every row of bad ones.
            return Judged(Counters()) if more_to_say else Judged(counters, RunStatus.COMPLETED)


def _tools(answer: CallModelResult, counters: Counters) -> Judged:
    unknown = all(call.unknown_tool for call in answer.calls)
    counted = Counters(schema_faults=counters.schema_faults, unknown_tools=counters.unknown_tools + 1 if unknown else 0)
    if counted.unknown_tools >= MAX_UNKNOWN_TOOLS:
        name = answer.calls[0].name
        return Judged(
            counted,
            RunStatus.FAILED,
            f"the model called tools that do not exist in {MAX_UNKNOWN_TOOLS} answers in a row (last: {name!r}); "
            "check the agent's instructions and tools",
        )
    return Judged(counted)


def _nudge(counters: Counters, note: str, reason: str, remedy: str) -> Judged:
    counted = counters.model_copy(update={"empty_or_cut": counters.empty_or_cut + 1})
    if counted.empty_or_cut > MAX_EMPTY_OR_CUT:
        return Judged(counted, RunStatus.FAILED, f"{reason} ({MAX_EMPTY_OR_CUT + 1} times in a row); {remedy}")
    return Judged(counted, notes=(NoteItem(text=Text(inline=note)),))


def _schema_fault(fault: str, counters: Counters) -> Judged:
    counted = Counters(schema_faults=counters.schema_faults + 1)
    if counted.schema_faults > MAX_SCHEMA_FAULTS:
        return Judged(
            counted, RunStatus.FAILED, f"output_schema: the answer does not satisfy it, also after a correction: {fault}"
        )
    note = f"Your answer does not satisfy the required JSON Schema: {fault}. Answer again with only the corrected JSON."
    return Judged(counted, notes=(NoteItem(text=Text(inline=note)),))


def summarise(answer: CallModelResult, step: int, actions: list[str]) -> StepSummary:
    """Return a step's line for the `steps` query."""
    text = answer.text.shown() if answer.text else ""
    return StepSummary(
        step=step,
        model_seconds=answer.seconds,
        tokens=answer.usage.input_tokens + answer.usage.output_tokens,
        actions=tuple(actions[:20]),
        text=text[:300],
    )


def kept(steps: tuple[StepSummary, ...], new: StepSummary) -> tuple[StepSummary, ...]:
    """Add a summary, and let the oldest go."""
    return (*steps, new)[-KEPT_STEPS:]


def checkpoint_of(run: CarriedRun) -> Checkpoint:
    """Return what is needed to continue a run from here."""
    return Checkpoint(step=run.step, transcript=run.head, items=run.items, usage=run.usage, snapshot=run.snapshot)


def result_of(
    status: RunStatus, reason: str | None, run: CarriedRun | None, answer: CallModelResult | None, artifacts: ArtifactList
) -> RunResult:
    """Write a run's result. `answer` is the one that ended it, if one did; else the last text stands as the output."""
    if run is None:
        return RunResult(status=status, reason=reason, usage=Usage(), artifacts=artifacts)
    text = answer.text if answer is not None else None
    output: JsonValue = text.shown() if text is not None else run.text or None
    if status is RunStatus.COMPLETED and run.prepared.plan.has_schema and text is not None and text.inline is not None:
        output = json.loads(text.inline)
    return RunResult(
        status=status,
        reason=reason,
        output=output,
        output_blob=text.blob if text is not None and text.inline is None else None,
        artifacts=artifacts,
        usage=run.usage,
        steps=run.step,
        checkpoint=checkpoint_of(run),
        agent_digest=run.prepared.agent_digest,
        model=run.prepared.model,
        model_label=run.model_label,
        provenance_head=run.head,
        recoveries=run.recoveries,
    )
