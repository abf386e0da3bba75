"""The provider for container engines: making sandboxes, and what they may do, on a real Podman and a real Docker."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from activities.sandbox.port import BadSandboxSpec, SandboxError, SandboxGone
from activities.sandbox.providers.docker import DockerProvider
from activities.sandbox.registry import PROVIDERS, provider_class
from contracts.sandbox import NetworkPolicy, SandboxLimits
from tests.providers.docker_support import ENGINES, Rig, rig_of, running
from tests.providers.podman import Engine

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each of the engines."""
    with running(request.param) as found:
        yield found


@pytest.fixture
async def rig(engine: Engine) -> AsyncIterator[Rig]:
    """An empty engine, and a provider for it."""
    async with rig_of(engine) as made:
        yield made


# Making and finding sandboxes


def test_the_registry_knows_it() -> None:
    """By its name."""
    assert "docker" in PROVIDERS
    assert provider_class("docker") is DockerProvider


async def test_the_same_key_gives_the_same_sandbox(rig: Rig) -> None:
    """To another worker too; another key gives another one."""
    first = await rig.create()
    rig.provider = rig.worker()
    assert await rig.create() == first
    rig.key = "another"
    assert (await rig.create()).id != first.id


async def test_two_attempts_at_once_make_one_sandbox(rig: Rig) -> None:
    """Whoever is later waits for the other's to be ready."""
    other = Rig(rig.engine, rig.worker(), rig.key)
    assert await rig.create() == await other.create()
    await rig.provider.kill(await rig.create())
    one, two = await asyncio.gather(rig.create(), other.create())
    assert one == two
    assert len(rig.containers()) == len(rig.volumes()) == 1


async def test_a_dead_sandbox_is_made_anew(rig: Rig) -> None:
    """With an empty workspace and another nonce; nothing of the old one is left."""
    first = await rig.create()
    await (await rig.provider.attach(first)).write("kept.txt", b"x")
    rig.engine.api.kill(first.id)
    second = await rig.create()
    assert second.id == first.id
    assert second.nonce != first.nonce
    assert (await rig.run("ls")).stdout == b""
    assert len(rig.containers()) == len(rig.volumes()) == 1


