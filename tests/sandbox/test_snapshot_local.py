"""Snapshots of real local sandboxes: what an agent made in one is there, and works, in another."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from activities.sandbox.port import SandboxGone
from activities.sandbox.providers.local import LocalProvider
from activities.sandbox.registry import ProviderRegistry
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.workspace.keeper import WorkspaceKeeper
from tests.sandbox.local_support import Local, make
from tests.snapshot_support import picture


class Host:
    """A host with a store, on which sandboxes come and go."""

    def __init__(self, provider: LocalProvider, root: Path, store: Path) -> None:
        self.provider = provider
        self.root = root
        self.keeper = self.worker(store)
        self._made = 0

    def worker(self, store: Path) -> WorkspaceKeeper:
        """A worker's keeper, which remembers nothing yet."""
        return WorkspaceKeeper(ProviderRegistry({"local": lambda: self.provider}), BlobStore(LocalStore(store)))

    async def sandbox(self) -> Local:
        """A new sandbox."""
        self._made += 1
        return Local(self.provider, await self.provider.attach(await make(self.provider, f"run-{self._made}")), self.root)


@pytest.fixture
def host(provider: LocalProvider, root: Path, tmp_path: Path) -> Host:
    """A host of its own."""
    return Host(provider, root, tmp_path / "store")


async def test_a_virtual_environment_works_in_another_sandbox(host: Host) -> None:
    """`python3 -m venv` makes absolute links and scripts; it is used, written to, and saved again, after a restore."""
    first = await host.sandbox()
    made = await first.sh(
        "python3 -m venv --without-pip .venv && .venv/bin/python -c 'import sys; print(sys.prefix)'", timeout=60
    )
    assert made.exit_code == 0, made.stderr
    ref = await host.keeper.snapshot(first.sandbox, None)
    before = picture(first.workspace)
    await host.provider.kill(first.sandbox.ref)
    second = await host.sandbox()
    await host.keeper.restore(second.sandbox, ref)
    assert picture(second.workspace) == before
    used = await second.sh(
        ".venv/bin/python -c 'import sys; print(sys.prefix)' && echo more >> .venv/pyvenv.cfg && mkdir .venv/new"
    )
    assert (used.exit_code, used.stdout) == (0, made.stdout), used.stderr
    assert (await host.keeper.snapshot(second.sandbox, ref)).id != ref.id


async def test_everything_in_the_sandbox_belongs_to_its_user_after_a_restore(host: Host) -> None:
    """Files, directories, links and the workspace can be changed there as before, and nothing of the restore is left."""
    first = await host.sandbox()
    await first.sh("mkdir -p d/e && echo x > d/e/f && ln d/e/f hard && ln -s d soft && chmod 0500 d/e && chmod 0600 hard")
    ref = await host.keeper.snapshot(first.sandbox, None)
    second = await host.sandbox()
    await second.sh("echo old > old; mkdir -p closed/below; chmod 0500 closed")
    await host.keeper.restore(second.sandbox, ref)
    text = await second.text(
        "chmod 0700 d/e && echo y >> hard && cat d/e/f && rm soft && touch d/new . && ls && stat -c %U . d hard | sort -u | wc -l"
    )
    assert text == "x\ny\nd\nhard\n1\n"
    assert sorted(path.name for path in (second.directory / "scratch").iterdir()) == []


async def test_changes_after_every_resume_are_kept(host: Host) -> None:
    """SN04 (e2b-dev/E2B#884): write, lose the sandbox, write more, lose it again, each time in a new sandbox and worker."""
    ref = None
    for n in range(4):
        sandbox = await host.sandbox()
        if ref is not None:
            await host.keeper.restore(sandbox.sandbox, ref)
        await sandbox.sh(f"echo {n} > {n}.txt")
        ref = await host.keeper.snapshot(sandbox.sandbox, ref)
        await host.provider.kill(sandbox.sandbox.ref)
        host.keeper = host.worker(host.root.parent / "store")
    last = await host.sandbox()
    assert ref is not None
    await host.keeper.restore(last.sandbox, ref)
    assert await last.text("cat *.txt") == "0\n1\n2\n3\n"


