"""Starting, finding, watching and ending jobs. Runs inside the sandbox only: Python 3.6, standard library.

`jobs/<digest of the job id>` comes into being in one step, with the pid of the job's supervisor in it, so that callers that race
start it once. In it are: `pid` (pid, start time, clock), `stdout`, `stderr`, `control` (where orders are taken), `exit` (how it
ended), `terminal` (if it has one), `inputs` (what was typed), `reads` (what was read).
"""

import contextlib
import json
import os
import signal
import time

from activities.sandbox.portable_helper.process import end, process, send_signal
from activities.sandbox.portable_helper.stream import Output
from activities.sandbox.portable_helper.wire import SIZE, Denied, hold_room, insist, raw, write_record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Tuple

    from activities.sandbox.portable_helper.wire import Request, Words

STREAMS = (b"stdout", b"stderr")
STATES = ("exited", "signalled", "timed_out", "killed", "lost")
LOST: "Dict[str, Any]" = {"state": "lost"}
TAIL = 4096
BEGUN = b"\0"
"""What a supervisor says when its job is there: by the time this is read the command may have removed the job's directory."""
STEPS = (0.01, 0.01, 0.02, 0.02, 0.03, 0.05)
"""Seconds between the first looks at whether a job has ended; from then on the last."""


class Job:
    """One job directory, of a job that was started or not."""

    def __init__(self, state: bytes, name: str) -> None:
        self.state = state
        self.name = raw(name)
        self.path = os.path.join(state, b"jobs", self.name)

    def file(self, name: bytes) -> bytes:
        """Return the path of one of its files."""
        return os.path.join(self.path, name)

    def is_known(self) -> bool:
        """Tell whether it was ever started."""
        return os.path.isdir(self.path)

    def supervisor(self) -> "Tuple[int, float] | None":
        """Return the pid of its supervisor and when it began, or None when that is dead."""
        try:
            with open(self.file(b"pid")) as file:
                pid, started, began = file.read().split()
        except (OSError, ValueError):
            return None
        found = process(int(pid))
        if found is None or found.started != int(started) or found.state in (b"Z", b"X"):
            return None
        if found.state in (b"T", b"t"):
            # A command may stop its supervisor, as it has the same user. It must not win time, or hang a caller, by that.
            send_signal(int(pid), signal.SIGKILL)
            return None
        return int(pid), float(began)

    def record(self) -> "Dict[str, Any] | None":
        """Return how it ended, or None while it runs. One whose supervisor is dead is ended, and called lost.

        So is one whose record or directory a command has spoiled.
        """
        for _ in range(2):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(self.file(b"exit"), "rb") as file:
                return sound(file.read(1 << 16))
            if self.supervisor() is not None:
                return None
        end(self.name, 0.0)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            write_record(self.path, LOST)
        with contextlib.suppress(OSError), open(self.file(b"exit"), "rb") as file:
            return sound(file.read(1 << 16))
        return LOST

    def wait(self, until: float) -> "Dict[str, Any] | None":
        """Wait for its end, and return how it was, or None when it still runs at the time `until`."""
        step = 0
        while True:
            record = self.record()
            if record is not None or time.monotonic() >= until:
                return record
            time.sleep(STEPS[min(step, len(STEPS) - 1)])
            step += 1

    def seconds(self) -> float:
        """Return for how long it has been running."""
        found = self.supervisor()
        return 0.0 if found is None else time.monotonic() - found[1]

    def has_terminal(self) -> bool:
        """Tell whether it was started with one."""
        return os.path.exists(self.file(b"terminal"))

    def output(self, number: int, record: "Dict[str, Any] | None" = None) -> Output:
        """Open one of its streams."""
        kept = record["kept"][number] if record is not None and "kept" in record else None
        return Output(self.file(STREAMS[number]), kept)

    def order(self, data: bytes) -> str:
        """Give its supervisor an order and return its word. Raises OSError when there is none."""
        import socket  # slow to load, and most calls need none

        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as peer:
            peer.settimeout(5.0)
            peer.connect(self.file(b"control"))
            peer.send(data)
            return peer.recv(100).decode()


