"""Snapshots and restores of real sandboxes that are reached through the port alone, as those of any remote provider are."""

from __future__ import annotations

import ast
import os
import resource
import shutil
import time
from pathlib import Path

import pytest

from activities.sandbox.port import BadSandboxSpec, SandboxGone, SandboxUnavailable
from activities.workspace import remote_scan
from activities.workspace.remote_call import HELPERS, RemoteLimits
from activities.workspace.remote_scan import RemoteWorkspace
from activities.workspace.tree import FILE, Entry, kept_time
from contracts.snapshot import SnapshotRef
from tests.sandbox.local_support import Local
from tests.sandbox.remote_support import PortOnly, keeper_at, only_busybox, only_gnu
from tests.snapshot_support import picture

RICH = r"""
set -e
mkdir -p a/b/c empty "spa ce" x.tmp closed; echo hello >a/f; echo x >a/b/g; head -c 300000 /dev/urandom >a/random
seq 1 200000 >large; truncate -s 5M sparse; printf tail | dd of=sparse bs=1 seek=3000000 conv=notrunc 2>/dev/null
ln a/f a/hard; ln a/f z-hard; ln -s /etc/passwd absolute; ln -s ../x a/relative; ln -s "$(printf 'new\nline')" newline
touch ./-dash "quo'te" "back\\slash" "$(printf 'bad\377name')" zero; echo w >"$(printf 'we\nird')"
echo long >"$(head -c 200 /dev/zero | tr '\0' n)"
mkfifo pipe; echo in >closed/f; chmod 600 a/f; chmod 4755 a/b/g
echo '*.tmp' >.caissonignore; echo t >no.tmp; echo t >x.tmp/y
"""
TIMES = r"""
touch -d @1600000000.123456789 a/b/g; touch -h -d @1500000000.5 absolute; touch -d @1400000000.25 empty; chmod 555 closed
"""
ATTRIBUTES = "import os; os.setxattr('a/f', 'user.one', b'1\\0'); os.setxattr('a', 'user.two', b'd')"

Tools = str
tools = pytest.mark.parametrize("tools", ["python", "gnu", "busybox"])


async def port_with(local: Local, kind: Tools) -> PortOnly:
    """The sandbox behind its port, with Python, with GNU's tools alone, or with BusyBox's."""
    port = PortOnly(local.sandbox)
    if kind == "gnu":
        port.path = await only_gnu(local)
    if kind == "busybox":
        if shutil.which("busybox") is None:
            pytest.skip("BusyBox is missing: apt-get install busybox-static")
        port.path = await only_busybox(local)
    return port


async def fill(local: Local) -> None:
    """Make one of everything."""
    for script in (RICH, TIMES):
        done = await local.sh(script)
        assert done.exit_code == 0, done.stderr
    done = await local.run("python3", "-c", ATTRIBUTES)
    assert done.exit_code == 0, done.stderr


async def test_the_same_workspace_has_the_same_snapshot_from_inside_and_outside(local: Local, tmp_path: Path) -> None:
    """What the helper in Python sees through the port is what a scan of the host's own directory sees."""
    await fill(local)
    inside = await keeper_at(tmp_path).snapshot(PortOnly(local.sandbox), None, ("a/random",))
    outside = await keeper_at(tmp_path).snapshot(local.sandbox, None, ("a/random",))
    assert inside.id == outside.id
    assert (inside.files, inside.total_bytes, inside.skipped) == (outside.files, outside.total_bytes, 1)


@tools
async def test_a_rich_tree_comes_back(local: Local, tmp_path: Path, tools: Tools) -> None:
    """Everything that the sandbox's tools can keep is there after a restore, and what was there before is not."""
    await fill(local)
    port, keeper = await port_with(local, tools), keeper_at(tmp_path)
    ref = await keeper.snapshot(port, None)
    before = picture(local.workspace, times=tools == "python")
    await local.sh("chmod -R u+w .; rm -rf a large closed; mkdir other; echo else >sparse")
    port.start()
    assert await keeper.restore(port, ref) == ref.files
    assert port.calls == ["look", "write part-0", "unpack", "read listing"]
    after = picture(local.workspace, times=tools == "python")
    for path, what in before.items():
        if path.endswith((b".tmp", b".tmp/y")) or what[0] == "other":
            assert path not in after
            continue
        kept = [part for part in what if tools == "python" or not (isinstance(part, tuple) and what[0] in ("file", "directory"))]
        expected = [part & 0o777 if number == 1 and isinstance(part, int) else part for number, part in enumerate(kept)]
        found = [part for part in after[path] if tools == "python" or not isinstance(part, tuple)]
        assert found == expected, path
    assert not {path for path in after if path not in before}


