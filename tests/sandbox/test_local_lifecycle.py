"""Making, finding and ending local sandboxes."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from temporalio.testing import ActivityEnvironment

from activities.sandbox.activity import SandboxActivities
from activities.sandbox.port import BadSandboxSpec, SandboxGone, SandboxUnavailable
from activities.sandbox.providers.local import LocalProvider
from activities.sandbox.providers.local_state import StateDirectory, remove_tree
from activities.sandbox.registry import ProviderRegistry
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.workspace.keeper import WorkspaceKeeper
from contracts.activity_names import Queues
from contracts.sandbox import OpenSandboxInput, SandboxSpec
from tests.sandbox.local_support import LABELS, Local, bash, make

REPOSITORY = Path(__file__).parents[2]


def processes_with(marker: str) -> list[int]:
    """Return the host's processes whose arguments hold `marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


async def test_a_new_sandbox_has_an_empty_workspace(local: Local) -> None:
    """Nothing but the home directory stands in a fresh workspace."""
    assert [path for path, _ in await local.sandbox.walk("")] == [".home"]


async def test_the_same_key_gives_the_same_sandbox(provider: LocalProvider) -> None:
    """A repeated create returns the living sandbox."""
    assert await make(provider) == await make(provider)


async def test_concurrent_creates_of_one_key_make_one_sandbox(provider: LocalProvider, root: Path) -> None:
    """Creates that race, also from two providers, all return the one sandbox."""
    other = LocalProvider(root)
    refs = await asyncio.gather(*(make(each) for each in (provider, other) * 4))
    assert len({ref.nonce for ref in refs}) == 1
    assert len(await provider.list({})) == 1


async def test_other_keys_give_other_sandboxes(provider: LocalProvider) -> None:
    """Two keys have two sandboxes with two workspaces."""
    first, second = [await provider.attach(await make(provider, key)) for key in ("a", "b")]
    await first.write("only-here", b"1")
    assert [path for path, _ in await second.walk("")] == [".home"]


async def test_the_ref_carries_the_queue(provider: LocalProvider) -> None:
    """The handle says which queue's workers reach the sandbox."""
    ref = await make(provider, queue="caisson-sandbox.west")
    assert (ref.provider, ref.queue) == ("local", "caisson-sandbox.west")


async def test_a_dead_sandbox_is_made_anew(local: Local) -> None:
    """After a sandbox died, its key gives a new one with another nonce and an empty workspace."""
    await local.sandbox.write("old", b"1")
    os.kill(local.init_pid(), signal.SIGKILL)
    await asyncio.sleep(0.1)
    ref = await make(local.provider)
    assert ref.id == local.sandbox.ref.id
    assert ref.nonce != local.sandbox.ref.nonce
    assert [path for path, _ in await (await local.provider.attach(ref)).walk("")] == [".home"]


async def test_attach_refuses_another_nonce(local: Local) -> None:
    """A handle on a sandbox that was replaced is never mistaken for the new one."""
    with pytest.raises(SandboxGone):
        await local.provider.attach(local.sandbox.ref.model_copy(update={"nonce": "0" * 32}))


async def test_a_handle_kept_over_a_replacement_is_gone(local: Local) -> None:
    """A sandbox object from before the replacement raises SandboxGone instead of using the new one."""
    await local.provider.kill(local.sandbox.ref)
    await make(local.provider)
    with pytest.raises(SandboxGone):
        await local.sandbox.exec(bash("late", "echo late"))


async def test_attach_to_an_unknown_id_is_gone(local: Local) -> None:
    """An id that this host never made is gone, also one that tries to be a path."""
    for odd in ("local-0000", "../state", "e2b-1"):
        with pytest.raises(SandboxGone):
            await local.provider.attach(local.sandbox.ref.model_copy(update={"id": odd}))


