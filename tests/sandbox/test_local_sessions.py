"""Sessions in a local sandbox: a command that is talked to while it runs, and read a piece at a time."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import signal
import sys
import time
from pathlib import Path

import pytest

from activities.sandbox.port import Command, InteractiveSandbox, SandboxGone, SessionFault, SessionOutput
from activities.sandbox.providers.local import MAX_INPUT, LocalProvider
from activities.sandbox.providers.local_wire import HEAD, RING, TOTALS
from contracts.sandbox import JobResult, JobState
from tests.sandbox.local_support import Local, make

REPOSITORY = Path(__file__).parents[2]
LIMIT = 8 << 20


class Session:
    """One session of a sandbox, in which every input and every read is a new one."""

    def __init__(self, sandbox: InteractiveSandbox, job: str = "run/session/1") -> None:
        self.sandbox = sandbox
        self.job = job
        self._names = (f"run/step/{n}" for n in itertools.count())

    async def start(self, *argv: str, terminal: bool = True, timeout: float = 30.0) -> Session:
        """Start a command."""
        await self.sandbox.start(Command(self.job, argv, timeout=timeout, terminal=terminal))
        return self

    async def type(self, text: str) -> None:
        """Type at the terminal."""
        await self.sandbox.send(self.job, next(self._names), text.encode())

    async def read(self, wait: float = 10.0, *, until_end: bool = False, limit: int = LIMIT) -> SessionOutput:
        """Read what is new."""
        return await self.sandbox.poll(self.job, next(self._names), wait, until_end=until_end, limit=limit)

    async def until(self, text: str) -> str:
        """Read on until `text` came, and return what was read."""
        got = ""
        async with asyncio.timeout(15):
            while text not in got:
                output = (await self.read()).result
                got += output.stdout.decode()
                assert text in got or output.state is JobState.RUNNING, (output, got)
        return got

    async def end(self) -> JobResult:
        """Wait for the end."""
        return (await self.read(until_end=True)).result


@pytest.fixture
def session(local: Local) -> Session:
    """A session that is not started yet."""
    return Session(local.sandbox)


async def test_a_python_console_answers_and_keeps_its_state(session: Session) -> None:
    """What one call defines the next one uses, and each read gives only what is new."""
    await session.start("python3", "-q")
    await session.until(">>> ")
    await session.type("x = 6 * 7\n")
    await session.until(">>> ")
    await session.type("print('x is', x)\n")
    answer = await session.until("x is 42")
    assert "6 * 7" not in answer
    await session.type("exit(3)\n")
    ended = await session.end()
    assert (ended.state, ended.exit_code) == (JobState.EXITED, 3)


async def test_a_shell_keeps_directory_and_variables(session: Session) -> None:
    """A shell in a session is one shell, unlike a call of a command."""
    await session.start("bash", "--norc")
    await session.type("cd /usr; A=on\n")
    await session.type('echo "[$PWD $A]"\n')
    assert "[/usr on]" in await session.until("[/usr on]")


async def test_a_terminal_is_a_terminal(session: Session) -> None:
    """All three streams are the same controlling terminal of a session of the command's own."""
    script = (
        "import os, sys\n"
        "print([os.isatty(fd) for fd in range(3)], os.ttyname(0) == os.ttyname(1) == os.ttyname(2),"
        " os.tcgetpgrp(0) == os.getpgrp() == os.getsid(0), os.open('/dev/tty', os.O_RDWR) > 2, *os.get_terminal_size())\n"
        "print('on the error stream', file=sys.stderr)"
    )
    await session.start("python3", "-c", script)
    read = await session.read(until_end=True)
    assert read.terminal
    assert read.result.stdout == b"[True, True, True] True True True 80 24\r\non the error stream\r\n"
    assert read.result.stderr == b""


async def test_without_a_terminal_there_is_none(session: Session) -> None:
    """A session can also be a plain command, whose two streams stay apart and whose input is closed."""
    await session.start("bash", "-c", "test -t 1 || echo none; echo bad >&2; cat; sleep 1; echo end", terminal=False)
    first = await session.read()
    assert (first.result.state, first.result.stdout, first.result.stderr) == (JobState.RUNNING, b"none\n", b"bad\n")
    assert not first.terminal
    rest = await session.end()
    assert (rest.state, rest.stdout, rest.stderr, rest.stdout_bytes) == (JobState.EXITED, b"end\n", b"", 4)
    with pytest.raises(SessionFault, match="ended"):
        await session.type("late\n")


