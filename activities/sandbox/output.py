"""Turning what a command gave into text for the model: bounded, decoded leniently, never empty."""

from __future__ import annotations

from contracts.sandbox import JobResult, JobState

_NUL = "\u2400"
"""What stands for a NUL byte, which JSON stores and databases refuse: the character SYMBOL FOR NULL."""


def decode(data: bytes) -> str:
    """Decode bytes as UTF-8; a byte that is none becomes `\\xNN`, and NUL becomes U+2400, so nothing is silently lost."""
    return data.decode("utf-8", "backslashreplace").replace("\0", _NUL)


def cut(text: str, limit: int, spilled: str | None) -> str:
    """Return `text`, or its beginning and end around a marker when it is longer than `limit` bytes of UTF-8.

    `spilled` is the path of the file that holds the whole text, for the marker.
    """
    data = text.encode()
    if len(data) <= limit:
        return text
    head = data[: limit // 2].decode("utf-8", "ignore")
    tail = data[-(limit // 2) :].decode("utf-8", "ignore")
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    where = f"; all of it is in {spilled}" if spilled else ""
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
    if stdout:
        parts.append(cut(stdout, max(limit - for_stderr, 256), spilled).rstrip("\n"))
    if stderr:
        parts.append("[standard error]\n" + cut(stderr, max(for_stderr, 256), spilled).rstrip("\n"))
    if not stdout and not stderr:
        parts.append("(no new output)" if result.state is JobState.RUNNING else "(no output)")
    return "\n".join(parts)
