"""Files whose text stands in the manifest."""

from __future__ import annotations

import os

from activities.workspace.ingest import Content
from activities.workspace.sources.port import TIME_OF_NO_FILE, Found
from contracts.manifest import InlineEntry


class InlineSource:
    """The one file of an inline entry."""

    def __init__(self, entry: InlineEntry) -> None:
        self._data = entry.text.encode("utf-8", "surrogatepass")

    async def find(self, most_files: int) -> list[Found]:
        """See Source."""
        return [Found("", "", size=len(self._data), open=lambda: in_memory(self._data))]

    def pin(self) -> str:
        """See Source."""
        return ""

    async def close(self) -> None:
        """See Source."""


def in_memory(data: bytes) -> Content:
    """Return bytes as an open file."""
    fd = os.memfd_create("source", os.MFD_CLOEXEC)
    os.pwrite(fd, data, 0)
    return Content(fd, len(data), TIME_OF_NO_FILE, 0o644)
