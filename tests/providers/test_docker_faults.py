"""What a container engine's faults mean to the provider: those that a real engine does not give on demand, over a real socket."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

from activities.sandbox.machine import Ran
from activities.sandbox.port import (
    BadSandboxSpec,
    SandboxAuth,
    SandboxError,
    SandboxGone,
    SandboxQuota,
    SandboxUnavailable,
)
from activities.sandbox.providers.docker import DockerMachine, DockerProvider
from activities.sandbox.providers.docker_engine import translated
from contracts.sandbox import SandboxRef, SandboxSpec
from tests.providers.engine_emulator import CUT, Answer, EmulatedEngine, emulated_engine, socket_file, upgraded

# The SDK leaks a socket that cannot connect.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
LABELS = {"caisson": "1", "caisson_nonce": "n", "caisson_queue": "q", "caisson_created": "1000.0", "caisson_expires": "2000.0"}
REF = SandboxRef(provider="docker", id="caisson-x", nonce="n", queue="q", expires_at=2000.0)
SPEC = SandboxSpec(provider="docker")


def container(**state: Any) -> Answer:
    """A sandbox as `inspect` shows it."""
    shown = {"Running": True, "Status": "running", "StartedAt": "t", **state}
    return Answer(body={"Id": "1" * 64, "Name": "/caisson-x", "Config": {"Labels": LABELS}, "State": shown})


@pytest.fixture
def engine() -> Iterator[EmulatedEngine]:
    """An engine with one sandbox, and nothing else."""
    with emulated_engine() as one:
        one.on(r"^GET /containers/[^/]+/json$", container())
        yield one


@pytest.fixture
def provider(engine: EmulatedEngine) -> Iterator[DockerProvider]:
    """A provider that waits two seconds for it."""
    yield DockerProvider(engine.url, timeout=2.0)
    gc.collect()  # what the SDK leaked, here and not in another test


def machine(provider: DockerProvider) -> DockerMachine:
    """The sandbox's machine."""
    found = provider._engine.find(REF.id)
    assert found is not None
    return DockerMachine(provider._engine, found, "docker")


def said(message: str, status: int = 500) -> Answer:
    """An error as engines give it."""
    return Answer(status, {"message": message})


