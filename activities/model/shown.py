"""Foreign text in messages."""

from __future__ import annotations


def shortened(text: str, limit: int) -> str:
    """Return `text`, cut to so many characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
