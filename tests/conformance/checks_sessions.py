"""Commands that are talked to while they run."""

from __future__ import annotations

import itertools
import time

import pytest

from activities.sandbox.port import Command, SessionFault, SessionOutput
from contracts.sandbox import WORKSPACE, JobState
from tests.conformance.box import Box, elsewhere, own, shared
from tests.conformance.subjects import Subject

LIMIT = 1 << 20
NONE = "the provider has no sessions, and the shell tool says so"
NO_TERMINAL = "without Python in the image there are no terminals, and the command's output says so"


class Session:
    """One session of a box."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.job = box.job()
        self._names = (f"{self.job}/step/{n}" for n in itertools.count())

    async def start(self, script: str, *, terminal: bool, timeout: float = 30.0) -> Session:
        """Start a script."""
        command = Command(self.job, ("sh", "-c", script), f"{WORKSPACE}/{self.box.name}", timeout=timeout, terminal=terminal)
        await self.box.sessions.start(command)
        return self

    async def type(self, text: str, name: str | None = None) -> None:
        """Type at the terminal."""
        await self.box.sessions.send(self.job, name or next(self._names), text.encode())

    async def read(self, wait: float = 10.0, *, until_end: bool = False, name: str | None = None) -> SessionOutput:
        """Read what is new."""
        return await self.box.sessions.poll(self.job, name or next(self._names), wait, until_end=until_end, limit=LIMIT)

    async def until(self, text: str) -> str:
        """Read on until `text` came, and return what was read."""
        got = ""
        while text not in got:
            output = (await self.read()).result
            got += output.stdout.decode()
            assert text in got or output.state is JobState.RUNNING, (output, got)
        return got


async def check_a_session_is_read_piece_by_piece(subject: Subject) -> str | None:
    """Each read gives what is new, waits in the sandbox for it, and the last one tells how the session ended."""
    if not subject.capabilities.interactive:
        return NONE
    session = await Session(await shared(subject)).start("echo one; echo bad >&2; sleep 3; echo two; exit 4", terminal=False)
    first = await session.read()
    assert (first.result.state, first.result.stdout, first.result.stderr) == (JobState.RUNNING, b"one\n", b"bad\n")
    assert not first.terminal
    began = time.monotonic()
    assert (await session.read(0.2)).result.stdout == b""
    assert time.monotonic() - began < 2.5
    last = (await session.read(20, until_end=True)).result
    assert (last.state, last.exit_code, last.stdout, last.stdout_bytes) == (JobState.EXITED, 4, b"two\n", 4)
    again = (await session.read(5)).result
    assert (again.state, again.exit_code, again.stdout) == (JobState.EXITED, 4, b"")
    return None


async def check_a_read_can_be_repeated(subject: Subject) -> str | None:
    """A read of one name gives the same again, also to another worker, and takes nothing from the next one."""
    if not subject.capabilities.interactive:
        return NONE
    box = await shared(subject)
    session = await Session(box).start("echo one; sleep 1.5; echo two", terminal=False)
    first = await session.read(name="a")
    last = await session.read(20, until_end=True, name="b")
    assert (first.result.stdout, last.result.stdout) == (b"one\n", b"two\n")
    session.box = await elsewhere(box)
    assert await session.read(0, name="a") == first
    assert await session.read(0, name="b") == last
    return None


async def check_a_session_starts_once(subject: Subject) -> str | None:
    """Starting a session again, and reading it as a job, finds the one that runs."""
    if not subject.capabilities.interactive:
        return NONE
    box = await shared(subject)
    session = await Session(box).start("echo x >> effects; sleep 0.5; echo end", terminal=False)
    await session.start("echo x >> effects", terminal=False)
    assert (await session.read(20, until_end=True)).result.stdout == b"end\n"
    assert await box.text("cat effects") == "x\n"
    return None


async def check_a_terminal_is_talked_to(subject: Subject) -> str | None:
    """A command with a terminal is typed at, each input once, and sees the terminal's size and interrupts."""
    if not subject.capabilities.interactive:
        return NONE
    session = Session(await shared(subject))
    script = 'test -t 0 && test -t 1 && echo terminal; stty size; read -r a; echo "[$a]"; read -r b; echo "<$b>"; exit 4'
    await session.start(script, terminal=True)
    if subject.image != "python" and not subject.capabilities.native_jobs:
        ended = (await session.read(10, until_end=True)).result
        assert ended.exit_code == 126
        assert b"no terminals" in ended.stderr
        return NO_TERMINAL
    assert "24 80" in await session.until("24 80")
    for _ in range(2):
        await session.type("one\n", name=f"{session.job}/once")
    assert "[one]" in await session.until("[one]")
    await session.box.sessions.resize(session.job, 50, 132)
    await session.type("two\n")
    ended = (await session.read(10, until_end=True)).result
    assert (ended.state, ended.exit_code) == (JobState.EXITED, 4)
    assert b"<two>" in ended.stdout
    await session.type("one\n", name=f"{session.job}/once")
    with pytest.raises(SessionFault, match="ended"):
        await session.type("late\n")
    return None


