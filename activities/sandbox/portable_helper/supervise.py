"""The supervisor of one job: starts the command, keeps its output, enforces its end, whatever becomes of the caller.

It is a process of its own, away from the call that started it. Runs inside the sandbox only: Python 3.6, standard library.
"""

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import termios
import time

from activities.sandbox.portable_helper.process import adopt, family, is_dead, send_signal, sweep
from activities.sandbox.portable_helper.stream import Stream, Terminal
from activities.sandbox.portable_helper.wire import SIZE, write_record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Set, Tuple

TERM_GRACE = 2.0
"""Seconds between TERM and KILL."""
DRAIN_GRACE = 0.1
"""Seconds to wait for late output after the command ended while a background child keeps its pipe open."""
GIVE_UP = 10.0
"""Seconds after KILL until a job counts as ended with a process left that cannot be ended: one of another user."""
PAUSE = 0.02
MAX_ORDER = 1 << 17
MAX_AHEAD = 2 * MAX_ORDER
"""Bytes that may be typed before the command takes them."""
OURS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD)


class Supervisor:
    """Runs one job. Its directory is the current one, with `pid` in it."""

    def __init__(self, name: bytes, terminal: bool, note: str) -> None:
        self.name = name
        self.note = note
        out, err = (os.open(stream, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for stream in ("stdout", "stderr"))
        self.terminal = Terminal(out) if terminal else None
        self.out = self.terminal or Stream(out)
        self.err = Stream(err)
        self.inputs: "Set[str]" = set()
        self.main = -1
        self.status: "int | None" = None
        self.ended_at = 0.0
        self.recorded = False
        self.alone = False
        self.verdict = ""
        self.kill_at: "float | None" = None
        self.adopts = adopt()
        self.wakeup, self.waker = os.pipe()
        for fd in (self.wakeup, self.waker):
            os.set_blocking(fd, False)
        # A `kill -TERM -1` ends commands and not their supervisors.
        for number in range(1, 65):
            if number not in OURS:
                with contextlib.suppress(OSError, ValueError):
                    signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.waker)
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.bind("control")
        self.control.listen(16)
        self.control.setblocking(False)

    def run(self, argv: "List[bytes]", cwd: bytes, environment: "Dict[bytes, bytes]", stdin: int, timeout: float) -> None:
        """Run the command and whatever it leaves, until no process of the job is left."""
        self.began = time.monotonic()
        deadline = self.began + timeout
        error = self.terminal.writer if self.terminal else self.err.writer
        files = (os.dup(error) if self.terminal else stdin, self.out.writer, error)
        try:
            self.main = start(argv, cwd, environment, files, self.terminal is not None)
        except OSError as fault:
            os.write(error, b"caisson: no process can be started: %s\n" % os.strerror(fault.errno or 0).encode())
            self.status, self.ended_at = 126 << 8, time.monotonic()
        os.close(files[0])
        os.close(self.err.writer)
        if self.terminal is None:
            os.close(self.out.writer)
        elif self.status is not None:
            self.terminal.let_go()
        while not (self.alone and self.recorded):
            self.wait(deadline)
            self.reap()
            now = time.monotonic()
            if self.status is None and self.kill_at is None and now >= deadline:
                self.end("timed_out")
            if self.kill_at is not None and now >= self.kill_at and not self.alone:
                sweep(self.name, self.roots(), {os.getpid()})
                if now >= self.kill_at + GIVE_UP:
                    self.alone = True
                    self.note = self.note or "stuck"
            if not self.recorded and self.is_over(now):
                self.record()

    def roots(self) -> "Set[int]":
        """Return the processes below which all of the job is."""
        return ({os.getpid()} if self.adopts else set()) | ({self.main} if self.main > 0 else set())

    def is_over(self, now: float) -> bool:
        """Tell whether the end can be recorded."""
        if self.alone:
            for stream in (self.out, self.err):
                if stream.open:
                    stream.pump(keep=True)
            return True
        if self.status is None or self.kill_at is not None:
            return False
        return not (self.out.open or self.err.open) or now >= self.ended_at + DRAIN_GRACE

    def wait(self, deadline: float) -> None:
        """Wait for whatever comes first, and take output and orders."""
        now = time.monotonic()
        until: "float | None" = None
        if self.kill_at is not None:
            until = min(max(self.kill_at, now + PAUSE), now + 0.2)
        elif self.status is None:
            until = deadline
        elif not self.recorded:
            until = self.ended_at + DRAIN_GRACE
        elif not self.adopts:
            until = now + 1.0
        poll = select.poll()
        poll.register(self.wakeup, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        streams = {stream.pipe: stream for stream in (self.out, self.err) if stream.open}
        for pipe, stream in streams.items():
            poll.register(pipe, stream.wanted())
        # One poll takes at most 2^31 ms; a longer wait is simply begun again.
        pause = None if until is None else min(max(0.0, until - now) * 1000 + 1, 1e9)
        for fd, _ in poll.poll(pause):
            if fd in streams:
                streams[fd].pump(keep=not self.recorded)
                if self.terminal is not None and streams[fd] is self.terminal:
                    self.terminal.flush()
            elif fd == self.wakeup:
                os.read(self.wakeup, 4096)
            else:
                self.converse()

    def converse(self) -> None:
        """Take one order, and answer it with a word that the harness knows, or nothing."""
        with contextlib.suppress(OSError):
            peer, _ = self.control.accept()
            with contextlib.closing(peer):
                peer.settimeout(2.0)
                data = peer.recv(MAX_ORDER)
                peer.send(self.obey(data) or b"ok")

    def obey(self, order: bytes) -> bytes:
        """Do what is asked, and return why it cannot be done, or nothing."""
        kind, rest = order[:1], order[1:]
        if kind == b"k":
            self.end("killed")
            return b""
        if self.recorded or self.status is not None:
            return b"ended"
        if self.terminal is None:
            return b"no terminal"
        if kind == b"r":
            self.terminal.resize(*SIZE.unpack(rest))
            return b""
        name, _, data = rest.partition(b"\n")
        if name.decode() in self.inputs:
            return b""
        if len(self.terminal.typed) + len(data) > MAX_AHEAD:
            return b"busy"
        if not self.terminal.takes(data):
            return b"line"
        self.inputs.add(name.decode())
        with contextlib.suppress(OSError), open("inputs", "ab") as file:  # for those who ask after the end
            file.write(name + b"\n")
        self.terminal.type(data)
        return b""

    def reap(self) -> None:
        """Take note of the processes that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self.alone = self.adopts or all(map(is_dead, family(self.name, self.roots(), {os.getpid()})))
                return
            if pid == 0:
                return
            if pid == self.main:
                self.status, self.ended_at = status, time.monotonic()
                if self.terminal is not None:
                    self.terminal.let_go()

    def end(self, verdict: str) -> None:
        """Begin to end the whole tree: TERM now, KILL later. CONT, since a stopped process would sleep through TERM."""
        if self.kill_at is not None:
            return
        self.kill_at = time.monotonic() + TERM_GRACE
        if self.status is None:
            self.verdict = verdict
        for pid in family(self.name, self.roots(), {os.getpid()}):
            send_signal(pid, signal.SIGTERM)
            send_signal(pid, signal.SIGCONT)

    def record(self) -> None:
        """Write how the job ended. What background children still write after this is read and dropped."""
        status = 0 if self.status is None else self.status
        signalled = os.WIFSIGNALED(status)
        state = self.verdict or ("signalled" if signalled else "exited")
        notes = [self.note] if self.note else []
        if self.out.kept >= 0 or self.err.kept >= 0:
            notes.append("full")
        record: "Dict[str, object]" = {
            "state": state,
            "exit_code": os.WEXITSTATUS(status) if state == "exited" else None,
            "signal": os.WTERMSIG(status) if state == "signalled" else None,
            "note": ",".join(notes),
            "seconds": (time.monotonic() if self.verdict else self.ended_at) - self.began,
            "totals": [self.out.total, self.err.total],
            "kept": [stream.total if stream.kept < 0 else stream.kept for stream in (self.out, self.err)],
        }
        write_record(b".", record)
        self.recorded = True


def start(
    argv: "List[bytes]", cwd: bytes, environment: "Dict[bytes, bytes]", files: "Tuple[int, int, int]", terminal: bool
) -> int:
    """Fork the command into its own session and return its pid. A fault is told as a shell would tell it."""
    pid = os.fork()
    if pid:
        return pid
    code = 126
    try:
        os.setsid()
        os.umask(0o022)
        signal.set_wakeup_fd(-1)
        for number in range(1, 65):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for standard, fd in enumerate(files):
            os.dup2(fd, standard)
        if terminal:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        try:
            os.chdir(cwd)
        except OSError as error:
            raise OSError(error.errno, "cannot start in %s: %s" % (os.fsdecode(cwd), os.strerror(error.errno or 0))) from error
        program = os.fsdecode(argv[0])
        try:
            os.execvpe(argv[0], argv, environment)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                code = 127
                reason = "No such file or directory" if "/" in program else "command not found"
            raise OSError(error.errno, "%s: %s" % (program, reason)) from error
    except OSError as error:
        os.write(2, b"caisson: " + str(error.strerror).encode("utf-8", "surrogateescape") + b"\n")
    except (ValueError, IndexError) as error:  # a NUL byte, an empty argument list
        os.write(2, ("caisson: the command cannot be started: %s\n" % error).encode("utf-8", "backslashreplace"))
    finally:
        os._exit(code)
