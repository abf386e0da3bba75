"""The limits of a sandbox: each one ends as a clear result, names itself, and harms neither the host nor other sandboxes."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from activities.sandbox.port import FileChange, FileFault, SandboxGone, SandboxUnavailable
from activities.sandbox.providers import local_start
from activities.sandbox.providers.local import LocalProvider
from activities.sandbox.providers.local_cgroup import (
    CONTROLLERS,
    SPARE_PROCESSES,
    Groups,
    enforcement,
    find_groups,
    group_prefix,
    remove_groups,
    settings,
)
from activities.sandbox.providers.local_guard import Guard
from contracts.sandbox import JobState, SandboxLimits, SandboxSpec
from tests.sandbox.local_support import Local, make

SMALL = SandboxLimits(memory_mb=256, processes=64, cpus=0.5, open_files=128, file_mb=20, workspace_mb=60, workspace_files=2000)
HELD = set(find_groups().places)
needs_memory_group = pytest.mark.skipif("memory" not in HELD, reason="this host gives no control group for memory")
Make = Callable[..., Awaitable[Local]]


@pytest.fixture
def limited(provider: LocalProvider, root: Path) -> Make:
    """Makes sandboxes with limits."""

    async def make_one(key: str = "limited", limits: SandboxLimits = SMALL) -> Local:
        spec = SandboxSpec(limits=limits)
        ref = await provider.create(spec, key, environment={}, labels={}, queue="q")
        return Local(provider, await provider.attach(ref), root)

    return make_one


@pytest.fixture
def without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on which the worker may make no control groups."""
    monkeypatch.setattr(local_start, "find_groups", Groups)


@needs_memory_group
async def test_running_out_of_memory_is_named(limited: Make) -> None:
    """A memory hog is killed by the kernel, the result says why, and the sandbox goes on."""
    local = await limited()
    result = await local.run("python3", "-c", "x = bytearray(400 << 20)")
    assert (result.state, result.signal) == (JobState.SIGNALLED, 9)
    assert result.note.startswith("out of memory: a process was killed at the limit of 256 MB")
    after = await local.sh("echo after")
    assert (after.stdout, after.note) == (b"after\n", "")


@needs_memory_group
async def test_many_small_hogs_never_take_init(limited: Make) -> None:
    """Init is the largest process when many small ones fill the memory, and still not the one that the kernel ends."""
    local = await limited()
    script = "for i in $(seq 40); do head -c 12M /dev/zero | tail -c 12M | sleep 5 & done; wait"
    result = await local.sh(script, timeout=15)
    assert "out of memory" in result.note
    assert (await local.sh("echo after")).stdout == b"after\n"


async def test_memory_is_held_without_control_groups(without_groups: None, limited: Make) -> None:
    """Without a group one process is held by its data limit and the sum of all by the watch, which names it."""
    local = await limited()
    assert (await local.run("python3", "-c", "x = bytearray(400 << 20)")).stderr.rstrip().endswith(b"MemoryError")
    hog = "python3 -c 'import time; x = bytearray(90 << 20); time.sleep(10)'"
    result = await local.sh(f"{hog} & {hog} & {hog} & {hog} & wait", timeout=9)
    assert (result.state, result.note[:15]) == (JobState.KILLED, "out of memory: ")
    assert (await local.sh("echo after")).stdout == b"after\n"


@needs_memory_group
async def test_the_temporary_directory_counts_as_memory(limited: Make) -> None:
    """Files in /tmp fill the memory limit too, but never so far that nothing can start."""
    local = await limited(limits=SandboxLimits(memory_mb=64))
    result = await local.sh("head -c 100M /dev/zero > /tmp/x; head -c 100M /dev/zero > /dev/shm/x; echo after")
    assert b"No space left on device" in result.stderr
    assert (await local.sh("du -sm /tmp | cut -f1; python3 -c 'print(1)'")).stdout == b"32\n1\n"


async def test_a_fork_bomb_in_a_command_is_ended_and_named(limited: Make) -> None:
    """A bomb stops at the limit of processes; after two seconds there it is ended, with its whole tree."""
    local = await limited()
    began = time.monotonic()
    result = await local.sh("f() { f & f & sleep 417.1; wait; }; f 2>/dev/null; sleep 417.1", timeout=60)
    assert result.state is JobState.KILLED
    assert result.note.startswith("the sandbox is at its limit of 64 processes")
    assert time.monotonic() - began < 20
    assert not await local.alive("417.1")


