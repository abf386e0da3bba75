"""Faults that a test can ask the emulator for, over HTTP.

POST   /_emulator/faults             one fault, as JSON: {"match": regular expression over "METHOD /path", "times": 1, and one of
    "status": 429, "headers": {}, "body": {}      answer this instead
    "delay": 1.5                                  wait so many seconds first
    "drop": "before" | "after"                    close the connection, before or after the request was carried out
    "cut": 2                                      close the connection after so many messages, or pieces of a file}
DELETE /_emulator/faults             forget all faults
POST   /_emulator/sandboxes/ID/kill  end a sandbox from outside
POST   /_emulator/sandboxes/ID/expire   let its time be over
GET    /_emulator/requests           what was asked so far: ["METHOD /path", ...]
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CUT = web.RequestKey("cut", int)


@dataclass
class Faults:
    """The faults that are still to come, and the requests so far."""

    waiting: list[dict[str, Any]] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    asked_of: list[str] = field(default_factory=list)
    """The sandbox that each request to a sandbox was for."""

    def take(self, request: str) -> dict[str, Any]:
        """Return the first fault for a request, if any, and count it down."""
        for fault in self.waiting:
            if re.search(fault["match"], request):
                fault["times"] = fault.get("times", 1) - 1
                if fault["times"] <= 0:
                    self.waiting.remove(fault)
                return fault
        return {}


def drop(request: web.Request) -> None:
    """Close the connection of a request, now."""
    if request.transport is not None:
        request.transport.abort()


def middleware(faults: Faults) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Return the middleware that makes faults."""

    @web.middleware
    async def make(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        if request.path.startswith("/_emulator/"):
            return await handler(request)
        line = f"{request.method} {request.path}"
        faults.requests.append(line)
        if (sandbox := request.headers.get("E2b-Sandbox-Id") or request.match_info.get("id")) is not None:
            faults.asked_of.append(sandbox)
        fault = faults.take(line)
        if "delay" in fault:
            await asyncio.sleep(fault["delay"])
        if fault.get("drop") == "before":
            drop(request)
            return web.Response()
        if "status" in fault:
            return web.json_response(fault.get("body"), status=fault["status"], headers=fault.get("headers"))
        if "cut" in fault:
            request[CUT] = fault["cut"]
        response = await handler(request)
        if fault.get("drop") == "after":
            drop(request)
        return response

    return make


def routes(faults: Faults) -> web.RouteTableDef:
    """Return the part of `/_emulator/` that needs no sandboxes."""
    table = web.RouteTableDef()

    @table.post("/_emulator/faults")
    async def add(request: web.Request) -> web.Response:
        faults.waiting.append(await request.json())
        return web.Response(status=204)

    @table.delete("/_emulator/faults")
    async def forget(request: web.Request) -> web.Response:
        faults.waiting.clear()
        return web.Response(status=204)

    @table.get("/_emulator/requests")
    async def tell(request: web.Request) -> web.Response:
        return web.json_response(faults.requests)

    return table
