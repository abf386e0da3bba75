"""Tools of MCP servers: which of them an agent uses, what was found there, and calling one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from contracts.base import Contract
from contracts.blob import BlobRef, Text
from contracts.model import ToolCall

BETWEEN = "__"
"""What stands between a server's name and its tool's in the name that the model calls. No server's name holds it."""

McpServerName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]
McpWholeServer = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}__\*$")]
"""All tools of a server, in an approval policy."""

MAX_SERVERS = 20
CALL_SECONDS = 60.0


def server_of(name: str) -> str:
    """Return the server that a tool's name for the model says it is of; empty for other tools."""
    server, between, _ = name.partition(BETWEEN)
    return server if between else ""


def all_of(name: str) -> str:
    """Return how an approval policy spells all tools of the server that a tool is of."""
    return f"{server_of(name)}{BETWEEN}*"


class McpUse(Contract):
    """An MCP server that an agent uses. Where it is and what secrets it is given says the operator's file alone."""

    name: McpServerName
    tools: tuple[Annotated[str, Field(min_length=1, max_length=128)], ...] = Field(
        default=(),
        max_length=200,
        description="globs of the names that its tools have there; none: all that the operator lets agents use",
    )


class McpTool(Contract):
    """A tool of an MCP server, as it was when the run began. The hints are what the server says of it."""

    server: McpServerName
    tool: str = Field(description="its name there")
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$", description="its name for the model")
    description: str
    parameters: dict[str, JsonValue]
    read_only: bool = False
    idempotent: bool = False


class ListMcpToolsInput(Contract):
    """Find out what tools the servers of an agent have."""

    run_id: str
    agent: BlobRef


class ListMcpToolsResult(Contract):
    """The agent with these tools, the seconds that a call of each server may take, and what the model is told of servers."""

    agent: BlobRef
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()


class CallMcpToolInput(Contract):
    """One call of a server's tool. `job_id` makes a retry find what was already begun."""

    run_id: str
    step: int
    job_id: str
    agent: BlobRef
    call: ToolCall


class CallMcpToolResult(Contract):
    """The tool's output for the model. Whatever fails, the server too, is an output."""

    output: Text
    summary: str
    failed: bool = False