FAULTS: dict[str, tuple[Answer, type[SandboxError]]] = {
    "500": (said("something"), SandboxUnavailable),
    "502": (Answer(raw=b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>"), SandboxUnavailable),
    "503": (said("the daemon is shutting down", 503), SandboxUnavailable),
    "429": (said("slow down", 429), SandboxUnavailable),
    "cut": (CUT, SandboxUnavailable),
    "cut in a body": (Answer(raw=b'HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n{"Id"'), SandboxUnavailable),
    "no JSON": (Answer(raw=b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{{"), SandboxUnavailable),
    "no HTTP": (Answer(raw=b"who is there?\r\n\r\n"), SandboxUnavailable),
    "no answer": (Answer(hang=20), SandboxUnavailable),
    "401": (said("who are you", 401), SandboxAuth),
    "403": (said("authorization denied by plugin", 403), SandboxAuth),
    "404": (said("No such container: caisson-x", 404), SandboxGone),
    "507": (said("full", 507), SandboxQuota),
    "no space": (said("write /var/lib/x: no space left on device"), SandboxQuota),
    "no memory": (said("fork/exec /usr/bin/runc: cannot allocate memory"), SandboxQuota),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_each_fault_has_its_class(engine: EmulatedEngine, provider: DockerProvider, fault: str) -> None:
    """Asked once: Temporal tries again, not the SDK."""
    answer, kind = FAULTS[fault]
    engine.on(r"^GET /containers/[^/]+/json$", answer)
    before = time.monotonic()
    with pytest.raises(kind) as caught:
        await provider.attach(REF)
    assert type(caught.value) is kind
    assert time.monotonic() - before < 5
    assert len(engine.asked) == 2, engine.asked


async def test_an_engine_that_is_not_there_may_come_back(engine: EmulatedEngine, provider: DockerProvider) -> None:
    """Also when it is the first thing that is asked of it."""
    socket_file(engine).rename(f"{socket_file(engine)}.away")
    with pytest.raises(SandboxUnavailable, match="the engine at unix:///"):
        await provider.attach(REF)
    socket_file(engine).with_suffix(".sock.away").rename(socket_file(engine))
    assert provider._engine.find(REF.id) is not None


def test_a_socket_that_is_closed_to_the_worker_is_a_matter_of_rights() -> None:
    """However deep the SDK has it; the message says what to do."""
    with pytest.raises(SandboxAuth, match="must be allowed to use the engine"), translated("unix:///x"):
        try:
            raise PermissionError(13, "Permission denied")
        except PermissionError as error:
            raise ConnectionError("aborted") from error


async def test_what_is_not_ours_is_not_touched(engine: EmulatedEngine, provider: DockerProvider) -> None:
    """A container of the same name without our label, and one with another nonce."""
    foreign = container()
    foreign.body["Config"]["Labels"] = {}
    engine.on(r"^GET /containers/[^/]+/json$", foreign)
    engine.on(r"^DELETE /volumes/caisson-x-n$", Answer(404, {"message": "no such volume"}))
    with pytest.raises(SandboxGone):
        await provider.attach(REF)
    await provider.kill(REF)
    engine.on(r"^GET /containers/[^/]+/json$", container())
    engine.on(r"^DELETE /volumes/caisson-x-other$", Answer(404, {"message": "no such volume"}))
    other = REF.model_copy(update={"nonce": "other"})
    with pytest.raises(SandboxGone):
        await provider.attach(other)
    await provider.kill(other)
    assert not [one for one in engine.asked if one.startswith("DELETE /containers")]


async def test_a_removal_that_is_going_on_is_waited_for(engine: EmulatedEngine, provider: DockerProvider) -> None:
    """Somebody else's, of the same container."""
    going = said("removal of container caisson-x is already in progress", 409)
    engine.on(r"^DELETE /containers/1{64}$", going, going, Answer(404, {"message": "No such container"}))
    engine.on(r"^DELETE /volumes/caisson-x-n$", Answer(204))
    await provider.kill(REF)


# Commands


def exec_rules(engine: EmulatedEngine, start: Answer, **inspected: Any) -> None:
    """Script one exec."""
    engine.on(r"^POST /containers/1{64}/exec$", Answer(201, {"Id": "e1"}))
    engine.on(r"^POST /exec/e1/start$", start)
    engine.on(r"^GET /exec/e1/json$", Answer(body={"Running": False, "ExitCode": 0, **inspected}))


async def test_output_in_one_piece_with_the_headers_is_not_lost(engine: EmulatedEngine, provider: DockerProvider) -> None:
    """The SDK itself drops what its reader has read ahead."""
    exec_rules(engine, upgraded((1, b"a"), (2, b"b" * 70_000), (1, b"c")), ExitCode=3)
    assert await machine(provider).run("x", timeout=5) == Ran(3, b"ac", b"b" * 70_000)


async def test_output_that_is_cut_off_is_no_end(engine: EmulatedEngine, provider: DockerProvider, monkeypatch: Any) -> None:
    """The engine says that the command goes on, so its connection was lost."""
    monkeypatch.setattr("activities.sandbox.providers.docker_exec._SHORTLY", 0.5)
    exec_rules(engine, upgraded((1, b"half")), Running=True, ExitCode=None)
    with pytest.raises(SandboxUnavailable, match="has not ended"):
        await machine(provider).run("x", timeout=5)


async def test_an_exec_that_the_engine_forgot_may_be_tried_again(engine: EmulatedEngine, provider: DockerProvider) -> None:
    """Its container lives, as after a restart of the engine."""
    exec_rules(engine, upgraded((1, b"half")))
    engine.on(r"^GET /exec/e1/json$", said("No such exec instance: e1", 404))
    with pytest.raises(SandboxUnavailable, match="lost a command"):
        await machine(provider).run("x", timeout=5)


async def test_a_flood_is_bounded(engine: EmulatedEngine, provider: DockerProvider) -> None:
    """What is more than any script of the harness writes is dropped."""
    exec_rules(engine, upgraded(*[(1, b"x" * 60_000)] * 50))
    assert 60_000 <= len((await machine(provider).run("x", timeout=5)).stdout) <= 240_000


@pytest.mark.parametrize(
    "dying",
    [
        said("Container 1111 is not running", 409),
        said("can only create exec sessions on running containers: container state improper"),
        said("OCI runtime exec failed: exec failed: cannot exec in a stopped container: unknown", 400),
    ],
)
async def test_a_killed_command_is_not_told_before_the_engine_knows(
    engine: EmulatedEngine, provider: DockerProvider, dying: Answer
) -> None:
    """The kernel kills everything in a container that ends, and the engine says for a while that it runs."""
    found = machine(provider)
    exec_rules(engine, upgraded(), ExitCode=137)
    engine.on(r"^POST /containers/1{64}/exec$", Answer(201, {"Id": "e1"}), dying)
    engine.on(r"^GET /containers/[^/]+/json$", container(), container(Running=False, Status="exited", ExitCode=137))
    with pytest.raises(SandboxGone, match="has ended"):
        await found.run("x", timeout=5)


# Making


async def test_an_engine_that_keeps_no_limits_is_refused(engine: EmulatedEngine, provider: DockerProvider) -> None:
    """None can be switched off, so there is no sandbox without them."""
    engine.on(r"^GET /containers/[^/]+/json$", said("no", 404))
    engine.on(r"^GET /info$", Answer(body={"OSType": "linux", "NCPU": 2, "MemoryLimit": False, "PidsLimit": False}))
    with pytest.raises(BadSandboxSpec, match=r"sandbox\.limits: .*MemoryLimit: false, PidsLimit: false"):
        await provider.create(SPEC, "k", environment={}, labels={}, queue="q")


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (said("No such image: python:3.13-slim", 404), BadSandboxSpec, "docker pull python:3.13-slim"),
        (said("no space left on device"), SandboxQuota, "make room"),
        (said("container-init binary not found on the host: stat /x"), BadSandboxSpec, "binary not found"),
        (said("invalid parameter", 400), BadSandboxSpec, "invalid parameter"),
        (said("anything else"), SandboxUnavailable, "anything else"),
        (CUT, SandboxUnavailable, "the engine at"),
    ],
)
async def test_a_making_that_fails_leaves_nothing(
    engine: EmulatedEngine, provider: DockerProvider, answer: Answer, kind: type[SandboxError], told: str
) -> None:
    """The workspace is removed again, and the fault is that of the making."""
    engine.on(r"^GET /containers/[^/]+/json$", said("no", 404))
    engine.on(r"^GET /info$", Answer(body={"OSType": "linux", "NCPU": 2, "MemoryLimit": True}))
    engine.on(r"^POST /volumes/create$", Answer(201, {"Name": "v"}))
    engine.on(r"^POST /containers/create$", answer)
    engine.on(r"^DELETE /volumes/caisson-\w+-\w+$", Answer(404, {"message": "no such volume"}))
    with pytest.raises(kind, match=told) as caught:
        await provider.create(SPEC, "k", environment={}, labels={}, queue="q")
    assert type(caught.value) is kind
    assert engine.asked[-1].startswith("DELETE /volumes/caisson-")
