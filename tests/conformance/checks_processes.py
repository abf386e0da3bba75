"""Process trees: how they end, what outlives a call, and what waits for nothing."""

from __future__ import annotations

import asyncio
import time

from contracts.sandbox import JobState
from tests.conformance.box import Box, shared
from tests.conformance.subjects import Subject

TREES = {
    "children": "sleep 311.2207 & sleep 311.2207",
    "own session": "setsid sleep 311.2207 & wait",
    "double fork": "(setsid sh -c 'sleep 311.2207 & sleep 311.2207' &) ; sleep 311.2207",
    "stopped": "sleep 311.2207 & kill -STOP $!; wait",
    "nohup": "nohup sleep 311.2207 >/dev/null 2>&1 & sleep 311.2207",
    "many": "for i in 1 2 3 4 5 6 7 8 9; do (sleep 311.2207 & sleep 311.2207 & wait) & done; wait",
}
STUBBORN = "trap '' TERM; (trap '' TERM; while :; do sleep 312.2207; done) & while :; do sleep 312.2207; done"


async def check_a_timeout_ends_the_whole_tree(subject: Subject) -> None:
    """However its processes hide, nothing of a job is left when its timeout is reported, and its output is kept (SH02)."""
    box = await shared(subject)
    began = time.monotonic()
    results = await asyncio.gather(*(box.sh(f"echo begun\n{script}", timeout=1.0) for script in TREES.values()))
    for name, result in zip(TREES, results, strict=True):
        assert (result.state, result.exit_code, result.stdout) == (JobState.TIMED_OUT, None, b"begun\n"), (name, result)
    assert time.monotonic() - began < 20
    assert not await box.alive("311.2207")


async def check_what_ignores_term_is_killed(subject: Subject) -> None:
    """A tree that ignores TERM is killed two seconds later (SH06)."""
    box = await shared(subject)
    began = time.monotonic()
    result = await box.sh(f"echo begun\n{STUBBORN}", timeout=1.0)
    assert (result.state, result.stdout) == (JobState.TIMED_OUT, b"begun\n")
    assert 2.9 < time.monotonic() - began < 12
    assert not await box.alive("312.2207")


async def check_what_cut_all_ties_is_found(subject: Subject) -> str | None:
    """A process with a session, a parent and an environment of its own still belongs to its job, with Python in the image."""
    box = await shared(subject)
    script = "(env -i PATH=\"$PATH\" setsid sh -c 'sleep 313.2 & exec sleep 313.2' &) ; sleep 30"
    assert (await box.sh(script, timeout=1.0)).state == JobState.TIMED_OUT
    if subject.image == "python" or subject.capabilities.native_jobs:
        assert not await box.alive("313.2")
        return None
    await box.sh("for f in /proc/[0-9]*/cmdline; do grep -q 313.2 $f && kill -9 $(echo $f | cut -d / -f 3); done 2>/dev/null")
    return "without Python in the image such a process is not found, and ends with the sandbox"


async def check_output_in_reply_to_term_is_kept(subject: Subject) -> None:
    """What a command says while it is being ended belongs to its output."""
    box = await shared(subject)
    result = await box.sh("trap 'echo cleaning; exit 0' TERM; sleep 30 & wait", timeout=0.7)
    assert (result.state, result.stdout) == (JobState.TIMED_OUT, b"cleaning\n")


async def check_a_background_child_blocks_nothing(subject: Subject) -> None:
    """A call returns when its command ends, whatever still holds its streams (SH01)."""
    box = await shared(subject)
    began = time.monotonic()
    result = await box.sh("sleep 314.2 & echo ready", timeout=20)
    assert (result.state, result.exit_code, result.stdout) == (JobState.EXITED, 0, b"ready\n")
    assert time.monotonic() - began < 5
    await end_all(box, "314.2")


async def check_a_background_child_lives_across_calls(subject: Subject) -> None:
    """What one call leaves works on during the next ones, also past the first call's timeout."""
    box = await shared(subject)
    loop = "while [ ! -e stop ]; do date +%s > beat.new; mv beat.new beat; sleep 0.2; done"
    assert (await box.sh(f"({loop}; echo ended > end) >/dev/null 2>&1 &", timeout=1.0)).state == JobState.EXITED
    await asyncio.sleep(1.5)
    await box.text("rm -f beat; sleep 1; cat beat")
    await box.text("touch stop; n=0; while [ ! -e end ] && [ $n -lt 50 ]; do sleep 0.1; n=$((n+1)); done; cat end")


async def check_late_output_changes_no_result(subject: Subject) -> None:
    """A recorded result stays as it was, and the child that still writes is never blocked."""
    box = await shared(subject)
    command = box.command("echo result; (sleep 0.8; head -c 300000 /dev/zero; touch done) &")
    first = await box.sandbox.exec(command)
    await box.text("n=0; while [ ! -e done ] && [ $n -lt 100 ]; do sleep 0.1; n=$((n+1)); done; ls done")
    assert await box.sandbox.exec(command) == first
    assert first.stdout == b"result\n"


async def check_kill_ends_a_running_job(subject: Subject) -> None:
    """A killed job is dead when the kill returns, and its waiting call says that it was killed, with its output so far."""
    box = await shared(subject)
    job = box.job()
    waiting = asyncio.create_task(box.sh("echo begun; setsid sleep 315.2 & sleep 315.2", job=job))
    await until_running(box, job)
    await box.sandbox.kill_job(job)
    assert not await box.alive("315.2")
    result = await waiting
    assert (result.state, result.exit_code, result.stdout) == (JobState.KILLED, None, b"begun\n")


async def check_kill_ends_what_a_finished_job_left(subject: Subject) -> None:
    """Background children can be ended by the job that started them; its record stays; an unknown job is no error."""
    box = await shared(subject)
    command = box.command("sleep 316.2 >/dev/null 2>&1 & echo ok")
    first = await box.sandbox.exec(command)
    assert await box.alive("316.2")
    await box.sandbox.kill_job(command.job_id)
    assert not await box.alive("316.2")
    assert await box.sandbox.exec(command) == first
    await box.sandbox.kill_job("never started")


async def check_a_stuck_command_blocks_no_other(subject: Subject) -> None:
    """While one call hangs, others are answered (SH24)."""
    box = await shared(subject)
    job = box.job()
    stuck = asyncio.create_task(box.sh("sleep 30", job=job))
    await until_running(box, job)
    began = time.monotonic()
    assert (await box.sh("echo ok")).stdout == b"ok\n"
    assert time.monotonic() - began < 5
    await box.sandbox.kill_job(job)
    await stuck


async def until_running(box: Box, job: str) -> None:
    """Wait until a job has said something."""
    async with asyncio.timeout(20):
        while True:
            progress = await box.sandbox.progress(job)
            if progress is not None and (progress.stdout_bytes or progress.running_seconds > 0.5):
                return
            await asyncio.sleep(0.05)


async def end_all(box: Box, marker: str) -> None:
    """End what a check left in the background."""
    found = """tr "\\0" "\\n" <$f | grep -qxF "$MARKER" && kill -9 $(echo $f | tr -cd 0-9)"""
    await box.sh(f"for f in /proc/[0-9]*/cmdline; do {found}; done 2>/dev/null", env={"MARKER": marker})
