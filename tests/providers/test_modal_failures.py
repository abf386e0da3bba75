"""The provider for Modal when something fails: the real SDK over a real socket to the emulator, with the faults of each test."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator
from pathlib import Path

import modal
import pytest
from grpclib.const import Status
from modal_proto import api_pb2

from activities.sandbox.port import (
    BadSandboxSpec,
    Command,
    SandboxAuth,
    SandboxError,
    SandboxGone,
    SandboxQuota,
    SandboxUnavailable,
)
from activities.sandbox.providers import modal as module
from contracts.base import BadInput
from contracts.sandbox import JobState, SandboxSpec
from tests.emulators import modal as emulator
from tests.emulators.modal import TOKEN_SECRET
from tests.providers.modal_support import Service, missing, nobodys_port, service_in
from workers.settings import Role, check_role, load_settings

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

ALWAYS = 99


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    """An emulator of its own for every test."""
    async with service_in(tmp_path) as service:
        yield service


# What the control plane answers

MAKING: dict[Status, type[SandboxError]] = {
    Status.CANCELLED: SandboxUnavailable,
    Status.UNKNOWN: SandboxUnavailable,
    Status.INVALID_ARGUMENT: BadSandboxSpec,
    Status.DEADLINE_EXCEEDED: SandboxUnavailable,
    Status.NOT_FOUND: SandboxUnavailable,  # the app, which the next attempt finds or makes
    Status.PERMISSION_DENIED: SandboxAuth,
    Status.RESOURCE_EXHAUSTED: SandboxQuota,
    Status.FAILED_PRECONDITION: SandboxUnavailable,
    Status.ABORTED: SandboxUnavailable,
    Status.OUT_OF_RANGE: BadSandboxSpec,
    Status.UNIMPLEMENTED: BadSandboxSpec,
    Status.INTERNAL: SandboxUnavailable,
    Status.UNAVAILABLE: SandboxUnavailable,
    Status.DATA_LOSS: SandboxUnavailable,
    Status.UNAUTHENTICATED: SandboxAuth,
}


@pytest.mark.parametrize("status", MAKING)
async def test_what_an_answer_means_while_a_sandbox_is_made(
    service: Service, status: Status, caplog: pytest.LogCaptureFixture
) -> None:
    """Every gRPC status but ALREADY_EXISTS, with the message told and the secret not, though the service itself repeats it."""
    caplog.set_level(logging.DEBUG)
    service.emulator.faults.add("SandboxCreateV2", times=ALWAYS, status=status, message=f"no: {TOKEN_SECRET}")
    with pytest.raises(SandboxError) as caught:
        await service.create()
    assert type(caught.value) is MAKING[status]
    assert "modal: make a sandbox: " in str(caught.value)
    assert "no: [secret]" in str(caught.value)
    assert TOKEN_SECRET not in "".join(traceback.format_exception(caught.value))
    assert service.asked("SandboxCreateV2") <= 4
    assert not service.emulator.account.boxes


FINDING: dict[Status, type[SandboxError]] = {
    **MAKING,
    Status.NOT_FOUND: SandboxGone,
}


@pytest.mark.parametrize("status", [Status.NOT_FOUND, Status.UNAVAILABLE, Status.UNAUTHENTICATED, Status.RESOURCE_EXHAUSTED])
async def test_attaching_tells_gone_from_unavailable(service: Service, status: Status) -> None:
    """Only what the control plane does not know is gone."""
    ref = await service.create()
    service.provider = service.worker()
    service.emulator.faults.add("SandboxWaitV2", times=ALWAYS, status=status)
    with pytest.raises(SandboxError) as caught:
        await service.provider.attach(ref)
    assert type(caught.value) is FINDING[status]


async def test_a_rate_that_is_too_high_is_not_a_quota(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modal says when to come back. The SDK waits for that, however long it is; here it is given up, and Temporal comes back."""
    policy = api_pb2.RPCRetryPolicy(retry_after_secs=0.1)
    service.emulator.faults.add("SandboxCreateV2", status=Status.RESOURCE_EXHAUSTED, details=[policy])
    await service.create("a")
    policy = api_pb2.RPCRetryPolicy(retry_after_secs=600)
    service.emulator.faults.add("SandboxCreateV2", status=Status.RESOURCE_EXHAUSTED, details=[policy])
    monkeypatch.setattr(module, "_MAKE_SECONDS", 1.0)
    with pytest.raises(SandboxUnavailable, match="no answer in time"):
        await service.create("b")
    service.emulator.faults.add("SandboxCreateV2", status=Status.RESOURCE_EXHAUSTED, details=[policy])
    monkeypatch.setenv("MODAL_MAX_THROTTLE_WAIT", "5")
    with pytest.raises(SandboxUnavailable, match="ResourceExhaustedError"):
        await service.create("c")


