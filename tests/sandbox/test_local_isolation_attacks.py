"""Attempts to break out of a sandbox from inside, one for each way out that others have found."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import site
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from activities.sandbox.port import BadSandboxSpec, FileChange, FileFault
from activities.sandbox.providers import local_start
from activities.sandbox.providers.local import LocalProvider
from tests.sandbox.local_support import Local, make

REPOSITORY = Path(__file__).parents[2]
NAMESPACES = ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
CANARY = "canary-31c9"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can")


async def test_nothing_can_be_mounted_moved_or_unmounted(local: Local) -> None:
    """No mount, bind, remount, unmount or new root, not even of what the sandbox may read or owns."""
    text = await local.text(
        "mkdir -p m; for c in 'mount -t tmpfs x m' 'mount --bind /usr m' 'mount -o remount,rw /' 'mount -o remount,rw /usr'"
        " 'umount /workspace' 'umount -l /proc' 'mount -t proc p m' 'mount -t overlay o m' 'pivot_root . m' 'chroot / true';"
        " do $c 2>/dev/null && echo did $c; done; ls -A m; echo done"
    )
    assert text == "done\n"


async def test_no_namespace_can_be_made_or_entered(local: Local) -> None:
    """Every kind of new namespace is refused, and so is entering the one of init or of a file."""
    text = await local.text(
        "for f in --user --mount --net --pid --ipc --uts --cgroup --time '-Ur' '-Urmpf'; do"
        " unshare $f true 2>/dev/null && echo made $f; done;"
        " for f in -U -m -n -p -i -u; do nsenter -t 1 $f true 2>/dev/null && echo entered $f; done;"
        " bwrap --ro-bind / / true 2>/dev/null && echo nested; echo done"
    )
    assert text == "done\n"


async def test_every_namespace_is_the_sandboxs_own(local: Local) -> None:
    """A command shares no namespace with the host."""
    inside = (await local.text("".join(f"readlink /proc/self/ns/{name};" for name in NAMESPACES))).split()
    outside = [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]
    assert len(inside) == len(NAMESPACES)
    assert not set(inside) & set(outside)


async def test_the_maps_and_merits_of_a_process_cannot_be_changed(local: Local) -> None:
    """No new user map, no groups, and no protection from the kernel when memory runs out."""
    text = await local.text(
        "for f in uid_map gid_map setgroups; do echo 0 0 1 > /proc/self/$f && echo wrote $f; done 2>/dev/null;"
        " (echo -1000 > /proc/self/oom_score_adj) 2>/dev/null && echo wrote; cat /proc/self/oom_score_adj; nice -n -5 true"
    )
    assert text.splitlines()[0] == "500"
    assert "Permission denied" in text


@needs_root
async def test_signals_reach_no_process_outside(local: Local) -> None:
    """A signal to everything, and to the pid that a process of the same user has on the host, leaves it alone."""
    owner = local.workspace.stat().st_uid
    outside = subprocess.Popen(["sleep", "60"], user=owner, group=owner, extra_groups=[])
    try:
        await local.sh(f"kill -9 {outside.pid}; kill -9 -- -{outside.pid}")
        await local.sh("kill -9 -1")
        assert outside.poll() is None
        assert (await local.sh("echo alive")).stdout == b"alive\n"
    finally:
        outside.kill()
        outside.wait()


async def test_sockets_of_the_host_are_out_of_reach(local: Local, tmp_path: Path) -> None:
    """Not on its loopback, not by an abstract name, not through a link to a socket file, not over a virtual machine's channel."""
    path = tmp_path / "host.sock"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        named.bind(str(path))
        abstract.bind(f"\0{CANARY}")
        for server in (named, abstract):
            server.listen()
        (local.workspace / "link").symlink_to(path)
        port = tcp.getsockname()[1]
        script = (
            "import socket\n"
            f"places = [(1, 'link'), (1, {str(path)!r}), (1, '\\0{CANARY}'), (2, ('127.0.0.1', {port})), (40, (2, 22))]\n"
            "for family, where in places:\n"
            "    try: socket.socket(family).connect(where); print('connected', where)\n"
            "    except OSError: pass\n"
        )
        result = await local.run("python3", "-c", script)
    assert (result.exit_code, result.stdout) == (0, b"")


