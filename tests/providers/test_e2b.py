"""The provider for E2B: the real SDK over a real socket, against the emulator of `tests/emulators/e2b`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from e2b import AsyncSandbox

from activities.sandbox.port import (
    BadSandboxSpec,
    FileFault,
    SandboxGone,
    SandboxUnavailable,
)
from contracts.sandbox import NAMESPACE_LABEL, RUN_LABEL, NetworkPolicy, SandboxLimits, SandboxSpec
from tests.providers.e2b_support import NOT_FOUND, Service, emulator_in, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
async def e2b(tmp_path: Path) -> AsyncIterator[Service]:
    """An emulator of its own for every test."""
    async with emulator_in(tmp_path) as emulator:
        yield Service(emulator)


# Making and finding sandboxes


async def test_the_same_key_gives_the_same_sandbox(e2b: Service) -> None:
    """A second attempt, by another worker too, finds what the first one made."""
    first = await e2b.create("a")
    e2b.provider = e2b.worker()
    assert await e2b.create("a") == first
    assert (await e2b.create("b")).id != first.id
    assert e2b.asked("POST /v2/sandboxes") - e2b.asked("POST /v2/sandboxes/") == 2


async def test_a_sandbox_whose_making_was_not_answered_is_found(e2b: Service) -> None:
    """The answer is lost on its way: the next attempt makes no second sandbox."""
    await e2b.fault("POST /v2/sandboxes$", drop="after")
    with pytest.raises(SandboxUnavailable):
        await e2b.create()
    (box,) = e2b.account.boxes
    assert (await e2b.create()).id == box


async def test_one_that_died_half_made_is_made_ready_by_the_next_attempt(e2b: Service) -> None:
    """The worker is killed, or the sandbox cannot be reached yet, before its workspace is made."""
    await e2b.fault("POST /process.Process/Start", status=502, body=NOT_FOUND)
    with pytest.raises(SandboxUnavailable):
        await e2b.create()
    machine = await e2b.machine(await e2b.create())
    assert len(e2b.account.boxes) == 1
    assert (await machine.run("pwd", timeout=10)).stdout == b"/workspace\n"


async def test_of_two_that_race_the_oldest_is_kept(e2b: Service) -> None:
    """Two workers find none and both make one: they end with the same, and the other is ended."""
    await e2b.fault("POST /v2/sandboxes$", delay=0.3)
    spec = SandboxSpec(provider="e2b")
    racers = [worker.create(spec, "k", environment={}, labels={}, queue="q") for worker in (e2b.worker(), e2b.worker())]
    first, second = await asyncio.gather(*racers)
    assert first == second
    assert list(e2b.account.boxes) == [first.id]


async def test_a_foreign_sandbox_is_never_taken(e2b: Service) -> None:
    """Even if the service lists one that was not asked for."""
    foreign = await AsyncSandbox.create("base", metadata={"caisson_key": "other", "caisson_nonce": "n"}, **e2b.options)
    listed = [box.described() for box in e2b.account.boxes.values()]
    await e2b.fault("GET /v2/sandboxes", times=2, status=200, body=listed)
    with pytest.raises(SandboxUnavailable, match="not listed yet"):
        await e2b.create()
    assert foreign.sandbox_id in e2b.account.boxes


async def test_another_nonce_is_another_sandbox(e2b: Service) -> None:
    """A recycled id is not taken for the sandbox that was meant, and what is there now is not ended."""
    ref = await e2b.create()
    other = ref.model_copy(update={"nonce": "0" * 32})
    with pytest.raises(SandboxGone):
        await e2b.provider.attach(other)
    await e2b.provider.kill(other)
    assert ref.id in e2b.account.boxes


async def test_killing_is_idempotent(e2b: Service) -> None:
    """Ending a sandbox that is gone is no error."""
    ref = await e2b.create()
    await e2b.provider.kill(ref)
    await e2b.provider.kill(ref)
    assert not e2b.account.boxes
    with pytest.raises(SandboxGone):
        await e2b.provider.attach(ref)


async def test_listing_reads_every_page_and_only_its_own(e2b: Service) -> None:
    """More sandboxes than one page has, beside some of others."""
    e2b.account.page = 2
    mine = [await e2b.create(f"key {n}", labels={RUN_LABEL: "run/é&=1", NAMESPACE_LABEL: "n"}) for n in range(5)]
    elsewhere = await e2b.create("other", labels={RUN_LABEL: "other", NAMESPACE_LABEL: "n"})
    await AsyncSandbox.create("base", **e2b.options)
    found = await e2b.provider.list({RUN_LABEL: "run/é&=1"})
    assert sorted(ref.id for ref in found) == sorted(ref.id for ref in mine)
    assert all(ref in mine for ref in found)
    assert {ref.id for ref in await e2b.provider.list({})} == {ref.id for ref in [*mine, elsewhere]}


# What a sandbox is


async def test_its_network_is_closed_in_both_directions(e2b: Service) -> None:
    """Neither does it reach out, nor is it reached; an open one has to be asked for, and named hosts are refused."""
    await e2b.create()
    (box,) = e2b.account.boxes.values()
    assert box.body["allow_internet_access"] is False
    assert box.body["network"] == {"allowPublicTraffic": False}
    assert box.body["autoPause"] is False
    opened = await e2b.create("open", SandboxSpec(provider="e2b", options={"network": "open"}))
    assert e2b.account.boxes[opened.id].body["allow_internet_access"] is True
    with pytest.raises(BadSandboxSpec, match=r"network\.allow"):
        await e2b.create("hosts", SandboxSpec(provider="e2b", network=NetworkPolicy(allow=("example.com",))))


@pytest.mark.parametrize(
    ("image", "limits", "fault"),
    [
        (None, {"memory_mb": 4096}, r"memory_mb: 4096: the template base gives 512"),
        ("large", {"memory_mb": 4096}, r"memory_mb: 4096: the template large gives 8192"),
        (None, {"cpus": 1.5}, r"cpus: 1\.5: the template base gives 2"),
        (None, {"processes": 100}, r"processes: 100"),
        ("nothing", {}, r"sandbox\.image nothing: .*template 'nothing' not found"),
    ],
)
async def test_what_it_cannot_give_is_refused(e2b: Service, image: str | None, limits: dict[str, Any], fault: str) -> None:
    """A limit that the template does not have, or no such template: the field is named, and nothing is left over."""
    with pytest.raises(BadSandboxSpec, match=fault):
        await e2b.create(spec=SandboxSpec(provider="e2b", image=image, limits=SandboxLimits(**limits)))
    assert not e2b.account.boxes


async def test_limits_that_the_template_has_are_taken(e2b: Service) -> None:
    """What is asked for is what there is."""
    limits = SandboxLimits(memory_mb=8192, cpus=8)
    ref = await e2b.create(spec=SandboxSpec(provider="e2b", image="large", limits=limits))
    assert e2b.account.boxes[ref.id].template.name == "large"


async def test_it_ends_at_the_end_of_its_lifetime(e2b: Service) -> None:
    """The ref says when, attaching does not move it, and then it is gone."""
    ref = await e2b.create(spec=SandboxSpec(provider="e2b", limits=SandboxLimits(lifetime_seconds=120)))
    assert ref.expires_at == pytest.approx(time.time() + 120, abs=10)
    machine = await e2b.machine(ref)
    assert e2b.account.boxes[ref.id].ends.timestamp() == ref.expires_at
    await e2b.outside(ref, "expire")
    with pytest.raises(SandboxGone):
        await machine.run("true", timeout=5)


async def test_a_plan_that_allows_less_cuts_the_lifetime(e2b: Service) -> None:
    """The free plan has one hour: the ref says so, and the run moves on before."""
    e2b.account.max_hours = 1
    ref = await e2b.create()
    assert ref.expires_at == pytest.approx(time.time() + 3600, abs=10)


async def test_extending_only_ever_moves_the_end_away_and_never_beyond_the_lifetime(e2b: Service) -> None:
    """An end that was near is moved; asking for less, or for more than the spec allows, is not followed."""
    ref = await e2b.create(spec=SandboxSpec(provider="e2b", limits=SandboxLimits(lifetime_seconds=200)))
    machine = await e2b.machine(ref)
    box = e2b.account.boxes[ref.id]
    await AsyncSandbox.set_timeout(ref.id, 20, **e2b.options)
    await machine.extend(100)
    moved = box.ends
    assert moved.timestamp() == pytest.approx(time.time() + 100, abs=3)
    await machine.extend(10)
    assert box.ends == moved
    await machine.extend(10_000)
    assert box.ends.timestamp() == pytest.approx(box.started.timestamp() + 200, abs=3)
    await e2b.outside(ref, "kill")
    with pytest.raises(SandboxGone):
        await machine.extend(10)


async def test_a_paused_sandbox_goes_on_when_it_is_attached_to(e2b: Service) -> None:
    """Its processes too."""
    ref = await e2b.create()
    machine = await e2b.machine(ref)
    await machine.run("(sleep 1.5; echo done > late) >/dev/null 2>&1 &", timeout=5)
    await e2b.provider.pause(ref)
    with pytest.raises(SandboxUnavailable):
        await machine.run("true", timeout=5)
    machine = await e2b.machine(ref)
    assert (await machine.run("while [ ! -e late ]; do sleep 0.1; done; cat late", timeout=10)).stdout == b"done\n"


async def test_a_resumed_sandbox_has_a_whole_lifetime_again(e2b: Service) -> None:
    """The time that it stood still does not count, whoever reaches it in between; one that runs goes on running."""
    ref = await e2b.create(spec=SandboxSpec(provider="e2b", limits=SandboxLimits(lifetime_seconds=10)))
    await e2b.provider.pause(ref)
    await e2b.provider.pause(ref)
    await asyncio.sleep(11)
    resumed = await e2b.worker().resume(ref)
    assert resumed.model_copy(update={"expires_at": None}) == ref.model_copy(update={"expires_at": None})
    assert resumed.expires_at == pytest.approx(time.time() + 10, abs=2)
    assert (await (await e2b.machine(resumed)).run("echo on", timeout=5)).stdout == b"on\n"
    again = await e2b.provider.resume(resumed)
    assert again.expires_at == pytest.approx(time.time() + 10, abs=2)


async def test_a_plan_that_allows_less_cuts_the_time_after_a_pause_too(e2b: Service) -> None:
    """The free plan's hour."""
    ref = await e2b.create()
    e2b.account.max_hours = 1
    await e2b.provider.pause(ref)
    resumed = await e2b.provider.resume(ref)
    assert resumed.expires_at == pytest.approx(time.time() + 3600, abs=5)