async def test_a_build_that_was_broken_off_may_be_tried_again(service: Service) -> None:
    """It says nothing about the image."""
    service.emulator.faults.add("ImageJoinStreaming", status=Status.UNAVAILABLE, times=ALWAYS)
    with pytest.raises(SandboxUnavailable):
        await service.create()
    service.emulator.faults.waiting.clear()
    assert await service.create()


async def test_an_app_that_was_stopped_is_looked_up_again(service: Service) -> None:
    """Sandboxes cannot be made in it any more; another has its name then."""
    await service.create("a")
    service.emulator.faults.add("SandboxCreateV2", status=Status.NOT_FOUND, message="App is stopped")
    with pytest.raises(SandboxUnavailable, match="App is stopped"):
        await service.create("b")
    await service.create("b")
    assert service.asked("AppGetOrCreate") == 2


async def test_one_that_ends_just_when_it_is_found_is_made_by_the_next_attempt(service: Service) -> None:
    """Its name was taken a moment ago, and nobody has it now."""
    service.emulator.faults.add("SandboxCreateV2", status=Status.ALREADY_EXISTS)
    with pytest.raises(SandboxUnavailable):
        await service.create()
    assert await service.create()


async def test_a_wrong_token_is_refused(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """By every call, and it is not shown."""
    caplog.set_level(logging.DEBUG)
    ref = await service.create()
    wrong = service.worker("as-wrong-wrong-wrong")
    for call in (wrong.list({}), wrong.attach(ref), wrong.kill(ref)):
        with pytest.raises(SandboxAuth) as caught:
            await call
        assert "as-wrong-wrong-wrong" not in "".join(traceback.format_exception(caught.value)) + caplog.text


# What a sandbox's worker answers


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (Status.NOT_FOUND, SandboxUnavailable),
        (Status.FAILED_PRECONDITION, SandboxUnavailable),
        (Status.UNAUTHENTICATED, SandboxUnavailable),
        (Status.INVALID_ARGUMENT, BadSandboxSpec),
        (Status.RESOURCE_EXHAUSTED, SandboxQuota),
    ],
)
async def test_a_worker_has_not_the_last_word(service: Service, status: Status, expected: type[SandboxError]) -> None:
    """A sandbox is gone only if the control plane says so too, and what the worker refuses is not the account's token."""
    ref = await service.create()
    machine = await service.machine(ref)
    for call in (machine.run("true", timeout=5), machine.put("/workspace/x", b"x"), _content(machine.get("/workspace/x"))):
        service.emulator.faults.add("TaskExecStart", times=2, status=status)
        with pytest.raises(SandboxError) as caught:
            await call
        assert type(caught.value) is expected
        service.emulator.faults.waiting.clear()
    assert (await (await service.machine(ref)).run("echo fine", timeout=5)).stdout == b"fine\n"


async def _content(parts: AsyncIterator[bytes]) -> bytes:
    return b"".join([part async for part in parts])