@tools
async def test_a_restored_workspace_has_the_same_snapshot(local: Local, tmp_path: Path, tools: Tools) -> None:
    """Whatever the tools of a sandbox cannot keep is not in its snapshots either, so that their ids are stable."""
    await fill(local)
    port, keeper = await port_with(local, tools), keeper_at(tmp_path)
    ref = await keeper.snapshot(port, None)
    await local.sh("chmod -R u+w .; rm -rf *")
    await keeper.restore(port, ref)
    assert (await keeper.snapshot(port, ref)).id == ref.id
    assert (await keeper_at(tmp_path).snapshot(port, None)).id == ref.id


@tools
async def test_odd_times_are_stored_and_restored(local: Local, tmp_path: Path, tools: Tools) -> None:
    """Long before 1970, in its first minutes, and later than 64 bits hold: of files, directories and links."""
    for number, seconds in enumerate(
        (-20_000_000_000, -1_000_000.5, -2, 0, 1, 900, 4_733_510_400, 9_000_000_000, 10_413_792_000)
    ):
        name = local.workspace / f"t{number}"
        made = await local.sh(f"echo x >t{number}; mkdir d{number}; ln -s x l{number}")
        assert made.exit_code == 0, made.stderr
        for path in (name, name.with_name(f"d{number}"), name.with_name(f"l{number}")):
            os.utime(path, ns=(round(seconds * 10**9),) * 2, follow_symlinks=False)
    before = {path: what[2] for path, what in picture(local.workspace).items() if path[:1] in b"tdl"}
    port, keeper = await port_with(local, tools), keeper_at(tmp_path)
    ref = await keeper.snapshot(port, None)
    await local.sh("rm -rf ./*")
    await keeper.restore(port, ref)
    after = {path: what[2] for path, what in picture(local.workspace).items() if path[:1] in b"tdl"}
    if tools != "busybox":
        assert after == {path: kept_time(time) for path, time in before.items() if isinstance(time, int)}
    assert (await keeper.snapshot(port, ref)).id == ref.id
    assert (await keeper_at(tmp_path).snapshot(port, None)).id == ref.id


@pytest.mark.parametrize("tools", ["gnu", "busybox"])
async def test_what_the_tools_cannot_keep_is_said(local: Local, tmp_path: Path, tools: Tools) -> None:
    """A snapshot from a sandbox without Python lists what it does not hold."""
    await local.sh("echo x >f")
    port, keeper = await port_with(local, tools), keeper_at(tmp_path)
    skipped = (await keeper.store.load(await keeper.snapshot(port, None))).skipped
    assert len(skipped) == 1
    assert "without Python in the sandbox" in skipped[0][1]
    assert ("below a second" in skipped[0][1]) == (tools == "busybox")


@tools
async def test_one_changed_file_costs_its_own_bytes(local: Local, tmp_path: Path, tools: Tools) -> None:
    """Of 2,000 files one that changed takes at most five calls, and nothing but the listing and its content crosses the wire."""
    await local.sh("for i in $(seq 2000); do head -c 3000 /dev/urandom >f$i; done; sleep 1")
    port, keeper = await port_with(local, tools), keeper_at(tmp_path)
    first = await keeper.snapshot(port, None)
    port.start()
    assert await keeper.snapshot(port, first) == first
    unchanged = port.received
    assert len(port.calls) == 2
    await local.sh("head -c 5000 /dev/urandom >f77")
    port.start()
    second = await keeper.snapshot(port, first)
    assert second.id != first.id
    assert len(port.calls) <= 5
    assert port.received < unchanged + 5000 + 6000 + 2000


@tools
async def test_a_worker_that_forgot_fetches_only_what_is_new(local: Local, tmp_path: Path, tools: Tools) -> None:
    """Without its memory a worker learns from digests what the snapshot before has already."""
    await local.sh("for i in $(seq 300); do head -c 30000 /dev/urandom >f$i; done; sleep 1")
    port = await port_with(local, tools)
    first = await keeper_at(tmp_path).snapshot(port, None)
    await local.sh("mv f1 moved; echo new >f2")
    port.start()
    second = await keeper_at(tmp_path).snapshot(port, first)
    assert len(port.calls) <= 5
    assert port.received < 200_000
    assert second.id == (await keeper_at(tmp_path).snapshot(port, None)).id


