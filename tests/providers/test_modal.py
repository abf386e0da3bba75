"""The provider for Modal: making sandboxes and running scripts in them, with the real SDK over a real socket to the emulator.

What happens when something fails is in `test_modal_failures.py`.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import modal
import pytest
from grpclib.const import Status

from activities.sandbox.port import BadSandboxSpec, Command, FileFault, SandboxGone, SandboxUnavailable
from contracts.sandbox import NAMESPACE_LABEL, RUN_LABEL, NetworkPolicy, SandboxLimits, SandboxSpec
from tests.providers.modal_support import Service, missing, service_in

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    """An emulator of its own for every test."""
    async with service_in(tmp_path) as service:
        yield service


# Making and finding sandboxes


async def test_the_same_key_gives_the_same_sandbox(service: Service) -> None:
    """A second attempt, by another worker too, finds what the first one made: Modal gives a name to one living sandbox."""
    first = await service.create("a")
    service.provider = service.worker()
    assert await service.create("a") == first
    assert (await service.create("b")).id != first.id
    assert len(service.emulator.account.boxes) == 2


async def test_a_sandbox_whose_making_was_not_answered_is_found(service: Service) -> None:
    """The answer is lost on its way: the SDK asks again, and is told that there is one."""
    service.emulator.faults.add("SandboxCreateV2", drop="after")
    ref = await service.create()
    assert list(service.emulator.account.boxes) == [ref.id]
    assert service.box(ref).tags["caisson_nonce"] == ref.nonce


async def test_one_that_died_half_made_is_made_ready_by_the_next_attempt(service: Service) -> None:
    """The worker is killed, or the sandbox cannot be reached yet, before its workspace is made."""
    service.emulator.faults.add("TaskExecStart", status=Status.NOT_FOUND)
    with pytest.raises(SandboxUnavailable):
        await service.create()
    machine = await service.machine(await service.create())
    assert len(service.emulator.account.boxes) == 1
    assert (await machine.run("pwd", timeout=10)).stdout == b"/workspace\n"


async def test_two_that_race_end_with_the_same(service: Service) -> None:
    """Two workers make one at the same time."""
    spec = SandboxSpec(provider="modal")
    racers = [worker.create(spec, "k", environment={}, labels={}, queue="q") for worker in (service.worker(), service.worker())]
    first, second = await asyncio.gather(*racers)
    assert first == second
    assert list(service.emulator.account.boxes) == [first.id]


async def test_the_key_of_one_that_has_ended_gives_a_new_one(service: Service) -> None:
    """Its name is free again."""
    first = await service.create()
    await service.emulator.expire(first.id)
    second = await service.create()
    assert (second.id, second.nonce) != (first.id, first.nonce)
    with pytest.raises(SandboxGone):
        await service.provider.attach(first)


async def test_another_nonce_is_another_sandbox(service: Service) -> None:
    """A recycled id is not taken for the sandbox that was meant, and what is there now is not ended."""
    ref = await service.create()
    other = ref.model_copy(update={"nonce": "0" * 32})
    with pytest.raises(SandboxGone):
        await service.provider.attach(other)
    await service.provider.kill(other)
    assert service.box(ref).result is None


async def test_killing_is_idempotent(service: Service) -> None:
    """Ending a sandbox that is gone, or never was, is no error."""
    ref = await service.create()
    await service.provider.kill(ref)
    await service.provider.kill(ref)
    await service.provider.kill(ref.model_copy(update={"id": "sb-00000000000000000000000000"}))
    assert not service.emulator.account.running()
    with pytest.raises(SandboxGone):
        await service.provider.attach(ref)


async def test_listing_reads_every_page_and_only_its_own(service: Service) -> None:
    """Labels that no tag can hold, a queue that is longer than one, more sandboxes than a page has, and some of others."""
    service.emulator.account.page = 2
    labels, queue = {RUN_LABEL: "run/é&=1", NAMESPACE_LABEL: "n"}, f"{'q' * 99}-sandbox"
    mine = [await service.create(f"key {n}", labels=labels, queue=queue) for n in range(3)]
    other = await service.create("other", labels={RUN_LABEL: "other", NAMESPACE_LABEL: "n"})
    client, app = await service.client()
    foreign = await modal.Sandbox.create.aio("sleep", "60", app=app, client=client, tags={"caisson_namespace": "n"})
    found = await service.provider.list({RUN_LABEL: "run/é&=1"})
    assert sorted(found, key=lambda ref: ref.id) == sorted(mine, key=lambda ref: ref.id)
    assert found[0].queue == queue
    assert {ref.id for ref in await service.provider.list({NAMESPACE_LABEL: "n"})} == {ref.id for ref in [*mine, other]}
    assert service.emulator.account.boxes[foreign.object_id].result is None


async def test_a_sandbox_of_somebody_else_is_not_taken(service: Service) -> None:
    """It has the name of a key, by whatever chance, and not the tags."""
    ref = await service.create()
    service.box(ref).tags.clear()
    with pytest.raises(SandboxGone, match="not one of Caisson's"):
        await service.create()
    await service.provider.kill(ref)
    assert service.box(ref).result is None


# What a sandbox is


async def test_its_network_is_closed(service: Service) -> None:
    """An open one has to be asked for, and named hosts are refused."""
    definition = service.box(await service.create()).asked.definition
    assert definition.network_access.network_access_type == definition.network_access.BLOCKED
    assert not definition.open_ports.ports
    opened = await service.create("open", SandboxSpec(provider="modal", options={"network": "open"}))
    access = service.box(opened).asked.definition.network_access
    assert access.network_access_type == access.OPEN
    with pytest.raises(BadSandboxSpec, match=r"network\.allow"):
        await service.create("hosts", SandboxSpec(provider="modal", network=NetworkPolicy(allow=("example.com",))))


async def test_its_limits_are_hard_ones(service: Service) -> None:
    """Memory and processors, with the little that Modal sets aside by default below them."""
    ref = await service.create(spec=SandboxSpec(provider="modal", limits=SandboxLimits(memory_mb=64, cpus=1.5)))
    asked = service.box(ref).asked.definition.resources
    assert (asked.memory_mb, asked.memory_mb_max) == (64, 64)
    assert (asked.milli_cpu, asked.milli_cpu_max) == (125, 1500)


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ({"limits": {"processes": 100}}, r"processes: 100"),
        ({"limits": {"lifetime_seconds": 24 * 3600 + 1}}, r"lifetime_seconds: 86401: Modal ends a sandbox after 86400 seconds"),
        ({"options": {"gpu": "H100"}}, r"options\.gpu"),
        (
            {"image": "registry.invalid/nothing:1"},
            r"sandbox\.image registry\.invalid/nothing:1: ImageBuildError: (?s:.*)manifest unknown",
        ),
        ({"image": "im-0000000000000000000000"}, r"sandbox\.image im-0000000000000000000000: .*not found"),
    ],
)
async def test_what_it_cannot_give_is_refused(service: Service, spec: dict[str, Any], fault: str) -> None:
    """The field is named, and nothing is left over."""
    with pytest.raises(BadSandboxSpec, match=fault):
        await service.create(spec=SandboxSpec.model_validate({"provider": "modal", **spec}))
    assert not service.emulator.account.boxes


async def test_it_is_made_of_the_image_that_was_asked_for(service: Service) -> None:
    """One of a registry is built once and found then, also by the id that Modal gave it; none is Modal's own."""
    images = service.emulator.account.images
    ref = await service.create("a", SandboxSpec(provider="modal", image="ghcr.io/org/image:2"))
    made_of = service.box(ref).asked.definition.image_id
    assert list(images[made_of].dockerfile_commands) == ["FROM ghcr.io/org/image:2"]
    await service.create("b", SandboxSpec(provider="modal", image="ghcr.io/org/image:2"))
    assert service.asked("ImageJoinStreaming") == 1
    again = await service.create("c", SandboxSpec(provider="modal", image=made_of))
    assert service.box(again).asked.definition.image_id == made_of
    own = await service.create("d")
    assert images[service.box(own).asked.definition.image_id].dockerfile_commands[0].startswith("FROM python:")