async def test_a_fork_bomb_left_behind_is_ended_and_told_to_the_next_command(limited: Make) -> None:
    """What a finished command left is ended too, and the next command is told."""
    local = await limited()
    # It begins when the command has ended, which a bomb would not let it do in time on a busy machine.
    assert (await local.sh("(sleep 1; :(){ :|:& };:) >/dev/null 2>&1 &")).state is JobState.EXITED
    notes = ""
    for _ in range(40):
        await asyncio.sleep(0.25)
        notes += (await local.sh("true")).note
        if "what an earlier command left running was ended" in notes:
            break
    assert "limit of 64 processes" in notes
    assert "what an earlier command left running was ended" in notes
    assert int(await local.text("echo /proc/[0-9]* | wc -w")) < 12


async def test_a_short_peak_of_processes_is_noted_and_goes_on(limited: Make) -> None:
    """A build that is too parallel for a moment is told so, and not ended."""
    local = await limited()
    result = await local.sh("for i in $(seq 100); do sleep 1 2>/dev/null & done 2>/dev/null; sleep 1; wait; echo done")
    assert result.state is JobState.EXITED
    assert "run less at a time" in result.note


async def test_a_fork_bomb_leaves_other_sandboxes_their_processes(limited: Make) -> None:
    """Processes are counted by sandbox, so that a neighbour of a bomb works on."""
    bomb, other = await limited("bomb"), await limited("other")
    running = asyncio.create_task(bomb.sh(":(){ :|:& };: ; sleep 30", timeout=8))
    await asyncio.sleep(1)
    assert (await other.sh("for i in $(seq 40); do sleep 0.1 & done; wait; echo all")).stdout == b"all\n"
    await running


async def test_a_workspace_that_grows_too_large_ends_the_command(limited: Make) -> None:
    """A disk filler is ended and named; then nothing grows until something is removed, which is told, and works."""
    local = await limited()
    result = await local.sh("for i in $(seq 2000); do head -c 5M /dev/zero > f$i; sleep 0.05; done", timeout=60)
    assert result.state is JobState.KILLED
    assert "and its limit is 60 MB: remove files from it" in result.note
    full = await local.sh("echo more > more; test -s more || echo nothing written")
    assert "until then no file can grow" in full.note
    assert await local.text("test -s more || echo nothing") == "nothing\n"
    with pytest.raises(FileFault, match="limit is 60 MB"):
        await local.sandbox.write("from-the-harness", b"1")
    with pytest.raises(FileFault, match="limit is 60 MB"):
        await local.sandbox.change([FileChange("from-the-harness", b"1")])
    await local.sandbox.change([FileChange("f1", None)])
    await local.sh("rm f*")
    after = await local.sh("echo more > more && cat more")
    assert (after.stdout, after.note) == (b"more\n", "")
    await local.sandbox.write("from-the-harness", b"1")


async def test_a_disk_filler_goes_over_its_limit_by_little(limited: Make) -> None:
    """Between two looks as much is written as the disk takes; the watch is quick enough to keep that in bounds."""
    local = await limited(limits=SandboxLimits(workspace_mb=100, file_mb=4096))
    before = shutil.disk_usage(local.workspace).free
    result = await local.sh("head -c 20G /dev/zero > f", timeout=60)
    assert result.state is JobState.KILLED
    assert before - shutil.disk_usage(local.workspace).free < 4 << 30


async def test_too_many_files_end_the_command(limited: Make) -> None:
    """A flood of empty files is ended and named."""
    local = await limited()
    result = await local.run(
        "python3", "-c", "import itertools, time\nfor i in itertools.count(): open(str(i), 'w').close(); time.sleep(0.0005)"
    )
    assert result.state is JobState.KILLED
    assert "files, and its limit is 2000" in result.note


async def test_a_workspace_filled_by_a_quick_command_is_noticed_by_the_next(limited: Make) -> None:
    """A command that is over before anybody looks passes the limit, but the one after it does not."""
    local = await limited()
    await local.sh("for i in 1 2 3 4; do head -c 19M /dev/zero > f$i; done")
    assert "and its limit is 60 MB" in (await local.sh("true")).note


