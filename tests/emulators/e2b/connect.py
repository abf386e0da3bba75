"""The Connect protocol as envd speaks it to the SDK: JSON, unary calls and server streams (https://connectrpc.com/docs/protocol)."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web

from tests.emulators.e2b.control import Box
from tests.emulators.e2b.faults import CUT, drop

_HTTP = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "failed_precondition": 400,
    "resource_exhausted": 429,
    "unimplemented": 501,
    "internal": 500,
}
_END = 2


class RpcError(Exception):
    """A call that failed, with its Connect code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def shown(self) -> dict[str, str]:
        """Return it as the protocol has it."""
        return {"code": self.code, "message": str(self)}


Unary = Callable[[Box, dict[str, Any], web.Request], Awaitable[dict[str, Any]]]
Streaming = Callable[[Box, dict[str, Any], web.Request], AsyncIterator[dict[str, Any]]]


def user_of(request: web.Request) -> str:
    """Return the user that a call is for: the name of its Basic authorization, or the template's default."""
    kind, _, value = request.headers.get("Authorization", "").partition(" ")
    name = base64.b64decode(value).decode().partition(":")[0] if kind == "Basic" else "user"
    if name not in ("root", "user"):
        raise RpcError("unauthenticated", f"invalid username: '{name}'")
    return name


def enveloped(message: dict[str, Any], flags: int = 0) -> bytes:
    """Return one message of a stream."""
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def messages(data: bytes) -> list[dict[str, Any]]:
    """Return the messages of a stream that is here as a whole."""
    found = []
    while data:
        _, length = struct.unpack(">BI", data[:5])
        found.append(json.loads(data[5 : 5 + length] or b"{}"))
        data = data[5 + length :]
    return found


async def answer_unary(box: Box, request: web.Request, method: Unary) -> web.StreamResponse:
    """Answer a call with one message."""
    try:
        return web.json_response(await method(box, json.loads(await request.read() or b"{}"), request))
    except RpcError as error:
        return web.json_response(error.shown(), status=_HTTP[error.code])


async def answer_stream(box: Box, request: web.Request, method: Streaming) -> web.StreamResponse:
    """Answer a call with a stream of messages, whose last says how it ended."""
    (asked,) = messages(await request.read())
    response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
    await response.prepare(request)
    last: dict[str, Any] = {}
    sent = 0
    try:
        async for message in method(box, asked, request):
            if sent == request.get(CUT):
                drop(request)
                return response
            await response.write(enveloped(message))
            sent += 1
    except RpcError as error:
        last = {"error": error.shown()}
    except ConnectionError:
        return response  # the client went away, which ends nothing in the sandbox
    await response.write(enveloped(last, _END))
    return response
