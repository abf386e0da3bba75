"""What a server sends, made into messages of the protocol by one rule, whichever way it comes.

The SDK reads a message strictly, tells what is wrong with it in words that quote it, and gives errors of its own the codes that
servers use as well. So each message is read here first, and each error says where it is from.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any

from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, JSONRPCMessage, JSONRPCResponse, RequestId, jsonrpc_message_adapter
from pydantic import ValidationError

from activities.model.calls import deeper
from activities.tools.mcp.flight import NOT_OF_PROTOCOL
from contracts.blob import whole_characters

OF_SERVER = "of the server"
OF_TRANSPORT = "of the transport"
"""What the `data` of an error is replaced by: whether the server said it, or a transport of Caisson's in its own words."""

MAX_NESTING = 180
"""Levels of a message. The parser that the SDK uses refuses some 200."""

_MAX_DIGITS = 300
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_ID = re.compile(r'^\s*\{[^{\[]{0,200}?"id"\s*:\s*(\d{1,15}|"[^"\\]{1,100}")')


def read(data: bytes, asked: Collection[RequestId]) -> list[JSONRPCMessage]:
    """Return the messages in one line or body, which may be an array of them; none for what is no message.

    Of a reply to something `asked` that is none of the protocol comes an error, so that nobody waits for it any longer.
    """
    text = whole_characters(data.decode("utf-8-sig", "replace"))
    try:
        value = json.loads(text, parse_constant=lambda _: None, parse_float=_finite, parse_int=_countable)
        if _HALF.search(text):
            # A half of a surrogate pair that is spelt as \ud800 only shows once it is read.
            value = json.loads(whole_characters(json.dumps(value, ensure_ascii=False)))
    except ValueError:
        return []
    except RecursionError:
        found = _ID.match(text)
        return [fault(json.loads(found[1]), NOT_OF_PROTOCOL)] if found else []
    parts = value if isinstance(value, list) else [value]
    return [message for part in parts if isinstance(part, dict) and (message := _message(part, asked)) is not None]


def _message(part: dict[str, Any], asked: Collection[RequestId]) -> JSONRPCMessage | None:
    try:
        message = jsonrpc_message_adapter.validate_python(part, by_name=False)
    except (ValidationError, RecursionError):
        number = part.get("id")
        if "method" in part or not isinstance(number, (str, int, float)) or isinstance(number, bool):
            return None
        return next((fault(one, NOT_OF_PROTOCOL) for one in asked if number in (one, str(one))), None)
    if isinstance(message, JSONRPCError):
        number = message.id
        if number is None and len(asked) == 1:
            number = next(iter(asked))  # what it could not read can only be that
        return JSONRPCError(jsonrpc="2.0", id=number, error=message.error.model_copy(update={"data": OF_SERVER}))
    return message


def fault(number: RequestId, brief: str) -> JSONRPCError:
    """Return what stands in for a reply that cannot be used, or does not come."""
    return JSONRPCError(jsonrpc="2.0", id=number, error=ErrorData(code=INTERNAL_ERROR, message=brief, data=OF_TRANSPORT))


def reply_to(number: RequestId, data: bytes) -> JSONRPCMessage:
    """Return the reply in the body that answers one request, or what stands in for it."""
    for message in read(data, [number]):
        if isinstance(message, JSONRPCError):
            # Servers that have read no further than the headers cannot know the id, and some make one up.
            return message.model_copy(update={"id": number})
        if isinstance(message, JSONRPCResponse) and str(message.id) == str(number):
            return fit(message)
    return fault(number, NOT_OF_PROTOCOL)


def fit(message: JSONRPCMessage) -> JSONRPCMessage:
    """Return a reply that can be written down and read once more, or what stands in for it."""
    if isinstance(message, JSONRPCResponse) and deeper(message.result, MAX_NESTING):
        return fault(message.id, NOT_OF_PROTOCOL)
    return message


def written(message: JSONRPCMessage) -> bytes:
    """Return a message as JSON."""
    return message.model_dump_json(by_alias=True, exclude_unset=True).encode()


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


def _countable(digits: str) -> int | None:
    return int(digits) if len(digits) <= _MAX_DIGITS else None
