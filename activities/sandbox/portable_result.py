"""From what the helper says of a job to what the port says of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from activities.sandbox.port import Command, SandboxUnavailable, SessionOutput
from activities.sandbox.portable_call import Answer
from contracts.sandbox import JobResult, JobState

NOTES = {
    "no-bash": "the image of this sandbox has no bash; its commands are run by sh, so use POSIX shell only (said once)",
    "full": "the disk of /tmp in this sandbox is full, so not all output could be kept; remove files there",
    "answer": "the disk of /tmp in this sandbox is full, so only some of the output is shown; remove files there",
    "stuck": "a process that it left could not be ended: it belongs to another user",
}
LOST_NOTE = "the command ended the supervisor of its own job, so how it ended is not known"
AMBIGUOUS = "exit code {code} may mean that signal {signal} killed it: without Python in the image the two look the same"
NO_TERMINAL = (
    "sh",
    "-c",
    "echo 'caisson: there are no terminals in this sandbox, as its image has no Python 3.6; start the command without one' >&2\n"
    "exit 126",
)
MAX_WORD = 130_000
"""Bytes of one argument or variable. Linux takes 131,071, the name of the variable with it."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SIGNALS = range(1, 65)


def sound_command(command: Command, *, has_bash: bool) -> tuple[Command, str]:
    """Return a command that the helper can start, and a note on what was changed in it.

    What no system can start becomes a command that says so. Without bash, a script for it is given to sh.
    """
    try:
        if not command.argv:
            raise ValueError("the argument list is empty")
        if any("\0" in word for word in (*command.argv, command.cwd, *(command.env or {}).values())):
            raise ValueError("embedded null byte")
        for name, value in (command.env or {}).items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"illegal environment variable name {name!r}")
            if len(value.encode("utf-8", "surrogateescape")) > MAX_WORD:
                raise ValueError(f"environment: {name}: Argument list too long")
        for word in (*command.argv, command.cwd):
            if len(word.encode("utf-8", "surrogateescape")) > MAX_WORD:
                raise ValueError("Argument list too long; put what is long into a file")
    except ValueError as error:
        return replace(command, argv=cannot_start(str(error)), cwd="/", env=None), ""
    if tuple(command.argv[:2]) == ("bash", "-c") and not has_bash:
        return replace(command, argv=("sh", *command.argv[1:])), "no-bash"
    return command, ""


def cannot_start(reason: str) -> tuple[str, ...]:
    """Return the arguments of a command that says why another one cannot be started."""
    text = f"caisson: the command cannot be started: {reason}".encode("ascii", "backslashreplace").decode()
    return "sh", "-c", 'printf "%s\\n" "$0" >&2; exit 126', text


def job_result(answer: Answer) -> JobResult:
    """Return how a job ended. Raises SandboxUnavailable when the answer makes no sense."""
    try:
        words = answer.words
        if words["state"] == JobState.LOST:
            return _lost(answer)
        stdout, stderr = _streams(answer, is_whole=False)
        return _ending(answer, stdout, stderr)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise SandboxUnavailable(f"the record of a job cannot be read: {error!r}") from error


def session_output(answer: Answer) -> SessionOutput:
    """Return what one read of a session gave. Raises SandboxUnavailable when the answer makes no sense."""
    try:
        stdout, stderr = _streams(answer, is_whole=True)
        if answer.words["state"] == JobState.LOST:
            return SessionOutput(_lost(answer), bool(answer.words["terminal"]))
        return SessionOutput(_ending(answer, stdout, stderr), bool(answer.words["terminal"]))
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise SandboxUnavailable(f"the read of a session cannot be understood: {error!r}") from error


def _ending(answer: Answer, stdout: bytes, stderr: bytes) -> JobResult:
    words = answer.words
    code = words.get("exit_code")
    notes = [NOTES.get(note, "") for note in str(words.get("note", "")).split(",")]
    if words.get("shell") and code is not None and code - 128 in _SIGNALS:
        notes.append(AMBIGUOUS.format(code=code, signal=code - 128))
    return JobResult(
        state=JobState(words["state"]),
        exit_code=code if words["state"] == JobState.EXITED else None,
        signal=words.get("signal"),
        stdout=stdout,
        stderr=stderr,
        stdout_bytes=words["totals"][0],
        stderr_bytes=words["totals"][1],
        duration_seconds=words["seconds"],
        note="; ".join(filter(None, notes)),
    )


def _lost(answer: Answer) -> JobResult:
    stdout = stderr = b""
    totals = answer.words.get("totals", [0, 0])
    if "lengths" in answer.words:
        stdout, stderr = _streams(answer, is_whole="kept" not in answer.words)
    return JobResult(
        state=JobState.LOST,
        stdout=stdout,
        stderr=stderr,
        stdout_bytes=totals[0],
        stderr_bytes=totals[1],
        note=LOST_NOTE,
    )


def _streams(answer: Answer, *, is_whole: bool) -> tuple[bytes, bytes]:
    """Return both streams: each is whole, or its beginning and its end around a marker of what is left out between them."""
    streams: list[bytes] = []
    at = 0
    for number, lengths in enumerate(answer.words["lengths"]):
        parts = []
        for length in lengths:
            parts.append(answer.body[at : at + length])
            at += length
        total = answer.words["totals"][number]
        kept = total if is_whole else answer.words["kept"][number]
        streams.append(_joined(parts, kept, total))
    return streams[0], streams[1]


def _joined(parts: Sequence[bytes], kept: int, total: int) -> bytes:
    if len(parts) == 1:
        return parts[0] + _marker(total - kept)
    head, tail = whole_characters_at_end(parts[0]), whole_characters_at_start(parts[1])
    return head + _marker(kept - len(head) - len(tail)) + tail + _marker(total - kept)


def _marker(left_out: int) -> bytes:
    return b"\n[... %d bytes left out ...]\n" % left_out if left_out > 0 else b""


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
