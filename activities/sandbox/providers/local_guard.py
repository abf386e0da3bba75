"""The limits of a local sandbox as seen from inside: those of each command, and a watch over what the kernel has no limit for.

A control group (see local_cgroup) or a resource limit acts at once. The workspace has neither: it is watched, so what is
written between two looks goes over the limit before anything is ended. The same holds for the memory of all processes
together where the host gives no control group.
Runs inside the sandbox only: Python 3.9, standard library.
"""
# ruff: noqa: PTH208 -- pathlib would cost every sandbox eight milliseconds of its start

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import stat
import time

from activities.sandbox.providers.local_process import PR_SET_DUMPABLE, below, close_strays, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from activities.sandbox.providers.local_wire import Limits

WORKSPACE = "/workspace"
MEMORY_PLACES = ("/tmp", "/dev/shm", "/var/tmp", "/run")  # noqa: S108 - the sandbox's own
PERIOD = 0.25
"""Seconds between two looks while anything runs."""
SCAN_PERIOD = 10.0
"""Seconds between two counts of the workspace while nothing speaks for growth."""
SCAN_SHARE = 4.0
"""How many times as long as a count took the watch pauses before the next without cause, so that a huge tree costs little."""
PATIENCE = 8
"""Looks that a sandbox may spend at its limit of processes. A build that is too parallel comes back from it, a bomb does not."""
MOST_LEVELS = 500
"""Depth to which directories are counted, as each level costs an open file."""
FIRST_TO_DIE = b"500"
"""Half a limit's worth of memory is added to a command when the kernel looks for what to end, so that it never takes init."""
MB = 1 << 20
PAGE = resource.getpagesize()


class Process:
    """What a look sees of one process."""

    def __init__(self, pid: int, fields: list[bytes]) -> None:
        self.pid = pid
        self.parent = int(fields[1])
        self.threads = max(1, int(fields[17]))


