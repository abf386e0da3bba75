"""An operator's file of MCP servers for tests, and the activities on it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from temporalio.testing import ActivityEnvironment

from activities.governance.secrets import Secrets
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.tools.mcp.activity import McpActivities
from activities.tools.mcp.servers import McpServers
from activities.tools.mcp.sessions import SessionPool
from contracts.agent import AgentSpec
from contracts.blob import BlobRef
from contracts.mcp import CallMcpToolInput, CallMcpToolResult, ListMcpToolsInput, ListMcpToolsResult
from contracts.model import ToolCall
from contracts.prepare import ResolvedAgent

STDIO = Path(__file__).parent / "emulators/mcp/stdio_server.py"


def program(mode: str, journal: Path | None = None, **more: Any) -> dict[str, Any]:
    """Describe a server on standard input and output that behaves as `mode` says."""
    return {"command": [sys.executable, str(STDIO), mode, *([str(journal)] if journal else [])], **more}


def write_servers(file: Path, **servers: dict[str, Any]) -> None:
    """Write an operator's file, whole or not at all."""
    fresh = file.with_suffix(".new")
    fresh.write_text(yaml.safe_dump({"servers": servers}))
    fresh.replace(file)


def calls_of(journal: Path) -> list[dict[str, Any]]:
    """The calls that a server was asked for."""
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


@dataclass
class Bench:
    """The activities of one tools worker."""

    home: Path
    pool: SessionPool = field(default_factory=SessionPool)

    def __post_init__(self) -> None:
        self.blobs = BlobStore(LocalStore(self.home / "store"))
        self.file = self.home / "mcp.yaml"
        (self.home / "secrets").mkdir()
        self.activities = self.another()

    def another(self) -> McpActivities:
        """The activities of a worker that takes over; its sessions are the same ones only because a test needs to close them."""
        servers = McpServers(self.file, Secrets(self.home / "secrets"), {"PATH": os.environ["PATH"]})
        return McpActivities(self.blobs, servers, self.pool)

    def secret(self, name: str, value: str) -> None:
        """Write a secret down."""
        path = self.home / "secrets" / name
        path.write_text(value)
        path.chmod(0o600)

    def servers(self, **servers: dict[str, Any]) -> None:
        """Write the file."""
        write_servers(self.file, **servers)

    async def listed(self, *uses: Any, **spec: Any) -> tuple[ListMcpToolsResult, ResolvedAgent]:
        """List the tools of an agent with these servers."""
        agent = ResolvedAgent(spec=AgentSpec.model_validate({"mcp_servers": uses, **spec}), model="m", instructions="")
        given = ListMcpToolsInput(run_id="run", agent=await self.blobs.put_json(agent.model_dump(mode="json")))
        result: ListMcpToolsResult = await ActivityEnvironment().run(self.activities.list_mcp_tools, given)
        return result, ResolvedAgent.model_validate(json.loads(await self.blobs.get(result.agent)))

    async def call(self, agent: BlobRef, name: str, job: str = "run/1/1/0", **arguments: Any) -> tuple[CallMcpToolResult, str]:
        """Call a tool; return the result, and its output as text."""
        written = await self.blobs.put_text(json.dumps(arguments))
        call = ToolCall(call_id="c", name=name, arguments=written.reference(), arguments_digest="", summary=f"{name}()")
        given = CallMcpToolInput(run_id="run", step=1, job_id=job, agent=agent, call=call)
        result: CallMcpToolResult = await ActivityEnvironment().run(self.activities.call_mcp_tool, given)
        return result, await self.blobs.get_text(result.output)

    async def asked(self, mode: str, tool: str = "search", **arguments: Any) -> tuple[CallMcpToolResult, str]:
        """List the tools of a program that behaves in one way, and call one."""
        self.servers(srv=program(mode, timeout_seconds=2))
        listed, _ = await self.listed("srv")
        return await self.call(listed.agent, f"srv__{tool}", **arguments)