async def test_a_file_that_grows_too_large_is_named(limited: Make) -> None:
    """A program that ignores the signal has the error, one that does not is ended, and the result says which limit it was."""
    local = await limited()
    result = await local.sh("exec head -c 30M /dev/zero > big")
    assert (result.state, result.signal) == (JobState.SIGNALLED, 25)
    assert "the limit of 20 MB for one file" in result.note
    assert "limit of 20 MB" in (await local.sh("head -c 30M /dev/zero > big")).note


async def test_a_flood_of_output_is_bounded_and_ends_with_its_timeout(limited: Make) -> None:
    """Endless output costs neither memory nor disk beyond what is kept, and the command is ended in time."""
    local = await limited()
    result = await local.sh("yes", timeout=1, output_limit=1000)
    assert result.state is JobState.TIMED_OUT
    assert len(result.stdout) < 1200
    assert result.stdout_bytes > 1_000_000
    assert sum(path.stat().st_blocks * 512 for path in local.directory.glob("jobs/*/*")) < 24 << 20


async def test_each_process_has_its_limits(limited: Make) -> None:
    """Open files, file size, processes and core dumps are limited, soft and hard, and cannot be raised again."""
    local = await limited()
    flags = "-n -f -u -c"
    text = await local.text(f"for f in {flags}; do ulimit -S $f; ulimit -H $f; done; ulimit -n 4096 || ulimit -u 1000")
    assert text.split()[:8] == ["128", "128", "20480", "20480", "64", "64", "0", "0"]
    assert text.count("cannot modify limit") == 2


@pytest.mark.skipif("cpu" not in HELD, reason="this host gives no control group for the processor")
async def test_the_share_of_the_processor_is_kept(limited: Make) -> None:
    """Two busy loops together get the time that the limit gives."""
    local = await limited()
    loop = "python3 -c 'import time; e = time.time() + 2; [0 for _ in iter(time.time, 0) if time.time() > e and exit()]'"
    text = await local.text(f"{loop} & {loop} & wait; times")
    user, system = (sum(int(m) * 60 + float(s) for m, s in [part[:-1].split("m")]) for part in text.split()[-2:])
    assert user + system < 2 * 0.5 * 1.6


async def test_a_lifetime_that_is_over_ends_the_sandbox_and_is_told(limited: Make) -> None:
    """At the end of its life the sandbox ends with all in it, and the error of a waiting call says why."""
    began = time.monotonic()
    local = await limited(limits=SMALL.model_copy(update={"lifetime_seconds": 1}))
    with pytest.raises(SandboxGone, match="lifetime_seconds"):
        await local.sh("setsid sleep 418.1 & sleep 418.1")
    assert time.monotonic() - began < 5
    with pytest.raises(SandboxGone, match="lifetime_seconds"):
        await local.provider.attach(local.sandbox.ref)


# --- control groups ------------------------------------------------------------------------------------------------------


def groups_of(root: Path) -> list[Path]:
    """Return the control groups of one state directory."""
    return [path for _, base in find_groups().places.values() for path in base.glob(f"{group_prefix(root)}*")]


@pytest.mark.skipif(not HELD, reason="this host gives no control groups")
async def test_every_process_of_a_sandbox_is_in_its_groups_which_go_with_it(limited: Make, root: Path) -> None:
    """Init, supervisors and commands are in them from the start, and a kill removes them."""
    local = await limited()
    await local.sh("setsid sleep 419.1 &")
    groups = groups_of(root)
    assert len(groups) == len(HELD)
    for group in groups:
        pids = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
        assert local.init_pid() in pids
        assert any(b"419.1" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids)
    await local.provider.kill(local.sandbox.ref)
    assert groups_of(root) == []


@pytest.mark.skipif(not HELD, reason="this host gives no control groups")
async def test_listing_removes_the_groups_that_killed_workers_left(limited: Make, root: Path) -> None:
    """An empty group of this state directory goes; one in use, or of another directory, stays."""
    local = await limited()
    living = groups_of(root)
    other = root.parent / "other"
    try:
        find_groups().make(f"{group_prefix(root)}local-00ff.12345678", SMALL)
        find_groups().make(f"{group_prefix(other)}local-00ff.12345678", SMALL)
        await local.provider.list({})
        assert groups_of(root) == living
        assert len(groups_of(other)) == len(HELD)
    finally:
        remove_groups(groups_of(other))


