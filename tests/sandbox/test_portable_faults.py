"""The portable sandbox on a full disk, with odd variables, and with records that a command has spoiled."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Mapping

import pytest

from activities.sandbox.port import BadSandboxSpec, Command, FileFault
from activities.sandbox.portable import PortableSandbox
from activities.sandbox.portable_setup import settings
from activities.sandbox.providers.local import LocalProvider
from contracts.sandbox import JobResult, JobState, SandboxLimits, SandboxSpec
from tests.conformance.local_machine import PortableProvider

SMALL = SandboxSpec(limits=SandboxLimits(memory_mb=64))
FILL = "dd if=/dev/zero of=/tmp/fill bs=65536 2>/dev/null"


class Box:
    """A sandbox in which every script is a new job."""

    def __init__(self, sandbox: PortableSandbox) -> None:
        self.sandbox = sandbox
        self._jobs = itertools.count()

    async def sh(self, script: str, timeout: float = 20.0) -> JobResult:
        """Run a script."""
        return await self.sandbox.exec(Command(f"job/{next(self._jobs)}", ("sh", "-c", script), timeout=timeout))


async def make(
    local: LocalProvider, flavour: str, spec: SandboxSpec | None = None, environment: Mapping[str, str] | None = None
) -> Box:
    """Make a sandbox of a flavour."""
    if flavour == "busybox" and shutil.which("busybox") is None:
        pytest.skip("BusyBox is missing: apt-get install busybox-static")
    portable = PortableProvider(local, busybox=flavour == "busybox")
    ref = await portable.create(spec or SandboxSpec(), flavour, environment=environment or {}, labels={}, queue="q")
    return Box(await portable.attach(ref))


@pytest.fixture(params=["python", "busybox"])
async def small(provider: LocalProvider, request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    """A sandbox whose /tmp is soon full."""
    yield await make(provider, request.param, SMALL)


async def test_a_full_disk_costs_output_and_not_the_sandbox(small: Box) -> None:
    """The command ends as it does, the result says what could not be kept and why, and the disk can be cleared again."""
    filled = await small.sh(f"{FILL}; seq 30000; exit 3")
    assert (filled.state, filled.exit_code, filled.stdout_bytes) == (JobState.EXITED, 3, 168_894)
    assert "the disk of /tmp in this sandbox is full" in filled.note
    assert len(filled.stdout) < 168_894
    for _ in range(3):
        assert (await small.sh("exit 4")).exit_code == 4
    with pytest.raises(FileFault, match="No space left on device"):
        await small.sandbox.write("big", bytes(3_000_000))
    assert (await small.sh("rm /tmp/fill")).exit_code == 0
    await small.sandbox.write("big", bytes(3_000_000))
    assert (await small.sh("seq 30000")).stdout_bytes == 168_894


async def test_a_command_with_a_long_input_on_a_full_disk_says_so(small: Box) -> None:
    """What finds no place is a result of the command, and no fault of the sandbox."""
    await small.sh(FILL)
    told = await small.sandbox.exec(Command("long", ("wc", "-c"), stdin=bytes(3_000_000)))
    assert told.exit_code == 126
    assert b"No space left on device" in told.stderr or "full" in told.note


@pytest.mark.parametrize("flavour", ["python", "busybox"])
async def test_an_argument_that_no_system_takes_is_a_result(provider: LocalProvider, flavour: str) -> None:
    """A script of more than 128 KiB is told as what it is; one that just fits runs."""
    box = await make(provider, flavour)
    told = await box.sh("echo " + "a" * 140_000)
    assert (told.exit_code, b"Argument list too long" in told.stderr) == (126, True)
    assert (await box.sh(": " + "a" * 100_000 + "; echo ran")).stdout == b"ran\n"


@pytest.mark.parametrize("flavour", ["python", "busybox"])
async def test_spoiled_records_make_a_lost_job(provider: LocalProvider, flavour: str) -> None:
    """A command that writes into its own record, or removes its directory, loses its result and nothing else."""
    box = await make(provider, flavour)
    # By its supervisor: that of a job that counts as lost goes on, and makes its directory the latest when it ends.
    own = 'd=$(dirname "$(grep -l "^$PPID " /tmp/.caisson/jobs/*/pid)")'
    for script in (f"{own}; printf junk >$d/exit; sleep 0.3", f"{own}; rm -rf $d; sleep 0.3"):
        assert (await box.sh(script)).state is JobState.LOST, script
    assert (await box.sh("echo alive")).stdout == b"alive\n"


async def test_a_stopped_supervisor_loses_its_job_at_once(provider: LocalProvider) -> None:
    """Where there is no Python as well: a command that stops what watches over it wins no time."""
    box = await make(provider, "busybox")
    async with asyncio.timeout(15):
        assert (await box.sh("echo begun; kill -STOP $PPID; sleep 30", timeout=25)).state is JobState.LOST
    assert (await box.sh("echo alive")).stdout == b"alive\n"


async def test_a_read_cuts_no_character_without_python(provider: LocalProvider) -> None:
    """A session is read in whole characters."""
    box = await make(provider, "busybox")
    await box.sandbox.start(Command("s", ("sh", "-c", "printf 'a\\342\\202'; sleep 1.5; printf '\\254\\n'"), timeout=20))
    reads = [await box.sandbox.poll("s", f"s/{n}", 10, until_end=n == 1, limit=1000) for n in range(2)]
    assert [read.result.stdout for read in reads] == [b"a", "\u20ac\n".encode()]


@pytest.mark.parametrize("flavour", ["python", "busybox"])
async def test_variables_reach_commands_and_not_the_helper(provider: LocalProvider, flavour: str) -> None:
    """The helper finds its programs whatever the agent's own PATH is."""
    box = await make(provider, flavour, environment={"PATH": "/opt/tools/bin", "IFS": "a", "python": "x"})
    script = "echo $PATH $python"
    told = await box.sandbox.exec(Command("own", ("/bin/sh", "-c", script)))
    assert told.stdout == b"/opt/tools/bin x\n"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("UID", "1", "UID"),
        ("OPTIND", "x", "OPTIND"),
        ("PPID", "1", "PPID"),
        ("BIG", "y" * 140_000, "BIG: 140000 bytes"),
        ("a.b", "1", "a.b"),
    ],
)
async def test_a_variable_that_no_shell_takes_is_refused_by_name(name: str, value: str, told: str) -> None:
    """Before a machine is made, and in words that say which."""
    with pytest.raises(BadSandboxSpec, match=f"environment: .*{told}"):
        settings({name: value})