async def test_it_ends_at_the_end_of_its_lifetime(service: Service) -> None:
    """The ref says when, extending does not move it, and then it is gone."""
    ref = await service.create(spec=SandboxSpec(provider="modal", limits=SandboxLimits(lifetime_seconds=120)))
    assert ref.expires_at == pytest.approx(time.time() + 120, abs=10)
    assert service.box(ref).asked.definition.timeout_secs == 120
    machine = await service.machine(ref)
    await machine.extend(1000)
    assert (await service.provider.list({}))[0].expires_at == ref.expires_at
    await service.emulator.expire(ref.id)
    with pytest.raises(SandboxGone):
        await machine.run("true", timeout=5)
    with pytest.raises(SandboxGone):
        await machine.extend(1)


async def test_an_environment_that_cannot_be_set_leaves_nothing(service: Service) -> None:
    """Refused once the sandbox is there, it is ended again."""
    with pytest.raises(BadSandboxSpec, match="environment"):
        await service.provider.create(SandboxSpec(provider="modal"), "k", environment={"a b": "c"}, labels={}, queue="q")
    assert not service.emulator.account.running()


# Images of sandboxes


async def test_a_sandbox_is_made_of_the_image_of_another(service: Service) -> None:
    """It has the other's files, and nothing of the other's harness: nonce, jobs and their output are its own."""
    ref = await service.create("a")
    sandbox = await service.provider.attach(ref)
    job = Command("job", ("sh", "-c", "echo one >kept; chmod 640 kept; echo said"))
    assert (await sandbox.exec(job)).stdout == b"said\n"
    image = await service.provider.make_image(ref)
    await service.provider.kill(ref)

    made = await service.create("b", SandboxSpec(provider="modal", image=image))
    assert made.nonce != ref.nonce
    assert await service.create("b", SandboxSpec(provider="modal", image=image)) == made
    other = await service.worker().attach(made)
    view = (await other.look(["kept"], 100))["kept"]
    assert (view.data, view.mode & 0o777) == (b"one\n", 0o640)
    again = await other.exec(Command("job", ("sh", "-c", "cat kept; echo more >>kept")))
    assert again.stdout == b"one\n", "the job of this sandbox, not the one that the image remembers"
    with pytest.raises(SandboxGone):
        await service.provider.attach(ref)


