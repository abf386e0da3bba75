"""What sandboxed code can see and touch of the host: the read-only system and its own workspace, nothing else."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from activities.sandbox.port import FileChange, FileFault
from activities.sandbox.providers import local_start
from activities.sandbox.providers.local import LocalProvider
from activities.sandbox.providers.local_bwrap import GUEST_MODULES, Interpreter, compile_modules
from contracts.sandbox import JobState
from tests.sandbox.local_support import Local, bash, make

CANARY = "canary-7f3a"


@pytest.fixture(autouse=True)
def canary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in a worker that holds a secret in its environment."""
    monkeypatch.setenv("CANARY_MODEL_KEY", CANARY)


async def test_no_other_process_tells_a_secret(local: Local) -> None:
    """Nothing readable below /proc holds the worker's environment (NousResearch/hermes-agent#4427)."""
    text = await local.text(
        "cat /proc/1/environ /proc/$PPID/environ; tr '\\0' '\\n' < /proc/self/environ; cat /proc/[0-9]*/environ; ps auxe;"
        "cat /proc/$PPID/cmdline; ls -l /proc/self/../$PPID/fd"
    )
    assert "PROJECT=north wing" in text
    assert CANARY not in text


async def test_no_shell_brings_the_environment_back(local: Local) -> None:
    """Login and interactive shells know only what the sandbox was given (openai/codex#1249, openai/codex#14774)."""
    text = await local.text("env; bash -lc env; bash -ic env; sh -c set; python3 -c 'import os; print(dict(os.environ))'")
    assert text.count("PROJECT=") >= 3
    assert CANARY not in text


