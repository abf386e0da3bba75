"""The emulator's process service: envd's `process.Process`, as its proto in the SDK and its source in e2b-dev/infra have it."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from tests.emulators.e2b.backing import HOMES, Process
from tests.emulators.e2b.connect import RpcError, Streaming, Unary, messages, user_of
from tests.emulators.e2b.control import Box


def _event(event: dict[str, Any]) -> dict[str, Any]:
    if "data" in event:
        event = {"data": {name: base64.b64encode(value).decode() for name, value in event["data"].items()}}
    return {"event": event}


def _selected(box: Box, asked: dict[str, Any]) -> Process:
    wanted = asked.get("process", {})
    for process in box.backing.processes.values():
        if process.pid == wanted.get("pid") or (process.tag is not None and process.tag == wanted.get("tag")):
            return process
    raise RpcError("not_found", f"process with {wanted} not found")


async def _events(process: Process, queue: asyncio.Queue[dict[str, Any]], request: web.Request) -> AsyncIterator[dict[str, Any]]:
    """Give what a process says until it ends, with a sign of life now and then, as the client asks."""
    every = float(request.headers.get("Keepalive-Ping-Interval", 90))
    try:
        yield _event({"start": {"pid": process.pid}})
        while True:
            try:
                event = await asyncio.wait_for(queue.get(), every)
            except TimeoutError:
                event = {"keepalive": {}}
            yield _event(event)
            if "end" in event:
                return
    finally:
        process.subscribers.remove(queue)


async def start(box: Box, asked: dict[str, Any], request: web.Request) -> AsyncIterator[dict[str, Any]]:
    """Start a process. Only its deadline, that of the call, ends it early, and no client that goes away."""
    user = user_of(request)
    config = asked["process"]
    size = asked.get("pty", {}).get("size")
    base = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": HOMES[user], "USER": user, "LOGNAME": user}
    cwd = config.get("cwd") or HOMES[user]
    if cwd != "/" and (await box.backing.do('test -d "$1"', cwd))[0] != 0:
        raise RpcError("invalid_argument", f"cwd '{cwd}' does not exist")
    try:
        process = await box.backing.spawn(
            [config["cmd"], *config.get("args", [])],
            user=user,
            cwd=cwd,
            env={**base, **box.body.get("envVars", {}), **config.get("envs", {})},
            stdin=asked.get("stdin", True),
            size=(size.get("rows", 24), size.get("cols", 80)) if size else None,
            config=config,
            tag=asked.get("tag"),
        )
    except FileNotFoundError as error:
        raise RpcError("invalid_argument", f"error starting process '{config['cmd']}': {error}") from error
    queue = process.listen()
    deadline = request.headers.get("Connect-Timeout-Ms")
    if deadline is not None:
        box.backing.go(_end_at(box, process, int(deadline) / 1000))
    async for event in _events(process, queue, request):
        yield event


async def _end_at(box: Box, process: Process, seconds: float) -> None:
    ended = process.listen()
    try:
        async with asyncio.timeout(seconds):
            while "end" not in await ended.get():
                pass
    except TimeoutError:
        await box.backing.send_signal(process.pid, "KILL")
    finally:
        process.subscribers.remove(ended)


async def connect(box: Box, asked: dict[str, Any], request: web.Request) -> AsyncIterator[dict[str, Any]]:
    """Listen to a process that runs: to what it says from now on."""
    process = _selected(box, asked)
    async for event in _events(process, process.listen(), request):
        yield event


async def show(box: Box, asked: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """List the processes that were started here and run."""
    return {
        "processes": [
            {"config": process.config, "pid": process.pid, **({"tag": process.tag} if process.tag else {})}
            for process in box.backing.processes.values()
        ]
    }


async def update(box: Box, asked: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Set the size of a terminal."""
    process = _selected(box, asked)
    if process.terminal is None:
        raise RpcError("internal", "error resizing tty: tty not assigned to process")
    size = asked["pty"]["size"]
    process.resize(size["rows"], size["cols"])
    return {}


async def _put(process: Process, given: dict[str, Any]) -> None:
    if "pty" in given:
        if process.terminal is None:
            raise RpcError("internal", "tty not assigned to process — input should be written to the stdin, not the tty")
        await asyncio.to_thread(os.write, process.terminal, base64.b64decode(given["pty"]))
        return
    if process.terminal is not None:
        raise RpcError("internal", "tty assigned to process — input should be written to the pty, not the stdin")
    if not process.stdin_open or process.inner.stdin is None:
        raise RpcError("internal", "stdin not enabled or closed")
    process.inner.stdin.write(base64.b64decode(given.get("stdin", "")))
    await process.inner.stdin.drain()


async def send_input(box: Box, asked: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Write to a process."""
    await _put(_selected(box, asked), asked["input"])
    return {}


async def stream_input(box: Box, request: web.Request) -> dict[str, Any]:
    """Write to a process in the order of a stream of messages."""
    process: Process | None = None
    for message in messages(await request.read()):
        if "start" in message:
            process = _selected(box, message["start"])
        elif "data" in message and process is not None:
            await _put(process, message["data"]["input"])
    return {}


async def send_signal(box: Box, asked: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Send SIGTERM or SIGKILL to a process."""
    name = {"SIGNAL_SIGKILL": "KILL", "SIGNAL_SIGTERM": "TERM"}.get(asked["signal"])
    if name is None:
        raise RpcError("unimplemented", f"invalid signal: {asked['signal']}")
    await box.backing.send_signal(_selected(box, asked).pid, name)
    return {}


async def close_stdin(box: Box, asked: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Let a process see the end of its input."""
    process = _selected(box, asked)
    if process.terminal is not None:
        raise RpcError("internal", "cannot close stdin for PTY process — send Ctrl+D (0x04) instead")
    if process.inner.stdin is not None:
        process.inner.stdin.close()
    process.stdin_open = False
    return {}


UNARY: dict[str, Unary] = {
    "List": show,
    "Update": update,
    "SendInput": send_input,
    "SendSignal": send_signal,
    "CloseStdin": close_stdin,
}
STREAMING: dict[str, Streaming] = {"Start": start, "Connect": connect}
