"""From what a tool gave to text for the model. Each part of it stands for itself: one that is none costs no other."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from activities.governance.redaction import Redactor
from activities.model.calls import deeper
from activities.tools.mcp.text import MAX_OUTPUT, plain, shown
from contracts.blob import preview_of

MAX_NESTING = 180
"""Levels of a result."""


@dataclass(frozen=True)
class Given:
    """What a call gave: the parts of its content, not yet looked at."""

    content: tuple[Any, ...]
    structured: Any = None
    is_error: bool = False


def given_by(raw: dict[str, Any]) -> Given:
    """Read a result as it came. Raises ValueError for one that is none of the protocol."""
    content, structured, is_error = raw.get("content"), raw.get("structuredContent"), raw.get("isError")
    if content is None and structured is not None:
        content = []
    if not isinstance(content, list) or deeper(raw, MAX_NESTING):
        raise ValueError("no result of a tool")
    return Given(tuple(content), structured, bool(is_error) and is_error != "false")


def render(content: Iterable[Any], structured: Any, hide: Redactor) -> str:
    """Return a result as text: its texts, or its structured content when it has none; a line for whatever else it holds."""
    texts: list[str] = []
    lines: list[str] = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            lines.append(f"[{_line(part if isinstance(part, dict) else {}, hide)}]")
    if not any(text.strip() for text in texts) and structured is not None:
        texts = [json.dumps(structured, ensure_ascii=False)]
    # Secrets first: what is cut in two is not found any more.
    text = hide(shown("\n".join([*texts, *lines])))
    return preview_of(text, MAX_OUTPUT) if text.strip() else "(no output)"


def _line(part: dict[str, Any], hide: Redactor) -> str:
    kind, inner = part.get("type"), part.get("resource")

    def said(value: Any, limit: int, else_: str) -> str:
        if not isinstance(value, str):
            return else_
        # What is not cut is looked through with the rest.
        return plain(value if len(value) <= limit else hide(value), limit) or else_

    match kind:
        case "image" | "audio":
            return f"{kind} {said(part.get('mimeType'), 100, 'of unknown type')}{_size(part.get('data'))}: not shown"
        case "resource" if isinstance(inner, dict):
            text = inner.get("text")
            size = f", {len(text.encode('utf-8', 'replace'))} bytes" if isinstance(text, str) else _size(inner.get("blob"))
            of_kind = said(inner.get("mimeType"), 100, "of unknown type")
            return f"resource {said(inner.get('uri'), 200, 'without an address')} {of_kind}{size}: not shown"
        case "resource_link":
            return f"link to resource {said(part.get('uri'), 200, 'without an address')}: not followed"
    return f"{said(kind, 40, 'a part of unknown type')}: not shown"


def _size(encoded: Any) -> str:
    return f", {len(encoded) * 3 // 4} bytes" if isinstance(encoded, str) else ""
