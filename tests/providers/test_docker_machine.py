"""The provider for container engines: commands, files, failures and sweeping, on a real Podman and a real Docker."""

from __future__ import annotations

import asyncio
import gc
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from activities.sandbox.machine import Ran
from activities.sandbox.port import FileFault, SandboxGone, SandboxUnavailable
from activities.sandbox.providers.docker import LEFT_SECONDS
from activities.sandbox.providers.docker_engine import CREATED
from contracts.sandbox import RUN_LABEL
from tests.providers.docker_support import ENGINES, Rig, rig_of, running
from tests.providers.podman import IMAGES, Engine

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


# Commands and files


async def test_output_comes_apart_and_whole(rig: Rig) -> None:
    """Both streams, their bytes as they are, and the exit code."""
    ran = await rig.run("printf 'a\\000\\377'; echo err >&2; exit 42")
    assert ran == Ran(42, b"a\0\xff", b"err\n")


async def test_what_is_left_in_the_background_holds_nothing_up(rig: Rig) -> None:
    """Though it has the output of the script open; and it goes on."""
    sandbox = await rig.open()
    before = time.monotonic()
    ran = await sandbox.machine.run("(sleep 4; echo late >late.txt; sleep 30) & echo soon", timeout=60)
    assert ran.stdout == b"soon\n"
    assert time.monotonic() - before < 3.5
    assert (await sandbox.machine.run("sleep 5; cat late.txt", timeout=60)).stdout == b"late\n"


async def test_a_script_of_100_kb_runs(rig: Rig) -> None:
    """As the seam says."""
    assert (await rig.run(f"echo {'x' * 100_000} | wc -c")).stdout == b"100001\n"


async def test_a_call_ends_at_its_timeout(rig: Rig) -> None:
    """As a sandbox that does not answer."""
    sandbox = await rig.open()
    before = time.monotonic()
    with pytest.raises(SandboxUnavailable, match="did not end in time"):
        await sandbox.machine.run("sleep 30", timeout=1)
    assert time.monotonic() - before < 5


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
async def test_files_come_back_as_they_went(rig: Rig, size: int) -> None:
    """Also empty ones, and into memory, where Docker's archive call does not reach."""
    machine = (await rig.open()).machine
    data = secrets.token_bytes(size)
    for path in ("/tmp/a file", "/workspace/-b"):
        await machine.put(path, data)
        assert b"".join([part async for part in machine.get(path)]) == data
        assert (await machine.run(f"stat -c %u:%a '{path}'; ls /tmp /workspace | grep -c part", timeout=20)).stdout.startswith(
            b"1000:644\n"
        )


async def test_files_that_cannot_be_are_faults_of_their_path(rig: Rig) -> None:
    """Not of the sandbox."""
    machine = (await rig.open()).machine
    await machine.run("mkdir dir; echo x >secret; chmod 0 secret", timeout=20)
    for path in ("/nowhere/x", "/etc/x", "/workspace/dir"):
        with pytest.raises(FileFault, match=path):
            await machine.put(path, b"x" * 200_000)
    for path in ("/nowhere/x", "/workspace/dir", "/workspace/secret"):
        with pytest.raises(FileFault, match=path):
            [part async for part in machine.get(path)]


# A sandbox that fails is no command that fails


Ending = Callable[[Any, str], object]
ENDINGS: dict[str, Ending] = {
    "killed": lambda api, name: api.kill(name),
    "stopped": lambda api, name: api.stop(name, timeout=1),
    "removed": lambda api, name: api.remove_container(name, force=True),
    "started again": lambda api, name: api.restart(name, timeout=1),
}


@pytest.mark.parametrize("how", ENDINGS)
async def test_a_container_that_ends_is_gone(rig: Rig, how: str) -> None:
    """While a command runs, when the next one starts, for attach, for files; and the same key gives a new one."""
    sandbox = await rig.open()
    running = asyncio.create_task(sandbox.machine.run("echo begun; sleep 60", timeout=60))
    await asyncio.sleep(1)
    await asyncio.to_thread(ENDINGS[how], rig.engine.api, sandbox.ref.id)
    with pytest.raises(SandboxGone):
        await running

    async def read() -> None:
        [part async for part in sandbox.machine.get("/etc/passwd")]

    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: sandbox.machine.run("echo here", timeout=20),
        lambda: sandbox.machine.put("/tmp/x", b"x"),
        read,
        lambda: sandbox.extend(60),
        lambda: rig.provider.attach(sandbox.ref),
    ]
    for call in calls:
        with pytest.raises(SandboxGone):
            await call()
    if how == "started again":  # by somebody, just now: it looks like one that is being made
        rig.engine.api.kill(sandbox.ref.id)
    assert (await rig.create()).nonce != sandbox.ref.nonce


