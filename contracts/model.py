"""Model calls and tool calls as activities see them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from contracts.base import Contract
from contracts.blob import BlobRef, Text
from contracts.sandbox import SandboxRef
from contracts.snapshot import SnapshotRef
from contracts.usage import CallUsage, Usage


class UserItem(Contract):
    """Something a person said."""

    type: Literal["user"] = "user"
    text: Text


class NoteItem(Contract):
    """Something the harness tells the model: a developer message, or a user's where it passes on the words of others."""

    type: Literal["note"] = "note"
    text: Text
    role: Literal["developer", "user"] = "developer"


class ToolOutputItem(Contract):
    """What one tool call gave."""

    type: Literal["tool_output"] = "tool_output"
    call_id: str
    output: Text


NewItem = Annotated[UserItem | NoteItem | ToolOutputItem, Field(discriminator="type")]


class ToolCall(Contract):
    """One action the model asked for.

    `call_id` is unique in the transcript. A call that cannot be carried out as asked (unknown tool, arguments that are not
    an object or do not fit the tool's schema, a call id used twice in one answer) has a `fault`, which is its output.
    """

    call_id: str
    name: str
    arguments: Text
    arguments_digest: str
    summary: str = Field(description="one line for people")
    fault: str | None = None
    unknown_tool: bool = False


class CallModelInput(Contract):
    """One model call: the transcript so far, what is new, and who asks.

    `key` is unique to this call in this run, and names the record that makes a retry idempotent. `chain` is Temporal's first run
    id of the run; with `usage` and `snapshot` the call has all of the checkpoint before it, and writes it down.
    """

    key: str
    run_id: str
    chain: str
    step: int
    agent: BlobRef
    head: BlobRef | None
    items: tuple[NewItem, ...]
    usage: Usage = Usage()
    snapshot: SnapshotRef | None = None


class CallModelResult(Contract):
    """The model's answer, already appended to the transcript.

    `finish` is `tools` when calls are asked for, `final` for an answer, `refused` when the model declined, `incomplete`
    when it was cut short by a limit (`incomplete_reason` says which).
    """

    head: BlobRef
    items_total: int
    response_id: str
    finish: Literal["tools", "final", "refused", "incomplete"]
    incomplete_reason: str | None = None
    text: Text | None = None
    calls: tuple[ToolCall, ...] = ()
    usage: CallUsage
    seconds: float
    schema_fault: str | None = Field(default=None, description="why the answer does not satisfy the output schema")
    model: str
    model_label: str | None = None


class ToolCallInput(Contract):
    """One tool call to carry out in a sandbox. `job_id` makes a retry find what was already started."""

    run_id: str
    step: int
    job_id: str
    sandbox: SandboxRef
    agent: BlobRef
    call: ToolCall
    snapshot: SnapshotRef | None = Field(default=None, description="the run's last one, which the next is built on")


class ToolCallResult(Contract):
    """A tool's output for the model. A tool fault is an output too."""

    output: Text
    summary: str
    failed: bool = False
    snapshot: SnapshotRef | None = Field(default=None, description="of the workspace after the call")