async def test_a_paused_sandbox_is_found_and_can_be_ended(e2b: Service) -> None:
    """Else one that nobody comes back to would stay for ever."""
    ref = await e2b.create(labels={"run": "r"})
    await e2b.provider.pause(ref)
    assert [one.id for one in await e2b.worker().list({"run": "r"})] == [ref.id]
    with pytest.raises(SandboxGone):
        await e2b.provider.resume(ref.model_copy(update={"nonce": "0" * 32}))
    assert e2b.account.boxes[ref.id].paused
    await e2b.provider.kill(ref)
    assert not e2b.account.boxes
    for work in (e2b.provider.resume, e2b.provider.pause):
        with pytest.raises(SandboxGone):
            await work(ref)


# The machine


async def test_a_script_runs_as_the_ordinary_user_in_the_workspace(e2b: Service) -> None:
    """Its output is bytes, whatever the login shell says before, and its input is empty."""
    machine = await e2b.machine()
    await machine.put("/home/user/.bash_profile", b"echo 'Welcome!'; echo oops >&2\n")
    ran = await machine.run("id -un; pwd; cat; printf '\\377\\000\\n'; printf '\\376' >&2; touch made; exit 7", timeout=10)
    assert (ran.exit_code, ran.stdout, ran.stderr) == (7, b"user\n/workspace\n\xff\x00\n", b"\xfe")
    assert (await machine.run("kill -9 $$", timeout=10)).exit_code == 137
    assert (await machine.run("rm made; cd /; rmdir /workspace 2>/dev/null; echo here", timeout=10)).stdout == b"here\n"