async def test_a_command_without_a_terminal_takes_no_input(session: Session) -> None:
    """The fault says what to do instead."""
    await session.start("sleep", "20", terminal=False)
    with pytest.raises(SessionFault, match="start the command with one"):
        await session.type("hello\n")


async def test_resizing_tells_the_command(session: Session) -> None:
    """The new size is seen by stty, and by whoever waits for SIGWINCH."""
    await session.start("bash", "-c", "trap 'stty size' WINCH; stty size; while read -r line; do stty size; done")
    assert "24 80" in await session.until("24 80")
    await session.sandbox.resize(session.job, 50, 132)
    await session.type("\n")
    assert "50 132" in await session.until("50 132")


async def test_control_c_interrupts_the_program_in_front(session: Session) -> None:
    """Ctrl-C ends what the shell runs, and not the shell."""
    await session.start("bash", "--norc")
    await session.type("echo ready; sleep 321.7\n")
    await session.until("\r\nready")
    await session.type("\x03")
    await session.type('echo "[$?]"\n')
    await session.until("[130]")


async def test_control_d_is_the_end_of_input(session: Session) -> None:
    """`cat` gives back what is typed until Ctrl-D."""
    await session.start("cat")
    await session.type("one\n")
    assert (await session.until("one\r\none\r\n")).count("one") == 2
    await session.type("\x04")
    assert (await session.end()).exit_code == 0


async def test_a_password_is_not_echoed(session: Session) -> None:
    """What is typed while a program has echo off is in no output."""
    await session.start("python3", "-c", "import getpass; print(len(getpass.getpass('Password: ')))")
    await session.until("Password: ")
    await session.type("s3cret\n")
    ended = await session.end()
    assert (ended.exit_code, ended.stdout) == (0, b"\r\n6\r\n")


async def test_bytes_that_are_no_text_come_and_go_unchanged(session: Session) -> None:
    """Every byte can be typed and read at a raw terminal; nothing is decoded on the way."""
    await session.start(
        "bash", "-c", "stty raw -echo; echo ready; head -c 256 | od -An -v -tu1 -w256 | tr -d '\\n'; printf '\\xff\\0\\xfe'"
    )
    await session.until("ready")
    await session.sandbox.send(session.job, "junk", bytes(range(256)))
    ended = await session.end()
    assert ended.stdout.split() == [b"%d" % n for n in range(255)] + [b"255\xff\0\xfe"]


async def test_a_character_is_not_cut_between_two_reads(session: Session) -> None:
    """A read that ends inside a character leaves it to the next one."""
    await session.start("bash", "-c", "stty -echo; printf 'a\\xe2\\x82'; read -r; printf '\\xac'; read -r")
    assert (await session.read()).result.stdout == b"a"
    await session.type("\n")
    assert "€" in (await session.read()).result.stdout.decode()


async def test_what_is_typed_ahead_is_kept(session: Session) -> None:
    """Input that comes before the program reads, and more than a terminal holds, reaches it in whole."""
    await session.start("bash", "-c", "stty raw -echo; echo ready; sleep 0.5; head -c 60000 | md5sum; exit")
    await session.until("ready")
    text = "".join(f"{n:06d}" for n in range(10_000))
    await session.type(text)
    assert hashlib.md5(text.encode()).hexdigest() in (await session.end()).stdout.decode()


async def test_too_much_input_at_once_is_refused(session: Session) -> None:
    """The fault names the limit."""
    await session.start("cat")
    with pytest.raises(SessionFault, match=str(MAX_INPUT)):
        await session.type("x" * (MAX_INPUT + 1))


async def test_input_to_one_who_does_not_read_is_refused_in_the_end(session: Session) -> None:
    """What nobody reads does not pile up: the fault says so, and the session can still be interrupted by a kill."""
    await session.start("bash", "-c", "stty raw -echo; echo ready; sleep 30")
    await session.until("ready")
    with pytest.raises(SessionFault, match="does not read"):
        for _ in range(40):
            await session.type("x" * MAX_INPUT)
    await session.sandbox.kill_job(session.job)
    assert (await session.end()).state is JobState.KILLED


async def test_input_with_one_name_is_typed_once(session: Session) -> None:
    """A repeated request, also from another worker and after the end, types nothing."""
    await session.start("bash", "-c", 'stty -echo; echo ready; read -r a; read -r b; echo "[$a][$b]"')
    await session.until("ready")
    other = Session(session.sandbox)
    for _ in range(3):
        await other.sandbox.send(session.job, "first", b"one\n")
    await session.sandbox.send(session.job, "second", b"two\n")
    assert b"[one][two]" in (await session.end()).stdout
    await session.sandbox.send(session.job, "second", b"two\n")


