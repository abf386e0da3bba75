"""Process trees in a local sandbox: how they end, what outlives a call, and that nothing is leaked."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from activities.sandbox.port import SandboxGone
from activities.sandbox.providers.local import LocalSandbox
from activities.sandbox.providers.local_wire import HEAD, RING
from contracts.sandbox import JobState
from tests.sandbox.local_support import Local, bash

TREES = {
    "own session": "setsid sleep 317.1 & wait",
    "double fork": "(setsid bash -c 'sleep 317.1 & disown; sleep 317.1' &) ; sleep 317.1",
    "ignores TERM": "f() { trap '' TERM; while :; do sleep 317.1; done; }; export -f f; setsid bash -c f & f",
    "stopped": "sleep 317.1 & kill -STOP $!; wait",
    "nohup": "nohup sleep 317.1 >/dev/null 2>&1 & disown; sleep 317.1",
    "first thread ended": (
        "python3 -c 'import ctypes, threading, time, sys\n"
        "threading.Thread(target=time.sleep, args=(317.1,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)' 317.1"
    ),
    "subreaper": (
        "python3 -c 'import ctypes, os, time\nctypes.CDLL(None).prctl(36, 1); os.fork() or os.fork(); time.sleep(317)' 317.1"
    ),
    "fork bomb": "ulimit -u 120; f() { f & f & sleep 317.1; wait; }; f 2>/dev/null",
}


@pytest.mark.parametrize("name", TREES)
async def test_at_a_timeout_the_whole_tree_dies(local: Local, name: str) -> None:
    """However its processes hide, nothing of a job is left when its timeout is reported."""
    began = time.monotonic()
    result = await local.sh(f"echo begun\n{TREES[name]}", timeout=0.5)
    assert (result.state, result.stdout) == (JobState.TIMED_OUT, b"begun\n")
    assert time.monotonic() - began < 5
    assert not await local.alive("317.1")


async def test_output_in_reply_to_term_is_kept(local: Local) -> None:
    """What a command says while it is being ended belongs to its output."""
    result = await local.sh("trap 'echo cleaning; exit 0' TERM; sleep 30 & wait", timeout=0.3)
    assert (result.state, result.stdout) == (JobState.TIMED_OUT, b"cleaning\n")


async def test_a_background_child_lives_across_calls_and_dies_with_the_sandbox(local: Local) -> None:
    """A server that one call starts serves the next ones, until the sandbox ends."""
    await local.sh("cd /tmp; echo served > page; python3 -m http.server 8123 >/dev/null 2>&1 &")
    script = (
        "import time, urllib.request\n"
        "for _ in range(100):\n"
        "    try: print(urllib.request.urlopen('http://127.0.0.1:8123/page').read().decode()); break\n"
        "    except OSError: time.sleep(0.05)\n"
    )
    assert (await local.run("python3", "-c", script)).stdout.strip() == b"served"
    pids = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if b"8123" in read(path)]
    assert pids
    await local.provider.kill(local.sandbox.ref)
    assert not any(Path("/proc", pid).exists() for pid in pids)


def read(path: Path) -> bytes:
    """Return a file of /proc, empty when its process has ended."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


async def test_a_timeout_spares_what_finished_calls_left(local: Local) -> None:
    """The timeout of a call ends when the call does; its background children go on."""
    assert (await local.sh("sleep 318.1 &", timeout=1.5)).state == JobState.EXITED
    await asyncio.sleep(2)
    assert await local.alive("318.1")


async def test_late_output_of_a_background_child_changes_no_result(local: Local) -> None:
    """A recorded result stays as it was, and the child that still writes is never blocked."""
    command = bash("job", "echo result; (sleep 0.4; head -c 3000000 /dev/zero; touch done) &")
    first = await local.sandbox.exec(command)
    for _ in range(60):
        if (local.workspace / "done").exists():
            break
        await asyncio.sleep(0.05)
    assert (local.workspace / "done").exists()
    assert await local.sandbox.exec(command) == first
    assert first.stdout == b"result\n"


async def test_kill_job_ends_the_tree_and_its_waiting_call(local: Local) -> None:
    """A killed job is reported as killed with its output so far, and is dead when the kill returns."""
    waiting = asyncio.create_task(local.sandbox.exec(bash("job", "echo begun; setsid sleep 319.1 & sleep 319.1")))
    await asyncio.sleep(0.3)
    await local.sandbox.kill_job("job")
    assert not await local.alive("319.1")
    result = await waiting
    assert (result.state, result.exit_code, result.stdout) == (JobState.KILLED, None, b"begun\n")


async def test_kill_job_ends_what_a_finished_call_left(local: Local) -> None:
    """Background children can be ended by the job that started them; its recorded result stays."""
    command = bash("job", "sleep 320.1 & echo ok")
    first = await local.sandbox.exec(command)
    await local.sandbox.kill_job("job")
    assert not await local.alive("320.1")
    assert await local.sandbox.exec(command) == first


async def test_kill_job_of_an_unknown_or_finished_job_is_no_error(local: Local) -> None:
    """There is nothing to end, and that is told by returning."""
    await local.sandbox.kill_job("never")
    await local.sandbox.exec(bash("job", "true"))
    await local.sandbox.kill_job("job")


