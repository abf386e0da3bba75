"""Processes inside a local sandbox: finding a tree of them, ending it, and the last act of a forked child.

Runs inside the sandbox only: Python 3.9, standard library.
"""
# ruff: noqa: PTH208 -- pathlib would cost every sandbox eight milliseconds of its start

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import TracebackType

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 36, 38
"""From linux/prctl.h."""


def prctl(option: int, value: int) -> None:
    """Set a property of this process. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Last:
    """The last thing a forked child does: it never returns into the loop it was forked from."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the process, telling a fault in the log of the sandbox."""
        if kind is not None and error is not None:
            sys.excepthook(kind, error, trace)
            sys.stderr.flush()
        os._exit(0 if kind is None else 1)


def process_table() -> dict[int, list[int]]:
    """Return the processes of this sandbox: parent pid -> child pids."""
    table: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fd = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # it ended since the listing
        try:
            stat = os.read(fd, 4096)
        except OSError:
            continue
        finally:
            os.close(fd)
        # The name of the program comes second, in brackets, and may itself hold brackets and spaces. Zombies count: a
        # process whose first thread has ended looks like one while its other threads live on.
        parent = stat[stat.rindex(b")") + 2 :].split(b" ", 2)[1]
        table.setdefault(int(parent), []).append(int(name))
    return table


def below(roots: Iterable[int], table: dict[int, list[int]]) -> list[int]:
    """Return every process below `roots`, without them."""
    found: list[int] = []
    waiting = list(roots)
    while waiting:
        children = table.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def sweep(find: Callable[[], list[int]]) -> None:
    """Kill what `find` finds. All are stopped first, since what is stopped neither forks nor frees room for a fork bomb."""
    stopped: set[int] = set()
    for _ in range(50):
        fresh = [pid for pid in find() if pid not in stopped]
        if not fresh:
            break
        for pid in fresh:
            send_signal(pid, signal.SIGSTOP)
        stopped.update(fresh)
    for pid in stopped:
        send_signal(pid, signal.SIGKILL)


def close_strays(keep: int) -> None:
    """Close whatever came in open besides the standard streams and the control socket."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            try:
                os.close(int(name))
            except OSError as error:
                if error.errno != errno.EBADF:  # the listing's own
                    raise