async def test_a_restore_is_remembered(local: Local, tmp_path: Path) -> None:
    """The first snapshot after a restore reads no file."""
    await local.sh("echo x >f; ln -s f l; sleep 0.05")
    port, keeper = PortOnly(local.sandbox), keeper_at(tmp_path)
    ref = await keeper.snapshot(port, None)
    await keeper.restore(port, ref)
    port.start()
    assert await keeper.snapshot(port, ref) == ref
    assert port.calls == ["list", "read listing"]


async def test_keeping_what_lies_beside(local: Local, tmp_path: Path) -> None:
    """With `keep`, what is not in the snapshot stays at the top."""
    await local.sh("mkdir d; echo old >d/f")
    port, keeper = PortOnly(local.sandbox), keeper_at(tmp_path)
    ref = await keeper.snapshot(port, None)
    await local.sh("echo new >d/f; echo stays >beside")
    await keeper.restore(port, ref, keep=True)
    assert await local.text("cat d/f beside") == "old\nstays\n"


async def test_unreadable_files_are_listed(local: Local, tmp_path: Path) -> None:
    """What the sandbox's user may not read is skipped and named; the rest is stored."""
    await local.sh("echo x >f; echo y >secret; chmod 0 secret; mkdir -m 0 dark; echo z >g")
    for kind in ("python", "gnu"):
        port, keeper = await port_with(local, kind), keeper_at(tmp_path)
        found = await keeper.store.load(await keeper.snapshot(port, None))
        skipped = dict(found.skipped)
        assert skipped[b"secret"] == "Permission denied"
        assert skipped[b"dark"] == "what it holds cannot be read: Permission denied"
        assert set(found.root.children) >= {b"f", b"g", b"dark"}


@tools
async def test_a_damaged_bundle_restores_nothing(local: Local, tmp_path: Path, tools: Tools) -> None:
    """One bit that flips on the way is found before anything changes."""
    await local.sh("head -c 100000 /dev/urandom >f; mkdir d")
    port, keeper = await port_with(local, tools), keeper_at(tmp_path)
    ref = await keeper.snapshot(port, None)
    await local.sh("echo changed >f; echo more >d/g")
    before = picture(local.workspace)
    port.on_write = lambda name, data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]
    with pytest.raises(SandboxUnavailable, match="what arrived is not what was sent"):
        await keeper.restore(port, ref)
    assert picture(local.workspace) == before


@tools
async def test_a_restore_that_does_not_fit_changes_nothing(local: Local, tmp_path: Path, tools: Tools) -> None:
    """When the staging directory cannot be filled, the fault is named and the workspace is as it was."""
    await local.sh("mkdir d; echo x >d/f; echo y >g")
    port, keeper = await port_with(local, tools), keeper_at(tmp_path)
    ref = await keeper.snapshot(port, None)
    await local.sh("echo z >g; truncate -s 7 d/h")
    before = picture(local.workspace)
    port.on_write = lambda name, data: b"" if name.startswith("part") else data
    with pytest.raises(SandboxUnavailable, match="what arrived is not what was sent"):
        await keeper.restore(port, ref)
    assert picture(local.workspace) == before


@tools
async def test_a_switch_that_fails_is_undone(local: Local, tmp_path: Path, tools: Tools) -> None:
    """Content that cannot be moved away, as another user's in a sticky directory, stays, and so does all that had been moved."""
    await local.sh("echo a >a; echo b >b; mkdir m")
    port, keeper = await port_with(local, tools), keeper_at(tmp_path)
    ref = await keeper.snapshot(port, None)
    await local.sh("echo c >c; echo changed >a")
    if os.geteuid():
        pytest.skip("only root can give a file to another user")
    # The workspace belongs to the sandbox's user, who may remove all of it; an immovable entry takes a foreign, sticky workspace.
    own = local.workspace.stat().st_uid
    local.workspace.chmod(0o1777)
    os.chown(local.workspace, 12345, 12345)
    os.chown(local.workspace / "m", 12345, 12345)
    before = picture(local.workspace)
    with pytest.raises(SandboxUnavailable, match="moved"):
        await keeper.restore(port, ref)
    after = picture(local.workspace)
    assert {path: what for path, what in after.items() if path != b"."} == {
        path: what for path, what in before.items() if path != b"."
    }
    os.chown(local.workspace, own, own)


