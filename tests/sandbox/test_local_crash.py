"""What dies under calls that wait: a worker with two commands, and the sandbox itself with every kind of call pending."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from activities.sandbox.port import Command, SandboxGone
from activities.sandbox.providers.local import LocalProvider
from contracts.sandbox import JobState
from tests.sandbox.local_support import Local, bash

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = {
    "run/1/0": "echo $$ >> first; until test -e go; do sleep 0.02; done; echo one; exit 3",
    "run/1/1": "echo $$ >> second; until test -e go; do sleep 0.02; done; echo two >&2; exit 4",
}
WORKER = """
import asyncio, json, sys
from pathlib import Path
from activities.sandbox.port import Command
from activities.sandbox.providers.local import LocalProvider
from contracts.sandbox import SandboxRef

async def main() -> None:
    sandbox = await LocalProvider(Path(sys.argv[1])).attach(SandboxRef.model_validate_json(sys.argv[2]))
    scripts = json.loads(sys.argv[3])
    await asyncio.gather(*(sandbox.exec(Command(job, ["bash", "-c", script])) for job, script in scripts.items()))

asyncio.run(main())
"""


async def until_there(*paths: Path) -> None:
    """Wait until files exist."""
    async with asyncio.timeout(10):
        while not all(path.exists() for path in paths):
            await asyncio.sleep(0.02)


async def test_two_commands_outlive_their_killed_worker(local: Local) -> None:
    """After SIGKILL in the middle of both, another worker gets the one result of each, and neither has run twice."""
    root, ref = str(local.directory.parent), local.sandbox.ref.model_dump_json()
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, root, ref, json.dumps(SCRIPTS), cwd=REPOSITORY)
    await until_there(local.workspace / "first", local.workspace / "second")
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    next_worker = await LocalProvider(local.directory.parent).attach(local.sandbox.ref)
    waiting = [asyncio.create_task(next_worker.exec(bash(job, script))) for job, script in SCRIPTS.items()]
    await local.sandbox.write("go", b"")
    one, two = await asyncio.gather(*waiting)
    assert (one.state, one.exit_code, one.stdout, one.stderr) == (JobState.EXITED, 3, b"one\n", b"")
    assert (two.state, two.exit_code, two.stdout, two.stderr) == (JobState.EXITED, 4, b"", b"two\n")
    assert [len((local.workspace / name).read_text().split()) for name in ("first", "second")] == [1, 1]


async def test_every_pending_call_is_told_that_its_sandbox_died(local: Local) -> None:
    """Within five seconds of the death of init, each call that waited raises SandboxGone, and so does each that comes after."""
    sandbox = local.sandbox
    script = "trap '' TERM; touch {}; while :; do sleep 0.1; done"
    await sandbox.start(Command("session", ["bash", "-c", script.format("c")], terminal=True, timeout=60))
    calls: list[Coroutine[Any, Any, object]] = [
        sandbox.exec(bash("a", script.format("a"), timeout=60)),
        sandbox.exec(bash("b", script.format("b"), timeout=60)),
        sandbox.poll("session", "read/1", 60, until_end=True, limit=1 << 20),
        sandbox.poll("session", "read/2", 60, until_end=False, limit=1 << 20),
    ]
    pending = [asyncio.create_task(call) for call in calls]
    await until_there(*(local.workspace / name for name in "abc"))
    pending.append(asyncio.create_task(sandbox.kill_job("a")))  # it waits for two seconds, since TERM is ignored
    await sandbox.progress("b")
    os.kill(local.init_pid(), signal.SIGKILL)
    began = time.monotonic()
    outcomes = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 5)
    assert [type(outcome) for outcome in outcomes] == [SandboxGone] * len(pending)
    later: list[Coroutine[Any, Any, object]] = [
        sandbox.exec(bash("late", "true")),
        sandbox.poll("session", "read/1", 60, until_end=True, limit=1),
        sandbox.send("session", "input", b"x"),
        sandbox.progress("b"),
        sandbox.write("late", b""),
    ]
    outcomes = await asyncio.gather(*later, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [SandboxGone] * len(later)
    assert time.monotonic() - began < 5
