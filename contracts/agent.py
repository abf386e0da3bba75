"""The agent spec: what people write as YAML to say who works, with what, and within which limits."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from contracts.base import Contract
from contracts.manifest import Manifest
from contracts.sandbox import SandboxSpec
from contracts.usage import Budget

AgentName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
MAX_INSTRUCTIONS = 256 * 1024


class ModelSettings(Contract):
    """How the model is asked. Unset fields are left to the service."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    max_output_tokens: int | None = Field(default=None, gt=0)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    parallel_tool_calls: bool | None = None
    store: bool = Field(default=False, description="allow the service to keep the response")
    background: bool = Field(
        default=False, description="run the call on the service's side, so that a retry picks it up; needs store"
    )
    timeout_seconds: float = Field(default=600, gt=0, le=3600, description="for one model call")

    @model_validator(mode="after")
    def _background_needs_store(self) -> ModelSettings:
        if self.background and not self.store:
            raise ValueError("background needs store: true, because a response must be kept to be picked up later")
        return self


class ShellTool(Contract):
    """Run commands in the sandbox with bash."""

    type: Literal["shell"] = "shell"
    timeout_seconds: float = Field(default=120, gt=0, le=24 * 3600, description="for a command that asks for none")
    max_timeout_seconds: float = Field(default=3600, gt=0, le=24 * 3600, description="the most a command may ask for")
    output_bytes: int = Field(default=16 * 1024, ge=1024, le=256 * 1024, description="of one command's output given to the model")


class ApplyPatchTool(Contract):
    """Edit workspace files with a V4A patch."""

    type: Literal["apply_patch"] = "apply_patch"


class ActivityTool(Contract):
    """Any Temporal activity on any task queue, in any language: it gets the arguments object, its result goes to the model."""

    type: Literal["activity"] = "activity"
    name: ToolName
    description: str = Field(min_length=1, max_length=4096)
    parameters: dict[str, JsonValue] = Field(description="JSON Schema of the arguments object")
    activity: str = Field(min_length=1, description="the activity's registered name")
    task_queue: str = Field(min_length=1)
    timeout_seconds: float = Field(default=300, gt=0, le=24 * 3600)
    queue_seconds: float = Field(
        default=60, gt=0, le=24 * 3600, description="how long a call may wait for a worker of the task queue to take it"
    )
    max_attempts: int = Field(default=3, gt=0, le=100)


def _spelled_out(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


ToolSpec = Annotated[
    Annotated[ShellTool | ApplyPatchTool | ActivityTool, Field(discriminator="type")], BeforeValidator(_spelled_out)
]


def tool_name(tool: ShellTool | ApplyPatchTool | ActivityTool) -> str:
    """The name by which the model calls a tool."""
    return tool.name if isinstance(tool, ActivityTool) else tool.type


class Verdict(StrEnum):
    """What policy says of one tool call."""

    ALLOW = "allow"
    PROMPT = "prompt"
    FORBID = "forbid"


class ApprovalPolicy(Contract):
    """What policy says of a tool call, by tool name; `default` for tools that are not named."""

    default: Verdict = Verdict.ALLOW
    tools: dict[ToolName, Verdict] = Field(default_factory=dict)


class AgentSpec(Contract):
    """One agent. Everything has a default, so that `{}` is an agent with a shell and apply_patch."""

    name: AgentName = "default"
    description: str = ""
    model: str | None = Field(default=None, min_length=1, description="null means the worker's default model")
    model_settings: ModelSettings = ModelSettings()
    instructions: str = Field(default="", max_length=MAX_INSTRUCTIONS)
    tools: tuple[ToolSpec, ...] = (ShellTool(), ApplyPatchTool())
    manifest: Manifest = Manifest()
    sandbox: SandboxSpec = SandboxSpec()
    approvals: ApprovalPolicy = ApprovalPolicy()
    budget: Budget = Budget()
    output_schema: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _tool_names_differ(self) -> AgentSpec:
        names = [tool_name(tool) for tool in self.tools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"tools: the name {twice[0]!r} is used more than once; each tool needs its own name")
        unknown = sorted(set(self.approvals.tools) - set(names))
        if unknown:
            raise ValueError(f"approvals.tools: no tool is named {unknown[0]!r}; the agent has {', '.join(names) or 'none'}")
        return self
