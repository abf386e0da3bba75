"""A worker may be killed at any moment: its command runs once, and the next worker gets the one result."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

from activities.sandbox.port import Command
from activities.sandbox.providers.local import LocalProvider
from activities.sandbox.providers.local_wire import HEADER, VERSION, encode
from contracts.sandbox import JobState
from tests.sandbox.local_support import Local, bash

REPOSITORY = Path(__file__).parents[2]
SCRIPT = "echo $$ >> effects; sleep 1; echo finished; exit 7"
WORKER = """
import asyncio, sys
from pathlib import Path
from activities.sandbox.port import Command
from activities.sandbox.providers.local import LocalProvider
from contracts.sandbox import SandboxRef

async def main() -> None:
    sandbox = await LocalProvider(Path(sys.argv[1])).attach(SandboxRef.model_validate_json(sys.argv[2]))
    await sandbox.exec(Command("run/1/call", ["bash", "-c", sys.argv[3]], timeout=float(sys.argv[4])))

asyncio.run(main())
"""


async def start_worker(local: Local, script: str, timeout: float = 20.0) -> asyncio.subprocess.Process:
    """Start another worker process that runs one job, and wait until the job has begun."""
    root, ref = str(local.directory.parent), local.sandbox.ref.model_dump_json()
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, root, ref, script, str(timeout), cwd=REPOSITORY)
    while not (local.workspace / "effects").exists():
        await asyncio.sleep(0.02)
    return worker


def effects(local: Local) -> int:
    """Return how often the command of a test was run."""
    return len((local.workspace / "effects").read_text().splitlines())


async def test_a_job_outlives_its_killed_worker(local: Local) -> None:
    """After SIGKILL of the worker in the middle of a command, another one waits for it and gets its result."""
    worker = await start_worker(local, SCRIPT)
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    result = await local.sandbox.exec(bash("run/1/call", SCRIPT))
    assert (result.state, result.exit_code, result.stdout) == (JobState.EXITED, 7, b"finished\n")
    assert effects(local) == 1


async def test_a_job_that_ended_while_no_worker_lived_gives_its_recorded_result(local: Local) -> None:
    """The result of a command that finished after its worker was killed is found, and nothing runs again."""
    worker = await start_worker(local, SCRIPT)
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    await asyncio.sleep(1.3)
    result = await local.sandbox.exec(bash("run/1/call", SCRIPT))
    assert (result.exit_code, result.stdout) == (7, b"finished\n")
    assert effects(local) == 1


async def test_a_timeout_holds_without_a_worker(local: Local) -> None:
    """The sandbox itself ends a command in time when its worker is dead."""
    script = "echo $$ >> effects; sleep 321.1"
    worker = await start_worker(local, script, timeout=0.8)
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    await asyncio.sleep(1.2)
    assert not await local.alive("321.1")
    assert (await local.sandbox.exec(bash("run/1/call", script))).state == JobState.TIMED_OUT


async def test_a_finished_job_is_not_run_again(local: Local) -> None:
    """A repeated call returns the recorded result, whatever its other arguments are."""
    first = await local.sandbox.exec(bash("job", "echo once >> effects; date +%N"))
    again = await local.sandbox.exec(bash("job", "echo twice >> effects", output_limit=1 << 19))
    assert again == first
    assert effects(local) == 1


async def test_a_recorded_result_can_be_cut_anew(local: Local) -> None:
    """The limit of the output belongs to the call, not to the record."""
    await local.sandbox.exec(bash("job", "seq 100"))
    result = await local.sandbox.exec(bash("job", "", output_limit=10))
    assert (result.stdout[:5], result.stdout[-5:], result.stdout_bytes) == (b"1\n2\n3", b"\n100\n", 292)


async def test_concurrent_calls_of_one_job_run_it_once(local: Local) -> None:
    """Calls of the same job that race, from two workers, start it once and all get its result."""
    other = await LocalProvider(local.directory.parent).attach(local.sandbox.ref)
    command = bash("job", "echo x >> effects; sleep 0.3; date +%N")
    results = await asyncio.gather(*(sandbox.exec(command) for sandbox in (local.sandbox, other) * 4))
    assert effects(local) == 1
    assert len({result.stdout for result in results}) == 1


async def test_cancelling_a_call_leaves_its_job_running(local: Local) -> None:
    """A cancelled call gives up waiting only; the next call of the job waits on."""
    command = bash("job", "echo x >> effects; sleep 0.6; echo end")
    task = asyncio.create_task(local.sandbox.exec(command))
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert (await local.sandbox.exec(command)).stdout == b"end\n"
    assert effects(local) == 1


async def test_a_request_sent_by_half_starts_nothing(local: Local) -> None:
    """What a worker killed while sending left in the socket is dropped, and the job can still be started."""
    request = encode(
        {
            "version": VERSION,
            "nonce": local.sandbox.ref.nonce,
            "op": "exec",
            "job": "job",
            "cwd": "/",
            "env": {},
            "argv": ["touch", "/workspace/half"],
            "stdin": False,
            "terminal": False,
            "timeout": 5.0,
        }
    )
    held = os.open(local.directory, os.O_PATH)
    for cut in (2, HEADER.size, len(request) // 2, len(request) - 1):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"/proc/self/fd/{held}/control.sock")
            connection.sendall(request[:cut])
    os.close(held)
    result = await local.sandbox.exec(Command("job", ["sh", "-c", "ls; echo whole"]))
    assert result.stdout == b"whole\n"


async def test_job_ids_may_hold_anything(local: Local) -> None:
    """A job id is a name and never a path."""
    for odd in ("../../escape", "a/b/c", "x" * 5000, "naïve ✓", "\ud800", ""):
        assert (await local.sandbox.exec(bash(odd, "echo ok"))).stdout == b"ok\n"
    assert {path.name for path in local.directory.iterdir()} == {"control.sock", "jobs", "log", "state.json", "workspace"}