async def test_a_killed_sandbox_is_gone_for_everything(service: Service) -> None:
    """Ended from outside, for those who knew it and for those who did not."""
    ref = await service.create()
    machine = await service.machine(ref)
    await service.emulator.kill(ref.id)
    for call in (machine.run("true", timeout=5), machine.put("/workspace/x", b"x"), _content(machine.get("/workspace/x"))):
        with pytest.raises(SandboxGone):
            await call
    for worker in (service.provider, service.worker()):
        with pytest.raises(SandboxGone):
            await worker.attach(ref)
    assert await service.provider.list({}) == []


@pytest.mark.parametrize("how", ["kill", "expire"])
async def test_a_sandbox_that_ends_under_a_script_is_gone(service: Service, how: str) -> None:
    """The worker says that there is no such task."""
    ref = await service.create()
    machine = await service.machine(ref)
    running = asyncio.create_task(machine.run("sleep 30", timeout=60))
    await asyncio.sleep(0.5)
    await getattr(service.emulator, how)(ref.id)
    with pytest.raises(SandboxGone):
        await running


async def test_a_token_that_is_over_is_renewed(service: Service) -> None:
    """The SDK does that, in the middle of what a sandbox is used for."""
    service.emulator.account.token_seconds = 10
    machine = await service.machine()
    service.emulator.expire_tokens()
    assert (await machine.run("echo fine", timeout=10)).stdout == b"fine\n"


async def test_an_answer_that_is_lost_starts_nothing_twice(service: Service) -> None:
    """The SDK asks again with the command's own id."""
    machine = await service.machine()
    service.emulator.faults.add("TaskExecStart", drop="after", times=2)
    service.emulator.faults.add("TaskExecStart", drop="before")
    assert (await machine.run("echo once >> ran; cat ran", timeout=10)).stdout == b"once\n"


@pytest.mark.parametrize("cut", [0, 1])
async def test_a_stream_that_is_cut_is_taken_up_where_it_was(service: Service, cut: int) -> None:
    """By the SDK, at the next byte."""
    machine = await service.machine()
    data = bytes(range(256)) * 8000
    await machine.put("/workspace/x", data)
    service.emulator.faults.add("TaskExecStdioRead", cut=cut, times=2)
    assert await _content(machine.get("/workspace/x")) == data


