"""Process 1 of a local sandbox: takes requests from the worker, starts jobs and file requests, reaps what is left over.

It is the single authority on which jobs were started, so a request that arrives twice, or from a second worker, starts
nothing twice. It trusts nothing that the sandbox can write, and keeps no file or directory of the host but the control
socket and the exit file of each unfinished job. When it dies, the kernel ends every process of the sandbox.

The one who makes the sandbox connects first, sends `configure`, and later `commit`; if it goes away in between, the sandbox
ends, so that a worker killed at that moment leaves nothing running.

Runs inside the sandbox only: Python 3.9, standard library, one thread.
"""
# ruff: noqa: PTH103 -- pathlib would cost every sandbox eight milliseconds of its start

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time

from activities.sandbox.providers import local_files
from activities.sandbox.providers.local_guard import Guard
from activities.sandbox.providers.local_job import KILL, LIMIT, NOTE, NUMBER, TAKEN, TOTAL, Supervisor
from activities.sandbox.providers.local_jobs import Connection, Job, order, tell
from activities.sandbox.providers.local_process import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    Last,
    below,
    close_strays,
    prctl,
    process_table,
    sweep,
)
from activities.sandbox.providers.local_wire import EGRESS_PORT, VERSION, read_request, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from activities.sandbox.providers.local_wire import Request

COMMIT_WITHIN = 30.0
"""Seconds a new sandbox waits for the one who makes it."""
MAX_FAULTS = 50
"""Rounds of the event loop with a fault in each, at ten milliseconds a fault."""
NUMBER_WITHIN = 1.0
"""Seconds that a new supervisor is waited for, to say which terminal it has made."""
KEPT_SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)
"""All others are ignored here and in every supervisor, so that a `kill -TERM -1` ends commands and not their supervisors."""


