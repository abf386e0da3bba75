"""Text of MCP servers, which is hostile: a model, people and logs are shown it, and it must do no more than be read there."""

from __future__ import annotations

import unicodedata

from contracts.blob import whole_characters

MAX_OUTPUT = 128 * 1024
"""Characters of a tool's output that the model is given."""

_NUL = "\u2400"


def shown(text: str) -> str:
    """Return a tool's output without characters that steer terminals; NUL becomes U+2400, as in the output of commands."""
    text = whole_characters(text).replace("\r\n", "\n").replace("\0", _NUL)
    if text.isprintable():
        return text
    return "".join(char for char in text if char in "\n\t" or unicodedata.category(char) != "Cc")


def plain(text: str, limit: int) -> str:
    """Return what describes something: also without characters that nobody sees, in which orders to a model can be hidden."""
    text = whole_characters(text[: limit * 4])
    text = "".join(char for char in text if char in "\n\t" or unicodedata.category(char)[0] != "C").strip()
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."
