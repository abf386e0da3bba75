"""Checking the MCP servers that this machine's settings name: whether the file can be used, and whether each server answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from activities.governance.secrets import Secrets
from activities.tools.mcp.flight import ServerFailed
from activities.tools.mcp.servers import McpServers
from activities.tools.mcp.sessions import SessionPool
from client.finding import Finding, State
from contracts.base import BadInput
from workers.settings import Settings, bare_environment


async def check_mcp(settings: Settings) -> AsyncIterator[Finding]:
    """Ask each server for its tools. Nothing where CAISSON_MCP is not set, as it is for the tools worker alone."""
    if settings.mcp is None:
        return
    servers, pool = McpServers(settings.mcp, Secrets(settings.secrets), bare_environment()), SessionPool()
    try:
        names = servers.names()
        if not names:
            yield Finding("MCP servers", State.WARN, f"{settings.mcp} names none", "add one (docs/mcp.md), or unset CAISSON_MCP")
        for finding in await asyncio.gather(*(_check(servers, pool, name) for name in names)):
            yield finding
    except BadInput as error:
        yield Finding("MCP servers", State.FAIL, str(error), f"correct {settings.mcp}")
    finally:
        await pool.close()


async def _check(servers: McpServers, pool: SessionPool, name: str) -> Finding:
    check = f"MCP server {name}"
    try:
        tools = await pool.session("doctor", servers.connection(name)).list_tools()
    except BadInput as error:
        return Finding(check, State.FAIL, str(error), "do what the message says")
    except ServerFailed as error:
        return Finding(check, State.WARN, str(error), "runs go on without its tools; see the server's own log")
    return Finding(check, State.OK, f"answers, with {len(tools)} tools")