async def test_the_environment_is_a_fixed_list(local: Local) -> None:
    """A command has the declared variables, the sandbox's own, and no others."""
    names = {line.partition("=")[0] for line in (await local.run("env")).stdout.decode().splitlines()}
    own = {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TERM", "TMPDIR", "XDG_CACHE_HOME", "SHELL"}
    assert names == own | {"PROJECT"}


async def test_the_home_lies_in_the_workspace_and_caches_outside(local: Local) -> None:
    """What is installed for the user is part of every snapshot, caches are not."""
    text = await local.text("echo $HOME $XDG_CACHE_HOME; stat -c %a ~; touch ~/kept")
    assert text.split() == ["/workspace/.home", "/tmp/.cache", "700"]
    assert (local.workspace / ".home/kept").exists()


async def test_no_file_of_the_host_is_there(local: Local) -> None:
    """Homes, secrets of /etc, the state directory and this repository cannot be seen."""
    hidden = ["/root", "/home", "/etc/shadow", "/etc/hostname", "/etc/resolv.conf", "/sys", "/boot", "/opt", "/var/lib", "/srv"]
    hidden += [str(local.directory), str(Path(__file__).parent), "/mnt", "/media"]
    text = await local.text("ls -d " + " ".join(hidden) + " 2>/dev/null; ls -A /var /run /tmp /dev/shm; hostname")
    assert text.split() == ["/dev/shm:", "/run:", "caisson", "/tmp:", "/var:", "tmp", "caisson"]


async def test_the_user_database_is_the_sandboxs_own(local: Local) -> None:
    """No account of the host is known inside."""
    text = await local.text("cut -d: -f1 /etc/passwd /etc/group; id -un; id -G")
    assert text.split() == ["root", "caisson", "nobody", "root", "caisson", "nogroup", "caisson", "1000"]


async def test_the_system_is_read_only(local: Local) -> None:
    """No directory but the workspace and the temporary ones can be written."""
    places = "/ /usr /usr/bin /etc /etc/ssl /dev /proc /proc/sys/kernel /run/caisson/activities/sandbox/providers/local_init.pyc"
    text = await local.text(
        f"for d in {places}; do touch $d/x 2>/dev/null && echo wrote $d; done; cp /bin/true /bin/sh; echo done"
    )
    assert "wrote" not in text
    assert text.endswith("done\n")
    assert (await local.text("touch /workspace/x /tmp/x /var/tmp/x /dev/shm/x && echo ok")) == "ok\n"


async def test_the_hosts_devices_cannot_be_changed(local: Local) -> None:
    """Also under a root worker the sandbox's user owns nothing of the host, such as the mode of /dev/null."""
    before = stat.S_IMODE(Path("/dev/null").stat().st_mode)
    result = await local.sh("chmod 600 /dev/null || chmod 600 /dev/zero || setfattr -n user.x /dev/null")
    after = stat.S_IMODE(Path("/dev/null").stat().st_mode)
    if after != before:
        Path("/dev/null").chmod(before)
    assert result.exit_code != 0
    assert after == before


async def test_the_kernels_settings_cannot_be_changed(local: Local) -> None:
    """No file of /proc that steers the host is open for writing."""
    text = await local.text(
        "for f in /proc/sys/kernel/core_pattern /proc/sys/vm/drop_caches /proc/sysrq-trigger /proc/mtrr /proc/kcore;"
        " do (: >> $f) 2>/dev/null && echo opened $f; done; head -c1 /proc/kcore /proc/slabinfo 2>/dev/null; echo done"
    )
    assert text == "done\n"


async def test_no_capability_can_be_used(local: Local) -> None:
    """Every capability set is empty, no exec brings one back, and no nested user namespace gives new ones."""
    text = await local.text("grep -E '^(Cap|NoNewPrivs)' /proc/self/status; unshare --user --map-root-user true && echo nested")
    values = dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)
    assert {values[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert values["NoNewPrivs"] == "1"
    assert "nested\n" not in text


@pytest.mark.skipif(os.geteuid() != 0, reason="only a root worker can choose")
async def test_under_a_root_worker_each_sandbox_has_a_user_of_its_own(provider: LocalProvider, root: Path) -> None:
    """The kernel knows a sandbox's processes and files by an unprivileged user that no other sandbox has."""
    owners = set()
    for key in ("a", "b"):
        local = Local(provider, await provider.attach(await make(provider, key)), root)
        await local.sandbox.write("file", b"1")
        owner = (local.workspace / "file").stat().st_uid
        assert f"Uid:\t{owner}\t{owner}\t{owner}\t{owner}\n" in Path(f"/proc/{local.init_pid()}/status").read_text()
        owners.add(owner)
    assert len(owners) == 2
    assert min(owners) > 65536


async def test_only_its_own_processes_are_visible(local: Local) -> None:
    """The process list begins with the sandbox's init and holds no process of the host."""
    pids = [int(pid) for pid in (await local.text("ls /proc | grep -E '^[0-9]+$'")).split()]
    assert 1 in pids
    assert len(pids) < 8


async def test_init_is_closed_to_commands(local: Local) -> None:
    """No command can look into init or a supervisor, or reach the control socket through their open files."""
    text = await local.text(
        "for p in 1 $PPID; do for f in environ mem maps fd/0; do head -c1 /proc/$p/$f 2>/dev/null && echo read $p $f; done;"
        " ls /proc/$p/fd /proc/$p/root/ /proc/$p/cwd/ 2>/dev/null; done; ls -l /proc/self/fd | grep socket; echo done"
    )
    assert text == "done\n"


async def test_there_is_no_network(local: Local) -> None:
    """A server on the host's loopback cannot be reached, and there is no interface but the sandbox's own loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        script = (
            "import socket\n"
            f"for where in (('127.0.0.1', {port}), ('1.1.1.1', 53)):\n"
            "    try: socket.create_connection(where, 2); print('connected', where)\n"
            "    except OSError as error: print(error.errno)\n"
            "print([name for _, name in socket.if_nameindex()])\n"
        )
        result = await local.run("python3", "-c", script)
    assert result.stdout.decode().split() == ["111", "101", "['lo']"]


async def test_abstract_sockets_of_the_host_cannot_be_reached(local: Local) -> None:
    """The abstract socket names of the host belong to another network namespace."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0caisson-test-abstract")
        server.listen()
        script = "import socket; socket.socket(socket.AF_UNIX).connect('\\0caisson-test-abstract')"
        assert (await local.run("python3", "-c", script)).exit_code == 1


async def test_a_link_to_the_host_dangles(local: Local, tmp_path: Path) -> None:
    """A link made by the agent decides nothing about what can be read (laude-institute/headlong#72, rappdw/sandy#209)."""
    (tmp_path / "key.txt").write_text(CANARY)
    (local.workspace / "x").symlink_to(tmp_path)
    (local.workspace / "y").symlink_to(tmp_path / "key.txt")
    assert CANARY not in await local.text("cat x/key.txt y")
    for path in ("x/key.txt", "y", f"/proc/1/root{tmp_path}/key.txt", str(tmp_path / "key.txt")):
        with pytest.raises(FileFault):
            _ = [part async for part in local.sandbox.read(path)]
    views = await local.sandbox.look(["x/key.txt", "y"], 100)
    assert (views["x/key.txt"].kind, views["y"].kind, views["y"].data) == ("missing", "symlink", None)


async def test_no_change_goes_through_a_link(local: Local, tmp_path: Path) -> None:
    """Neither a write nor a change follows a link out of the workspace."""
    (tmp_path / "kept").write_text("kept")
    (local.workspace / "x").symlink_to(tmp_path)
    (local.workspace / "y").symlink_to(tmp_path / "kept")
    with pytest.raises(FileFault, match="is a link"):
        await local.sandbox.change([FileChange("x/kept", b"changed")])
    with pytest.raises(FileFault):
        await local.sandbox.write("x/kept", b"changed")
    await local.sandbox.write("y", b"a file of its own")
    assert (tmp_path / "kept").read_text() == "kept"
    assert (local.workspace / "y").read_text() == "a file of its own"


async def test_files_of_proc_are_not_handed_out(local: Local) -> None:
    """What procfs shows depends on the reader, so no such file is read with the worker's rights."""
    for path in ("/proc/kallsyms", "/proc/self/maps", "/proc/1/environ"):
        with pytest.raises(FileFault):
            _ = [part async for part in local.sandbox.read(path)]


@pytest.mark.parametrize("blow", ["kill -9 $PPID", "kill -STOP $PPID", "kill -9 -1"])
async def test_a_command_that_ends_its_supervisor_loses_its_result_only(local: Local, blow: str) -> None:
    """A job whose supervisor is killed or stopped from inside ends as lost, what it left dies, and the sandbox goes on."""
    result = await local.sh(f"echo before; sleep 0.1; setsid sleep 316.1 & {blow}; sleep 316.1")
    assert (result.state, result.exit_code, result.stdout) == (JobState.LOST, None, b"before\n")
    assert "how it ended is not known" in result.note
    assert not await local.alive("316.1")


async def test_signals_to_everything_spare_the_supervisors(local: Local) -> None:
    """`kill -TERM -1` ends commands, not the one who tells how they ended."""
    result = await local.sh("kill -TERM -1; kill -HUP -1; kill -USR1 -1; sleep 0.1; echo still here")
    assert (result.state, result.stdout) == (JobState.EXITED, b"still here\n")


async def test_an_ordinary_worker_needs_no_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, bubblewrap is started as the worker's own user."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    provider = LocalProvider(root)
    sandbox = await provider.attach(await make(provider))
    assert (await sandbox.exec(bash("1", "id -u; echo $PROJECT"))).stdout == b"1000\nnorth wing\n"
    await provider.kill(sandbox.ref)


async def test_the_workers_own_python_can_run_init(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host without a Python below /usr, the worker's own is shown in the sandbox at its own path."""
    here = Path(local_start.__file__).parent
    sources = {name: (here / f"{name}.py").read_text() for name in GUEST_MODULES}
    python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    modules = compile_modules(python, sources)
    assert not isinstance(modules, str)
    monkeypatch.setattr(local_start, "find_interpreter", lambda: Interpreter(str(python), Path(sys.base_prefix), modules))
    provider = LocalProvider(root)
    sandbox = await provider.attach(await make(provider))
    assert (await sandbox.exec(bash("1", f"test -x {python} && echo here"))).stdout == b"here\n"
    await provider.kill(sandbox.ref)