async def test_a_sandbox_that_dies_leaves_no_snapshot(local: Local, tmp_path: Path) -> None:
    """Killed in the middle of a snapshot or a restore, it is SandboxGone, and no record is written."""
    await local.sh("echo x >f")
    port, keeper = PortOnly(local.sandbox), keeper_at(tmp_path)

    def kill(what: str) -> None:
        if what == "pack":
            os.kill(local.init_pid(), 9)
            time.sleep(0.2)

    port.before_call = kill
    with pytest.raises(SandboxGone):
        await keeper.snapshot(port, None)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


async def test_a_large_file_needs_little_memory(local: Local, tmp_path: Path) -> None:
    """A snapshot of a file of 100 MB takes less than that of memory: content is spooled on disk, and read in pieces."""
    await local.sh("head -c 100000000 /dev/urandom >f", timeout=60)
    port, keeper = PortOnly(local.sandbox), keeper_at(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ref = await keeper.snapshot(port, None)
    assert ref.total_bytes >= 100_000_000
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 90 << 10


async def test_much_content_comes_in_rounds(local: Local, tmp_path: Path) -> None:
    """A bundle is bounded, so files come in several, and one file in several too."""
    await local.sh("for i in 1 2 3; do head -c 3000000 /dev/urandom >f$i; done; truncate -s 9M hole; echo end >>hole")
    port = PortOnly(local.sandbox)
    whole = await keeper_at(tmp_path).snapshot(port, None)
    limits = RemoteLimits(round_bytes=2 << 20, part_bytes=1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_scan, "RemoteLimits", lambda: limits)
        port.start()
        keeper = keeper_at(tmp_path)
        assert (await keeper.snapshot(port, None)).id == whole.id
        assert port.calls.count("pack") > 5
        await local.sh("rm -f *")
        await keeper.restore(port, whole)
    assert (await keeper_at(tmp_path).snapshot(port, None)).id == whole.id


async def test_a_file_that_goes_meanwhile_is_left_out(local: Local, tmp_path: Path) -> None:
    """A file removed after it was listed is not in the snapshot; its other name then is the file."""
    await local.sh("echo x >gone; echo y >a; ln a b; sleep 0.05")
    port, keeper = PortOnly(local.sandbox), keeper_at(tmp_path)

    def vanish(what: str) -> None:
        if what == "pack" and (local.workspace / "gone").exists():
            (local.workspace / "gone").unlink()
            (local.workspace / "a").unlink()

    port.before_call = vanish
    ref = await keeper.snapshot(port, None)
    port.before_call = None
    root = (await keeper.store.load(ref)).root
    found = root.children[b"b"]
    assert not {b"gone", b"a"} & set(root.children)
    assert isinstance(found, Entry)
    assert (found.kind, found.size) == (FILE, 2)
    second = await keeper.snapshot(port, ref)
    assert second.id == (await keeper_at(tmp_path).snapshot(port, None)).id


async def test_an_image_without_the_tools_is_refused(local: Local, tmp_path: Path) -> None:
    """The error names what is missing, and is no reason to try again."""
    port = await port_with(local, "gnu")
    await local.sh("rm /tmp/gnu/tar /tmp/gnu/stat")
    with pytest.raises(BadSandboxSpec, match="lacks stat tar"):
        await keeper_at(tmp_path).snapshot(port, None)


async def test_a_login_shell_may_say_what_it_likes(local: Local, tmp_path: Path) -> None:
    """Some providers start commands in a login shell, whose greeting comes before what the helper says."""
    await local.sh("echo x >f")
    port = PortOnly(local.sandbox)
    greeted = PortOnly(local.sandbox)
    greeted.greeting = b"Welcome!\ncaisson-1 fault no\n"
    ref = await keeper_at(tmp_path).snapshot(greeted, None)
    assert ref.id == (await keeper_at(tmp_path).snapshot(port, None)).id


def test_the_helper_is_for_python_3_6() -> None:
    """Images have old interpreters: the helper uses no newer syntax."""
    for path in HELPERS.glob("*.py"):
        ast.parse(path.read_text(), feature_version=(3, 6))


async def test_the_remote_workspace_leaves_no_large_bundle(local: Local, tmp_path: Path) -> None:
    """In a sandbox whose /tmp is memory, content that was fetched does not stay."""
    await local.sh("head -c 3000000 /dev/urandom >f")
    port = PortOnly(local.sandbox)
    async with RemoteWorkspace(port).scan(None, None) as (scan, _):
        assert len(scan.pending) == 1
    assert await local.text("find /tmp -name bundle") == ""
    assert isinstance(await keeper_at(tmp_path).snapshot(port, None), SnapshotRef)
