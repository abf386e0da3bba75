"""The activities around MCP servers: finding out what tools a run has, and calling one. They run in the tools worker alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import cast

import structlog
from pydantic import JsonValue
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.agents import AgentReader
from activities.heartbeat import Beat, beating
from activities.store.blobs import BlobStore
from activities.tools.mcp.flight import ServerFailed
from activities.tools.mcp.offer import Offer, bound_together, choose
from activities.tools.mcp.results import render
from activities.tools.mcp.servers import Connection, McpServers
from activities.tools.mcp.sessions import SessionPool
from contracts.activity_names import CALL_MCP_TOOL, LIST_MCP_TOOLS, ErrorType
from contracts.agent import AgentSpec
from contracts.base import BadInput
from contracts.mcp import (
    CallMcpToolInput,
    CallMcpToolResult,
    ListMcpToolsInput,
    ListMcpToolsResult,
    McpTool,
    McpUse,
    server_of,
)

LIST_DELAYS = (0.5, 2.0)
"""Seconds between tries at a server that is away when a run begins."""

CALL_DELAYS = (0.3, 0.8)
"""The same for a call, as long as nothing has been sent: with a server that is down the model knows within five seconds."""

_MAYBE = "it may or may not have been carried out"
_log = structlog.stdlib.get_logger("caisson.mcp")


class McpActivities:
    """Talks to the servers of the operator's file. Their secrets go nowhere else."""

    def __init__(self, blobs: BlobStore, servers: McpServers, pool: SessionPool) -> None:
        self._blobs = blobs
        self._servers = servers
        self._pool = pool
        self._agents = AgentReader(blobs)

    @activity.defn(name=LIST_MCP_TOOLS.name)
    async def list_mcp_tools(self, given: ListMcpToolsInput) -> ListMcpToolsResult:
        """Return the agent with the tools of its servers. A server that is away costs its tools, and not the run.

        Raises ApplicationError `BadInput` for what the operator's file or the agent has wrong, before a model is asked.
        """
        async with beating() as beat:
            agent = await self._agents.get(given.agent)
            uses = agent.spec.mcp_servers
            try:
                connections = [self._servers.connection(use.name, f"mcp_servers.{n}") for n, use in enumerate(uses)]
                beat.details = {"servers": [use.name for use in uses]}
                found = await asyncio.gather(
                    *(self._offer(given.run_id, use, there) for use, there in zip(uses, connections, strict=True))
                )
                _check_policy(agent.spec, found)
            except BadInput as error:
                raise ApplicationError(str(error), type=ErrorType.BAD_INPUT, non_retryable=True) from None
            offers = [offer for offer in found if isinstance(offer, Offer)]
            tools, notes = bound_together(offers)
            notes += [away for away in found if isinstance(away, str)]
            resolved = agent.model_copy(update={"mcp_tools": tuple(tools)})
            return ListMcpToolsResult(
                agent=await self._blobs.put_json(resolved.model_dump(mode="json")),
                seconds={there.name: there.seconds for there in connections},
                notes=tuple(notes),
            )

    async def _offer(self, run_id: str, use: McpUse, there: Connection) -> Offer | str:
        """Return a server's offer, or what the model is told of a server that has none to make."""
        for delay in (*LIST_DELAYS, None):
            try:
                said = await self._pool.session(run_id, there).list_tools()
            except ServerFailed as failed:
                _log.warning("mcp_server_is_away", server=there.name, error=str(failed), is_tried_again=delay is not None)
                if delay is None:
                    # What the server says itself is no word of the harness's, and stays in the log.
                    return f"MCP server {there.name!r}: {failed.brief}; its tools are missing in this run."
                await asyncio.sleep(delay)
            else:
                offer = choose(use, there.tools, said, there.redactor())
                _log.info("mcp_tools", server=there.name, listed=len(said), given=len(offer.tools), notes=offer.notes)
                return offer
        raise AssertionError  # the last try returns

    @activity.defn(name=CALL_MCP_TOOL.name)
    async def call_mcp_tool(self, given: CallMcpToolInput) -> CallMcpToolResult:
        """Call a tool once. Whatever comes of it is an output; a call that may have been made already is not made again.

        What is recorded under `job_id` is that a call was begun, and later what it gave: so a retry knows which case it is in.
        """
        async with beating() as beat:
            recorded = await self._blobs.get_record(f"mcp-call/{given.job_id}/result")
            if recorded is None:
                result = await self._call(given, beat)
                recorded = await self._blobs.put_record(f"mcp-call/{given.job_id}/result", result.model_dump(mode="json"))
            return CallMcpToolResult.model_validate(recorded)

    async def _call(self, given: CallMcpToolInput, beat: Beat) -> CallMcpToolResult:
        name = given.call.name
        agent = await self._agents.get(given.agent)
        tool = next((one for one in agent.mcp_tools if one.name == name), None)
        if tool is None:
            return await self._told(given, f"MCP server {server_of(name)!r} has no such tool in this run; it was not called")
        try:
            there = self._servers.connection(tool.server)
        except BadInput as error:
            return await self._told(given, f"not called: {error}")
        begun = f"mcp-call/{given.job_id}"
        if not (tool.read_only or tool.idempotent) and await self._blobs.get_record(begun) is not None:
            return await self._told(
                given,
                f"the worker that called it was lost before it answered: {_MAYBE}, and it was not called again. "
                "Find out what became of it before you call it once more",
            )
        beat.details = {"server": tool.server, "tool": tool.name}
        await self._blobs.put_record(begun, {"begun": True})
        arguments = cast("dict[str, JsonValue]", json.loads(await self._blobs.get_text(given.call.arguments)))
        try:
            return await self._answer(given, tool, there, arguments)
        except asyncio.CancelledError:
            # What still goes on at the server is of no use to anybody; a program is ended with it.
            await self._pool.drop(given.run_id, tool.server)
            raise

    async def _answer(
        self, given: CallMcpToolInput, tool: McpTool, there: Connection, arguments: dict[str, JsonValue]
    ) -> CallMcpToolResult:
        for delay in (*CALL_DELAYS, None):
            try:
                result = await self._pool.session(given.run_id, there).call_tool(tool.tool, arguments)
            except ServerFailed as failed:
                _log.warning("mcp_call_failed", server=there.name, tool=tool.name, error=str(failed), is_unsent=failed.is_unsent)
                if not failed.is_unsent or delay is None:
                    became = "nothing was carried out" if failed.is_unsent else _MAYBE
                    said = str(failed).removeprefix(failed.brief)
                    return await self._told(given, f"MCP server {there.name!r}: {failed.brief}; {became}{said}")
                await asyncio.sleep(delay)
            else:
                text = render(result.content, result.structured, there.redactor())
                if result.is_error:
                    return await self._told(given, f"the tool reports an error:\n{text}")
                return CallMcpToolResult(output=await self._blobs.put_text(text), summary=given.call.summary)
        raise AssertionError  # the last try returns

    async def _told(self, given: CallMcpToolInput, fault: str) -> CallMcpToolResult:
        output = await self._blobs.put_text(f"{given.call.name}: {fault}")
        return CallMcpToolResult(output=output, summary=f"{given.call.summary} → failed", failed=True)


def _check_policy(spec: AgentSpec, found: Sequence[Offer | str]) -> None:
    """Refuse a policy that is about a tool which a server does not have: a misspelt name would guard nothing. Raises BadInput."""
    every = {use.name: offer.every for use, offer in zip(spec.mcp_servers, found, strict=True) if isinstance(offer, Offer)}
    places = [(f"approvals.tools.{name}", name) for name in spec.approvals.tools]
    places += [(f"approvals.rules.{n}", rule.about) for n, rule in enumerate(spec.approvals.rules)]
    for place, name in places:
        server = server_of(name)
        if server in every and not name.endswith("*") and name not in every[server]:
            there = ", ".join(sorted(every[server])[:20]) or "none"
            raise BadInput(
                f"{place}: MCP server {server!r} has no tool {name!r}; there are: {there}; correct the name or remove it"
            )