async def test_a_paused_container_may_answer_later(rig: Rig) -> None:
    """It is not gone, and not made anew."""
    sandbox = await rig.open()
    rig.engine.api.pause(sandbox.ref.id)
    for call in (sandbox.machine.run("echo here", timeout=20), rig.provider.attach(sandbox.ref), rig.create()):
        with pytest.raises(SandboxUnavailable):
            await call
    rig.engine.api.unpause(sandbox.ref.id)
    assert (await sandbox.machine.run("echo here", timeout=20)).stdout == b"here\n"
    assert await rig.create() == sandbox.ref


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the SDK leaks a socket that cannot connect
async def test_an_engine_that_is_away_may_come_back(rig: Rig) -> None:
    """A sandbox outlives its engine's service, and what ran in it goes on."""
    sandbox = await rig.open()
    await sandbox.machine.run("(sleep 2; echo on >on.txt) >/dev/null 2>&1 &", timeout=20)
    await asyncio.to_thread(rig.engine.stop)
    try:
        for call in (
            sandbox.machine.run("true", timeout=20),
            rig.provider.attach(sandbox.ref),
            rig.provider.list({}),
            rig.create(),
        ):
            with pytest.raises(SandboxUnavailable, match=r"the engine at unix:///"):
                await call
        with pytest.raises(SandboxUnavailable):
            await rig.provider.kill(sandbox.ref)
    finally:
        await asyncio.to_thread(rig.engine.start)
    again = await rig.provider.attach(sandbox.ref)
    assert (await again.machine.run("sleep 2; cat on.txt", timeout=20)).stdout == b"on\n"
    gc.collect()  # what the SDK leaked, here and not in another test


# Sweeping


async def test_sandboxes_are_listed_by_their_labels(rig: Rig) -> None:
    """The living ones; for a sweep, the dead ones too, with their labels and when they were made."""
    mine = await rig.create(labels={RUN_LABEL: "run-1", "team": "a b=c"})
    rig.key = "other"
    other = await rig.create(labels={RUN_LABEL: "run-2"})
    assert await rig.provider.list({RUN_LABEL: "run-1", "team": "a b=c"}) == [mine]
    assert await rig.provider.list({RUN_LABEL: "run-3"}) == []
    rig.engine.api.kill(other.id)
    assert await rig.provider.list({}) == [mine]
    first, second = await rig.provider.inventory()
    assert (first.ref, first.alive, first.labels) == (mine, True, {RUN_LABEL: "run-1", "team": "a b=c"})
    assert (second.ref, second.alive) == (other, False)
    assert abs(first.created_at - time.time()) < 60


async def test_what_crashes_left_is_cleared_away(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead sandboxes, helpers and workspaces of nobody, once they are old; never what is another's or alive."""
    api = rig.engine.api
    living = await rig.create()
    rig.key = "dead"
    dead = await rig.create()
    api.kill(dead.id)
    marks = {"caisson": "1", CREATED: f"{time.time():.3f}"}
    api.create_volume("caisson-left", labels=marks)
    api.create_volume("foreign")
    api.create_container(IMAGES["busybox"], ["true"], labels=marks, name="helper")
    api.create_container(IMAGES["busybox"], ["true"], name="foreign")
    await rig.provider.clear()
    assert len(rig.containers()) == 4
    assert len(rig.volumes()) == 4
    later = time.time() + LEFT_SECONDS + 1
    monkeypatch.setattr(time, "time", lambda: later)
    await rig.provider.clear()
    assert sorted(one["Names"][0].lstrip("/") for one in rig.containers()) == sorted([living.id, "foreign"])
    assert sorted(rig.volumes()) == sorted([f"{living.id}-{living.nonce}", "foreign"])