class Guard:
    """Knows the limits of this sandbox, and who is to be ended when one is broken."""

    def __init__(self, limits: Limits, oom_counter: int | None) -> None:
        self.limits = limits
        self.oom_counter = oom_counter
        self.end_by = time.monotonic() + limits["lifetime_seconds"]
        self.notes: list[str] = []
        """What the next command is told, since what it is about happened when no command ran."""
        self.full = ""
        """Why no file may grow now."""
        self._counted = (0, 0)
        self._base = usage()
        self._scan: tuple[int, float, tuple[int, int]] | None = None
        self._scan_took = 0.0
        self._scanned_at = time.monotonic()
        self._changed = False
        """Whether anything has run since the last count began."""
        self._next_look = self._scanned_at + PERIOD
        self._wait_until = 0.0
        self._at_limit = 0

    # --- one command -----------------------------------------------------------------------------------------------------

    def confine(self, may_write: bool) -> None:
        """In the child that becomes a command: set its limits."""
        given = self.limits
        wanted = [
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, given["open_files"]),
            (resource.RLIMIT_FSIZE, given["file_mb"] * MB if may_write else 0),
        ]
        if given["counts_processes"]:
            wanted.append((resource.RLIMIT_NPROC, given["processes"]))
        if self.oom_counter is None:
            wanted.append((resource.RLIMIT_DATA, given["memory_mb"] * MB))
        for limit, value in wanted:
            ceiling = resource.getrlimit(limit)[1]
            value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
            resource.setrlimit(limit, (value, value))
        # A process that may not be looked into may not set this either. From here on there is nothing left to see in it.
        close_strays(-1)
        prctl(PR_SET_DUMPABLE, 1)
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        os.write(fd, FIRST_TO_DIE)
        os.close(fd)

    def oom_kills(self) -> int:
        """Return how often the kernel has ended a process of this sandbox for its memory."""
        if self.oom_counter is None:
            return 0
        for line in os.pread(self.oom_counter, 4096, 0).splitlines():
            name, _, count = line.partition(b" ")
            if name == b"oom_kill":
                return int(count)
        return 0

    def check(self) -> str:
        """Return why files may not grow now, or nothing. Counts the workspace only when there is cause to."""
        if not self.full and not self._suspects(usage()):
            return ""
        return self._excess(count()[:2])

    def explain(self, status: int, oom_kills: int, note: str) -> str:
        """Return what to say of a command that ended with this wait status, after so many kills for memory in its time.

        `note` is what there is to say already.
        """
        given = self.limits
        if oom_kills:
            processes = "a process was" if oom_kills == 1 else f"{oom_kills} processes were"
            return (
                f"out of memory: {processes} killed at the limit of {given['memory_mb']} MB for all processes and /tmp "
                "together; use less at a time, or remove files from /tmp"
            ) + (f"; {note}" if note else "")
        if note:
            return note
        too_large = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ
        if too_large or (os.WIFEXITED(status) and os.WEXITSTATUS(status) == 128 + signal.SIGXFSZ):
            has = "has" if too_large else "may have"
            return f"a file {has} reached the limit of {given['file_mb']} MB for one file; write several smaller ones"
        return ""

    # --- the watch -------------------------------------------------------------------------------------------------------

    def pause(self, running: bool) -> float:
        """Return after how many seconds to look again: soon while something runs or was not counted yet, else at the end."""
        if running or self._changed or self._scan is not None:
            self._changed = self._changed or running
            return PERIOD
        return min(max(0.0, self.end_by - time.monotonic()), 3600.0)

    def look(
        self, supervisors: Collection[int], fork: Callable[[Callable[[], None]], None]
    ) -> tuple[list[str], list[tuple[int, str]]]:
        """Look once. Return notes for every running job, and (supervisor, reason) for each job that is to be ended."""
        now = time.monotonic()
        if now < self._next_look:
            return [], []
        self._next_look = now + PERIOD
        excess = self._watch_workspace(now, fork, bool(supervisors))
        notes: list[str] = []
        if not supervisors:
            return notes, []
        processes = self._processes()
        children: dict[int, list[int]] = {}
        for process in processes.values():
            children.setdefault(process.parent, []).append(process.pid)
        trees = {pid: below([pid], children) for pid in supervisors}
        threads = sum(process.threads for process in processes.values())
        most = self.limits["processes"]
        if threads >= most - max(1, most // 50):
            self._at_limit += 1
            reason = f"the sandbox is at its limit of {most} processes and threads"
            notes.append(f"{reason}; what could not start failed with 'Resource temporarily unavailable': run less at a time")
        else:
            self._at_limit = 0
        if now < self._wait_until:  # what was ended last is still ending
            return notes, []
        if self._at_limit >= PATIENCE:
            return notes, self._end(trees, f"{reason} and stays there", lambda pid: processes[pid].threads)
        memory = self._memory(processes) if self.oom_counter is None else 0
        if memory > self.limits["memory_mb"] * MB:
            reason = f"out of memory: the sandbox is over its limit of {self.limits['memory_mb']} MB for all processes and /tmp"
            return notes, self._end(trees, reason, anonymous_memory)
        if excess:
            return notes, self._end(trees, excess, written)
        return notes, []

    def _end(self, trees: dict[int, list[int]], reason: str, weigh: Callable[[int], int]) -> list[tuple[int, str]]:
        """Choose the job whose processes weigh most."""
        self._at_limit = 0
        if not any(trees.values()):
            return []
        self._wait_until = time.monotonic() + 1.0
        heaviest = max(trees, key=lambda supervisor: sum(map(weigh, trees[supervisor])))
        return [(heaviest, f"{reason}; what used most of it was ended")]

    def _processes(self) -> dict[int, Process]:
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):  # it may end meanwhile
                    data = read(f"/proc/{name}/stat")
                    found[int(name)] = Process(int(name), data[data.rindex(b")") + 2 :].split())
        return found

    def _memory(self, processes: Collection[int]) -> int:
        held = 0
        for place in MEMORY_PLACES:
            fs = os.statvfs(place)
            held += (fs.f_blocks - fs.f_bfree) * fs.f_frsize
        return held + sum(map(anonymous_memory, processes))

    def _suspects(self, now: tuple[int, int]) -> bool:
        """Tell whether the workspace may be over its limit, if all that grew on its disk since the last count were its own."""
        limits = (self.limits["workspace_mb"] * MB, self.limits["workspace_files"])
        return any(
            had + max(0, used - base) > limit
            for had, used, base, limit in zip(self._counted, now, self._base, limits)  # noqa: B905 - not in Python 3.9
        )

    def _watch_workspace(self, now: float, fork: Callable[[Callable[[], None]], None], running: bool) -> str:
        """Begin a count of the workspace when it is time, and take its result; return what is wrong with it."""
        if self._scan is not None:
            pipe, began, base = self._scan
            try:
                data = os.read(pipe, 4096)
            except BlockingIOError:
                return ""
            os.close(pipe)
            self._scan = None
            self._scan_took, self._scanned_at = now - began, now
            if data:
                self._counted, self._base = tuple(json.loads(data)), base
                self.full = self._excess(self._counted)
            return self.full
        base = usage()
        has_cause = bool(self.full) or self._suspects(base)
        if now >= self._scanned_at + (self._scan_took if has_cause else max(SCAN_PERIOD, SCAN_SHARE * self._scan_took)):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            try:
                fork(lambda: tell(writer))
            except OSError:  # no process to be had: the watch goes on, and comes back to this
                os.close(reader)
            else:
                self._scan = (reader, now, base)
                self._changed = running
            finally:
                os.close(writer)
        return ""

    def _excess(self, counted: tuple[int, int]) -> str:
        size, files = counted
        given = self.limits
        if size > given["workspace_mb"] * MB:
            return f"the workspace holds {size // MB} MB, and its limit is {given['workspace_mb']} MB: remove files from it"
        if files > given["workspace_files"]:
            return f"the workspace holds {files} files, and its limit is {given['workspace_files']}: remove files from it"
        return ""


