"""The desk: where what people say to a run is checked and written down, until the run comes to read it.

Update handlers only write here and never wait, so a run may continue as new between any two of them without losing one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from pydantic import JsonValue, ValidationError

    from contracts.activity_names import ErrorType
    from contracts.base import Contract, explain
    from contracts.carried import CarriedRun
    from contracts.run import ApprovalDecision, Message, PendingApproval, Reason
    from contracts.usage import Budget, BudgetExtension, extend

Given = TypeVar("Given", bound=Contract)

MAX_QUEUED_MESSAGES = 16
"""Messages that may wait for the next model call. With 64 KB each they stay far below a payload's limit."""


def parsed(kind: type[Given], raw: JsonValue, what: str) -> Given:
    """Validate what somebody sent. Raises ApplicationError `BadInput` that names the field."""
    try:
        return kind.model_validate({} if raw is None else raw)
    except ValidationError as error:
        raise ApplicationError(explain(error, what), type=ErrorType.BAD_INPUT, non_retryable=True) from None


def refused(message: str) -> ApplicationError:
    """An update that cannot be accepted now."""
    return ApplicationError(message, type=ErrorType.BAD_INPUT, non_retryable=True)


class Desk:
    """What people have said to one run. Every `check_` raises ApplicationError and changes nothing."""

    def __init__(self, carried: CarriedRun | None) -> None:
        self.messages: list[str] = list(carried.messages) if carried else []
        self.paused_by: str | None = carried.paused_by if carried else None
        self.stopped_by: str | None = carried.stopped_by if carried else None
        self.extensions: list[BudgetExtension] = []
        self.pending: dict[str, PendingApproval] = {}
        self.decided: dict[str, ApprovalDecision] = {}
        self.finished = False

    def pack(self) -> dict[str, object]:
        """What a run takes with it when it continues as new. No approval is ever open then."""
        return {"messages": tuple(self.messages), "paused_by": self.paused_by, "stopped_by": self.stopped_by}

    def holds(self) -> bool:
        """Whether the run is to wait before its next model call."""
        return self.paused_by is not None and self.stopped_by is None

    def check_open(self, what: str) -> None:
        """Refuse anything said to a run that is over."""
        if self.finished:
            raise refused(f"{what}: the run is finished")
        if self.stopped_by is not None:
            raise refused(f"{what}: the run is stopping ({self.stopped_by})")

    def check_message(self, raw: JsonValue) -> None:
        """Whether `send_message` may be accepted."""
        parsed(Message, raw, "send_message")
        self.check_open("send_message")
        if len(self.messages) >= MAX_QUEUED_MESSAGES:
            raise refused(f"send_message: {MAX_QUEUED_MESSAGES} messages wait already; wait until the model has read them")

    def take_message(self, raw: JsonValue) -> str:
        """Write down a message for the model's next call."""
        self.messages.append(parsed(Message, raw, "send_message").text)
        return f"queued as message {len(self.messages)}; the model reads it before its next call"

    def read_messages(self) -> list[str]:
        """Hand out the messages, once."""
        taken, self.messages = self.messages, []
        return taken

    def check_pause(self, raw: JsonValue) -> None:
        """Whether `pause` may be accepted."""
        parsed(Reason, raw, "pause")
        self.check_open("pause")
        if self.paused_by is not None:
            raise refused(f"pause: the run is paused already ({self.paused_by})")

    def pause(self, raw: JsonValue) -> str:
        """Hold the run before its next model call."""
        self.paused_by = who(parsed(Reason, raw, "pause"))
        return "the run pauses before its next model call"

    def check_resume(self, raw: JsonValue) -> None:
        """Whether `resume` may be accepted."""
        parsed(Reason, raw, "resume")
        self.check_open("resume")
        if self.paused_by is None:
            raise refused("resume: the run is not paused")

    def resume(self, raw: JsonValue) -> str:
        """Let a paused run go on."""
        self.paused_by = None
        return "the run goes on"

    def check_stop(self, raw: JsonValue) -> None:
        """Whether `stop` may be accepted."""
        parsed(Reason, raw, "stop")
        self.check_open("stop")

    def stop(self, raw: JsonValue) -> str:
        """End the run after the step in flight."""
        self.stopped_by = who(parsed(Reason, raw, "stop"))
        return "the run ends after this step and returns what there is"

    def check_extension(self, raw: JsonValue) -> None:
        """Whether `extend_budget` may be accepted."""
        more = parsed(BudgetExtension, raw, "extend_budget")
        self.check_open("extend_budget")
        if not more.model_dump(exclude_none=True):
            raise refused("extend_budget: name at least one of steps, tokens, cost_usd, wall_seconds, and how much to add")

    def extend(self, raw: JsonValue) -> str:
        """Write down an extension of the budget."""
        self.extensions.append(parsed(BudgetExtension, raw, "extend_budget"))
        return "the budget is extended"

    def hear(self, said: JsonValue) -> None:
        """Take down a signal: what an update would refuse is left out, since nobody waits for an answer."""
        heard = said if isinstance(said, dict) else {}
        with contextlib.suppress(ApplicationError):
            if "message" in heard:
                self.check_message(heard["message"])
                self.take_message(heard["message"])
            if "stop" in heard:
                self.check_stop(heard["stop"])
                self.stop(heard["stop"])

    def extended(self, budget: Budget) -> Budget:
        """Return `budget` with every extension that was not counted yet, once."""
        budget = self.foreseen(budget)
        self.extensions = []
        return budget

    def foreseen(self, budget: Budget) -> Budget:
        """Return `budget` as it will be when every extension is counted; changes nothing, so a query may ask."""
        for more in self.extensions:
            budget = extend(budget, more)
        return budget

    def check_decision(self, raw: JsonValue) -> None:
        """Whether `decide_approval` may be accepted: it must name one open approval, and the arguments that were shown."""
        decision = parsed(ApprovalDecision, raw, "decide_approval")
        pending = self.pending.get(decision.approval_id)
        if decision.approval_id in self.decided or pending is None:
            open_ones = ", ".join(self.pending) or "none"
            raise refused(f"decide_approval: approval_id {decision.approval_id!r} is not open (open: {open_ones}); ask `status`")
        if decision.arguments_digest != pending.arguments_digest:
            raise refused(
                f"decide_approval: arguments_digest is not that of approval {decision.approval_id}; the call may not be the "
                "one you were shown; ask `status` again"
            )

    def decide(self, raw: JsonValue) -> str:
        """Write down a decision; the call that waits for it takes it once."""
        decision = parsed(ApprovalDecision, raw, "decide_approval")
        self.decided[decision.approval_id] = decision
        del self.pending[decision.approval_id]
        return f"approval {decision.approval_id} is {'granted' if decision.allow else 'denied'}"

    async def decision_on(self, approval: PendingApproval, seconds_left: Callable[[], float | None]) -> ApprovalDecision | None:
        """Wait until a person decides on one exact call; None when the run is stopped or out of time first. May wait for days."""
        self.pending[approval.approval_id] = approval
        await self.wait(lambda: approval.approval_id in self.decided or self.stopped_by is not None, seconds_left)
        self.pending.pop(approval.approval_id, None)
        return self.decided.pop(approval.approval_id, None)

    @staticmethod
    async def wait(condition: Callable[[], bool], seconds_left: Callable[[], float | None]) -> None:
        """Wait for people until `condition` holds or the run's time is up.

        The time is asked for anew whenever it seems to be up, since people may extend it meanwhile.
        """
        while not condition() and ((left := seconds_left()) is None or left > 0):
            with contextlib.suppress(asyncio.TimeoutError):
                await workflow.wait_condition(condition, timeout=None if left is None else timedelta(seconds=left))


def who(reason: Reason) -> str:
    """Say in a few words who asked for something, and why."""
    by = f"by {reason.by}" if reason.by else "by request"
    return f"{by}: {reason.reason}" if reason.reason else by