async def test_a_script_of_100_kb_with_quotes_runs(e2b: Service) -> None:
    """Quoting must not make it longer than an argument may be."""
    machine = await e2b.machine()
    line = "x='a\"b'; : $x \\\\\n"
    script = line * (100_000 // len(line)) + "printf '%s' \"$x\""
    assert (await machine.run(script, timeout=20)).stdout == b'a"b'


async def test_as_much_output_as_a_script_may_have_comes_back_whole(e2b: Service) -> None:
    """60,000 bytes of each stream."""
    machine = await e2b.machine()
    ran = await machine.run("head -c 60000 /dev/zero; head -c 60000 /dev/zero | tr '\\0' '\\377' >&2", timeout=20)
    assert (ran.stdout, ran.stderr) == (bytes(60_000), b"\xff" * 60_000)


async def test_what_a_script_leaves_behind_holds_nothing_up_and_lives_on(e2b: Service) -> None:
    """Also with the script's own output still open."""
    machine = await e2b.machine()
    begun = time.monotonic()
    assert (await machine.run("sleep 30 & echo $!", timeout=20)).exit_code == 0
    assert time.monotonic() - begun < 5
    assert (await machine.run("pgrep -x sleep -u user", timeout=20)).exit_code == 0


async def test_a_script_that_takes_too_long_is_unavailable(e2b: Service) -> None:
    """E2B kills the shell at the deadline, and says -1 or nothing: neither is a result. Killed before, it is one."""
    machine = await e2b.machine()
    begun = time.monotonic()
    with pytest.raises(SandboxUnavailable):
        await machine.run("sleep 30", timeout=1)
    assert time.monotonic() - begun < 8
    ran = await machine.run("kill -9 $PPID; sleep 5", timeout=20)
    assert (ran.exit_code, ran.stdout) == (137, b"")


async def test_files_are_bytes(e2b: Service) -> None:
    """Of any content and a size beyond any buffer, owned by the ordinary user."""
    machine = await e2b.machine()
    data = bytes(range(256)) * 40_000
    await machine.put("/workspace/a b", data)
    assert b"".join([part async for part in machine.get("/workspace/a b")]) == data
    assert (await machine.run("stat -c '%U %s' 'a b'", timeout=10)).stdout == b"user 10240000\n"


async def test_files_that_are_not_there_are_the_callers_fault(e2b: Service) -> None:
    """No such file, a directory, no space: none of these is a failure of the sandbox."""
    machine = await e2b.machine()
    for path in ("/workspace/missing", "/workspace"):
        with pytest.raises(FileFault, match=path):
            _ = [part async for part in machine.get(path)]
    with pytest.raises(FileFault, match="/workspace"):
        await machine.put("/workspace", b"x")
    await e2b.fault("POST /files", status=507, body={"code": 507, "message": "not enough disk space available"})
    with pytest.raises(FileFault, match="disk space"):
        await machine.put("/workspace/x", b"x")
