"""The agent spec: what people write as YAML to say who works, with what, and within which limits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator

from contracts.base import NOT_BOOLEAN, Contract
from contracts.manifest import Manifest, WorkspacePath, check_workspace_path
from contracts.mcp import BETWEEN, MAX_SERVERS, McpUse, McpWholeServer, server_of
from contracts.sandbox import SandboxSpec
from contracts.usage import Budget

AgentName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,63}$")]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
MAX_INSTRUCTIONS = 256 * 1024
Whole = Annotated[int, NOT_BOOLEAN]
Number = Annotated[float, NOT_BOOLEAN]


def _fits_temporal(name: str) -> str:
    # What the server refuses only when it is used would fail the workflow task again and again.
    if not name.strip() or name.startswith("/_sys/") or "\0" in name:
        raise ValueError("must be a name that is not blank, does not begin with /_sys/ and holds no NUL character")
    return name


TemporalName = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_fits_temporal)]
"""The name of a task queue or an activity."""


class ModelSettings(Contract):
    """How the model is asked. Unset fields are left to the service."""

    temperature: Annotated[float, Field(ge=0, le=2), NOT_BOOLEAN] | None = None
    top_p: Annotated[float, Field(gt=0, le=1), NOT_BOOLEAN] | None = None
    max_output_tokens: Annotated[int, Field(gt=0), NOT_BOOLEAN] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    parallel_tool_calls: bool | None = None
    store: bool = Field(default=False, description="allow the service to keep the response")
    background: bool = Field(
        default=False, description="run the call on the service's side, so that a retry picks it up; needs store"
    )
    timeout_seconds: Number = Field(default=600, gt=0, le=3600, description="for one model call")
    compact_tokens: Annotated[int, Field(ge=1000, le=10**9), NOT_BOOLEAN] | None = Field(
        default=None, description="have the service compact what was said when a call would have more tokens; null: never"
    )

    @model_validator(mode="after")
    def _background_needs_store(self) -> ModelSettings:
        if self.background and not self.store:
            raise ValueError("background needs store: true, because a response must be kept to be picked up later")
        return self


class ShellTool(Contract):
    """Run commands in the sandbox with bash."""

    type: Literal["shell"] = "shell"
    timeout_seconds: Number = Field(default=120, gt=0, le=24 * 3600, description="for a command that asks for none")
    max_timeout_seconds: Number = Field(default=3600, gt=0, le=24 * 3600, description="the most a command may ask for")
    output_bytes: Whole = Field(
        default=16 * 1024, ge=1024, le=256 * 1024, description="of one command's output given to the model"
    )


class ApplyPatchTool(Contract):
    """Edit workspace files with a V4A patch."""

    type: Literal["apply_patch"] = "apply_patch"


class ActivityTool(Contract):
    """Any Temporal activity on any task queue, in any language: it gets the arguments object, its result goes to the model."""

    type: Literal["activity"] = "activity"
    name: ToolName
    description: str = Field(min_length=1, max_length=4096)
    parameters: dict[str, JsonValue] = Field(description="JSON Schema of the arguments object")
    activity: TemporalName = Field(description="the activity's registered name")
    task_queue: TemporalName
    timeout_seconds: Number = Field(default=300, gt=0, le=24 * 3600)
    queue_seconds: Number = Field(
        default=60, gt=0, le=24 * 3600, description="how long a call may wait for a worker of the task queue to take it"
    )
    max_attempts: Whole = Field(default=3, gt=0, le=100)


def _spelled_out(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


ToolSpec = Annotated[
    Annotated[ShellTool | ApplyPatchTool | ActivityTool, Field(discriminator="type")], BeforeValidator(_spelled_out)
]


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


McpServer = Annotated[McpUse, BeforeValidator(_named)]
"""An MCP server by its name alone, or with the tools of it that are wanted."""


def tool_name(tool: ShellTool | ApplyPatchTool | ActivityTool) -> str:
    """The name by which the model calls a tool."""
    return tool.name if isinstance(tool, ActivityTool) else tool.type


class Verdict(StrEnum):
    """What policy says of one tool call."""

    ALLOW = "allow"
    PROMPT = "prompt"
    FORBID = "forbid"


ArgumentPattern = str | int | float | bool | None
CommandPattern = Annotated[str, Field(min_length=1, max_length=1000)] | Annotated[tuple[str, ...], Field(min_length=1)]
MAX_RULES = 100
MAX_PATTERNS = 1000
"""Of all rules together: a workflow tries them all on every part of a call, and must be quick."""

MAX_RULES_BYTES = 64 * 1024
"""Of all rules as JSON: a workflow carries them in its history."""

_SHELL_SIGNS = re.compile(r"[;&|<>()`'\"\\\n\r{}]|\$(?=\S)|(?<=\S)[$*]|\*(?=\S)")


class ApprovalRule(Contract):
    """One rule of an approval policy: the calls that it is about, and what happens to them.

    A command pattern is the beginning of a command, word for word: `git status` covers `git status --short`. The word `*`
    stands for any one word, and `$` as the last word says that no further word may follow. A path pattern is a glob in which
    `*` stays within one directory and `**` goes through any number of them. An argument pattern is a glob for text, where `*`
    stands for any text, and the value itself for everything else.
    """

    tool: ToolName | None = Field(default=None, description="null: shell for `command`, apply_patch for `path`")
    command: tuple[CommandPattern, ...] = Field(
        default=(), max_length=100, description="for shell: patterns, each a string of words or a list of words; one must match"
    )
    path: tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...] = Field(
        default=(), max_length=100, description="for apply_patch: globs of files in the workspace; one must match"
    )
    arguments: dict[str, ArgumentPattern | tuple[ArgumentPattern, ...]] = Field(
        default_factory=dict,
        description="for activity tools: fields of the arguments, each with a pattern or a list of them; all fields must match",
    )
    verdict: Verdict
    reason: str = Field(default="", max_length=500, description="told to the model when forbidden, to the person when asked")

    @property
    def about(self) -> str:
        """The name of the tool that the rule is about."""
        return self.tool or ("shell" if self.command else "apply_patch")

    @property
    def command_words(self) -> tuple[tuple[str, ...], ...]:
        """The command patterns as words."""
        return tuple(tuple(one.split()) if isinstance(one, str) else one for one in self.command)

    @model_validator(mode="after")
    def _one_matcher_that_fits_the_tool(self) -> ApprovalRule:
        given = [name for name in ("command", "path", "arguments") if getattr(self, name)]
        if not given:
            raise ValueError(
                "a rule needs command, path or arguments to say which calls it is about; "
                "for all calls of a tool write approvals.tools, for everything else approvals.default"
            )
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} in one rule: no tool has both; write a rule for each")
        (matcher,) = given
        if matcher == "arguments":
            if self.tool is None:
                raise ValueError("arguments without tool: name the activity tool whose arguments they are")
            if self.tool in ("shell", "apply_patch"):
                instead = "command" if self.tool == "shell" else "path"
                raise ValueError(f"arguments with tool {self.tool!r}: they are for activity tools; write {instead} instead")
        elif self.tool not in (None, only := "shell" if matcher == "command" else "apply_patch"):
            raise ValueError(f"{matcher} with tool {self.tool!r}: {matcher} is for {only}; write arguments, or tool: {only}")
        return self

    @model_validator(mode="after")
    def _patterns_can_match(self) -> ApprovalRule:
        for given, words in zip(self.command, self.command_words, strict=True):
            if not words or words[0] in ("", "*", "$"):
                raise ValueError(f"command {given!r}: its first word must name a program; write for example 'git status'")
            if "$" in words[:-1]:
                raise ValueError(f"command {given!r}: the word $ says that no further word follows; write it last")
            if isinstance(given, str) and (sign := _SHELL_SIGNS.search(given)):
                raise ValueError(
                    f"command {given!r}: {sign[0]!r} means something to the shell, and a pattern is plain words of one command; "
                    "write a pattern for each command, * only as a whole word, or a list of words if the sign belongs to a word"
                )
        for path in self.path:
            try:
                check_workspace_path(path)
            except ValueError as error:
                raise ValueError(f"path {path!r}: {error}; write for example 'src/**'") from None
        for field, pattern in self.arguments.items():
            if pattern == ():
                raise ValueError(f"arguments.{field}: an empty list matches nothing; give a pattern, or leave the field out")
        return self


class ApprovalPolicy(Contract):
    """What policy says of a tool call: the first rule that is about it, else its tool's verdict, else `default`."""

    default: Verdict = Verdict.ALLOW
    tools: dict[ToolName | McpWholeServer, Verdict] = Field(
        default_factory=dict, description="by the tool's name; `server__*` is about every tool of an MCP server"
    )
    rules: tuple[ApprovalRule, ...] = Field(default=(), max_length=MAX_RULES, description="in order: the first that fits counts")

    @model_validator(mode="after")
    def _rules_are_bounded(self) -> ApprovalPolicy:
        patterns = sum(len(rule.command) + len(rule.path) + len(rule.arguments) for rule in self.rules)
        if patterns > MAX_PATTERNS:
            raise ValueError(f"rules: {patterns} patterns together, more than {MAX_PATTERNS}; write fewer, or broader ones")
        size = sum(len(rule.model_dump_json().encode()) for rule in self.rules)
        if size > MAX_RULES_BYTES:
            raise ValueError(f"rules: {size} bytes together, more than {MAX_RULES_BYTES}; write shorter patterns or fewer rules")
        return self


