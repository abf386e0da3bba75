"""From what a tool gave to text for the model. The content is of the SDK's types, read by their fields alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from activities.governance.redaction import Redactor
from activities.tools.mcp.text import MAX_OUTPUT, plain, shown
from contracts.blob import preview_of


def render(content: Iterable[Any], structured: Any, hide: Redactor) -> str:
    """Return a result as text: its texts, or its structured content when it has none; a line for whatever else it holds."""
    texts: list[str] = []
    lines: list[str] = []
    for part in content:
        if part.type == "text":
            texts.append(part.text)
        else:
            lines.append(_line(part))
    if not any(text.strip() for text in texts) and structured is not None:
        texts = [json.dumps(structured, ensure_ascii=False)]
    # Secrets first: what is cut in two is not found any more.
    text = hide(shown("\n".join([*texts, *lines])))
    return preview_of(text, MAX_OUTPUT) if text.strip() else "(no output)"


def _line(part: Any) -> str:
    match part.type:
        case "image" | "audio":
            return f"[{part.type} {plain(part.mime_type, 100)}, {len(part.data) * 3 // 4} bytes: not shown]"
        case "resource":
            inner = part.resource
            size = len(inner.text.encode("utf-8", "replace")) if hasattr(inner, "text") else len(inner.blob) * 3 // 4
            kind = plain(inner.mime_type or "of unknown type", 100)
            return f"[resource {plain(str(inner.uri), 200)} {kind}, {size} bytes: not shown]"
        case "resource_link":
            return f"[link to resource {plain(str(part.uri), 200)}: not followed]"
    return f"[{plain(str(part.type), 40)}: not shown]"