def usage() -> tuple[int, int]:
    """Return the bytes and files in use on the whole file system of the workspace."""
    fs = os.statvfs(WORKSPACE)
    return (fs.f_blocks - fs.f_bfree) * fs.f_frsize, fs.f_files - fs.f_ffree


def tell(pipe: int) -> None:
    """In a child: count the workspace and write the result."""
    os.nice(10)
    os.write(pipe, json.dumps(count()).encode())


def count() -> tuple[int, int]:
    """Return the bytes that the workspace takes on the disk, and how many files, directories and links are in it.

    Not counted is what its owner may not list, lies deeper than 500 directories, or has no name any more.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    size = files = 0
    several: set[int] = set()
    way = [os.open(WORKSPACE, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    left = [list_directory(way[0])]
    while way:
        if not left[-1]:
            left.pop()
            os.close(way.pop())
            continue
        name = left[-1].pop()
        try:
            found = os.stat(name, dir_fd=way[-1], follow_symlinks=False)
            if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                if found.st_ino in several:
                    continue
                several.add(found.st_ino)
            size, files = size + found.st_blocks * 512, files + 1
            if stat.S_ISDIR(found.st_mode) and len(way) < MOST_LEVELS:
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=way[-1])
                way.append(fd)
                left.append(list_directory(fd))
        except OSError:
            continue  # removed meanwhile, or closed to its owner
    return size, files


def list_directory(fd: int) -> list[str]:
    """Return the names in an open directory."""
    try:
        return os.listdir(fd)
    except OSError:
        return []


def read(path: str) -> bytes:
    """Return the beginning of a file of /proc. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def anonymous_memory(pid: int) -> int:
    """Return the bytes that a process holds and does not share with files, 0 when it has ended. Format: proc(5), statm."""
    try:
        fields = read(f"/proc/{pid}/statm").split()
        return max(0, int(fields[1]) - int(fields[2])) * PAGE
    except (OSError, IndexError):
        return 0


def written(pid: int) -> int:
    """Return the bytes that a process and its ended children had written to disk, 0 when that cannot be seen."""
    try:
        return next(int(line[12:]) for line in read(f"/proc/{pid}/io").splitlines() if line.startswith(b"write_bytes:"))
    except (OSError, StopIteration):
        return 0