async def test_set_user_id_programs_give_nothing(local: Local) -> None:
    """Neither the system's nor a copy with the bit set changes the user, and no mount would let it."""
    text = await local.text(
        "cp /usr/bin/id own; chmod 6755 own; ./own -u; cp /usr/bin/id /tmp/own; chmod 6755 /tmp/own; /tmp/own -u;"
        " python3 -c 'import os\ntry: os.setuid(0); print(\"root\")\nexcept OSError: print(os.getresuid())';"
        " for p in su sudo pkexec newgrp; do echo | timeout 5 $p -c id 2>/dev/null | grep -q uid=0 && echo root by $p; done;"
        " grep -vc nosuid /proc/self/mountinfo; awk '$5 !~ \"^/dev\" && $6 !~ /nodev/ {print $5}' /proc/self/mountinfo"
    )
    assert text.split("\n") == ["1000", "1000", "(1000, 1000, 1000)", "0", ""]


async def test_there_are_no_devices_but_these(local: Local) -> None:
    """The list of device nodes is exact, and no other can be made."""
    text = await local.text(
        # What lies below a mount point is what counts, so `find -type` will not do.
        "find / -path /proc -prune -o -path /usr -prune -o -print 2>/dev/null |"
        " while read -r f; do if [ -c $f ] || [ -b $f ]; then echo $f; fi; done; find /usr -type b -o -type c;"
        " mknod disk b 254 0; mknod mem c 1 1"
    )
    nodes = sorted(line for line in text.splitlines() if line.startswith("/"))
    names = ["full", "null", "ptmx", "pts/ptmx", "random", "tty", "urandom", "zero"]
    assert nodes == [f"/dev/{name}" for name in names]
    assert text.count("Operation not permitted") == 2


async def test_a_command_has_no_open_file_of_the_host(local: Local) -> None:
    """Only its three standard streams are open, none of them a file of the host that it could read back."""
    text = await local.text(
        "exec 2>&1; readlink /proc/self/fd/0; ls /proc/self/fd | wc -l; : < /proc/self/fd/1 && readlink /proc/$$/fd/1"
    )
    lines = text.split()
    assert (lines[0], lines[1]) == ("/dev/null", "4")
    assert lines[2].startswith("pipe:")


async def test_no_hard_link_leads_out(local: Local) -> None:
    """Files of the system, of /proc and of the host cannot be linked into the workspace."""
    text = await local.text(
        "for f in /usr/bin/env /etc/passwd /proc/1/environ /proc/self/exe; do ln $f x 2>/dev/null && echo linked $f;"
        " ln -L $f y 2>/dev/null && echo linked $f; done; echo done"
    )
    assert text == "done\n"


RACE = """
import ctypes, os
libc = ctypes.CDLL(None)
for name, target in (("host", {outside!r}), ("tmp", "/tmp")):
    os.mkdir(name)
    open(name + "/f", "w").close()
    os.symlink(target, name + ".link")
while True:
    for name in ("host", "tmp"):
        libc.renameat2(-100, name.encode(), -100, (name + ".link").encode(), 2)
"""
"""Swaps a directory and a link to elsewhere as fast as it can (RENAME_EXCHANGE)."""


async def test_a_race_of_links_leads_the_harness_nowhere(local: Local, tmp_path: Path) -> None:
    """While a directory is swapped for a link all the time, reads and writes of the harness stay in the workspace."""
    outside = tmp_path / "outside"
    outside.mkdir(0o777)
    (outside / "f").write_text(CANARY)
    racing = asyncio.create_task(local.run("python3", "-c", RACE.format(outside=str(outside))))
    await asyncio.sleep(0.5)
    seen = 0
    for round_ in range(120):
        for name in ("host", "tmp"):
            try:
                await local.sandbox.change([FileChange(f"{name}/f", b"written"), FileChange(f"{name}/new/g{round_}", b"1")])
                seen += 1
            except FileFault:
                continue
        try:
            views = await local.sandbox.look(["host/f", "host.link/f"], 1000)
            assert all(CANARY.encode() not in (view.data or b"") for view in views.values())
            assert CANARY.encode() not in b"".join([part async for part in local.sandbox.read("host/f")])
            await local.sandbox.write("host/f", b"written")
        except FileFault:
            continue
    await local.sandbox.walk("")
    await local.sandbox.kill_job("run/1")
    await racing
    assert seen > 0
    assert [path.name for path in outside.iterdir()] == ["f"]
    assert (outside / "f").read_text() == CANARY
    assert await local.text("ls /tmp") == ""


