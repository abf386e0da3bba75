"""Tools of MCP servers, as a run uses them: listed once, before anything else is made, and called like somebody's activities."""

from __future__ import annotations

from collections.abc import Callable

from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

from workflows.activities import call, explain_failure

with workflow.unsafe.imports_passed_through():
    from contracts.activity_names import CALL_MCP_TOOL, LIST_MCP_TOOLS, Queues
    from contracts.blob import Text
    from contracts.carried import CarriedRun
    from contracts.mcp import CALL_SECONDS, CallMcpToolInput, ListMcpToolsInput, server_of
    from contracts.model import NoteItem, ToolCall, ToolOutputItem
    from contracts.prepare import PrepareRunResult

OPENING_SECONDS = 60.0
"""What a call may take beyond its server's own time: connecting, perhaps more than once."""


async def list_tools(run: CarriedRun, run_id: str, show: Callable[[str], object]) -> CarriedRun:
    """Return the run with the tools of its agent's MCP servers, and with what the model must know of servers that are away.

    A run whose agent names none is returned as it is. Raises ActivityError for a server that the operator does not have.
    """
    prepared = run.prepared
    servers = prepared.plan.mcp_servers
    if not servers:
        return run
    show(f"asking MCP servers for their tools: {', '.join(servers)}")
    listed = await call(
        LIST_MCP_TOOLS,
        ListMcpToolsInput(run_id=run_id, agent=prepared.agent),
        queue=_tools_queue(),
        summary=f"list tools of {', '.join(servers)}",
    )
    plan = prepared.plan.model_copy(update={"mcp_servers": listed.seconds})
    notes = [NoteItem(text=Text(inline=note)) for note in listed.notes]
    return run.model_copy(
        update={
            "prepared": prepared.model_copy(update={"agent": listed.agent, "plan": plan}),
            "items": (*run.items, *notes),
        }
    )


async def call_tool(one: ToolCall, prepared: PrepareRunResult, run_id: str, step: int, job_id: str) -> tuple[ToolOutputItem, str]:
    """Return what a call gave, and a line for people. A server's fault is an output, and so is one of the harness around it."""
    given = CallMcpToolInput(
        run_id=run_id,
        step=step,
        job_id=job_id,
        agent=prepared.agent,
        call=one.model_copy(update={"arguments": one.arguments.reference()}),
    )
    seconds = prepared.plan.mcp_servers.get(server_of(one.name), CALL_SECONDS) + OPENING_SECONDS
    try:
        done = await call(CALL_MCP_TOOL, given, queue=_tools_queue(), summary=one.summary, seconds=seconds)
    except ActivityError as error:
        if is_cancelled_exception(error):
            raise
        text = f"{one.name}: failed: {explain_failure(error)[1][:2000]}; it may or may not have been carried out"
        return ToolOutputItem(call_id=one.call_id, output=Text(inline=text)), f"{one.summary} → failed"
    return ToolOutputItem(call_id=one.call_id, output=done.output.reference()), done.summary


def _tools_queue() -> str:
    return Queues(workflow.info().task_queue).tools