async def test_another_process_attaches(local: Local) -> None:
    """A second worker process on the host reaches the sandbox by its handle alone."""
    await local.sandbox.write("note", b"from the first worker")
    code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from activities.sandbox.providers.local import LocalProvider\n"
        "from contracts.sandbox import SandboxRef\n"
        "async def main():\n"
        "    sandbox = await LocalProvider(Path(sys.argv[1])).attach(SandboxRef.model_validate_json(sys.argv[2]))\n"
        "    print(b''.join([part async for part in sandbox.read('note')]).decode())\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(local.directory.parent), local.sandbox.ref.model_dump_json()]
    done = await asyncio.to_thread(subprocess.run, command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "from the first worker\n"


async def test_list_selects_by_labels(provider: LocalProvider) -> None:
    """Only living sandboxes that carry all the labels are listed."""
    ref = await make(provider)
    assert await provider.list({"run": LABELS["run"]}) == [ref]
    assert await provider.list({"run": LABELS["run"], "kind": "other"}) == []


async def test_listing_clears_away_what_died(local: Local) -> None:
    """The files of a sandbox that died, and what killed workers left half done, do not stay on the disk."""
    os.kill(local.init_pid(), signal.SIGKILL)
    root = local.directory.parent
    for left in (".new-local-aa", ".dead-local-bb"):
        (root / left / "workspace").mkdir(parents=True)
    await asyncio.sleep(0.1)
    assert await local.provider.list({}) == []
    assert [path.name for path in root.iterdir()] == ["locks"]


async def test_kill_ends_every_process_and_removes_every_file(local: Local) -> None:
    """After kill no process of the sandbox and nothing of its directory is left."""
    await local.sh("setsid sleep 4711.1 & sleep 4711.1 & (sleep 4711.1 &)")
    assert processes_with("4711.1")
    await local.provider.kill(local.sandbox.ref)
    assert not processes_with("4711.1")
    assert not processes_with(str(local.directory))
    assert [path.name for path in local.directory.parent.iterdir()] == ["locks"]


async def test_kill_is_idempotent(local: Local) -> None:
    """Killing a sandbox that is gone is no error, and neither is killing one that died by itself."""
    os.kill(local.init_pid(), signal.SIGKILL)
    for _ in range(2):
        await local.provider.kill(local.sandbox.ref)
    assert not local.directory.exists()


async def test_kill_with_an_old_handle_spares_the_new_sandbox(local: Local) -> None:
    """A handle on the one that was replaced ends nothing."""
    await local.provider.kill(local.sandbox.ref)
    ref = await make(local.provider)
    await local.provider.kill(local.sandbox.ref)
    assert await local.provider.list({}) == [ref]


async def test_kill_removes_whatever_the_agent_made(local: Local) -> None:
    """Unreadable directories, odd names, FIFOs, sockets and links out do not stop removal, and links are not followed."""
    outside = local.directory.parent.parent / "outside"
    outside.mkdir()
    (outside / "kept").write_text("1")
    script = f"""
        mkdir -p shut/in/side; touch shut/in/side/f; chmod 000 shut/in/side shut/in shut
        mkfifo pipe; ln -s {outside} out; ln -s {outside}/kept file; touch $'odd\\xff\\nname'
        python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("s")'
        python3 -c 'import os\nfor _ in range(1500): os.mkdir("d" * 50); os.chdir("d" * 50)'
    """
    await local.sh(script)
    await local.provider.kill(local.sandbox.ref)
    assert not local.directory.exists()
    assert (outside / "kept").read_text() == "1"


def test_removing_a_wide_and_deep_tree_keeps_few_files_open(tmp_path: Path) -> None:
    """A tree deeper than the limit on open files can be removed."""
    code = (
        "import os, resource, sys; from pathlib import Path\n"
        "from activities.sandbox.providers.local_state import remove_tree\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\n"
        "remove_tree(Path(sys.argv[1]))\n"
    )
    deep = tmp_path / "tree"
    deep.mkdir()
    for branch in range(3):
        at = deep
        for level in range(300):
            at = at / f"{branch}-{level}"
            at.mkdir()
            (at / "file").touch()
    subprocess.run([sys.executable, "-c", code, str(deep)], cwd=REPOSITORY, check=True)
    assert not deep.exists()
    remove_tree(deep)


async def test_the_state_directory_is_private(local: Local) -> None:
    """Other users of the host can look into no part of the state."""
    assert stat.S_IMODE(local.directory.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(local.directory.stat().st_mode) == 0o700


async def test_a_root_with_a_very_long_path_works(tmp_path: Path) -> None:
    """The state directory may lie deeper than a socket address can say."""
    provider = LocalProvider(tmp_path / ("long-" * 20) / ("longer-" * 20))
    ref = await make(provider)
    result = await (await provider.attach(ref)).exec(bash("1", "echo here"))
    assert result.stdout == b"here\n"
    await provider.kill(ref)


async def test_a_missing_bubblewrap_is_told_with_its_remedy(root: Path) -> None:
    """Without bubblewrap the error names the package to install."""
    with pytest.raises(BadSandboxSpec, match="apt-get install bubblewrap"):
        await make(LocalProvider(root, bwrap="/nowhere/bwrap"))


@pytest.mark.parametrize(
    ("said", "error", "advice"),
    [
        ("bwrap: No permissions to create new namespace, likely because ...", BadSandboxSpec, "sysctl"),
        ("bwrap: setting up uid map: Permission denied", BadSandboxSpec, "docker"),
        ("bwrap: Can't mount proc: No space left on device", SandboxUnavailable, "No space left"),
    ],
)
async def test_a_start_that_fails_leaves_nothing(root: Path, said: str, error: type[Exception], advice: str) -> None:
    """When bubblewrap cannot start, the error says what the host said and what to do, and no file is left."""
    with TemporaryDirectory() as directory:  # where also the sandbox's own user finds it
        Path(directory).chmod(0o755)
        fake = Path(directory) / "bwrap"
        fake.write_text(f'#!/bin/sh\n[ "$1" = --help ] || echo "{said}" >&2\nexit 1\n')
        fake.chmod(0o755)
        with pytest.raises(error, match=advice):
            await make(LocalProvider(root, bwrap=str(fake)))
    assert [path.name for path in root.iterdir()] == ["locks"]


async def test_a_create_cut_off_before_its_end_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault after the sandbox runs ends it and removes its files."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateDirectory, "save", full)
    with pytest.raises(SandboxUnavailable, match="No space left"):
        await make(LocalProvider(root))
    assert [path.name for path in root.iterdir()] == ["locks"]
    await asyncio.sleep(0.2)
    assert not processes_with(str(root))


async def test_variables_that_are_too_long_are_refused_and_a_home_that_cannot_be_made_is_not(provider: LocalProvider) -> None:
    """The variable is named; a HOME is the agent's own affair."""
    with pytest.raises(BadSandboxSpec, match="environment: BIG: 140000 bytes"):
        await provider.create(SandboxSpec(), "k", environment={"BIG": "y" * 140_000}, labels={}, queue="q")
    ref = await provider.create(SandboxSpec(), "k", environment={"HOME": "/nonexistent"}, labels={}, queue="q")
    assert (await (await provider.attach(ref)).exec(bash("a", "echo $HOME"))).stdout == b"/nonexistent\n"


async def test_an_environment_name_that_cannot_be_set_is_refused(provider: LocalProvider) -> None:
    """A name with an equals sign is a fault of the manifest, told before anything starts."""
    with pytest.raises(BadSandboxSpec, match="environment"):
        await provider.create(SandboxSpec(), "k", environment={"A=B": "1"}, labels={}, queue="q")


async def test_extend_sees_that_the_sandbox_lives(local: Local) -> None:
    """Extending a living sandbox is nothing; extending a dead one tells of its end."""
    await local.sandbox.extend(60)
    await local.provider.kill(local.sandbox.ref)
    with pytest.raises(SandboxGone):
        await local.sandbox.extend(60)


async def test_the_kill_of_a_worker_in_the_middle_of_create_leaves_nothing_running(root: Path) -> None:
    """A sandbox whose maker is killed before it is complete ends by itself, and the next create works."""
    code = (
        "import asyncio, os, signal, sys; from pathlib import Path\n"
        "from activities.sandbox.providers.local_state import StateDirectory\n"
        "from activities.sandbox.providers.local import LocalProvider\n"
        "from contracts.sandbox import SandboxSpec\n"
        "def die(directory, record): print(record.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)\n"
        "StateDirectory.save = staticmethod(die)\n"
        "create = LocalProvider(Path(sys.argv[1])).create\n"
        "asyncio.run(create(SandboxSpec(), 'run-1', environment={}, labels={}, queue='q'))\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code, str(root)], cwd=REPOSITORY, capture_output=True, text=True
    )
    pid = int(done.stdout)
    for _ in range(40):
        if not Path(f"/proc/{pid}").exists():
            break
        await asyncio.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    provider = LocalProvider(root)
    ref = await make(provider)
    assert await provider.list({}) == [ref]
    await provider.kill(ref)
    assert [path.name for path in root.iterdir()] == ["locks"]


async def test_a_sandbox_that_is_being_made_when_its_run_is_cancelled_is_told_of(
    provider: LocalProvider, root: Path, tmp_path: Path
) -> None:
    """So that the run can end it. On a busy host making one takes longer than it takes to hear of the cancellation."""
    providers, blobs = ProviderRegistry({"local": lambda: provider}), BlobStore(LocalStore(tmp_path / "store"))
    activities = SandboxActivities(providers, blobs, WorkspaceKeeper(providers, blobs), Queues("q"), "host")
    environment = ActivityEnvironment()
    wanted = OpenSandboxInput(key="k", run_id="r", spec=SandboxSpec())
    state = StateDirectory(root)
    with state.locked(state.id_for("k")):  # as by another maker, for which it has to wait
        making = asyncio.ensure_future(environment.run(activities.open_sandbox, wanted))
        await asyncio.sleep(0.5)
        assert await provider.list({}) == []
        environment.cancel()
        await asyncio.sleep(0.1)
    opened = await making
    assert await provider.list({}) == [opened.sandbox]
    await provider.kill(opened.sandbox)