async def test_a_maker_that_died_is_not_waited_for_forever(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it left is no sandbox: it was never made ready."""
    monkeypatch.setattr("activities.sandbox.providers.docker.MAKING_SECONDS", 1.0)

    async def die(*_: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr("activities.sandbox.providers.docker.prepare", die)
        with pytest.raises(asyncio.CancelledError):
            await rig.create()
    assert (await rig.run("echo here")).stdout == b"here\n"
    assert len(rig.containers()) == len(rig.volumes()) == 1


async def test_another_sandbox_under_the_same_name_is_not_mistaken(rig: Rig) -> None:
    """Neither attached to nor killed with the handle of the one before it."""
    first = await rig.create()
    await rig.provider.kill(first)
    second = await rig.create()
    with pytest.raises(SandboxGone):
        await rig.provider.attach(first)
    await rig.provider.kill(first)
    await rig.provider.attach(second)


async def test_kill_removes_everything_and_may_be_repeated(rig: Rig) -> None:
    """Container and volume, of a living one, a dead one, and one whose container somebody removed."""
    for end in (None, rig.engine.api.kill, lambda name: rig.engine.api.remove_container(name, force=True)):
        ref = await rig.create()
        if end is not None:
            end(ref.id)
        await rig.provider.kill(ref)
        await rig.provider.kill(ref)
        assert rig.containers() == []
        assert rig.volumes() == []


async def test_the_environment_is_for_commands_alone(rig: Rig) -> None:
    """Commands have it; who may look at containers does not see it."""
    sandbox = await rig.open()
    shown = rig.engine.api.inspect_container(sandbox.ref.id)
    assert "blue moon" not in str(shown)
    assert b"COLOUR='blue moon'" in (await sandbox.machine.run("cat /tmp/.caisson/environment", timeout=20)).stdout


# Refusals


async def test_an_image_that_is_not_there_is_refused(rig: Rig) -> None:
    """With the command that gets it; nothing is left."""
    with pytest.raises(BadSandboxSpec, match=r"sandbox\.image: nowhere/nothing:9: .*docker pull nowhere/nothing:9"):
        await rig.create(image="nowhere/nothing:9")
    assert rig.volumes() == []


async def test_an_image_without_a_shell_is_refused(rig: Rig) -> None:
    """The image is named, and what it lacks."""
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("nothing"))
    made = rig.engine.api.import_image_from_data(empty.getvalue(), repository="localhost/hollow", tag="1")
    image = made.split('"')[-2] if rig.engine.kind == "podman" else "localhost/hollow:1"
    with pytest.raises(BadSandboxSpec, match=r"sandbox\.image: .*: it needs sh, sleep, chmod and chown"):
        await rig.create(image=image)
    assert rig.containers() == []
    assert rig.volumes() == []


async def test_what_cannot_be_kept_is_refused(rig: Rig) -> None:
    """A list of hosts, and a limit that a volume does not have."""
    with pytest.raises(BadSandboxSpec, match=r"sandbox\.network\.allow"):
        await rig.create(network=NetworkPolicy(allow=("packages.example.com",)))
    with pytest.raises(BadSandboxSpec, match=r"sandbox\.limits\.workspace_mb"):
        await rig.create(SandboxLimits(workspace_mb=10))
    assert rig.containers() == []


async def test_an_image_that_cannot_be_fetched_is_said_so(rig: Rig) -> None:
    """With `pull`, as no registry can be reached here."""
    rig.provider = rig.worker(pull=True)
    with pytest.raises(SandboxError, match=r"nothing"):
        await rig.create(image="127.0.0.1:9/nowhere/nothing:9")
    assert rig.volumes() == []


# What a sandbox may do


async def test_nothing_in_it_has_any_right(rig: Rig) -> None:
    """No root, no capability, no way to get one, the engine's filter of system calls, no network."""
    ran = await rig.run(
        "id -u; grep -h -E '^(Uid|CapPrm|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status /proc/1/status; ls /sys/class/net"
    )
    uid, *rows, net = ran.stdout.decode().splitlines()
    told = [tuple(row.split()[:2]) for row in rows]
    assert (uid, net) == ("1000", "lo")
    rights = [("CapPrm:", "0" * 16), ("CapBnd:", "0" * 16), ("NoNewPrivs:", "1"), ("Seccomp:", "2")]
    assert told == [("Uid:", "1000"), *rights, ("Uid:", "65532"), *rights]


async def test_it_can_write_to_its_workspace_and_to_memory_alone(rig: Rig) -> None:
    """Its root is read-only; the workspace is its user's own."""
    ran = await rig.run("touch /x /etc/x /bin/x; stat -c '%u %g %a' /workspace; touch a /tmp/b && ls -n a | cut -c1-10; id -g")
    assert ran.stderr.count(b"Read-only file system") == 3
    assert ran.stdout == b"1000 1000 755\n-rw-r--r--\n1000\n"


async def test_it_cannot_stop_what_ends_it(rig: Rig) -> None:
    """The process that keeps the lifetime is another user's."""
    ran = await rig.run("kill -STOP 1; for p in $(pidof sleep); do kill -STOP $p; kill -9 $p; done; echo on")
    assert ran.stderr.count(b"Operation not permitted") + ran.stderr.count(b"not permitted") >= 3
    assert ran.stdout == b"on\n"


async def test_its_life_ends_when_it_was_said_to(rig: Rig) -> None:
    """Whatever runs in it; its handle says when."""
    before = time.time()
    ref = await rig.create(SandboxLimits(memory_mb=128, processes=64, lifetime_seconds=10))
    assert ref.expires_at is not None
    assert before + 10 <= ref.expires_at <= time.time() + 10
    sandbox = await rig.provider.attach(ref)
    with pytest.raises(SandboxGone, match="its lifetime is over"):
        await sandbox.machine.run("sleep 60", timeout=60)
    assert time.time() >= ref.expires_at
    assert await rig.provider.list({}) == []


async def test_memory_is_limited(rig: Rig) -> None:
    """A process that takes more dies, and its /tmp counts; the sandbox goes on."""
    sandbox = await rig.open()
    ran = await sandbox.machine.run("head -c 400000000 /dev/zero | tail -c 399999999 >/dev/null; echo $?", timeout=60)
    assert b"1" in ran.stdout, ran
    assert ran.stdout != b"0\n"
    ran = await sandbox.machine.run("head -c 400000000 /dev/zero >/tmp/big; echo $?; rm -f /tmp/big", timeout=60)
    assert ran.stdout != b"0\n"
    assert (await sandbox.machine.run("echo on", timeout=20)).stdout == b"on\n"


async def test_processes_files_and_processors_are_limited(rig: Rig) -> None:
    """By the engine."""
    limits = SandboxLimits(memory_mb=128, processes=30, open_files=100, file_mb=1, cpus=0.5)
    sandbox = await rig.open(limits)
    ran = await sandbox.machine.run(
        "ulimit -n; head -c 2000000 /dev/zero >big; wc -c <big; for i in $(seq 60); do sleep 20 >/dev/null 2>&1 & done",
        timeout=60,
    )
    assert ran.stdout.startswith(b"100\n1048576\n")
    assert b"fork" in ran.stderr or b"vfork" in ran.stderr, ran
    host = rig.engine.api.inspect_container(sandbox.ref.id)["HostConfig"]
    assert host["NanoCpus"] == 500_000_000
    assert host["MemorySwap"] == host["Memory"] == 128 << 20


async def test_a_workspace_in_memory_has_its_limits(rig: Rig) -> None:
    """Of bytes, and of files."""
    rig.provider = rig.worker(workspace="memory")
    limits = SandboxLimits(memory_mb=128, processes=64, workspace_mb=2, workspace_files=40)
    ran = await rig.run(
        "head -c 4000000 /dev/zero >big; wc -c <big; rm big; for i in $(seq 60); do echo >f$i; done; ls | wc -l", limits
    )
    size, files = (int(word) for word in ran.stdout.split())
    assert 1_900_000 <= size <= 2 << 20
    assert 30 <= files <= 40
    assert ran.stderr.count(b"No space left on device") >= 20