async def test_links_of_the_workspace_decide_no_mount_of_the_next_sandbox(local: Local, tmp_path: Path) -> None:
    """After a restart the mounts are the same, whatever the workspace held (laude-institute/headlong#72, rappdw/sandy#209)."""
    mounts = "awk '{print $5, $6}' /proc/self/mountinfo"
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text(CANARY)
    before = await local.text(mounts)
    await local.sh(f"rm -rf .home; ln -s {secret} .home; ln -s {secret} x; mkdir -p etc; ln -s {secret}/key etc/passwd")
    os.kill(local.init_pid(), signal.SIGKILL)
    await asyncio.sleep(0.2)
    again = Local(local.provider, await local.provider.attach(await make(local.provider)), local.directory.parent)
    assert await again.text(mounts) == before
    assert CANARY not in await again.text("cat ~/key x/key /workspace/etc/passwd")


# --- an ordinary user ----------------------------------------------------------------------------------------------------

WHOLE_LIFE = """
import asyncio, json, sys
from pathlib import Path
from activities.sandbox.port import Command, SandboxGone
from activities.sandbox.providers.local import LocalProvider
from contracts.sandbox import SandboxLimits, SandboxSpec

async def main():
    provider = LocalProvider(Path(sys.argv[1]))
    spec = SandboxSpec(limits=SandboxLimits(memory_mb=200, processes=40, workspace_mb=50))
    ref = await provider.create(spec, "k", environment={"A": "b"}, labels={}, queue="q")
    sandbox = await provider.attach(ref)
    said = []
    for number, script in enumerate((
        "id -u; echo $A; grep -E '^(Seccomp|NoNewPrivs):' /proc/self/status | cut -f2",
        "python3 -c 'x = bytearray(300 << 20)' 2>&1 | tail -1",
        ":(){ :|:& };: 2>/dev/null; sleep 30",
        "unshare -U true 2>/dev/null || echo refused; ls -d /root /home 2>/dev/null; echo 1 > f; cat f",
        "for i in $(seq 999); do head -c 5M /dev/zero > f$i; sleep 0.02; done",
    )):
        result = await sandbox.exec(Command(str(number), ["bash", "-c", script], timeout=20))
        said.append([result.state, result.stdout.decode(), result.note])
    await provider.kill(ref)
    try:
        await provider.attach(ref)
    except SandboxGone:
        said.append("gone")
    print(json.dumps(said))

asyncio.run(main())
"""


@pytest.fixture
def fresh_user() -> Iterator[str]:
    """A user that was made for this test."""
    name = f"caisson-{secrets.token_hex(4)}"
    subprocess.run(["useradd", "--no-create-home", "--shell", "/usr/sbin/nologin", name], check=True)
    yield name
    subprocess.run(["userdel", name], check=True, capture_output=True)


@needs_root
@pytest.mark.skipif(shutil.which("useradd") is None, reason="this host has no useradd")
def test_a_fresh_user_without_any_right_can_do_it_all(fresh_user: str, tmp_path: Path) -> None:
    """Create, commands, limits and kill work for an ordinary user of the host, with the same filter."""
    packages = os.pathsep.join([str(REPOSITORY), *site.getsitepackages()])
    options = {"user": fresh_user, "group": fresh_user, "extra_groups": [], "cwd": "/", "capture_output": True, "text": True}
    for python in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            probe = subprocess.run([python, "-c", "import pydantic, contracts"], env=environment, **options)  # type: ignore[call-overload]
        except OSError:
            continue
        if probe.returncode == 0:
            break
    else:
        pytest.skip("no Python that an ordinary user can run has the packages")
    home = Path("/var/tmp") / fresh_user
    home.mkdir(0o700)
    shutil.chown(home, fresh_user, fresh_user)
    try:
        done = subprocess.run([python, "-c", WHOLE_LIFE, str(home / "state")], env=environment, **options)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr
        first, memory, bomb, denied, disk, end = json.loads(done.stdout)
        assert first[1].split() == ["1000", "b", "1", "2"]
        assert memory[1].startswith("MemoryError") or "out of memory" in memory[2]
        assert (bomb[0], bomb[2][:35]) == ("killed", "the sandbox is at its limit of 40 p")
        assert denied[1] == "refused\n1\n"
        assert (disk[0], "its limit is 50 MB" in disk[2]) == ("killed", True)
        assert end == "gone"
        assert [path.name for path in (home / "state").iterdir()] == ["locks"]
    finally:
        shutil.rmtree(home)


async def test_a_provider_on_another_system_says_what_to_use(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On macOS the local provider refuses with the name of the one that works there."""
    monkeypatch.setattr(local_start, "sys", SimpleNamespace(platform="darwin"))
    with pytest.raises(BadSandboxSpec, match="docker provider"):
        await make(LocalProvider(root))
