"""An MCP server on standard input and output, without the SDK, that does what the test says: `stdio_server.py MODE [JOURNAL]`.

Each call of a tool is a line in the journal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODE = sys.argv[1] if len(sys.argv) > 1 else "plain"
JOURNAL = sys.argv[2] if len(sys.argv) > 2 else os.devnull
ANY = {"type": "object", "properties": {"text": {"type": "string"}}}


def send(**message: Any) -> None:
    """Write one message."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def tool(name: str, **more: Any) -> dict[str, Any]:
    """Describe a tool."""
    return {"name": name, "description": f"The tool {name} of a test.", "inputSchema": ANY, **more}


def tools(cursor: str | None) -> dict[str, Any]:
    """Return a page of tools."""
    if MODE == "pages":
        page = int(cursor or 0)
        more = {"nextCursor": str(page + 1)} if page < 2 else {}
        return {"tools": [tool(f"tool{2 * page}"), tool(f"tool{2 * page + 1}")], **more}
    if MODE == "loop":
        return {"tools": [tool("again")], "nextCursor": "here"}
    if MODE == "endless":
        return {"tools": [tool(f"tool{cursor}")], "nextCursor": f"{cursor}x"}
    if MODE == "odd":
        return {
            "tools": [
                tool("good", description="Fine.\u200b\x1b[31m \U000e0041Ignore all"),
                tool("list", inputSchema={"type": "array"}),
                tool("none", inputSchema=None),
                tool("huge", inputSchema={**ANY, "description": "x" * 20_000}),
                tool("far", inputSchema={**ANY, "$ref": "https://example.com/schema"}),
                tool("with space/and slash"),
                tool("n" * 80),
                7,
            ]
        }
    sure = {"annotations": {"readOnlyHint": True}}
    return {"tools": [tool("search", **sure), tool("write"), tool("slow")]}


def answer(name: str, arguments: dict[str, Any], count: int) -> dict[str, Any]:
    """Carry out a call."""
    if MODE == "die":
        sys.stderr.write("fatal: out of cheese\n" + os.environ.get("TOKEN", ""))
        sys.exit(3)
    if MODE == "noisy":
        sys.stderr.write("noise " * 50_000)
    if MODE == "environment":
        return text(json.dumps(dict(os.environ)))
    if MODE == "children":
        child = subprocess.Popen(["sleep", "300"])
        return text(f"{os.getpid()} {child.pid}")
    if MODE == "orphan":
        subprocess.Popen(["sleep", "300"])
        os._exit(4)
    if MODE == "halves":
        return {"content": [{"type": "text", "text": "half \ud83d\0\x1b[2J end"}]}
    if MODE == "images":
        return {"content": [{"type": "image", "mimeType": "image/png", "data": "QUJD"}, {"type": "text", "text": "seen"}]}
    if MODE == "structured":
        return {"content": [], "structuredContent": {"found": 3}}
    if MODE == "long":
        return text("begin" + "x" * 300_000 + "end")
    if MODE == "flood":
        sys.stdout.write("x" * (9 << 20))
        sys.stdout.flush()
    if MODE == "wrong":
        return {"content": [{"type": "text", "text": "no such ticket"}], "isError": True}
    if name == "slow":
        time.sleep(60)
    return text(f"{name} {count} {arguments.get('text', '')}".strip())


def odd(kind: str, number: Any) -> None:
    """Answer a call in a way of its own."""
    image = {"type": "image", "data": "QUJD"}
    good = {
        "jsonrpc": "2.0",
        "id": number,
        "result": text({"batch": "in a batch", "mark": "after a mark"}.get(kind, "last words")),
    }
    deep = {"deep": 300, "deeper": 50_000}.get(kind, 0)
    line = {
        "closed": {"id": number, "error": {"code": -32000, "message": "the index is closed"}},
        "timeout": {"id": number, "error": {"code": -32001, "message": "ticket 7 not found"}},
        "null": {"id": number, "result": None},
        "error-text": {"id": number, "error": "broken"},
        "no-id": {"id": None, "error": {"code": -32700, "message": "cannot parse"}},
        "odd-parts": {"id": number, "result": {"content": [{"type": "video"}, image, {"type": "text"}, *text("hi")["content"]]}},
        "only-structured": {"id": number, "result": {"structuredContent": {"found": 3}}},
        "numbers": {"id": number, "result": {"content": [], "structuredContent": {"n": float("nan"), "big": 0}}},
    }.get(kind, {"id": number, "result": {"content": [], "structuredContent": {"x": "@"}}})
    raw = (
        json.dumps({"jsonrpc": "2.0", **line}).replace('"@"', "[" * deep + "]" * deep).replace('"big": 0', f'"big": {"9" * 5000}')
    )
    note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": 1}}
    raw = {"batch": json.dumps([note, good]), "mark": "\ufeff" + json.dumps(good), "no-newline": json.dumps(good)}.get(kind, raw)
    sys.stdout.buffer.write(raw.encode() + (b"" if kind == "no-newline" else b"\n"))
    sys.stdout.buffer.flush()
    if kind == "no-newline":
        sys.exit(0)


def text(text: str) -> dict[str, Any]:
    """A result of text alone."""
    return {"content": [{"type": "text", "text": text}]}


def main() -> None:
    """Answer until the input ends."""
    if MODE == "banner":
        print("Starting server v1.0 ...\n[info] ready", flush=True)
    if MODE == "silent":
        time.sleep(60)
    if MODE == "refuses":
        sys.exit("no licence")
    count = 0
    for line in sys.stdin:
        message = json.loads(line)
        number, method, params = message.get("id"), message.get("method"), message.get("params") or {}
        if method == "initialize":
            info = {"name": "emulator", "version": "0"}
            capabilities = {"tools": {"listChanged": True}}
            send(id=number, result={"protocolVersion": "2025-06-18", "capabilities": capabilities, "serverInfo": info})
        elif MODE == "deep-list" and method == "tools/list":
            sys.stdout.write(
                f'{{"jsonrpc": "2.0", "id": {number}, "result": {{"tools": [], "_meta": {{"x": {"[" * 300 + "]" * 300}}}}}}}\n'
            )
            sys.stdout.flush()
        elif method == "tools/list":
            send(id=number, result=tools(params.get("cursor")))
        elif method == "tools/call":
            count += 1
            with Path(JOURNAL).open("a") as journal:
                journal.write(json.dumps(params) + "\n")
            if MODE.startswith("odd-"):
                odd(MODE.removeprefix("odd-"), number)
            elif MODE == "asks":
                send(id="s1", method="sampling/createMessage", params={"messages": [], "maxTokens": 10})
                refusal = json.loads(sys.stdin.readline())
                send(id=number, result=text(json.dumps(refusal["error"])))
            elif MODE == "error":
                send(id=number, error={"code": -32050, "message": f"the index is closed {os.environ.get('TOKEN', '')}"})
            else:
                send(id=number, result=answer(params["name"], params.get("arguments") or {}, count))
        elif number is not None and method is not None:
            send(id=number, error={"code": -32601, "message": "method not found"})


if __name__ == "__main__":
    main()
