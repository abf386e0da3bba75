"""The supervisor of one job inside a local sandbox: starts the command, keeps its output, enforces its end.

Runs in its own process, a child of init and the subreaper of everything the command starts, so that whatever the command
leaves (also after setsid or a double fork) is found below it and can be ended. It goes on when the worker is gone.
Runs inside the sandbox only: Python 3.9, standard library.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import struct
import termios
import time
import warnings  # noqa: F401 - os.execvpe imports it: here once a sandbox, there once a command

from activities.sandbox.providers.local_process import below, process_table, send_signal, sweep
from activities.sandbox.providers.local_stream import WINDOW, Stream, Terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from activities.sandbox.providers.local_guard import Guard
    from activities.sandbox.providers.local_wire import Request

TERM_GRACE = 2.0
"""Seconds between TERM and KILL."""
DRAIN_GRACE = 0.1
"""Seconds to wait for late output after the command ended while a background child keeps its pipe open."""
SWEEP_PAUSE = 0.02
SETTABLE = tuple(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})
"""Signals whose handling a process may choose. Listed once, since making the list takes longer than going through it."""
DONE = b"d"
KILL = b"k"
TAKEN = b"t"
NUMBER = b"p"
"""The number of the job's terminal under /dev/pts."""
TOTAL = struct.Struct("<Q")
INPUT = b"i"
RESIZE = b"r"
LIMIT = b"l"
"""Ends the job like KILL; the rest is the note that says which limit it broke."""
NOTE = b"n"
"""Only the note."""
MAX_ORDER = 1 << 17
"""Bytes of one order of init. The line between them keeps orders whole (SOCK_SEQPACKET)."""


def start(request: Request, environment: dict[str, str], files: tuple[int, int, int], confine: Callable[[], None]) -> int:
    """Fork the command of `request` into its own session and return its pid. A fault is told as a shell would tell it."""
    pid = os.fork()
    if pid:
        return pid
    code = 126
    try:
        os.setsid()
        os.umask(0o022)
        for number in SETTABLE:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for standard, fd in enumerate(files):
            os.dup2(fd, standard)
        if request["terminal"]:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        confine()
        try:
            os.chdir(request["cwd"])
        except OSError as error:
            raise OSError(error.errno, f"cannot start in {request['cwd']}: {os.strerror(error.errno or 0)}") from error
        program = request["argv"][0]
        try:
            os.execvpe(program, request["argv"], environment)  # noqa: S606 - no shell is meant
        except FileNotFoundError as error:
            code = 127
            reason = "No such file or directory" if "/" in program else "command not found"
            raise OSError(error.errno, f"{program}: {reason}") from error
        except OSError as error:
            raise OSError(error.errno, f"{program}: {os.strerror(error.errno or 0)}") from error
    except OSError as error:
        os.write(2, f"caisson: {error.strerror}\n".encode("utf-8", "surrogateescape"))
    except (ValueError, IndexError) as error:  # a NUL byte, a lone surrogate, an empty argument list
        os.write(2, f"caisson: the command cannot be started: {error}\n".encode("utf-8", "backslashreplace"))
    finally:
        os._exit(code)


