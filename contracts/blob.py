"""Blobs, and text that may live in one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from contracts.base import Contract

INLINE_LIMIT = 4096
"""Bytes of text carried inline in history; anything longer is a blob with a preview, so the Web UI still shows small things."""

PREVIEW_CHARS = 400
"""Characters of a blob's text shown beside its reference."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class BlobRef(Contract):
    """Bytes in the object store, named by their SHA-256."""

    digest: Digest
    size: int = Field(ge=0, description="bytes")


class Text(Contract):
    """Text of any size: `inline` when it is short, else a `blob` with a `preview` of its beginning and end.

    Text that is both short and stored (so that a later activity may be given the reference alone) has both.
    """

    inline: str | None = None
    blob: BlobRef | None = None
    preview: str = ""

    def reference(self) -> Text:
        """The same text without anything that a later activity can read from the store."""
        return self if self.blob is None else Text(blob=self.blob)

    def shown(self) -> str:
        """What there is to show without the store."""
        return self.inline if self.inline is not None else self.preview


def whole_characters(text: str) -> str:
    """Return `text` with each half of a surrogate pair, which JSON can spell but UTF-8 and history cannot hold, as U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def preview_of(text: str, limit: int = PREVIEW_CHARS) -> str:
    """Return `text`, or its beginning and end around a marker when it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
