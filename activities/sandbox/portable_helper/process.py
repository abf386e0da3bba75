"""Processes: finding all of a job, and ending them. Runs inside the sandbox only: Python 3.6, standard library."""

import contextlib
import ctypes
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Set

PR_SET_CHILD_SUBREAPER = 36
"""From linux/prctl.h."""


class Process:
    """What /proc/<pid>/stat tells of one process."""

    def __init__(self, stat: bytes) -> None:
        # The name of the program comes second, in brackets, and may itself hold brackets and spaces.
        fields = stat[stat.rindex(b")") + 2 :].split()
        self.state = fields[0]
        self.parent, self.group, self.session = map(int, fields[1:4])
        self.started = int(fields[19])


def read_file(path: str) -> bytes:
    """Return a small file, empty when it is not there or may not be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def process(pid: int) -> "Process | None":
    """Return what is known of a process, or None when it has ended."""
    stat = read_file("/proc/%d/stat" % pid)
    return Process(stat) if stat else None


def processes() -> "Dict[int, Process]":
    """Return every process that can be seen."""
    found = {pid: process(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    return {pid: one for pid, one in found.items() if one is not None}


def adopt() -> bool:
    """Become the parent of all that is left by what this process starts, and return whether that can be."""
    try:
        return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def family(job: bytes, roots: "Set[int]", own: "Set[int]") -> "List[int]":
    """Return every living process of a job: those below `roots` and of their sessions and groups, and those marked with it.

    The mark is in the environment that a program was started with; what it starts has it too. `own` are left out.
    """
    table = processes()
    mark = b"CAISSON_JOB=" + job
    found = {pid for pid, one in table.items() if one.parent in roots or one.session in roots or one.group in roots}
    for pid in table:
        if pid not in found and mark in read_file("/proc/%d/environ" % pid).split(b"\0"):
            found.add(pid)
    while True:
        more = {pid for pid, one in table.items() if one.parent in found} - found
        if not more:
            break
        found |= more
    return list(found - own)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone already, or may belong to somebody else."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def sweep(job: bytes, roots: "Set[int]", own: "Set[int]") -> None:
    """Kill all of a job. All are stopped first, since what is stopped neither forks nor frees room for a fork bomb."""
    stopped: "Set[int]" = set()
    for _ in range(50):
        fresh = [pid for pid in family(job, roots, own) if pid not in stopped]
        if not fresh:
            break
        for pid in fresh:
            send_signal(pid, signal.SIGSTOP)
        stopped.update(fresh)
    for pid in stopped:
        send_signal(pid, signal.SIGKILL)


def is_dead(pid: int) -> bool:
    """Tell whether a process has ended, whether or not somebody has asked for its end."""
    one = process(pid)
    return one is None or one.state in (b"Z", b"X")


def end(job: bytes, grace: float) -> None:
    """End what a job without a supervisor has left: TERM, KILL after `grace` seconds. Returns when all is."""
    own = {os.getpid()}
    deadline = time.monotonic() + grace
    for pid in family(job, set(), own):
        send_signal(pid, signal.SIGTERM)
        send_signal(pid, signal.SIGCONT)
    give_up = deadline + 5
    while time.monotonic() < give_up and not all(map(is_dead, family(job, set(), own))):
        if time.monotonic() >= deadline:
            sweep(job, set(), own)
        time.sleep(0.02)