async def test_a_read_with_one_name_gives_the_same_again(session: Session) -> None:
    """A repeated read takes nothing from the next one, and tells no end that the first did not tell."""
    await session.start("bash", "-c", "echo one; read -r; echo two; exit 4")
    poll = session.sandbox.poll
    first = await poll(session.job, "a", 10, until_end=False, limit=LIMIT)
    assert (first.result.state, first.result.stdout) == (JobState.RUNNING, b"one\r\n")
    await session.type("\n")
    second = await poll(session.job, "b", 10, until_end=True, limit=LIMIT)
    assert (second.result.exit_code, second.result.stdout) == (4, b"\r\ntwo\r\n")
    assert await poll(session.job, "a", 10, until_end=True, limit=LIMIT) == first
    assert await poll(session.job, "b", 0, until_end=False, limit=LIMIT) == second
    last = await poll(session.job, "c", 10, until_end=False, limit=LIMIT)
    assert (last.result.exit_code, last.result.stdout) == (4, b"")


def first_number(part: bytes) -> int:
    """Return the number in the first line."""
    return int(part.split()[0])


async def test_racing_reads_share_the_output(session: Session) -> None:
    """Reads that race give every byte once; those of one name are the same."""
    await session.start("bash", "-c", "seq 1000; sleep 0.1; seq 1000 2000; read -r")
    names = [f"read/{n % 4}" for n in range(12)]
    reads = await asyncio.gather(*(session.sandbox.poll(session.job, name, 5, until_end=False, limit=LIMIT) for name in names))
    by_name = {name: read.result.stdout for name, read in zip(names, reads, strict=True)}
    assert all(by_name[name] == read.result.stdout for name, read in zip(names, reads, strict=True))
    rest = (await session.read(0.1)).result.stdout
    parts: list[bytes] = sorted((part for part in (*by_name.values(), rest) if part), key=first_number)
    lines = b"".join(parts).split()
    assert lines == [b"%d" % n for n in [*range(1, 1001), *range(1000, 2001)]]


async def test_reading_waits_on_the_side_of_the_sandbox(session: Session) -> None:
    """A read returns when output comes, when the end comes, or when its time is over, and not before."""
    await session.start("bash", "-c", "sleep 0.6; echo late; read -r", terminal=False)
    began = time.monotonic()
    assert (await session.read(0.1)).result.stdout == b""
    assert 0.1 <= time.monotonic() - began < 0.6
    assert (await session.read(20)).result.state is JobState.EXITED
    assert time.monotonic() - began < 5


async def test_waiting_for_the_end_is_not_ended_by_output(session: Session) -> None:
    """A long command is waited for in one read, however much it says meanwhile."""
    await session.start("bash", "-c", "for i in 1 2 3; do echo $i; sleep 0.4; done", terminal=False)
    ended = await session.end()
    assert (ended.state, ended.stdout) == (JobState.EXITED, b"1\n2\n3\n")


async def test_an_unread_flood_stays_bounded(local: Local, session: Session) -> None:
    """A session that nobody reads keeps a bounded part on the disk, and a late read gives its beginning and its end."""
    await session.start("bash", "-c", "yes 0123456789 | head -c 60000000; echo; echo done; read -r")
    async with asyncio.timeout(60):
        while (progress := await session.sandbox.progress(session.job)) and b"done" not in progress.stdout_tail:
            await asyncio.sleep(0.05)
    sizes = [path.stat().st_size for path in local.directory.glob("jobs/*/stdout")]
    assert sizes == [HEAD + RING + TOTALS.size]
    result = (await session.read(limit=4000)).result
    assert result.stdout.startswith(b"0123456789\r\n0123456789\r\n")
    assert result.stdout.endswith(b"done\r\n")
    assert b"bytes left out" in result.stdout
    assert len(result.stdout) < 4100
    assert result.stdout_bytes > 60_000_000


async def test_reads_during_a_flood_mix_nothing_up(session: Session) -> None:
    """What is overwritten while it is read is left out: every line that is given is a line that was written."""
    await session.start("bash", "-c", "seq -f %09.0f 3000000", terminal=False)
    last = -1
    for _ in range(1000):
        result = (await session.read(0)).result
        for part in result.stdout.split(b" bytes left out ...]\n"):
            numbers = [int(line) for line in part.rpartition(b"\n[...")[0].split(b"\n")[1:-1] if len(line) == 9]
            assert all(one + 1 == two for one, two in itertools.pairwise(numbers)), numbers[:3]
            assert not numbers or numbers[0] > last
            last = numbers[-1] if numbers else last
        if result.state is not JobState.RUNNING:
            break
    assert result.state is JobState.EXITED