async def test_an_image_is_removed_once(service: Service) -> None:
    """And nothing is made of it then; the spec that names it is said to be wrong."""
    ref = await service.create("a")
    image = await service.provider.make_image(ref)
    await service.provider.remove_image(image)
    await service.provider.remove_image(image)
    assert not service.emulator.account.kept
    with pytest.raises(BadSandboxSpec, match=image):
        await service.create("b", SandboxSpec(provider="modal", image=image))


async def test_of_a_sandbox_that_is_gone_there_is_no_image(service: Service) -> None:
    """Nor of another one with its id."""
    ref = await service.create("a")
    with pytest.raises(SandboxGone):
        await service.provider.make_image(ref.model_copy(update={"nonce": "0" * 32}))
    await service.emulator.kill(ref.id)
    with pytest.raises(SandboxGone):
        await service.provider.make_image(ref)
    assert not service.emulator.account.kept


# The machine


async def test_a_script_runs_as_the_ordinary_user_in_the_workspace(service: Service) -> None:
    """Which is root. Its output is bytes, and its input is empty."""
    machine = await service.machine()
    ran = await machine.run("id -un; pwd; cat; printf '\\377\\000\\n'; printf '\\376' >&2; touch made; exit 7", timeout=10)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (7, b"root\n/workspace\n\xff\x00\n", b"\xfe")
    assert (await machine.run("kill -9 $$", timeout=10)).exit_code == 137
    assert (await machine.run("ls made; echo '1 2 3'", timeout=10)).stdout == b"made\n1 2 3\n"


