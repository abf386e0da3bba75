"""What a job of a local sandbox left in its directory on the host: its output, and how it ended."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from activities.sandbox.providers.local_wire import HEAD, RING, TOTAL_AT, TOTALS
from contracts.sandbox import JobResult, JobState

STREAMS = ("stdout", "stderr")
FILES = (*STREAMS, "exit")
"""The files of a job, in the order in which they are handed to init."""
LOST_NOTE = "the command ended the supervisor of its own job, so how it ended is not known"
TAIL = 4096
"""Bytes of each stream that a progress report shows."""


@dataclass(frozen=True)
class Output:
    """One stream file, open for reading, and the length of the stream it keeps (see local_wire for its layout)."""

    fd: int
    total: int
    missing: int = 0
    """How much came after that and was not kept, since the disk was full."""

    def read(self, start: int, end: int) -> bytes:
        """Return the kept bytes of the stream between two positions, both inside the head or both inside the tail."""
        if end <= HEAD:
            return os.pread(self.fd, end - start, start)
        if start < HEAD:
            return self.read(start, HEAD) + self.read(HEAD, end)
        at, length = HEAD + (start - HEAD) % RING, end - start
        first = min(length, HEAD + RING - at)
        return os.pread(self.fd, first, at) + os.pread(self.fd, length - first, HEAD)

    def tail_from(self, length: int) -> int:
        """Return where the last `length` bytes begin, or the first byte after which everything was kept."""
        kept_from = 0 if self.total <= HEAD + RING else self.total - RING
        return max(self.total - length, kept_from, 0)

    def part(self, start: int, end: int, limit: int) -> bytes:
        """Return what lies between two positions, with a marker for what is over `limit` bytes or is not kept.

        The stream may grow meanwhile: what the writer overwrites is left out, and never given in pieces of two ages.
        """
        half = limit // 2
        wanted = [(start, end)] if end - start <= limit else [(start, start + half), (end - (limit - half), end)]
        data, at = b"", start
        for first, last in wanted:
            for begin, stop in ((first, min(last, HEAD)), (max(first, HEAD), last)):
                if begin >= stop:
                    continue
                begin = max(begin, min(self._overwritten(), stop)) if begin >= HEAD else begin
                piece = self.read(begin, stop)
                lost = min(max(self._overwritten() - begin, 0), len(piece)) if begin >= HEAD else 0
                data += marker(begin + lost - at) + piece[lost:]
                at = stop
        return data + marker(end - at)

    def _overwritten(self) -> int:
        """Return up to which position of the ring the writer has overwritten, or may be doing so now."""
        counters = os.pread(self.fd, TOTALS.size, TOTAL_AT)
        return max(TOTALS.unpack(counters)) - RING if len(counters) == TOTALS.size else 0

    def bounded(self, limit: int) -> bytes:
        """Return the stream whole if it has at most `limit` bytes and was kept whole, else its head and tail around a marker."""
        if self.total <= min(limit, HEAD + RING):
            return self.read(0, self.total) + marker(self.missing)
        head = whole_characters_at_end(self.read(0, min(limit // 2, HEAD)))
        tail = whole_characters_at_start(self.read(self.tail_from(limit - limit // 2), self.total))
        return head + marker(self.total - len(head) - len(tail)) + tail + marker(self.missing)


def marker(left_out: int) -> bytes:
    """Return what stands in a result for bytes that are left out."""
    return b"\n[... %d bytes left out ...]\n" % left_out if left_out else b""


def whole_characters_at_end(data: bytes) -> bytes:
    """Return `data` without a UTF-8 sequence that its end cuts. Bytes that are no UTF-8 stay as they are."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            length = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if length > back else data
    return data


def whole_characters_at_start(data: bytes) -> bytes:
    """Return `data` without the rest of a UTF-8 sequence that its beginning cuts."""
    for skipped in range(4):
        if skipped == len(data) or data[skipped] & 0xC0 != 0x80:
            return data[skipped:]
    return data


def open_output(job: Path, stream: str, record: Mapping[str, int] | None = None) -> Output:
    """Open one stream of a job, as long as `record` says or else as long as it is now. The caller closes `fd`."""
    fd = os.open(job / stream, os.O_RDONLY | os.O_CLOEXEC)
    if record is not None:
        kept = record[f"{stream}_kept"]
        return Output(fd, kept, record[f"{stream}_bytes"] - kept)
    total = os.fstat(fd).st_size
    counters = os.pread(fd, TOTALS.size, TOTAL_AT)
    if len(counters) == TOTALS.size:
        total, _ = TOTALS.unpack(counters)
    return Output(fd, total)


def bounded_output(job: Path, stream: str, limit: int, record: Mapping[str, int] | None) -> tuple[bytes, int]:
    """Return what a result holds of one stream, and its true total."""
    output = open_output(job, stream, record)
    try:
        return output.bounded(limit), output.total + output.missing
    finally:
        os.close(output.fd)


def last_output(job: Path, stream: str) -> tuple[bytes, int]:
    """Return the last bytes of one stream as it stands, and its true total so far."""
    output = open_output(job, stream)
    try:
        return output.read(output.tail_from(TAIL), output.total), output.total
    finally:
        os.close(output.fd)


def recorded_result(job: Path, limit: int) -> JobResult:
    """Return how a finished job ended, each stream cut to `limit` bytes."""
    record = json.loads((job / "exit").read_bytes())
    is_lost = record["state"] == JobState.LOST
    (stdout, stdout_bytes), (stderr, stderr_bytes) = (
        bounded_output(job, stream, limit, None if is_lost else record) for stream in STREAMS
    )
    if is_lost:
        return JobResult(
            state=JobState.LOST,
            stdout=stdout,
            stderr=stderr,
            stdout_bytes=stdout_bytes,
            stderr_bytes=stderr_bytes,
            note=LOST_NOTE,
        )
    return JobResult(
        state=JobState(record["state"]),
        exit_code=record["exit_code"],
        signal=record["signal"],
        stdout=stdout,
        stderr=stderr,
        stdout_bytes=stdout_bytes,
        stderr_bytes=stderr_bytes,
        duration_seconds=record["duration"],
        note=record["note"],
    )
