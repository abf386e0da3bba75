"""Turning what a command gave into text for the model: bounded, decoded leniently, never empty."""

from __future__ import annotations

import re

from contracts.sandbox import JobResult, JobState

_NUL = "\u2400"
"""What stands for a NUL byte, which JSON stores and databases refuse: the character SYMBOL FOR NULL."""
_LEFT_OUT = re.compile(rb"\n\[\.\.\. (\d+) bytes left out \.\.\.\]\n")
"""What stands in a stream that was not kept whole."""


def decode(data: bytes) -> str:
    """Decode bytes as UTF-8; a byte that is none becomes `\\xNN`, and NUL becomes U+2400, so nothing is silently lost."""
    return data.decode("utf-8", "backslashreplace").replace("\0", _NUL)


def too_long(result: JobResult, limit: int) -> bool:
    """Tell whether the streams, as they are shown, have more than `limit` bytes together, so that something is cut."""
    return len(decode(result.stdout).encode()) + len(decode(result.stderr).encode()) > limit


def cut(text: str, limit: int, spilled: str | None, *, is_whole: bool = True) -> str:
    """Return `text`, or its beginning and end around a marker when it is longer than `limit` bytes of UTF-8.

    `spilled` is the path of the file that holds the text, for the marker. When the text `is_whole` no more, as its middle or its
    end was not kept, the marker does not say that all is there, and counts what was not kept where it stands for it.
    """
    data = text.encode()
    if len(data) <= limit:
        return text
    head = data[: limit // 2].decode("utf-8", "ignore")
    tail = data[-(limit // 2) :].decode("utf-8", "ignore")
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    if not is_whole:
        middle = data[len(head.encode()) : len(data) - len(tail.encode())]
        left_out += sum(int(found[1]) - len(found[0]) for found in _LEFT_OUT.finditer(middle))
    what = "all of it is" if is_whole else "its beginning and end are"
    where = f"; {what} in {spilled}" if spilled else ""
    return f"{head}\n[... {left_out} bytes left out{where} ...]\n{tail}"


def status_line(result: JobResult, timeout: float) -> str:
    """Say in one line how a command ended."""
    took = f"after {result.duration_seconds:.1f} s"
    match result.state:
        case JobState.EXITED:
            return f"exit code {result.exit_code} {took}"
        case JobState.SIGNALLED:
            return f"killed by signal {result.signal} (exit code {128 + (result.signal or 0)}) {took}"
        case JobState.TIMED_OUT:
            return f"timed out after {timeout:g} s; it and its children were killed. What it had written until then follows"
        case JobState.KILLED:
            return f"killed {took}"
        case JobState.LOST:
            return "the command killed the process that watched over it; how it ended is unknown"
        case JobState.RUNNING:
            return "still running"


def render(result: JobResult, timeout: float, limit: int, spilled: str | None, status: str | None = None) -> str:
    """Return the text that the model is given for one command, with `status` as its first line or the one that fits.

    Each stream gets half of `limit` bytes, or what the other leaves over.
    """
    stdout, stderr = decode(result.stdout), decode(result.stderr)
    for_stderr = min(len(stderr.encode()), max(limit // 2, limit - len(stdout.encode())))
    parts = [status or status_line(result, timeout)]
    if result.note:
        parts.append(f"[caisson] {result.note}")
    is_whole = len(result.stdout) == result.stdout_bytes
    out = cut(stdout, max(limit - for_stderr, 256), spilled, is_whole=is_whole).rstrip("\n")
    is_whole = len(result.stderr) == result.stderr_bytes
    err = cut(stderr, max(for_stderr, 256), spilled, is_whole=is_whole).rstrip("\n")
    if out:
        parts.append(out)
    if err:
        parts.append("[standard error]\n" + err)
    if not out and not err:
        parts.append("(no new output)" if result.state is JobState.RUNNING else "(no output)")
    return "\n".join(parts)