async def test_a_stream_that_cannot_be_taken_up_is_no_result(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a shorter file nor an exit code."""
    machine = await service.machine()
    await machine.put("/workspace/x", bytes(2_000_000))
    monkeypatch.setattr(module, "_REQUEST_SECONDS", 1.0)
    service.emulator.faults.add("TaskExecStdioRead", cut=0, times=ALWAYS)
    with pytest.raises(SandboxUnavailable):
        await _content(machine.get("/workspace/x"))
    with pytest.raises(SandboxUnavailable):
        await machine.run("echo x", timeout=1)


async def test_a_command_whose_stream_was_cut_is_found_again(service: Service) -> None:
    """It runs once, however often its caller comes back."""
    ref = await service.create()
    command = Command("run/1/call", ["sh", "-c", "echo once >> ran; sleep 1; echo done"])
    sandbox = await service.provider.attach(ref)
    calling = asyncio.create_task(sandbox.exec(command))
    await asyncio.sleep(0.5)
    await service.emulator.deafen()
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    await service.emulator.listen()
    result = await (await service.worker().attach(ref)).exec(command)
    assert (result.state, result.exit_code, result.stdout) == (JobState.EXITED, 0, b"done\n")
    assert (await (await service.machine(ref)).run("cat ran", timeout=10)).stdout == b"once\n"


# What does not answer at all


async def test_a_service_that_cannot_be_reached_is_unavailable(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens: soon said, though the SDK would try for a minute, and over when it listens again."""
    ref = await service.create()
    machine = await service.machine(ref)
    monkeypatch.setattr(module, "_OPEN_SECONDS", 1.0)
    monkeypatch.setattr(module, "_REQUEST_SECONDS", 2.0)
    await service.emulator.deafen()
    begun = time.monotonic()
    for call in (machine.run("true", timeout=20), service.provider.list({}), service.provider.kill(ref)):
        with pytest.raises(SandboxUnavailable):
            await call
    with pytest.raises(SandboxUnavailable):
        # A port of its own, since the SDK goes on trying to connect for a while.
        await service.worker(url=f"http://127.0.0.1:{nobodys_port()}").attach(ref)
    assert time.monotonic() - begun < 20
    await service.emulator.listen()
    assert (await (await service.machine(ref)).run("echo back", timeout=10)).stdout == b"back\n"


@pytest.mark.parametrize("call", ["TaskExecStart", "TaskExecStdioRead"])
async def test_a_worker_that_hangs_is_unavailable(service: Service, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the call and does not answer."""
    machine = await service.machine()
    monkeypatch.setattr(module, "_REQUEST_SECONDS", 1.0)
    service.emulator.faults.add(call, delay=30)
    begun = time.monotonic()
    with pytest.raises(SandboxUnavailable, match="no answer in time"):
        await machine.run("true", timeout=2)
    assert time.monotonic() - begun < 10


# The credential


async def test_the_secret_is_nowhere_but_in_the_provider(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """Not in a ref, in the sandbox, in a process's arguments, or in any log of the SDK at its most talkative."""
    caplog.set_level(logging.DEBUG)
    logging.getLogger("modal-client").setLevel(logging.DEBUG)
    try:
        ref = await service.create()
        machine = await service.machine(ref)
        seen = await machine.run("env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null", timeout=10)
    finally:
        logging.getLogger("modal-client").setLevel(logging.WARNING)
    assert TOKEN_SECRET not in ref.model_dump_json()
    assert TOKEN_SECRET.encode() not in seen.stdout
    assert b"MODAL_SANDBOX_ID" in seen.stdout
    assert TOKEN_SECRET not in caplog.text
    asked = service.box(ref).asked
    assert TOKEN_SECRET not in str(asked)
    assert not asked.secret_sources
    assert not asked.definition.secret_ids
    assert not asked.definition.include_oidc_identity_token
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert TOKEN_SECRET.encode() not in process.read_bytes()
        except OSError:
            continue


async def test_nothing_of_the_environment_is_taken_for_the_credential(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither the token nor the server of somebody's own Modal."""
    for name, value in {
        "SERVER_URL": "http://127.0.0.1:1",
        "TOKEN_ID": "ak-other",
        "TOKEN_SECRET": "as-other",
        "PROFILE": "none",
    }.items():
        monkeypatch.setenv(f"MODAL_{name}", value)
    assert (await service.worker().create(SandboxSpec(), "k", environment={}, labels={}, queue="q")).provider == "modal"


def test_only_the_sandbox_worker_may_hold_the_token() -> None:
    """Any other refuses to start with its secret, under either name, and does not show it."""
    for prefix in ("", "CAISSON_"):
        settings = load_settings({f"{prefix}MODAL_TOKEN_ID": "ak-1", f"{prefix}MODAL_TOKEN_SECRET": TOKEN_SECRET})
        check_role(settings, frozenset({Role.SANDBOX}))
        assert TOKEN_SECRET not in f"{settings!r} {settings.model_dump_json()}"
        with pytest.raises(BadInput, match="MODAL_TOKEN_SECRET: set in the environment of a workflow worker") as caught:
            check_role(settings, frozenset({Role.WORKFLOW}))
        assert TOKEN_SECRET not in str(caught.value)


async def test_the_emulator_has_no_more_than_it_says(service: Service) -> None:
    """What it has not is refused as such, and nobody takes it for the service."""
    client, _ = await service.client()
    with pytest.raises(modal.exception.UnimplementedError):
        await modal.Volume.from_name("v", create_if_missing=True).hydrate.aio(client)
    assert "An emulator of Modal for tests, not Modal" in (emulator.__doc__ or "")