async def test_a_group_that_cannot_be_made_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the last setting fails, no sandbox starts and no group stays."""
    monkeypatch.setattr(local_start, "join", lambda groups, pid: os.stat("/nowhere"))
    with pytest.raises(SandboxUnavailable, match="cannot be started"):
        await make(LocalProvider(root))
    assert groups_of(root) == []
    assert [path.name for path in root.iterdir()] == ["locks"]


def host(directory: Path, own: str, mounts: list[str]) -> Path:
    """Make what /proc/self tells of control groups."""
    (directory / "cgroup").write_text(own)
    (directory / "mountinfo").write_text("".join(f"{line}\n" for line in mounts))
    return directory


def unified(directory: Path, enabled: str) -> Path:
    """Make a directory that looks like a group of version 2."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cgroup.procs").touch()
    (directory / "cgroup.subtree_control").write_text(enabled)
    return directory


def test_with_version_2_the_nearest_group_that_hands_on_controllers_is_taken(tmp_path: Path) -> None:
    """A worker in a scope of systemd's user manager finds the slice above it."""
    top = tmp_path / "fs with space"
    unified(top / "user.slice" / "app.slice" / "worker.scope", "")
    (top / "user.slice" / "app.slice" / "worker.scope" / "cgroup.procs").chmod(0o444)
    unified(top / "user.slice" / "app.slice", "cpu memory pids")
    unified(top / "user.slice" / "app.slice" / "caisson", "cpu memory pids")
    mounts = [f"30 23 0:26 / {str(top).replace(' ', chr(92) + '040')} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"]
    (top / "user.slice" / "app.slice" / "worker.scope").chmod(0o555)
    if os.geteuid() == 0:  # root may write everywhere, and moves up only where nothing can be handed on
        (top / "user.slice" / "app.slice" / "worker.scope" / "cgroup.procs").unlink()
    groups = find_groups(host(tmp_path, "0::/user.slice/app.slice/worker.scope\n", mounts))
    assert groups.places == dict.fromkeys(CONTROLLERS, (2, top / "user.slice" / "app.slice" / "caisson"))
    assert enforcement(groups)["memory_mb"] == "control group (cgroup v2)"


def test_without_any_right_there_are_no_groups(tmp_path: Path) -> None:
    """A worker below nothing that it may write has none, and the table says what holds instead."""
    groups = find_groups(host(tmp_path, "0::/a\n", [f"30 23 0:26 / {tmp_path}/fs rw - cgroup2 cgroup2 rw"]))
    assert groups.places == {}
    assert "RLIMIT_DATA" in enforcement(groups)["memory_mb"]
    assert set(enforcement(groups)) == set(SandboxLimits.model_fields)


@pytest.mark.parametrize("version", [1, 2])
def test_settings_say_what_the_limits_say(version: int) -> None:
    """Memory without swap, processes with room for init, and a quota of the processor."""
    written = {name.lstrip("?"): value for each in CONTROLLERS for name, value in settings(each, version, SMALL)}
    assert str(256 << 20) in (written.get("memory.max"), written.get("memory.limit_in_bytes"))
    assert written["pids.max"] == str(64 + SPARE_PROCESSES)
    assert "50000" in (written.get("cpu.cfs_quota_us"), written.get("cpu.max", "").split(" ")[0])
    if version == 2:
        assert written["memory.swap.max"] == "0"


@pytest.mark.parametrize("text", ["oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "low 0\nmax 7\noom 4\noom_kill 3\n"])
def test_both_counters_of_the_kernel_are_read(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """memory.oom_control of version 1 and memory.events of version 2 name the same count."""
    (tmp_path / "counter").write_text(text)
    fd = os.open(tmp_path / "counter", os.O_RDONLY)
    monkeypatch.setattr(Guard, "__init__", lambda self: setattr(self, "oom_counter", fd))
    try:
        assert Guard().oom_kills() == 3  # type: ignore[call-arg]
    finally:
        os.close(fd)