class SubagentRole(Contract):
    """A kind of subagent that an agent may start: who it is, what it gets to see, and how much it may spend."""

    name: AgentName
    description: str = Field(min_length=1, max_length=2000, description="told to the model: what it is for, what to tell it")
    agent: AgentChoice | None = Field(
        default=None, description="a name in the workers' agent directory, or a whole spec; null means the plain agent"
    )
    workspace: Literal["own", "inputs", "fork"] = Field(
        default="own",
        description="own: what its agent's manifest names; inputs: the files of its parent's workspace that it is given; "
        "fork: its parent's whole workspace, into which its changes may be merged back",
    )
    task_queue: TemporalName | None = Field(
        default=None,
        description="where it runs: other workers, hosts or versions; null: as its parent",
    )
    budget_share: Number = Field(
        default=0.25,
        gt=0,
        le=1,
        description="of what its parent has left when it is started; its agent's own budget holds as well",
    )


SUBAGENT_TOOLS = ("spawn_agents", "subagents")
"""The tools that an agent with subagents has beside its own."""
SKILL_TOOL = "load_skill"
"""The tool that an agent with skills has beside its own."""
BUILT_IN = frozenset(("shell", "apply_patch", "fetch_file", SKILL_TOOL, *SUBAGENT_TOOLS))
"""The names of Caisson's own tools, which no activity tool can have."""