def sound(data: bytes) -> "Dict[str, Any]":
    """Return what a record says, or that the job is lost when it cannot be what its supervisor wrote."""
    try:
        record = json.loads(data.decode("ascii"))
        if record["state"] not in STATES or not isinstance(record.get("note", ""), str):
            return LOST
        if record["state"] != "lost":
            numbers = record["totals"] + record["kept"] + [record["seconds"]]
            numbers += [one for one in (record["exit_code"], record["signal"]) if one is not None]
            if len(record["totals"]) != 2 or len(record["kept"]) != 2 or min(numbers) < 0:
                return LOST
        return dict(record)
    except (ValueError, KeyError, TypeError, AttributeError):
        return LOST


def begin(job: Job, given: "Request") -> None:
    """Start a job away from this process, unless it was started already. Returns when it is there. Raises OSError."""
    if job.is_known():
        return
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                supervise(job, given, done)
        finally:
            os._exit(0)
    os.close(done)
    os.waitpid(pid, 0)
    said = os.read(ready, 1000)
    os.close(ready)
    if said != BEGUN and not job.is_known():
        raise OSError(0, "no job can be started in the sandbox: " + said.decode("utf-8", "replace"))


def supervise(job: Job, given: "Request", done: int) -> None:
    """In a process of its own: claim the job, and run it unless another one was first."""
    try:
        null = os.open("/dev/null", os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != done:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        os.umask(0o077)
        own = process(os.getpid())
        claim = os.path.join(job.state, b"jobs", b"new-%d-%d" % (os.getpid(), own.started if own else 0))
        insist(job.state, lambda: os.mkdir(claim))
        os.chdir(claim)

        def note_pid() -> None:
            with open("pid", "w") as file:
                file.write("%d %d %r\n" % (os.getpid(), own.started if own else 0, time.monotonic()))

        insist(job.state, note_pid)
        hold_room(job.state)
        if given["terminal"]:
            open("terminal", "w").close()
        from activities.sandbox.portable_helper.supervise import Supervisor  # slow to load, as above

        supervisor = Supervisor(job.name, given["terminal"], "")
        stdin = os.open(raw(given["stdin"] or "/dev/null"), os.O_RDONLY | os.O_CLOEXEC)
        argv = [raw(word) for word in given["argv"]]
        environment = dict(os.environb)
        environment.update((raw(name), raw(value)) for name, value in given["env"].items())
        environment[b"CAISSON_JOB"] = job.name
        if given["note"]:
            with contextlib.suppress(FileExistsError):  # said once in a sandbox
                os.close(os.open(os.path.join(job.state, b"said-" + raw(given["note"])), os.O_CREAT | os.O_EXCL))
                supervisor.note = given["note"]
        try:
            os.rename(claim, job.path)  # onto a directory with files in it: another one was first
        except OSError:
            for left in os.listdir("."):
                os.unlink(left)
            os.rmdir(claim)
            if not job.is_known():
                raise
            return
        os.write(done, BEGUN)
        os.close(done)
        supervisor.run(argv, raw(given["cwd"]), environment, stdin, given["timeout"])
    except Exception as error:  # noqa: BLE001 - told to the one who waits for the job to be there, or else noted beside it
        with contextlib.suppress(OSError):
            os.write(done, ("%s: %s" % (type(error).__name__, error)).encode("utf-8", "replace"))
        with contextlib.suppress(OSError), open("fault", "w") as file:
            file.write(repr(error))


def run(state: bytes, given: "Request") -> "Tuple[Words, List[bytes]]":
    """Start a job or find it, wait for its end for a while, and tell how it ended, or that it runs."""
    job = Job(state, given["job"])
    try:
        begin(job, given)
    finally:
        if given["stdin"]:
            with contextlib.suppress(OSError):
                os.unlink(raw(given["stdin"]))
    return ended(job, job.wait(time.monotonic() + given["wait"]), given["limit"])


def await_end(state: bytes, given: "Request") -> "Tuple[Words, List[bytes]]":
    """Wait for the end of a job that was started, and tell how it ended, or that it runs."""
    job = Job(state, given["job"])
    if not job.is_known():
        return {"state": "lost"}, []
    return ended(job, job.wait(time.monotonic() + given["wait"]), given["limit"])


def ended(job: Job, record: "Dict[str, Any] | None", limit: int) -> "Tuple[Words, List[bytes]]":
    """Tell how a job ended, with its output."""
    if record is None:
        return {"state": "running"}, []
    if not all(map(os.path.isfile, map(job.file, STREAMS))):
        return {"state": "lost"}, []
    words = dict(record)
    body: "List[bytes]" = []
    lengths: "List[List[int]]" = []
    totals: "List[int]" = []
    kept: "List[int]" = []
    for number in range(2):
        output = job.output(number, record)
        head, tail = output.ends(limit)
        os.close(output.fd)
        body += [head, tail or b""]
        lengths.append([len(head)] if tail is None else [len(head), len(tail)])
        kept.append(output.total)
        totals.append(record["totals"][number] if "totals" in record else output.total)
    words.update(lengths=lengths, totals=totals, kept=kept, terminal=job.has_terminal())
    return words, body


def progress(state: bytes, given: "Request") -> "Tuple[Words, List[bytes]]":
    """Tell how a running job stands."""
    job = Job(state, given["job"])
    if not job.is_known() or job.record() is not None:
        return {"running": False}, []
    tails: "List[bytes]" = []
    totals: "List[int]" = []
    for number in range(2):
        output = job.output(number)
        tails.append(output.tail(TAIL))
        totals.append(output.total)
        os.close(output.fd)
    return {"running": True, "seconds": job.seconds(), "totals": totals, "lengths": [len(tail) for tail in tails]}, tails


def kill(state: bytes, given: "Request") -> "Tuple[Words, List[bytes]]":
    """End all of a job, and tell whether any of it is left after a while."""
    job = Job(state, given["job"])
    if not job.is_known():
        return {"running": False}, []
    until = time.monotonic() + given["wait"]
    while job.supervisor() is not None:
        with contextlib.suppress(OSError):
            job.order(b"k")
        # The order is given again: what does not answer in time may do so later.
        again = min(time.monotonic() + 3.0, until)
        while job.supervisor() is not None and time.monotonic() < again:
            time.sleep(0.02)
        if time.monotonic() >= until and job.supervisor() is not None:
            return {"running": True}, []
    job.record()
    end(job.name, 2.0)
    return {"running": False}, []


def tell(state: bytes, given: "Request") -> "Tuple[Words, List[bytes]]":
    """Type at a job's terminal, or set its size. Raises Denied."""
    job = Job(state, given["job"])
    if not job.is_known():
        raise Denied("unknown")
    if "input" in given:
        name = raw(given["input"])
        with contextlib.suppress(FileNotFoundError), open(job.file(b"inputs"), "rb") as file:
            if name in file.read().splitlines():
                return {}, []
        data = raw("")
        if given["data"]:
            with open(raw(given["data"]), "rb") as file:
                data = file.read()
            os.unlink(raw(given["data"]))
        order = b"i" + name + b"\n" + data
    else:
        order = b"r" + SIZE.pack(given["rows"], given["columns"])
    if job.record() is not None:
        raise Denied("ended")
    if not job.has_terminal():
        raise Denied("no terminal")
    try:
        word = job.order(order)
    except OSError:
        word = "ended" if job.record() is not None else "busy"
    if word != "ok":
        raise Denied(word)
    return {}, []