class Init:
    """The event loop of process 1."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.PollSelector()
        self.connections: dict[int, Connection] = {}
        self.jobs: dict[str, Job] = {}
        self.by_pid: dict[int, Job] = {}
        self.helpers: set[int] = set()
        self.lost: list[Job] = []
        self.egress: socket.socket | None = None
        self.guard: Guard | None = None
        self.nonce: str | None = None
        self.environment: dict[str, str] = {}
        self.maker: Connection | None = None
        self.committed = False
        self.commit_by = time.monotonic() + COMMIT_WITHIN
        self.faults = 0
        self.wakeup, self.waker = os.pipe()
        for fd in (self.wakeup, self.waker):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.waker, warn_on_full_buffer=False)
        listener.setblocking(False)
        self._watch(listener.fileno(), self._accept)
        self._watch(self.wakeup, lambda: self._ignore(os.read(self.wakeup, 4096)))

    def run(self) -> None:
        """Serve until the end of the sandbox."""
        while self.committed or time.monotonic() < self.commit_by:
            pause = self.guard.pause(bool(self.by_pid)) if self.guard else COMMIT_WITHIN
            if not self.committed:
                pause = min(pause, max(0.0, self.commit_by - time.monotonic()))
            if self.lost:
                pause = 0.02
            actions = [key.data for key, _ in self.selector.select(pause)]
            outcomes = [self._succeeds(action) for action in (*actions, self._reap, self._settle_lost, self._keep_limits)]
            # One fault must not end the sandbox; but when nothing goes any more, its end is better than callers that hang.
            self.faults = 0 if all(outcomes) else self.faults + 1
            if self.faults >= MAX_FAULTS:
                os._exit(1)

    def _succeeds(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - process 1 must outlive every fault of one request
            print(f"init: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            time.sleep(0.01)
            return False
        return True

    def _ignore(self, _: object) -> None:
        """Drop a value."""

    def _watch(self, fd: int, action: Callable[[], None]) -> None:
        self.selector.register(fd, selectors.EVENT_READ, action)

    def _accept(self) -> None:
        try:
            peer, _ = self.listener.accept()
        except BlockingIOError:
            return
        connection = Connection(peer)
        peer.setblocking(False)
        self.connections[peer.fileno()] = connection
        self._watch(peer.fileno(), lambda: self._converse(connection))

    def _hang_up(self, connection: Connection) -> None:
        self.selector.unregister(connection.peer.fileno())
        del self.connections[connection.peer.fileno()]
        connection.inbox.close_fds()
        connection.peer.close()
        if connection in connection.queue:
            connection.queue.remove(connection)
        if connection is self.maker and not self.committed:
            os._exit(1)

    def _converse(self, connection: Connection) -> None:
        try:
            is_open = connection.inbox.feed(connection.peer)
            body = connection.inbox.take()
        except BlockingIOError:
            return
        except (OSError, ValueError):
            is_open, body = False, None
        if body is not None:
            try:
                self._serve(connection, read_request(body))
            except Exception as error:  # noqa: BLE001 - told to the one who asked
                connection.answer({"error": "internal", "message": f"{type(error).__name__}: {error}"})
            finally:
                connection.inbox.close_fds()
        if not is_open and connection.peer.fileno() in self.connections:
            self._hang_up(connection)

    def _serve(self, connection: Connection, request: Request) -> None:
        operation = request["op"]
        if request["version"] != VERSION:
            connection.answer({"error": "version", "message": f"the sandbox speaks version {VERSION} of the protocol"})
        elif operation == "configure" and self.nonce is None:
            self._configure(connection, request)
        elif request["nonce"] != self.nonce:
            connection.answer({"error": "nonce", "message": "the sandbox is another one than was meant"})
        elif operation == "commit":
            self.committed = True
            connection.answer({})
        elif operation == "ping":
            connection.answer({})
        elif operation == "exec":
            self._exec(connection, request)
        elif operation == "kill":
            self._kill(connection, request["job"])
        elif operation in ("progress", "await"):
            tell(connection, self.jobs.get(request["job"]), waits=operation == "await")
        elif operation in ("type", "resize"):
            order(connection, self.jobs.get(request["job"]), request)
        elif operation == "egress":
            self._give_egress(connection)
        else:
            self._serve_files(connection, request)

    def _configure(self, connection: Connection, request: Request) -> None:
        self.nonce = request["nonce"]
        self.environment = request["environment"]
        fds = connection.inbox.fds
        self.guard = Guard(request["limits"], fds.pop() if fds else None)
        self.maker = connection
        with contextlib.suppress(OSError):  # where an agent's own HOME cannot be made, its commands say so
            os.makedirs(self.environment["HOME"], 0o700, exist_ok=True)
        connection.answer({})

    def _give_egress(self, connection: Connection) -> None:
        """Hand out the socket on which the proxy outside accepts: always the same one, so that none who waits in it is lost."""
        if self.egress is None:
            self.egress = socket.create_server(("127.0.0.1", EGRESS_PORT), backlog=128)
        send(connection.peer, {}, [self.egress.fileno()])

    def _exec(self, connection: Connection, request: Request) -> None:
        job = self.jobs.get(request["job"])
        if job is None:
            job = self._start(request, connection.inbox.fds)
        connection.answer({"running": not job.finished})
        if not job.finished:
            connection.wait_in(job.awaiting_finish)

    def _start(self, request: Request, fds: list[int]) -> Job:
        stdin = fds[3] if request["stdin"] else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        environment = {**self.environment, **request["env"]}
        assert self.guard is not None  # noqa: S101 - there is none only before `configure`, and then no nonce fits either
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            with Last():
                self._let_go(ours)
                os.setsid()
                prctl(PR_SET_CHILD_SUBREAPER, 1)
                Supervisor(theirs, fds[:3], request["terminal"], self.guard).run(request, environment, stdin)
        self.guard.notes.clear()
        theirs.close()
        if not request["stdin"]:
            os.close(stdin)
        job = Job(pid, ours, os.dup(fds[2]))
        job.terminal = request["terminal"]
        if job.terminal:  # before anything can be typed
            ours.settimeout(NUMBER_WITHIN)
            with contextlib.suppress(OSError):
                (job.number,) = TOTAL.unpack(ours.recv(16)[1:])
        ours.setblocking(False)
        self.jobs[request["job"]] = self.by_pid[pid] = job
        self._watch(ours.fileno(), lambda: self._hear(job))
        return job

    def _let_go(self, *others: socket.socket) -> None:
        """In a forked child: close what belongs to init, so that a closed connection is seen as closed by the worker."""
        signal.set_wakeup_fd(-1)
        for connection in self.connections.values():
            connection.peer.close()
        for job in (*self.by_pid.values(), *self.lost):
            job.control.close()
            if not job.finished:
                os.close(job.exit_file)
        for other in (self.listener, self.egress, *others):
            if other is not None:
                other.close()
        os.close(self.wakeup)
        os.close(self.waker)

    def _hear(self, job: Job) -> None:
        """Take what a job's supervisor says: its terminal, what input was taken, that the end is recorded, the line's end."""
        try:
            message = job.control.recv(16)
        except BlockingIOError:
            return
        except ConnectionResetError:
            message = b""
        if message[:1] == TAKEN:
            (job.taken,) = TOTAL.unpack(message[1:])
        elif message[:1] == NUMBER:  # late, on a busy machine
            (job.number,) = TOTAL.unpack(message[1:])
        elif message:
            self._finish(job)
        else:
            self.selector.unregister(job.control.fileno())

    def _finish(self, job: Job) -> None:
        if not job.finished:
            job.finished = True
            os.close(job.exit_file)
        while job.awaiting_finish:
            job.awaiting_finish.pop().answer({"running": False})

    def _kill(self, connection: Connection, name: str) -> None:
        job = self.jobs.get(name)
        if job is None or job.gone:
            connection.answer({"running": False})
            return
        connection.wait_in(job.awaiting_gone)
        job.insist(KILL)

    def _keep_limits(self) -> None:
        """End the sandbox at the end of its life, and the jobs that break its other limits."""
        if self.guard is None:
            return
        for job in self.by_pid.values():
            job.flush()
        if time.monotonic() >= self.guard.end_by:
            os._exit(0)
        notes, ends = self.guard.look(self.by_pid, self._help)
        orders = [(job, NOTE, note) for job in self.by_pid.values() for note in notes if not job.finished]
        for job, kind, text in [*orders, *((self.by_pid[pid], LIMIT, reason) for pid, reason in ends)]:
            job.insist(kind + text.encode())
            if kind == LIMIT and job.finished:
                self.guard.notes.append(f"what an earlier command left running was ended: {text}")

    def _help(self, work: Callable[[], None]) -> None:
        """Do something in a child. Raises OSError when there can be none."""
        pid = os.fork()
        if pid == 0:
            with Last():
                self._let_go()
                work()
        self.helpers.add(pid)

    def _serve_files(self, connection: Connection, request: Request) -> None:
        fds = connection.inbox.fds
        pid = os.fork()
        if pid == 0:
            with Last():
                peer = connection.peer.dup()
                peer.setblocking(True)
                self._let_go()
                try:
                    adds = any(item["length"] is not None for item in request.get("changes", []))
                    full = self.guard.check() if adds and self.guard else ""
                    if full:
                        raise local_files.Refused(full)
                    send(peer, *local_files.serve(request, fds))
                except local_files.Refused as error:
                    send(peer, {"error": "file", "message": str(error)})
        self.helpers.add(pid)
        self._hang_up(connection)  # the child answers on its own copy of it

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                # A command may stop its supervisor, as it has the same user id. It must not win time, or hang a caller, by that.
                if pid in self.by_pid or pid in self.helpers:
                    os.kill(pid, signal.SIGKILL)
                continue
            self.helpers.discard(pid)
            job = self.by_pid.get(pid)
            if job is not None:
                self._bury(job, killed=status != 0)

    def _bury(self, job: Job, killed: bool) -> None:
        """A supervisor ended: of itself, with nothing left below it, or killed by a command of the sandbox."""
        if job.control.fileno() in self.selector.get_map():
            self._hear(job)
        if job.control.fileno() in self.selector.get_map():
            self.selector.unregister(job.control.fileno())
        if not job.finished and os.fstat(job.exit_file).st_size:
            self._finish(job)
        del self.by_pid[job.pid]
        job.control.close()
        if killed or not job.finished:
            self.lost.append(job)
        else:
            self._tell_gone(job)

    def _settle_lost(self) -> None:
        """End the processes that a killed supervisor left, then tell what became of its job.

        Every child of init is a supervisor or a helper; anything else was left by a supervisor that is dead.
        """
        if not self.lost:
            return
        strangers = self._strangers()
        if strangers:
            sweep(self._strangers)
            return
        for job in self.lost:
            if not job.finished:
                os.pwrite(job.exit_file, json.dumps({"state": "lost"}).encode() + b"\n", 0)
                self._finish(job)
            self._tell_gone(job)
        self.lost.clear()

    def _tell_gone(self, job: Job) -> None:
        job.gone = True
        while job.awaiting_gone:
            job.awaiting_gone.pop().answer({"running": False})

    def _strangers(self) -> list[int]:
        table = process_table()
        first = [pid for pid in table.get(1, []) if pid not in self.by_pid and pid not in self.helpers]
        return first + below(first, table)


def main(listener: int) -> None:
    """Become process 1 of the sandbox whose control socket is the open file `listener`."""
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    os.umask(0o022)
    close_strays(listener)
    os.set_inheritable(listener, False)
    for number in signal.valid_signals():
        if number not in KEPT_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    Init(socket.socket(fileno=listener)).run()
    os._exit(1)
