"""The activities of the baselines."""

from __future__ import annotations

import base64
import os

from temporalio import activity


@activity.defn
async def hop_model(n: int) -> int:
    """Do nothing, where a model call would be."""
    return n


@activity.defn
async def hop_host(n: int) -> int:
    """Do nothing, where a command would be."""
    return n


@activity.defn
async def answer(conversation: list[dict[str, str]]) -> dict[str, str]:
    """Answer as a model would that calls a tool."""
    turn = len(conversation)
    return {"type": "function_call", "call_id": f"call_{turn}", "name": "shell", "arguments": '{"command": "..."}'}


@activity.defn
async def produce(n: int, size: int) -> str:
    """Return `size` characters that hardly compress, different each time."""
    return base64.b64encode(os.urandom(size)).decode()[:size]