async def check_control_c_interrupts(subject: Subject) -> str | None:
    """Ctrl-C at the terminal ends the program in front, and a new size is told to it."""
    if not subject.capabilities.interactive:
        return NONE
    if subject.image != "python" and not subject.capabilities.native_jobs:
        return NO_TERMINAL
    session = await Session(await shared(subject)).start(
        "trap 'echo interrupted; exit 9' INT; trap 'stty size' WINCH; echo ready; while :; do sleep 0.1; done", terminal=True
    )
    await session.until("ready")
    await session.box.sessions.resize(session.job, 50, 132)
    assert "50 132" in await session.until("50 132")
    await session.type("\x03")
    ended = (await session.read(10, until_end=True)).result
    assert (ended.exit_code, b"interrupted" in ended.stdout) == (9, True)
    return None


async def check_what_a_session_cannot_do_is_told(subject: Subject) -> str | None:
    """Unknown sessions, and input where there is no terminal, are refused in words that say what to do."""
    if not subject.capabilities.interactive:
        return NONE
    box = await shared(subject)
    unknown = Session(box)
    for call in (unknown.read(30), unknown.type("x"), box.sessions.resize(unknown.job, 1, 1)):
        with pytest.raises(SessionFault, match="no such session"):
            await call
    session = await Session(box).start("sleep 20", terminal=False)
    with pytest.raises(SessionFault, match="start the command with one"):
        await session.type("hello\n")
    await box.sandbox.kill_job(session.job)
    assert (await session.read(10, until_end=True)).result.state is JobState.KILLED
    return None


async def check_a_session_ends_in_time(subject: Subject) -> str | None:
    """The lifetime of a session ends it with its children, whether anybody reads or not."""
    if not subject.capabilities.interactive:
        return NONE
    async with own(subject) as box:
        session = await Session(box).start(
            "trap '' HUP; echo begun; setsid sleep 323.3 & sleep 323.3", terminal=False, timeout=1.0
        )
        ended = (await session.read(20, until_end=True)).result
        assert (ended.state, ended.stdout) == (JobState.TIMED_OUT, b"begun\n")
        assert not await box.alive("323.3")
    return None


async def check_a_terminal_waits_for_its_command(subject: Subject) -> str | None:
    """A command that lets go of its terminal for a while, as one that asks for a password does, is heard when it comes back."""
    if not subject.capabilities.interactive:
        return NONE
    if subject.image != "python" and not subject.capabilities.native_jobs:
        return NO_TERMINAL
    script = (
        "exec </dev/null >/dev/null 2>&1; sleep 0.4; echo 'Password: ' >/dev/tty; read -r x </dev/tty; echo \"[$x]\" >/dev/tty"
    )
    session = await Session(await shared(subject)).start(script, terminal=True)
    await session.until("Password: ")
    await session.type("secret\n")
    ended = (await session.read(10, until_end=True)).result
    assert (ended.state, ended.exit_code, b"[secret]" in ended.stdout) == (JobState.EXITED, 0, True)
    return None


async def check_a_line_that_would_be_cut_is_refused(subject: Subject) -> str | None:
    """A terminal that collects whole lines takes 4095 bytes of one; what is longer is not typed at all."""
    if not subject.capabilities.interactive:
        return NONE
    if subject.image != "python" and not subject.capabilities.native_jobs:
        return NO_TERMINAL
    script = 'stty -echo; echo ready; read -r x; echo "got ${#x}"; stty raw; echo again; head -c 6000 | wc -c'
    session = await Session(await shared(subject)).start(script, terminal=True)
    await session.until("ready")
    with pytest.raises(SessionFault, match="4095 bytes"):
        await session.type("x" * 5000 + "\n")
    await session.type("x" * 3000)
    with pytest.raises(SessionFault, match="4095 bytes"):
        await session.type("x" * 2000)
    await session.type("x" * 1000 + "\n")
    assert "got 4000" in await session.until("again")
    await session.type("x" * 6000)
    assert b"6000" in (await session.read(10, until_end=True)).result.stdout
    return None