async def test_kill_ends_a_session_with_its_children(local: Local, session: Session) -> None:
    """A killed session is reported as killed, and nothing of it is left, also what called setsid."""
    await session.start("bash", "-c", "setsid sleep 322.3 & echo begun; sleep 322.3")
    await session.until("begun")
    await session.sandbox.kill_job(session.job)
    assert not await local.alive("322.3")
    assert (await session.end()).state is JobState.KILLED


async def test_the_lifetime_of_a_session_ends_it(local: Local, session: Session) -> None:
    """The timeout of its command holds for a session too, whether anybody reads or not."""
    await session.start("bash", "-c", "trap '' HUP; echo begun; sleep 323.3", timeout=0.6)
    ended = await session.end()
    assert (ended.state, ended.stdout) == (JobState.TIMED_OUT, b"begun\r\n")
    assert not await local.alive("323.3")


async def test_a_command_that_lets_go_of_its_terminal_goes_on(session: Session) -> None:
    """Closing the standard streams is not the end, and gets no hangup."""
    await session.start("bash", "-c", "exec </dev/null >/workspace/out 2>&1; sleep 0.4; echo alive")
    assert (await session.end()).exit_code == 0


async def test_a_background_child_that_holds_the_terminal_does_not_hold_the_end(session: Session) -> None:
    """The end is reported when the command ends."""
    await session.start("bash", "-c", "(trap '' HUP; sleep 20) & echo end")
    began = time.monotonic()
    assert (await session.end()).exit_code == 0
    assert time.monotonic() - began < 3


async def test_an_unknown_session_is_told_as_such(session: Session) -> None:
    """Neither read nor input nor resize of a job that was never started starts one or waits."""
    for call in (session.read(30), session.type("x"), session.sandbox.resize(session.job, 1, 1)):
        with pytest.raises(SessionFault, match="no such session"):
            await call


async def test_a_session_belongs_to_its_sandbox(local: Local, session: Session) -> None:
    """The same job id in another sandbox is another job."""
    await session.start("cat")
    other = Session(await local.provider.attach(await make(local.provider, "another run")))
    with pytest.raises(SessionFault, match="no such session"):
        await other.read(0)


async def test_sessions_end_with_their_sandbox(local: Local, session: Session) -> None:
    """A pending read is told at once, and later ones too."""
    await session.start("cat")
    waiting = asyncio.create_task(session.read(30, until_end=True))
    await session.sandbox.progress(session.job)
    await local.provider.kill(local.sandbox.ref)
    with pytest.raises(SandboxGone):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(SandboxGone):
        await session.type("x")


WORKER = """
import asyncio, sys
from pathlib import Path
from activities.sandbox.port import Command
from activities.sandbox.providers.local import LocalProvider
from contracts.sandbox import SandboxRef

async def main() -> None:
    sandbox = await LocalProvider(Path(sys.argv[1])).attach(SandboxRef.model_validate_json(sys.argv[2]))
    await sandbox.start(Command("run/session/1", ["bash", "--norc"], timeout=30, terminal=True))
    await sandbox.send("run/session/1", "first", b"echo $$ >> effects; echo typed\\n")
    output = await sandbox.poll("run/session/1", "read", 10, until_end=False, limit=1 << 20)
    print(output.result.stdout.hex(), flush=True)
    await sandbox.poll("run/session/1", "pending", 30, until_end=True, limit=1 << 20)

asyncio.run(main())
"""


async def test_another_worker_goes_on_with_a_session(local: Local, session: Session) -> None:
    """After SIGKILL of the worker that started it: the same read again, nothing typed twice, and then what is new."""
    root, ref = str(local.directory.parent), local.sandbox.ref.model_dump_json()
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, root, ref), cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    first = bytes.fromhex((await worker.stdout.readline()).decode())
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    sandbox = await LocalProvider(local.directory.parent).attach(local.sandbox.ref)
    await sandbox.start(Command("run/session/1", ["bash", "--norc"], timeout=30, terminal=True))
    await sandbox.send("run/session/1", "first", b"echo $$ >> effects; echo typed\n")
    again = await sandbox.poll("run/session/1", "read", 10, until_end=False, limit=1 << 20)
    assert again.result.stdout == first
    await session.type("wc -l < effects; exit\n")
    ended = await session.end()
    assert (ended.exit_code, b"\r\n1\r\n" in ended.stdout) == (0, True)
    assert b"typed" not in ended.stdout
