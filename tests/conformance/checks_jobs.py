"""Jobs: run once, found again, watched, and bounded in what they say."""

from __future__ import annotations

import asyncio
import time

from activities.sandbox.port import SandboxGone
from contracts.sandbox import JobState
from tests.conformance.box import elsewhere, own, shared
from tests.conformance.checks_processes import until_running
from tests.conformance.subjects import Subject


async def check_a_finished_job_is_not_run_again(subject: Subject) -> None:
    """A repeated call gives the recorded result, whatever its other arguments are, cut to its own limit."""
    box = await shared(subject)
    job = box.job()
    first = await box.sh("echo once >> effects; seq 100; exit 7", job=job)
    assert await box.sh("echo twice >> effects", job=job) == first
    assert await (await elsewhere(box)).sh("echo thrice >> effects", job=job) == first
    cut = await box.sh("", job=job, output_limit=10)
    assert (cut.exit_code, cut.stdout[:5], cut.stdout[-5:], cut.stdout_bytes) == (7, b"1\n2\n3", b"\n100\n", 292)
    assert await box.text("cat effects") == "once\n"


async def check_racing_calls_run_a_job_once(subject: Subject) -> None:
    """Calls of one job that race, from two workers, start it once and all get its result."""
    box = await shared(subject)
    other = await elsewhere(box)
    command = box.command("echo x >> effects; sleep 0.5; cat /proc/sys/kernel/random/uuid")
    results = await asyncio.gather(*(one.sandbox.exec(command) for one in (box, other) * 3))
    assert len({result.stdout for result in results}) == 1
    assert await box.text("cat effects") == "x\n"


async def check_a_job_outlives_its_caller(subject: Subject) -> None:
    """A call that is cut leaves its command running; another worker waits for it and gets its one result."""
    box = await shared(subject)
    command = box.command("echo x >> effects; sleep 2; echo end; exit 5")
    task = asyncio.create_task(box.sandbox.exec(command))
    await until_running(box, command.job_id)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    result = await (await elsewhere(box)).sandbox.exec(command)
    assert (result.state, result.exit_code, result.stdout) == (JobState.EXITED, 5, b"end\n")
    assert await box.text("cat effects") == "x\n"


async def check_a_timeout_holds_without_a_caller(subject: Subject) -> None:
    """The sandbox itself ends a command in time when nobody waits for it."""
    box = await shared(subject)
    command = box.command("echo begun; sleep 321.1", timeout=1.0)
    task = asyncio.create_task(box.sandbox.exec(command))
    await until_running(box, command.job_id)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(1.5)
    assert not await box.alive("321.1")
    result = await box.sandbox.exec(command)
    assert (result.state, result.stdout) == (JobState.TIMED_OUT, b"begun\n")


async def check_progress_is_shown(subject: Subject) -> None:
    """While a command runs its latest output and true totals can be seen; unknown and finished jobs have none."""
    box = await shared(subject)
    job = box.job()
    running = asyncio.create_task(box.sh("head -c 5000 /dev/zero | tr '\\0' x; echo last; echo err >&2; sleep 30", job=job))
    async with asyncio.timeout(15):
        while True:
            progress = await box.sandbox.progress(job)
            if progress is not None and progress.stdout_bytes == 5005 and progress.stderr_bytes:
                break
            await asyncio.sleep(0.05)
    assert progress.stdout_tail.endswith(b"xxxlast\n")
    assert (progress.stderr_tail, progress.stderr_bytes) == (b"err\n", 4)
    assert 0 <= progress.running_seconds < 15
    await box.sandbox.kill_job(job)
    await running
    assert await box.sandbox.progress(job) is None
    assert await box.sandbox.progress("never started") is None


async def check_a_supervisor_can_be_lost(subject: Subject) -> str | None:
    """A command that kills everything it can reach costs its own result, and the sandbox at most, but no caller's patience."""
    async with own(subject) as box:
        began = time.monotonic()
        try:
            result = await box.sh("echo begun; sleep 0.3; kill -9 -1; sleep 30", timeout=25)
        except SandboxGone:
            assert time.monotonic() - began < 30
            return "`kill -9 -1` ends the machine as well, which is then gone"
        assert result.state in (JobState.LOST, JobState.SIGNALLED), result
        assert time.monotonic() - began < 20
        assert (await box.sh("echo after")).stdout == b"after\n"
        return None


async def check_long_output_keeps_its_ends(subject: Subject) -> None:
    """Output over the limit comes as its beginning and its end around a marker, with the true total (SH10, SH12)."""
    box = await shared(subject)
    result = await box.sh("seq 1 200000; echo FAILED-HERE", output_limit=2000)
    assert result.stdout.startswith(b"1\n2\n")
    assert result.stdout.endswith(b"FAILED-HERE\n")
    assert result.stdout_bytes == 1_288_895 + 12
    assert b"bytes left out" in result.stdout
    assert len(result.stdout) < 2100
    result = await box.sh("head -c 120000 /dev/zero | tr '\\0' A; printf Z", output_limit=1000)
    assert (result.stdout[:1], result.stdout[-1:], result.stdout_bytes) == (b"A", b"Z", 120_001)


async def check_a_big_output_is_whole(subject: Subject) -> None:
    """Some megabytes of output within the limit come as they were written."""
    box = await shared(subject)
    result = await box.sh("head -c 3000000 /dev/urandom > random; cat random; cat random >&2", output_limit=8 << 20)
    assert (result.stdout_bytes, len(result.stdout), len(result.stderr)) == (3_000_000, 3_000_000, 3_000_000)
    assert result.stdout == result.stderr == await box.content(box.at("random"))


async def check_a_flood_is_bounded(subject: Subject) -> None:
    """Forty megabytes of output are counted truly, keep their ends, and leave a bounded part on the sandbox's disk."""
    used = "du -sk /tmp | cut -f 1"
    async with own(subject) as box:
        before = int(await box.text(used))
        result = await box.sh("echo first; head -c 40000000 /dev/zero; echo last", output_limit=4000, timeout=60)
        assert result.stdout_bytes == 40_000_011
        assert result.stdout.startswith(b"first\n")
        assert result.stdout.endswith(b"last\n")
        assert int(await box.text(used)) - before < 30_000