class Supervisor:
    """Runs one job. `files` are the host's stdout, stderr and exit files, `control` leads to init."""

    def __init__(self, control: socket.socket, files: list[int], terminal: bool, guard: Guard) -> None:
        self.control = control
        self.guard = guard
        self.note = ""
        self.terminal = Terminal(files[0]) if terminal else None
        self.told = 0
        self.out, self.err = self.terminal or Stream(files[0]), Stream(files[1])
        self.exit_file = files[2]
        self.main = -1
        self.status: int | None = None
        self.ended_at = 0.0
        self.recorded = False
        self.alone = False
        self.verdict = ""
        self.kill_at: float | None = None
        self._wakeup, self._waker = os.pipe()
        for fd in (self._wakeup, self._waker):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def run(self, request: Request, environment: dict[str, str], stdin: int) -> None:
        """Run the command and whatever it leaves, until no process of the job is left."""
        self.started_at, self.began = time.time(), time.monotonic()
        deadline = self.began + request["timeout"]
        if self.terminal is not None:
            self.control.send(NUMBER + TOTAL.pack(self.terminal.number()))
        full = self.guard.check()
        self.note = "; ".join([*self.guard.notes, *([f"{full}; until then no file can grow"] if full else [])])
        self.oom_kills = self.guard.oom_kills()
        try:
            stdin, stderr = (os.dup(self.out.writer), self.out.writer) if self.terminal else (stdin, self.err.writer)
            files = (stdin, self.out.writer, stderr)
            self.main = start(request, environment, files, lambda: self.guard.confine(may_write=not full))
        except OSError as error:
            os.write(self.err.writer, f"caisson: no process can be started: {error.strerror}\n".encode())
            self.status, self.ended_at = 126 << 8, time.monotonic()
        os.close(stdin)
        os.close(self.err.writer)
        if self.terminal is None:
            os.close(self.out.writer)
        elif self.status is not None:
            self.terminal.let_go()
        while not (self.alone and self.recorded):
            self._wait(deadline)
            self._reap()
            now = time.monotonic()
            if self.status is None and self.kill_at is None and now >= deadline:
                self._end("timed_out")
            if self.kill_at is not None and now >= self.kill_at and not self.alone:
                sweep(self.tree)
            if not self.recorded and self._is_over(now):
                self._record()

    def tree(self) -> list[int]:
        """Return every process of this job."""
        return below([os.getpid()], process_table())

    def _is_over(self, now: float) -> bool:
        if self.alone:
            for stream in (self.out, self.err):
                if stream.open:
                    stream.pump(keep=True)
            return True
        if self.status is None or self.kill_at is not None:
            return False
        return not (self.out.open or self.err.open) or now >= self.ended_at + DRAIN_GRACE

    def _wait(self, deadline: float) -> None:
        now = time.monotonic()
        if self.kill_at is not None:
            until = max(self.kill_at, now + SWEEP_PAUSE)
        elif self.status is None:
            until = deadline
        elif not self.recorded:
            until = self.ended_at + DRAIN_GRACE
        else:
            until = None
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        streams = {stream.pipe: stream for stream in (self.out, self.err) if stream.open}
        for pipe, stream in streams.items():
            poll.register(pipe, stream.wanted())
        # One poll takes at most 2^31 ms; a longer wait is simply begun again.
        pause = None if until is None else min(max(0.0, until - now) * 1000 + 1, 1e9)
        for fd, _ in poll.poll(pause):
            if fd in streams:
                streams[fd].pump(keep=not self.recorded)
                if streams[fd] is self.terminal:
                    self.terminal.flush()
                    self._tell_taken(self.terminal)
            elif fd == self._wakeup:
                os.read(self._wakeup, 4096)
            else:
                self._obey(self.control.recv(MAX_ORDER))

    def _obey(self, order: bytes) -> None:
        if not order:
            os._exit(1)  # init is gone, and with it this whole sandbox
        kind, rest = order[:1], order[1:]
        if kind == KILL:
            self._end("killed")
        elif kind in (LIMIT, NOTE):
            self.note = rest.decode() if kind == LIMIT else self.note or rest.decode()
            if kind == LIMIT:
                self._end("killed", grace=0.0)
        elif kind == INPUT and self.terminal:
            self.terminal.type(rest)
            self._tell_taken(self.terminal)
        elif kind == RESIZE and self.terminal:
            self.terminal.resize(*WINDOW.unpack(rest))

    def _tell_taken(self, terminal: Terminal) -> None:
        """Tell init how much input was taken, so that it gives no more than fits into this process's memory."""
        if terminal.taken != self.told:
            self.told = terminal.taken
            with contextlib.suppress(BrokenPipeError):
                self.control.send(TAKEN + TOTAL.pack(self.told))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.alone = True
                return
            if pid == 0:
                return
            if pid == self.main:
                self.status, self.ended_at = status, time.monotonic()
                if self.terminal is not None:
                    self.terminal.let_go()

    def _end(self, verdict: str, grace: float = TERM_GRACE) -> None:
        """Begin to end the whole tree: TERM now, KILL later. CONT, since a stopped process would sleep through TERM."""
        if self.kill_at is not None:
            return
        self.kill_at = time.monotonic() + grace
        if self.status is None:
            self.verdict = verdict
        for pid in self.tree():
            send_signal(pid, signal.SIGTERM)
            send_signal(pid, signal.SIGCONT)

    def _record(self) -> None:
        """Write how the job ended. What background children still write after this is read and dropped."""
        status = 0 if self.status is None else self.status
        signalled = os.WIFSIGNALED(status)
        state = self.verdict or ("signalled" if signalled else "exited")
        record = {
            "state": state,
            "exit_code": os.WEXITSTATUS(status) if state == "exited" else None,
            "signal": os.WTERMSIG(status) if state == "signalled" else None,
            "note": self.guard.explain(status, self.guard.oom_kills() - self.oom_kills, self.note),
            "started_at": self.started_at,
            "duration": (time.monotonic() if self.verdict else self.ended_at) - self.began,
            "stdout_bytes": self.out.total,
            "stderr_bytes": self.err.total,
            "stdout_kept": self.out.total if self.out.kept is None else self.out.kept,
            "stderr_kept": self.err.total if self.err.kept is None else self.err.kept,
        }
        os.pwrite(self.exit_file, json.dumps(record).encode() + b"\n", 0)
        self.recorded = True
        try:
            self.control.send(DONE)
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