def _twice(names: Iterable[str]) -> list[str]:
    return sorted(name for name, times in Counter(names).items() if times > 1)


class SubagentLimits(Contract):
    """How far an agent may go with subagents."""

    depth: Whole = Field(default=1, ge=0, le=5, description="levels below the first run; 1: subagents start none themselves")
    total: Whole = Field(default=50, ge=0, le=1000, description="subagents in one run, those below them counted as well")
    parallel: Whole = Field(default=10, ge=1, le=100, description="that are going on at one time")


class AgentSpec(Contract):
    """One agent. Everything has a default, so that `{}` is an agent with a shell and apply_patch."""

    name: AgentName = "default"
    description: str = ""
    model: str | None = Field(default=None, min_length=1, description="null means the worker's default model")
    model_settings: ModelSettings = ModelSettings()
    instructions: str = Field(default="", max_length=MAX_INSTRUCTIONS)
    tools: tuple[ToolSpec, ...] = (ShellTool(), ApplyPatchTool())
    mcp_servers: tuple[McpServer, ...] = Field(
        default=(), max_length=MAX_SERVERS, description="MCP servers whose tools the agent has beside its own"
    )
    skills: tuple[WorkspacePath, ...] = Field(
        default=(),
        max_length=20,
        description="directories of the workspace that the manifest fills, in which skills lie: directories with a SKILL.md. "
        "Of two skills with one name that of the earlier directory counts",
    )
    agents_md: bool = Field(default=True, description="give the model the AGENTS.md files that the manifest brings")
    manifest: Manifest = Manifest()
    sandbox: SandboxSpec = SandboxSpec()
    approvals: ApprovalPolicy = ApprovalPolicy()
    budget: Budget = Budget()
    output_schema: dict[str, JsonValue] | None = None
    subagents: tuple[SubagentRole, ...] = Field(default=(), max_length=20)
    subagent_limits: SubagentLimits = SubagentLimits()

    @model_validator(mode="after")
    def _role_names_differ(self) -> AgentSpec:
        if twice := _twice(role.name for role in self.subagents):
            raise ValueError(f"subagents: the name {twice[0]!r} is used more than once; each role needs its own name")
        return self

    @model_validator(mode="after")
    def _skill_directories_differ(self) -> AgentSpec:
        if twice := _twice(self.skills):
            raise ValueError(f"skills: the directory {twice[0]!r} is named more than once; name it once")
        return self

    @model_validator(mode="after")
    def _server_names_differ(self) -> AgentSpec:
        if twice := _twice(use.name for use in self.mcp_servers):
            raise ValueError(f"mcp_servers: the name {twice[0]!r} is used more than once; name each server once")
        return self

    @model_validator(mode="after")
    def _tool_names_differ(self) -> AgentSpec:
        own = [*(SUBAGENT_TOOLS if self.subagents else ()), *((SKILL_TOOL,) if self.skills else ())]
        names = [*(tool_name(tool) for tool in self.tools), *own]
        if twice := _twice(names):
            raise ValueError(f"tools: the name {twice[0]!r} is used more than once; each tool needs its own name")
        if taken := sorted(tool.name for tool in self.tools if isinstance(tool, ActivityTool) and tool.name in BUILT_IN):
            raise ValueError(f"tools: {taken[0]!r} is the name of one of Caisson's own tools; give the activity tool another")
        servers = {use.name for use in self.mcp_servers}
        if clash := sorted(name for name in names if server_of(name) in servers):
            raise ValueError(
                f"tools: the name {clash[0]!r} could be that of a tool of the MCP server {server_of(clash[0])!r}; "
                f"take one that does not begin with {server_of(clash[0])}{BETWEEN}"
            )
        # Which tools a server has is only known once it was asked.
        unknown = sorted(name for name in set(self.approvals.tools) - set(names) if server_of(name) not in servers)
        if unknown:
            raise ValueError(f"approvals.tools: no tool is named {unknown[0]!r}; the agent has {', '.join(names) or 'none'}")
        return self

    @model_validator(mode="after")
    def _rules_fit_the_tools(self) -> AgentSpec:
        names = [tool_name(tool) for tool in self.tools]
        servers = {use.name for use in self.mcp_servers}
        for number, rule in enumerate(self.approvals.rules):
            where = f"approvals.rules.{number}"
            if server_of(rule.about) in servers:
                continue
            if rule.about not in names:
                raise ValueError(
                    f"{where}: no tool is named {rule.about!r}; the agent has {', '.join(names) or 'none'}. "
                    "Correct the name, or remove the rule"
                )
        return self


def _name_or_spec(value: Any) -> str:
    return "(spec)" if isinstance(value, (dict, AgentSpec)) else "(name)"


AgentChoice = Annotated[Annotated[AgentName, Tag("(name)")] | Annotated[AgentSpec, Tag("(spec)")], Discriminator(_name_or_spec)]
"""The name of an agent in the workers' agent directory, or a whole spec."""

SubagentRole.model_rebuild()
AgentSpec.model_rebuild()
