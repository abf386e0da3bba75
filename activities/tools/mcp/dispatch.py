"""The SDK's client session, asked for what Caisson asks. Imported only where a session is opened: it takes half a second."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from mcp import ClientSession, MCPError
from mcp.shared.dispatcher import CallOptions
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    METHOD_NOT_FOUND,
    UNSUPPORTED_PROTOCOL_VERSION,
    CallToolRequest,
    CallToolRequestParams,
    Implementation,
    PaginatedRequestParams,
    RequestId,
)
from pydantic import BaseModel

from activities.tools.mcp.flight import ServerFailed
from activities.tools.mcp.offer import Said
from activities.tools.mcp.results import Given, given_by

_NAME = "caisson"

# The SDK logs what it cannot read, with all that stands in it. What becomes of a request is told to who made it.
for _logger in ("mcp", "client"):
    logging.getLogger(_logger).setLevel(logging.CRITICAL + 1)


class _Result(BaseModel):
    """A result that passes the SDK by."""

    as_it_came: dict[str, Any]


class Dispatcher(JSONRPCDispatcher[TransportContext]):
    """The SDK's, but for tools and results, which it takes whole or not at all: one bad part must not cost the others."""

    tools: Any = ()

    async def send_raw_request(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        opts: CallOptions | None = None,
        *,
        _related_request_id: RequestId | None = None,
    ) -> dict[str, Any]:
        raw = await super().send_raw_request(method, params, opts, _related_request_id=_related_request_id)
        if method == "tools/list":
            self.tools = raw.get("tools")
            raw = {**raw, "tools": []}
        elif method == "tools/call":
            raw = {"content": [], "resultType": "complete", "as_it_came": raw}
        return raw


@contextlib.asynccontextmanager
async def open_session(reading: Any, writing: Any, seconds: float) -> AsyncIterator[tuple[ClientSession, Dispatcher]]:
    """Shake hands with a server. It is offered nothing: no sampling, no elicitation, no roots; what it asks for is refused."""
    dispatcher = Dispatcher(reading, writing)
    info = Implementation(name=_NAME, version=importlib.metadata.version(_NAME))
    async with ClientSession(dispatcher=dispatcher, client_info=info) as session:
        async with asyncio.timeout(seconds):
            try:
                await session.initialize()
            except MCPError as error:
                # Servers of the newest protocol alone have no handshake. They are asked second, since some old ones end at a
                # question that they do not know.
                if error.code not in (METHOD_NOT_FOUND, UNSUPPORTED_PROTOCOL_VERSION):
                    raise
                await session.discover()
        yield session, dispatcher


async def list_page(
    session: ClientSession, dispatcher: Dispatcher, cursor: str | None, seconds: float
) -> tuple[list[Said], str | None]:
    """Return a page of the server's tools, and where the next begins."""
    params = PaginatedRequestParams(cursor=cursor) if cursor is not None else None
    async with asyncio.timeout(seconds):
        page = await session.list_tools(params=params)
    tools = dispatcher.tools
    if not isinstance(tools, list):
        raise ServerFailed("its list of tools is no list", is_unsent=True)
    return [_said(tool) for tool in tools if isinstance(tool, dict)], page.next_cursor


def _said(tool: dict[str, Any]) -> Said:
    name, description, hints = tool.get("name"), tool.get("description"), tool.get("annotations")
    hints = hints if isinstance(hints, dict) else {}
    return Said(
        name=name if isinstance(name, str) else "",
        description=description if isinstance(description, str) else "",
        schema=tool.get("inputSchema"),
        read_only=hints.get("readOnlyHint") is True,
        idempotent=hints.get("idempotentHint") is True,
    )


async def call(session: ClientSession, tool: str, arguments: dict[str, Any], seconds: float) -> Given:
    """Call a tool. Raises ValueError for a result that is none of the protocol."""
    request = CallToolRequest(params=CallToolRequestParams(name=tool, arguments=arguments))
    raw = (await session.send_request(request, _Result, request_read_timeout_seconds=seconds)).as_it_came
    if raw.get("resultType") == "input_required" or "inputRequests" in raw:
        raise ServerFailed("it asks for input of a person, which Caisson does not offer to servers")
    return given_by(raw)