async def test_progress_shows_the_end_of_a_running_output(local: Local) -> None:
    """While a command runs its latest output and true totals can be seen, also past what is kept."""
    size = HEAD + RING + 12345
    running = asyncio.create_task(
        local.sandbox.exec(bash("job", f"head -c {size} /dev/zero | tr '\\0' x; echo last; echo err >&2; sleep 30"))
    )
    for _ in range(100):
        progress = await local.sandbox.progress("job")
        if progress is not None and progress.stdout_bytes == size + 5 and progress.stderr_bytes:
            break
        await asyncio.sleep(0.05)
    assert progress is not None
    assert progress.stdout_tail.endswith(b"xxxlast\n")
    assert (progress.stdout_bytes, progress.stderr_tail, progress.stderr_bytes) == (size + 5, b"err\n", 4)
    assert 0 < progress.running_seconds < 10
    await local.sandbox.kill_job("job")
    assert (await running).stdout_bytes == size + 5


async def test_progress_of_a_job_that_is_not_running_is_none(local: Local) -> None:
    """Unknown and finished jobs have no progress."""
    assert await local.sandbox.progress("never") is None
    await local.sandbox.exec(bash("job", "sleep 30 &"))
    assert await local.sandbox.progress("job") is None


async def test_a_flood_stays_bounded_on_disk(local: Local) -> None:
    """200 MB of output is counted truly, keeps its head and tail, and takes no more than the cap of disk."""
    result = await local.sh("echo first; head -c 200000000 /dev/zero; echo last; head -c 20000000 /dev/zero >&2")
    assert (result.stdout_bytes, result.stderr_bytes) == (200_000_011, 20_000_000)
    assert result.stdout.startswith(b"first\n")
    assert result.stdout.endswith(b"last\n")
    used = sum(path.stat().st_blocks * 512 for path in local.directory.glob("jobs/*/*"))
    assert used <= 2 * (HEAD + RING + 8192)


CALLS: dict[str, Callable[[LocalSandbox], Coroutine[object, object, object]]] = {
    "exec": lambda sandbox: sandbox.exec(bash("new", "true")),
    "exec of a finished job": lambda sandbox: sandbox.exec(bash("old", "true")),
    "progress": lambda sandbox: sandbox.progress("old"),
    "kill_job": lambda sandbox: sandbox.kill_job("old"),
    "write": lambda sandbox: sandbox.write("f", b""),
    "look": lambda sandbox: sandbox.look(["f"], 1),
    "change": lambda sandbox: sandbox.change([]),
    "walk": lambda sandbox: sandbox.walk(""),
}


@pytest.mark.parametrize("removed", [False, True], ids=["died", "removed"])
async def test_every_call_on_a_dead_sandbox_says_that_it_is_gone(local: Local, removed: bool) -> None:
    """Whatever is asked of a dead sandbox raises SandboxGone within a second (UKGovernmentBEIS/inspect_ai#4740)."""
    await local.sandbox.exec(bash("old", "true"))
    if removed:
        await local.provider.kill(local.sandbox.ref)
    else:
        os.kill(local.init_pid(), signal.SIGKILL)
    for call in CALLS.values():
        began = time.monotonic()
        with pytest.raises(SandboxGone):
            await call(local.sandbox)
        assert time.monotonic() - began < 1
    with pytest.raises(SandboxGone):
        await anext(aiter(local.sandbox.read("f")))
    with pytest.raises(SandboxGone):
        await local.provider.attach(local.sandbox.ref)


async def test_the_death_of_the_sandbox_ends_waiting_calls(local: Local) -> None:
    """A call that waits for a command is told within a second that its sandbox died."""
    waiting = [asyncio.create_task(local.sandbox.exec(bash(f"job-{n}", "sleep 30"))) for n in range(3)]
    await asyncio.sleep(0.3)
    os.kill(local.init_pid(), signal.SIGKILL)
    began = time.monotonic()
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, SandboxGone)
    assert time.monotonic() - began < 1


async def test_no_command_can_rob_init_of_its_limits(local: Local) -> None:
    """The limits of another process cannot be set, so that init and the supervisors keep theirs."""
    for target in ("1", "$PPID"):
        result = await local.sh(f"prlimit --pid {target} --nofile=3:3 || prlimit --pid {target} --nproc=1:1")
        assert result.exit_code != 0
    assert (await local.sh("echo after")).stdout == b"after\n"


async def test_many_commands_leak_nothing(local: Local) -> None:
    """Neither open files nor processes nor memory grow with the number of commands."""
    pid = local.init_pid()

    def state() -> tuple[int, int, int]:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
        inside = 0
        if os.access(f"/proc/{pid}/fd", os.R_OK):
            inside = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        return len(list(Path("/proc/self/fd").iterdir())), inside, resident

    await local.sh("true")
    before = state()
    for _ in range(100):
        await asyncio.gather(*(local.run("true") for _ in range(4)))
    await asyncio.sleep(0.1)
    after = state()
    assert after[0] <= before[0] + 1
    assert after[1] <= before[1]
    assert after[2] - before[2] < 3 << 20
    assert len((await local.text("echo /proc/[0-9]*")).split()) <= 4