async def test_absolute_links_inside_the_workspace_still_lead_there(host: Host) -> None:
    """SN05 (openai/openai-agents-python#4831): the host's directories differ, the sandbox's paths do not."""
    first = await host.sandbox()
    await first.sh('mkdir v1; echo v1 > v1/v.txt; ln -s "$PWD/v1" lib; ln -s v1 lib2; ln -s /etc/hostname esc')
    ref = await host.keeper.snapshot(first.sandbox, None)
    second = await host.sandbox()
    await host.keeper.restore(second.sandbox, ref)
    assert await second.text("cat lib/v.txt lib2/v.txt; readlink esc") == "v1\nv1\n/etc/hostname\n"
    record = await host.keeper.store.load(ref)
    assert {"esc", "lib", "lib2", "v1"} <= {name.decode() for name in record.root.children}


async def test_pipes_and_sockets_hold_nothing_up(host: Host) -> None:
    """SN06 (canonical/snapd#9941): made inside, with a process that listens; a locked file of the sandbox's user is kept."""
    first = await host.sandbox()
    await first.sh(
        "mkfifo pipe; echo keep > keep.txt; echo x > locked; chmod 0 locked\n"
        "python3 -c 'import socket; s = socket.socket(socket.AF_UNIX); s.bind(\"sock\")'"
    )
    started = time.monotonic()
    ref = await host.keeper.snapshot(first.sandbox, None)
    assert time.monotonic() - started < 10
    assert {path for path, _ in (await host.keeper.store.load(ref)).skipped} >= {b"pipe", b"sock"}
    second = await host.sandbox()
    await host.keeper.restore(second.sandbox, ref)
    assert await second.text("cat keep.txt") == "keep\n"


async def test_a_snapshot_while_the_sandbox_works_can_be_restored(host: Host) -> None:
    """Files come, grow, move and go all the time: whatever is stored is whole, and the next ones are too."""
    first = await host.sandbox()
    await first.sh(
        "(i=0; while [ -e go -o $i = 0 ]; do i=$((i+1)); touch go; d=d$((i%5)); mkdir -p $d;"
        " echo $i >> $d/f$((i%7)); ln -f $d/f$((i%7)) $d/h;"
        " mv $d moved$((i%3)) 2>/dev/null; rm -rf moved$((i%2)); [ $i -gt 3000 ] && break; done) > /dev/null 2>&1 &"
    )
    ref = None
    for _ in range(15):
        ref = await host.keeper.snapshot(first.sandbox, ref)
        second = await host.sandbox()
        await host.keeper.restore(second.sandbox, ref)
        assert (await host.worker(host.root.parent / "store").snapshot(second.sandbox, None)).id == ref.id
        await host.provider.kill(second.sandbox.ref)


async def test_a_sandbox_that_is_gone_says_so_and_leaves_nothing_behind(host: Host) -> None:
    """Neither a snapshot of nothing nor a directory for a sandbox that no longer is."""
    first = await host.sandbox()
    await first.sh("echo x > x")
    ref = await host.keeper.snapshot(first.sandbox, None)
    await host.provider.kill(first.sandbox.ref)
    with pytest.raises(SandboxGone):
        await host.keeper.snapshot(first.sandbox, ref)
    with pytest.raises(SandboxGone):
        await host.keeper.restore(first.sandbox, ref)
    assert not first.directory.exists()


async def test_a_restored_workspace_is_known_and_its_first_snapshot_reads_nothing(host: Host) -> None:
    """After a rehydration the step's snapshot costs what the step changed, even within the same tick of the clock."""
    first = await host.sandbox()
    await first.sh("for i in $(seq 300); do echo $i > f$i; done")
    ref = await host.keeper.snapshot(first.sandbox, None)
    second = await host.sandbox()
    await host.keeper.restore(second.sandbox, ref)
    path = second.workspace / "f7"
    status = path.stat()
    path.write_text("8")
    path.write_text("8\n")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    later = await host.keeper.snapshot(second.sandbox, ref)
    assert later.id != ref.id
    third = await host.sandbox()
    await host.keeper.restore(third.sandbox, later)
    assert await third.text("cat f7 f8") == "8\n8\n"
