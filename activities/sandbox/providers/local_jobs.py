"""Jobs and conversations as init of a local sandbox knows them: how a job stands, and orders for its supervisor.

Runs inside the sandbox only: Python 3.9, standard library.
"""

from __future__ import annotations

import contextlib
import time

from activities.sandbox.providers.local_job import INPUT, MAX_ORDER, RESIZE
from activities.sandbox.providers.local_stream import LINE, WINDOW, collects_lines, lines
from activities.sandbox.providers.local_wire import Inbox, encode

MAX_AHEAD = 2 * MAX_ORDER
"""Bytes that may be typed before the command takes them."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from activities.sandbox.providers.local_wire import Reply, Request


class Job:
    """A job as init knows it: `finished` once its end is recorded, `gone` once no process of it is left."""

    def __init__(self, pid: int, control: socket.socket, exit_file: int) -> None:
        self.pid = pid
        self.control = control
        self.exit_file = exit_file
        self.began = time.monotonic()
        self.terminal = False
        self.number: int | None = None
        """The number of its terminal under /dev/pts, as far as its supervisor has told it yet."""
        self.line = 0
        """How many bytes were typed of a line that is not ended yet."""
        self.inputs: set[str] = set()
        """What was typed already, by the names that the worker gave it: a request that comes again types nothing."""
        self.typed = 0
        self.taken = 0
        """How many bytes were typed, and how many of them the command has taken."""
        self.finished = False
        self.gone = False
        self.awaiting_finish: list[Connection] = []
        self.awaiting_gone: list[Connection] = []
        self.unsent: list[bytes] = []
        """Orders that found no room beside what was typed before. Each is sent as soon as there is some."""

    def insist(self, order: bytes) -> None:
        """Give its supervisor an order that must arrive."""
        if order not in self.unsent:
            self.unsent.append(order)
        self.flush()

    def flush(self) -> None:
        """Send what found no room before. A supervisor that is ending needs no orders."""
        try:
            while self.unsent:
                self.control.send(self.unsent[0])
                del self.unsent[0]
        except BlockingIOError:
            return
        except OSError:
            self.unsent.clear()


class Connection:
    """One conversation with a worker."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.inbox = Inbox()
        self.queue: list[Connection] = []
        """Where it waits for news of a job."""

    def wait_in(self, queue: list[Connection]) -> None:
        """Wait for news."""
        queue.append(self)
        self.queue = queue

    def answer(self, reply: Reply) -> None:
        """Send a short answer; a worker that is gone needs none."""
        with contextlib.suppress(OSError):
            self.peer.send(encode(reply))


def tell(connection: Connection, job: Job | None, waits: bool) -> None:
    """Tell how a job stands; with `waits`, tell its end too."""
    if job is None:
        connection.answer({"known": False, "running": False, "terminal": False, "seconds": 0.0})
        return
    seconds = time.monotonic() - job.began
    connection.answer({"known": True, "running": not job.finished, "terminal": job.terminal, "seconds": seconds})
    if waits and not job.finished:
        connection.wait_in(job.awaiting_finish)


def order(connection: Connection, job: Job | None, request: Request) -> None:
    """Hand on to a job's supervisor what is typed, once for each name it is given, or the new size of its window."""
    name = request.get("input", "")
    if job is not None and name in job.inputs:
        connection.answer({})
        return
    fault = _deliver(job, request)
    if fault:
        connection.answer({"error": "session", "message": fault})
        return
    if job is not None and name:
        job.inputs.add(name)
    connection.answer({})


def _deliver(job: Job | None, request: Request) -> str:
    """Return why it could not be delivered, or nothing."""
    if job is None:
        return "unknown"
    if job.finished:
        return "ended"
    if not job.terminal:
        return "no terminal"
    data = request.get("data", "").encode("latin-1")
    if job.typed - job.taken + len(data) > MAX_AHEAD:
        return "busy"
    line = job.line if not data else 0
    if data and job.number is not None and collects_lines(job.number):
        longest, line = lines(job.line, data)
        if longest > LINE:
            return "line"
    try:
        job.control.send(INPUT + data if data else RESIZE + WINDOW.pack(request["rows"], request["columns"]))
    except BlockingIOError:
        return "busy"
    except OSError:  # its supervisor is ending just now
        return "ended"
    job.typed += len(data)
    job.line = line
    return ""
