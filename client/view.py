"""The picture of a run that is being followed: moving on a terminal, plain lines everywhere else.

Both views tell the same story, from `_Story`: each thing once, in order. The terminal adds, below it, what goes on this moment.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from client.show import approval_lines, clean, duration, label_line, one_line, quoted, step_lines, usage_line
from contracts.activity_names import (
    APPLY_PATCH,
    CALL_MODEL,
    CLOSE_SANDBOX,
    COLLECT_OUTPUTS,
    DELIVER_OUTPUTS,
    FETCH_FILES,
    FETCH_MANIFEST,
    OPEN_SANDBOX,
    PREPARE_RUN,
    RESTORE_WORKSPACE,
    RESUME_SANDBOX,
    RUN_SETUP,
    RUN_SHELL,
    SNAPSHOT_WORKSPACE,
    TAKE_RESULTS,
    WRITE_FILES,
)
from contracts.run import RunState, StatusReport, StepSummary

TAIL_LINES = 8
_IDLE_SECONDS = 5.0
"""How long an activity may wait for a worker before it is worth a word."""
_REPEAT_SECONDS = 30.0
"""How often a plain view says that a long command still runs."""
_ROLES = {
    PREPARE_RUN.name: "workflow",
    CALL_MODEL.name: "model",
    **{stub.name: "tools" for stub in (FETCH_MANIFEST, FETCH_FILES, DELIVER_OUTPUTS)},
    **{
        stub.name: "sandbox"
        for stub in (
            OPEN_SANDBOX,
            RESUME_SANDBOX,
            RESTORE_WORKSPACE,
            SNAPSHOT_WORKSPACE,
            RUN_SETUP,
            WRITE_FILES,
            TAKE_RESULTS,
            RUN_SHELL,
            APPLY_PATCH,
            COLLECT_OUTPUTS,
            CLOSE_SANDBOX,
        )
    },
}
"""The worker role that takes up each activity."""


@dataclass(frozen=True)
class Running:
    """An activity that is not done yet: `seconds` since it started, or None with `idle` seconds of waiting for a worker.

    `fault` is what its last attempt failed with; `retry_in` the seconds until the next one.
    """

    activity: str
    seconds: float | None = None
    idle: float = 0.0
    tail: str = ""
    attempt: int = 1
    fault: str = ""
    retry_in: float | None = None


@dataclass(frozen=True)
class Glimpse:
    """What one look at a run found. `steps` are those that will not change any more; `trouble` is why there is no report."""

    open: bool
    report: StatusReport | None = None
    steps: tuple[StepSummary, ...] = ()
    running: tuple[Running, ...] = ()
    trouble: str | None = None


class View(Protocol):
    """A picture of one run, as a context manager that leaves the terminal as it was."""

    def show(self, glimpse: Glimpse) -> int:
        """Show what is new; return the number of the last step that was shown."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def view_for(console: Console, run_id: str) -> View:
    """Return the view that fits: a moving one needs a terminal that can move its cursor."""
    # Not `console.is_terminal`: FORCE_COLOR sets that, and is set where logs are kept, which a moving picture would fill.
    moving = console.file.isatty() and not console.is_dumb_terminal
    return TerminalView(console, run_id) if moving else PlainView(console, run_id)


