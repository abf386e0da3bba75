"""Reading a session: what each read gave is written down, so that it can be given again. Python 3.6, standard library.

`reads` of a job has a line for each read. A read begins where the one before it ended, so a caller that is killed between a
read and its report loses nothing: the next one finds the read by its name.
"""

import errno
import fcntl
import json
import os
import time

from activities.sandbox.portable_helper.jobs import Job
from activities.sandbox.portable_helper.stream import whole_characters
from activities.sandbox.portable_helper.wire import Denied, insist

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Tuple

    from activities.sandbox.portable_helper.wire import Request, Words

    Read = Dict[str, Any]

LOOK_EVERY = 0.05
SILENCE = 0.25
"""Seconds without output after which what came counts as an answer."""


def reads(job: Job) -> "List[Read]":
    """Return the reads that were made, in their order."""
    try:
        with open(job.file(b"reads")) as file:
            lines = file.read().split("\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]  # a full disk may have cut one


def ends(job: Job, record: "Dict[str, Any] | None") -> "List[int]":
    """Return how much there is of each stream."""
    found = []
    for number in range(2):
        output = job.output(number, record)
        found.append(output.total)
        os.close(output.fd)
    return found


def poll(state: bytes, given: "Request") -> "Tuple[Words, List[bytes]]":
    """Wait for an answer or the end, at most `wait` seconds; unless `last`, come back then without a read having been made."""
    job = Job(state, given["job"])
    if not job.is_known():
        raise Denied("unknown")
    try:
        return read_once(job, given)
    except FileNotFoundError:  # a command has removed what is known of it
        raise Denied("unknown") from None


def read_once(job: Job, given: "Request") -> "Tuple[Words, List[bytes]]":
    """Make the read that is asked for, or find it. Raises FileNotFoundError when nothing is known of the job any more."""
    known = [read for read in reads(job) if read["id"] == given["read"]]
    if known:
        return told(job, known[0], given["limit"])
    now = time.monotonic()
    until, latest = now + given["wait"], last_end(job)
    before, changed, answered = latest, now, False
    record = job.record()
    while record is None and not answered and time.monotonic() < until:
        time.sleep(min(LOOK_EVERY, max(until - time.monotonic(), 0.001)))
        record = job.record()
        there = ends(job, record)
        if there != before:
            before, changed = there, time.monotonic()
        elif not given["until_end"] and there != latest and time.monotonic() - changed >= SILENCE:
            answered = True
    if record is None and not answered and not given["last"]:
        return {"waiting": True}, []
    return told(job, note(job, given["read"], record), given["limit"])


def last_end(job: Job) -> "List[int]":
    """Return where the last read ended."""
    made = reads(job)
    return list(made[-1]["end"]) if made else [0, 0]


def note(job: Job, name: str, record: "Dict[str, Any] | None") -> "Read":
    """Write a read down, or return the one of this name that another caller has written meanwhile."""
    fd = os.open(job.file(b"reads"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        for read in reads(job):
            if read["id"] == name:
                return read
        start = last_end(job)
        end = [max(pair) for pair in zip(start, ends(job, record))]
        if record is None:
            end = [whole(job, number, start[number], end[number]) for number in range(2)]
        read = {"id": name, "start": start, "end": end, "running": record is None, "seconds": job.seconds()}
        line = b"\n" + json.dumps(read).encode() + b"\n"

        def write() -> None:
            if os.write(fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        insist(job.state, write)
        return read
    finally:
        os.close(fd)


def whole(job: Job, number: int, start: int, end: int) -> int:
    """Return `end`, moved before a character of which only a part is there, unless that part is all there is to give."""
    output = job.output(number)
    try:
        last = output.part(max(start, end - 4), end, 4)
    finally:
        os.close(output.fd)
    moved = end - (len(last) - whole_characters(last))
    return moved if moved > start else end


def told(job: Job, read: "Read", limit: int) -> "Tuple[Words, List[bytes]]":
    """Tell what a read gave, and how the session stood then."""
    record = None if read["running"] else job.record()
    body = []
    for number in range(2):
        output = job.output(number, record)
        body.append(output.part(read["start"][number], read["end"][number], limit))
        os.close(output.fd)
    words: "Words" = {"state": "running", "seconds": read["seconds"]} if record is None else dict(record)
    words["terminal"] = job.has_terminal()
    words["totals"] = [end - start for start, end in zip(read["start"], read["end"])]
    words["lengths"] = [[len(part)] for part in body]
    return words, body
