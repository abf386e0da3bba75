"""The journal: one line for each request, so that a test can count what was really answered."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class JournalEntry(BaseModel):
    """What became of one request.

    `outcome` is `answered` once the whole response (`response.completed`) was written to the socket; `accepted` for a
    background request answered before its response is finished; the kind of a fault that was played; or
    `aborted_by_client`, `expectation_failed`, `refused`. `turn` and `attempt` are 0 where the request did not get so far.
    """

    model_config = ConfigDict(frozen=True)

    at: str
    request: str
    conversation: str
    turn: int
    attempt: int
    outcome: str
    detail: str
    response_id: str | None
    model: str
    input_items: int
    metadata: dict[str, str]
    stream: bool
    background: bool
    idempotency_key: str | None


class Journal:
    """The entries in memory and, where a file is given, one JSON line for each, flushed at once."""

    def __init__(self, path: Path | None) -> None:
        self._entries: list[JournalEntry] = []
        self._file = None if path is None else path.open("a", encoding="utf-8")

    def add(self, entry: JournalEntry) -> None:
        """Append one entry."""
        self._entries.append(entry)
        if self._file is not None:
            self._file.write(entry.model_dump_json() + "\n")
            self._file.flush()

    def entries(self) -> list[JournalEntry]:
        """Return a copy of the entries, oldest first."""
        return list(self._entries)

    def close(self) -> None:
        """Close the file; the entries stay readable."""
        if self._file is not None:
            self._file.close()


def now() -> str:
    """Return the present moment as the journal writes it, in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
