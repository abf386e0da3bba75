"""Reading the sessions of a local sandbox: what each read gave is written down, so that it can be given again.

`<job>/reads` has a line for each read. A read begins where the one before it ended, so a worker that is killed between a
read and its report loses nothing: the next one finds the read by its name.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from activities.sandbox.port import SessionFault, SessionOutput
from activities.sandbox.providers.local_client import SESSION_FAULTS, Client
from activities.sandbox.providers.local_output import STREAMS, open_output, recorded_result, whole_characters_at_end
from contracts.sandbox import JobResult, JobState

if TYPE_CHECKING:
    from activities.sandbox.providers.local_client import Conversation

LOOK_EVERY = 0.05
"""Seconds between two looks at how much output there is."""
SILENCE = 0.25
"""Seconds without output after which what came counts as an answer."""


@dataclass(frozen=True)
class Read:
    """One read: which part of each stream it gave, and how the session stood then."""

    id: str
    start: tuple[int, int]
    end: tuple[int, int]
    running: bool
    terminal: bool
    seconds: float


async def poll(client: Client, job_id: str, job: Path, read_id: str, wait: float, until_end: bool, limit: int) -> SessionOutput:
    """Read a session as the port says it. `job` is its directory."""
    began = time.monotonic()
    async with client.converse() as conversation:
        reply, _ = await client.put(conversation, {"op": "await", "job": job_id})
        if not reply["known"]:
            raise SessionFault(SESSION_FAULTS["unknown"])
        read = await asyncio.to_thread(_find, job, read_id)
        if read is None:
            running = reply["running"] and not await _ends(conversation, job, wait, until_end)
            seconds = reply["seconds"] + time.monotonic() - began
            read = await asyncio.to_thread(_note, job, read_id, running, reply["terminal"], seconds)
        return await asyncio.to_thread(_output, job, read, limit)


async def _ends(conversation: Conversation, job: Path, wait: float, until_end: bool) -> bool:
    """Wait for the end, and return whether it came: before `wait` seconds are over and before an answer is there."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait
    given = _last_end(_reads(job))
    before, changed = given, loop.time()
    ending = asyncio.ensure_future(conversation.receive())
    try:
        while not ending.done() and (left := deadline - loop.time()) > 0:
            await asyncio.wait([ending], timeout=left if until_end else min(LOOK_EVERY, left))
            now = _ends_of(job, running=True)
            if now != before:
                before, changed = now, loop.time()
            elif not until_end and now != given and loop.time() - changed >= SILENCE:
                break
        if not ending.done():
            return False
        await ending  # raises what became of the connection
        return True
    finally:
        ending.cancel()
        await asyncio.wait([ending])


def _find(job: Path, read_id: str) -> Read | None:
    return next((read for read in _reads(job) if read.id == read_id), None)


def _reads(job: Path) -> list[Read]:
    try:
        lines = (job / "reads").read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [_parsed(line) for line in lines if line.endswith(b"}")]  # a full disk may have cut one


def _parsed(line: bytes) -> Read:
    fields = json.loads(line)
    return Read(**{**fields, "start": tuple(fields["start"]), "end": tuple(fields["end"])})


def _last_end(reads: Iterable[Read]) -> tuple[int, int]:
    last = (0, 0)
    for read in reads:
        last = read.end
    return last


def _note(job: Path, read_id: str, running: bool, terminal: bool, seconds: float) -> Read:
    """Write a read down, or return the one of this name that another attempt has written meanwhile."""
    fd = os.open(job / "reads", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        reads = _reads(job)
        known = next((read for read in reads if read.id == read_id), None)
        if known is not None:
            return known
        start = _last_end(reads)
        out, err = (max(pair) for pair in zip(start, _ends_of(job, running), strict=True))
        if running:
            out, err = (
                _whole(job, stream, *span) for stream, span in zip(STREAMS, zip(start, (out, err), strict=True), strict=True)
            )
        read = Read(read_id, start, (out, err), running, terminal, seconds)
        os.write(fd, b"\n" + json.dumps(asdict(read)).encode() + b"\n")
        return read
    finally:
        os.close(fd)


def _ends_of(job: Path, running: bool) -> tuple[int, int]:
    """Return how much of each stream there is: now, or once the job has ended."""
    record = None if running else _record(job)
    out, err = (_length(job, stream, record) for stream in STREAMS)
    return out, err


def _length(job: Path, stream: str, record: dict[str, int] | None) -> int:
    output = open_output(job, stream, record)
    os.close(output.fd)
    return output.total


def _record(job: Path) -> dict[str, int] | None:
    record = json.loads((job / "exit").read_bytes())
    return None if record["state"] == JobState.LOST else record


def _whole(job: Path, stream: str, start: int, end: int) -> int:
    """Return `end`, moved before a character of which only a part is there, unless that part is all there is to give."""
    output = open_output(job, stream)
    try:
        last = output.part(max(start, end - 4), end, 4)
    finally:
        os.close(output.fd)
    whole = end - (len(last) - len(whole_characters_at_end(last)))
    return whole if whole > start else end


def _output(job: Path, read: Read, limit: int) -> SessionOutput:
    record = None if read.running else _record(job)
    data: list[bytes] = []
    for stream, start, end in zip(STREAMS, read.start, read.end, strict=True):
        output = open_output(job, stream, record)
        try:
            data.append(output.part(start, end, limit))
        finally:
            os.close(output.fd)
    how = JobResult(state=JobState.RUNNING, duration_seconds=read.seconds) if read.running else recorded_result(job, 0)
    lengths = [end - start for start, end in zip(read.start, read.end, strict=True)]
    given = {"stdout": data[0], "stderr": data[1], "stdout_bytes": lengths[0], "stderr_bytes": lengths[1]}
    return SessionOutput(how.model_copy(update=given), read.terminal)