class _Story:
    """What has been told of a run, and what is news."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._introduced = False
        self._labelled = False
        self._approvals: set[str] = set()
        self._trouble: str | None = None
        self.shown_step = 0

    def news(self, glimpse: Glimpse) -> Iterator[Text]:
        if glimpse.trouble != self._trouble:
            self._trouble = glimpse.trouble
            yield Text(clean(glimpse.trouble) if glimpse.trouble else "the run answers again", style="yellow")
        report = glimpse.report
        if report is not None:
            yield from self._introduction(report)
        yield from self._steps(glimpse.steps)
        if report is not None:
            yield from self._asked(report)

    def _introduction(self, report: StatusReport) -> Iterator[Text]:
        if report.agent and not self._introduced:
            self._introduced = True
            yield Text(f"run {clean(self._run_id)} · agent {report.agent} · model {clean(report.model)}", style="bold")
        if report.model_label and not self._labelled:
            self._labelled = True
            yield label_line(report.model_label)

    def _steps(self, steps: tuple[StepSummary, ...]) -> Iterator[Text]:
        for step in steps:
            if step.step <= self.shown_step:
                continue
            missed = step.step - self.shown_step - 1
            if missed:
                which = f"step {step.step - 1}" if missed == 1 else f"steps {self.shown_step + 1} to {step.step - 1}"
                yield Text(f"{which}: caisson transcript {quoted(self._run_id)}", style="dim")
            self.shown_step = step.step
            yield from step_lines(step)

    def _asked(self, report: StatusReport) -> Iterator[Text]:
        for approval in report.pending_approvals:
            if approval.approval_id not in self._approvals:
                self._approvals.add(approval.approval_id)
                yield from approval_lines(self._run_id, approval)


class PlainView:
    """One line for each change, without any escape sequence: for logs, pipes and screen readers."""

    def __init__(self, console: Console, run_id: str) -> None:
        self._console = console
        self._story = _Story(run_id)
        self._activity = ""
        self._spoken = time.monotonic()
        self._faults: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def show(self, glimpse: Glimpse) -> int:
        """See View."""
        for line in (*self._story.news(glimpse), *self._now(glimpse)):
            self._console.print(Text(line.plain), soft_wrap=True, highlight=False)
        return self._story.shown_step

    def _now(self, glimpse: Glimpse) -> Iterator[Text]:
        report = glimpse.report
        if not glimpse.open:
            return
        if report is not None and report.activity != self._activity:
            self._activity, self._spoken = report.activity, time.monotonic()
            yield Text(f"now: {one_line(report.activity)}")
        for running in glimpse.running:
            if running.fault and (running.activity, running.attempt) not in self._faults:
                self._faults.add((running.activity, running.attempt))
                yield Text(_retrying(running))
        if glimpse.running and time.monotonic() - self._spoken >= _REPEAT_SECONDS:
            self._spoken = time.monotonic()
            yield from (Text(_going_on(running)) for running in glimpse.running)


class TerminalView:
    """The story, scrolling, with what goes on now below it."""

    def __init__(self, console: Console, run_id: str) -> None:
        self._console = console
        self._story = _Story(run_id)
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(Text(""), console=console, transient=True, refresh_per_second=8, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, glimpse: Glimpse) -> int:
        """See View."""
        for line in self._story.news(glimpse):
            self._live.console.print(line, soft_wrap=True, highlight=False)
        self._live.update(self._picture(glimpse), refresh=True)
        return self._story.shown_step

    def _picture(self, glimpse: Glimpse) -> Group:
        if not glimpse.open:
            return Group()
        lines = [_cut(line) for line in now_lines(glimpse)]
        self._spinner.update(text=lines[0])
        return Group(self._spinner, *lines[1:])


def now_lines(glimpse: Glimpse) -> Iterator[Text]:
    """Write what goes on at this moment: the activity, a command's last lines, retries, and what was used so far."""
    report = glimpse.report
    if report is None:
        yield Text(clean(glimpse.trouble or "asking the run"), style="yellow")
    else:
        running = next((one for one in glimpse.running if one.seconds is not None), None)
        clock = f"  {duration(running.seconds)}" if running is not None and running.seconds is not None else ""
        state = "" if report.state is RunState.RUNNING else f"{report.state.value.replace('_', ' ')}: "
        yield Text.assemble((state, "bold yellow"), one_line(report.activity), (clock, "dim"))
    for one in glimpse.running:
        for line in [line for line in clean(one.tail).split("\n") if line.strip()][-TAIL_LINES:]:
            yield Text(f"  │ {line.expandtabs()}", style="dim")
        if one.fault:
            yield Text(f"  {_retrying(one)}", style="yellow")
        elif one.idle > _IDLE_SECONDS:
            yield Text(f"  {_going_on(one)}", style="yellow")
    if report is not None:
        more = [f"{report.queued_messages} messages wait"] if report.queued_messages else []
        more += [f"{report.recoveries} sandboxes lost and replaced"] if report.recoveries else []
        yield Text(" · ".join([f"  {usage_line(report.usage, report.step, report.budget)}", *more]), style="dim")
        for run_id in report.subagents[:TAIL_LINES]:
            yield Text(f"  subagent {clean(run_id)} is going on: caisson watch {quoted(run_id)}", style="dim")


def _retrying(running: Running) -> str:
    when = "" if running.retry_in is None else f"; again in {duration(running.retry_in)}"
    return f"{running.activity}: attempt {running.attempt}, after: {one_line(running.fault, 300)}{when}"


def _going_on(running: Running) -> str:
    if running.seconds is None:
        role = _ROLES.get(running.activity)
        remedy = f" (start one: caisson worker --role {role})" if role else ""
        return f"{running.activity}: no worker has taken it up for {duration(running.idle)}{remedy}"
    last = next((line for line in reversed(clean(running.tail).split("\n")) if line.strip()), "")
    return f"{running.activity}: running for {duration(running.seconds)}" + (
        f", last line: {one_line(last, 160)}" if last else ""
    )


def _cut(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