@pytest.mark.parametrize("size", [40_000, 100_000])
async def test_a_long_script_with_quotes_runs(service: Service, size: int) -> None:
    """As an argument, and where that would be too long through standard input, which the script then does not see."""
    machine = await service.machine()
    line = "x='a\"b'; : $x \\\\\n"
    script = line * (size // len(line)) + 'printf "%s" "$x"; cat'
    assert (await machine.run(script, timeout=20)).stdout == b'a"b'


async def test_as_much_output_as_a_script_may_have_comes_back_whole(service: Service) -> None:
    """60,000 bytes of each stream."""
    machine = await service.machine()
    ran = await machine.run("head -c 60000 /dev/zero; head -c 60000 /dev/zero | tr '\\0' '\\377' >&2", timeout=20)
    assert (ran.stdout, ran.stderr) == (bytes(60_000), b"\xff" * 60_000)


async def test_what_a_script_leaves_behind_holds_nothing_up_and_lives_on(service: Service) -> None:
    """Also with the script's own output still open."""
    machine = await service.machine()
    begun = time.monotonic()
    assert (await machine.run("sleep 30 & echo $! > pid", timeout=20)).exit_code == 0
    assert time.monotonic() - begun < 10
    assert (await machine.run("kill -0 $(cat pid)", timeout=20)).exit_code == 0


async def test_a_script_that_takes_too_long_is_unavailable(service: Service) -> None:
    """It is waited for no longer than that; one that something kills has ended as a shell says."""
    machine = await service.machine()
    begun = time.monotonic()
    with pytest.raises(SandboxUnavailable, match="no answer in time"):
        await machine.run("sleep 30", timeout=1)
    assert time.monotonic() - begun < 8
    assert (await machine.run("kill -9 $PPID; sleep 5", timeout=20)).exit_code == 137


async def test_an_image_that_lacks_the_tools_is_refused(service: Service) -> None:
    """Here by having no place for a script's output: to try again would be of no use."""
    ref = await service.create()
    machine = await service.machine(ref)
    shutil.rmtree(service.box(ref).backing.root / "tmp")
    with pytest.raises(BadSandboxSpec, match="it lacks"):
        await machine.run("true", timeout=10)


@pytest.mark.parametrize("size", [0, 1, 4 << 20, 10_240_000])
async def test_files_are_bytes(service: Service, size: int) -> None:
    """Of any content, in as many pieces as it takes, and readable by all."""
    machine = await service.machine()
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    await machine.put("/workspace/a b", data)
    assert b"".join([part async for part in machine.get("/workspace/a b")]) == data
    assert (
        await machine.run("stat -c '%a %s' 'a b'; ls -A | grep -vx .home", timeout=10)
    ).stdout == f"644 {size}\na b\n".encode()


async def test_files_that_are_not_there_are_the_callers_fault(service: Service) -> None:
    """No such file, a directory, a read-only place: none of these is a failure of the sandbox, also with much to write."""
    machine = await service.machine()
    for path, fault in (("/workspace/missing", "no such file"), ("/workspace", "not a regular file")):
        with pytest.raises(FileFault, match=f"{path}: {fault}"):
            _ = [part async for part in machine.get(path)]
    for path in ("/nowhere/x", "/proc/x", "/workspace/missing/x"):
        with pytest.raises(FileFault, match=f"(?s){path}: .*cannot be written"):
            await machine.put(path, bytes(9 << 20))


async def test_an_end_of_input_that_is_lost_on_its_way_is_sent_again(service: Service) -> None:
    """What was written already is not written twice."""
    machine = await service.machine()
    service.emulator.faults.add("TaskExecStdinWrite", drop="after", times=2)
    await machine.put("/workspace/x", b"abc" * 2_000_000)
    assert (await machine.run("wc -c < x", timeout=10)).stdout.strip() == b"6000000"


async def test_the_connection_to_a_worker_is_kept(service: Service) -> None:
    """A call of the port is a command and its output, and nothing to the control plane."""
    ref = await service.create()
    await service.provider.attach(ref)
    before = len(service.emulator.calls)
    sandbox = await service.provider.attach(ref)
    await sandbox.look(["x"], 1)
    assert set(service.emulator.calls[before:]) == {"TaskExecStart", "TaskExecStdioRead"}
