"""How failures at E2B are told apart: what is gone, what may be better later, and what a person must hear of."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from activities.sandbox.port import (
    BadSandboxSpec,
    Command,
    SandboxAuth,
    SandboxError,
    SandboxGone,
    SandboxQuota,
    SandboxUnavailable,
)
from contracts.base import BadInput
from contracts.sandbox import JobState
from tests.emulators.e2b.server import API_KEY
from tests.providers.e2b_support import NOT_FOUND, Service, emulator_in, missing
from workers.settings import Role, check_role, load_settings

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture
async def e2b(tmp_path: Path) -> AsyncIterator[Service]:
    """An emulator of its own for every test."""
    async with emulator_in(tmp_path) as emulator:
        yield Service(emulator)


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (400, "Invalid template reference", BadSandboxSpec),
        (401, f"Invalid API key {API_KEY}", SandboxAuth),
        (402, "payment required", SandboxQuota),
        (403, "team is blocked", SandboxAuth),
        (403, "Team doesn't have access to the template", BadSandboxSpec),
        (404, "template 'base' not found", BadSandboxSpec),
        (409, "Sandbox is changing state", SandboxUnavailable),
        (422, "invalid body", BadSandboxSpec),
        (429, "too many requests", SandboxUnavailable),
        (429, "you have reached the maximum number of concurrent E2B sandboxes (20)", SandboxQuota),
        (500, "Error", SandboxUnavailable),
        (502, "Bad gateway", SandboxUnavailable),
        (503, "no capacity", SandboxUnavailable),
        (504, "timeout", SandboxUnavailable),
    ],
)
async def test_an_answer_of_the_api_means_what_the_table_says(
    e2b: Service, status: int, message: str, expected: type[SandboxError], caplog: pytest.LogCaptureFixture
) -> None:
    """While a sandbox is made; each is asked once, as Temporal retries, and none tells the key."""
    caplog.set_level(logging.DEBUG)
    await e2b.fault("POST /v2/sandboxes$", times=9, status=status, body={"code": status, "message": message})
    with pytest.raises(SandboxError) as caught:
        await e2b.create()
    assert type(caught.value) is expected
    assert message.replace(API_KEY, "[key]") in str(caught.value)
    assert e2b.asked("POST /v2/sandboxes") == 1
    told = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert API_KEY not in told


async def test_waiting_as_long_as_the_service_says_is_left_to_temporal(e2b: Service) -> None:
    """429 with Retry-After is not slept on in here."""
    await e2b.fault("GET /v2/sandboxes", status=429, headers={"Retry-After": "30"}, body={"code": 429, "message": "slow down"})
    begun = time.monotonic()
    with pytest.raises(SandboxUnavailable, match="slow down"):
        await e2b.create()
    assert time.monotonic() - begun < 3


async def test_the_accounts_own_limits(e2b: Service) -> None:
    """What the emulator itself answers: no more sandboxes, and a wrong key."""
    e2b.account.max_sandboxes = 1
    await e2b.create("one")
    with pytest.raises(SandboxQuota, match="concurrent"):
        await e2b.create("two")
    wrong = e2b.worker("e2b_wrong_key_0000")
    with pytest.raises(SandboxAuth) as caught:
        await wrong.list({})
    assert "e2b_wrong_key_0000" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "message", "expected"),
    [
        (404, "Sandbox doesn't exist", SandboxGone),
        (410, "Sandbox was killed", SandboxGone),
        (409, "Sandbox is changing state", SandboxUnavailable),
        (503, "busy", SandboxUnavailable),
    ],
)
async def test_attaching_tells_gone_from_unavailable(
    e2b: Service, status: int, message: str, expected: type[SandboxError]
) -> None:
    """410 is what the API has for a killed sandbox, and the SDK has no class for."""
    ref = await e2b.create()
    await e2b.fault("POST /v2/sandboxes/.*/connect", status=status, body={"code": status, "message": message})
    with pytest.raises(expected):
        await e2b.provider.attach(ref)


async def test_a_killed_sandbox_is_gone_for_everything(e2b: Service) -> None:
    """Ended from outside."""
    ref = await e2b.create()
    machine = await e2b.machine(ref)
    await e2b.outside(ref, "kill")
    with pytest.raises(SandboxGone):
        await machine.run("true", timeout=5)
    with pytest.raises(SandboxGone):
        await machine.put("/workspace/x", b"x")
    with pytest.raises(SandboxGone):
        _ = [part async for part in machine.get("/workspace/x")]
    with pytest.raises(SandboxGone):
        await e2b.provider.attach(ref)
    with pytest.raises(SandboxGone):
        await e2b.provider.pause(ref)


async def test_a_sandbox_that_is_killed_under_a_script_is_gone(e2b: Service) -> None:
    """The stream breaks, and the SDK asks for its health."""
    ref = await e2b.create()
    machine = await e2b.machine(ref)
    running = asyncio.create_task(machine.run("sleep 30", timeout=60))
    await asyncio.sleep(0.5)
    await e2b.outside(ref, "kill")
    with pytest.raises(SandboxGone):
        await running


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (502, NOT_FOUND, SandboxUnavailable),
        (502, {"message": "The sandbox is running but port is not open", "code": 502}, SandboxUnavailable),
        (401, {"code": 401, "message": "unauthorized access"}, SandboxAuth),
        (403, {"code": 403, "message": "Token header is missing"}, SandboxAuth),
        (429, {"code": 429, "message": "slow down"}, SandboxUnavailable),
        (500, {"code": 500, "message": "oops"}, SandboxUnavailable),
    ],
)
async def test_an_answer_of_the_sandboxs_proxy_is_not_the_last_word(
    e2b: Service, status: int, body: dict[str, Any], expected: type[SandboxError]
) -> None:
    """It also says "not found" of a sandbox that it does not know yet: it is gone only if the API says so too."""
    machine = await e2b.machine()
    await e2b.fault("POST /process.Process/Start", status=status, body=body)
    with pytest.raises(expected):
        await machine.run("true", timeout=5)
    await e2b.fault("/files", times=2, status=status, body=body)
    with pytest.raises(expected):
        _ = [part async for part in machine.get("/workspace/x")]
    with pytest.raises(expected):
        await machine.put("/workspace/x", b"x")
    assert (await machine.run("echo fine", timeout=5)).stdout == b"fine\n"


@pytest.mark.parametrize("cut", [0, 1])
async def test_a_stream_that_is_cut_is_no_result(e2b: Service, cut: int) -> None:
    """Before the process is known to have started, or before its end is told."""
    machine = await e2b.machine()
    await e2b.fault("POST /process.Process/Start", cut=cut)
    with pytest.raises(SandboxUnavailable):
        await machine.run("echo x", timeout=10)


async def test_a_file_that_is_cut_is_no_file(e2b: Service) -> None:
    """A download that breaks off is not taken for a shorter file."""
    machine = await e2b.machine()
    await machine.put("/workspace/x", bytes(1_000_000))
    await e2b.fault("GET /files", cut=2)
    with pytest.raises(SandboxUnavailable):
        _ = [part async for part in machine.get("/workspace/x")]


async def test_a_command_whose_stream_was_cut_is_found_again(e2b: Service) -> None:
    """It runs once, however often its caller comes back."""
    ref = await e2b.create()
    command = Command("run/1/call", ["sh", "-c", "echo once >> ran; sleep 1; echo done"])
    sandbox = await e2b.provider.attach(ref)
    await e2b.fault("POST /process.Process/Start", cut=1)
    for _ in range(5):
        try:
            result = await sandbox.exec(command)
        except SandboxUnavailable:
            sandbox = await e2b.worker().attach(ref)
        else:
            break
    assert (result.state, result.exit_code, result.stdout) == (JobState.EXITED, 0, b"done\n")
    machine = await e2b.machine(ref)
    assert (await machine.run("cat ran", timeout=10)).stdout == b"once\n"


async def test_a_service_that_cannot_be_reached_is_unavailable(e2b: Service) -> None:
    """Nothing listens: soon said, and over when it listens again."""
    ref = await e2b.create()
    machine = await e2b.machine(ref)
    await e2b.emulator.deafen()
    begun = time.monotonic()
    with pytest.raises(SandboxUnavailable):
        await machine.run("true", timeout=20)
    with pytest.raises(SandboxUnavailable):
        await e2b.provider.attach(ref)
    assert time.monotonic() - begun < 20
    await e2b.emulator.listen()
    assert (await machine.run("echo back", timeout=10)).stdout == b"back\n"


async def test_the_key_is_nowhere_but_in_the_provider(e2b: Service, caplog: pytest.LogCaptureFixture) -> None:
    """Not in a ref, in the sandbox, or in any log."""
    caplog.set_level(logging.DEBUG)
    ref = await e2b.create()
    machine = await e2b.machine(ref)
    seen = await machine.run("env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null", timeout=10)
    assert API_KEY not in ref.model_dump_json()
    assert API_KEY.encode() not in seen.stdout
    assert API_KEY not in caplog.text
    assert all(API_KEY not in str(box.body) for box in e2b.account.boxes.values())


def test_only_the_sandbox_worker_may_hold_the_key() -> None:
    """Any other refuses to start with it, under either name, and does not show it."""
    for name in ("E2B_API_KEY", "CAISSON_E2B_API_KEY"):
        settings = load_settings({name: API_KEY})
        check_role(settings, frozenset({Role.SANDBOX}))
        assert API_KEY not in f"{settings!r} {settings.model_dump_json()}"
        with pytest.raises(BadInput, match="E2B_API_KEY: set in the environment of a workflow worker") as caught:
            check_role(settings, frozenset({Role.WORKFLOW}))
        assert API_KEY not in str(caught.value)


async def test_the_emulator_says_what_it_is(e2b: Service) -> None:
    """Nobody takes it for the service."""
    assert "emulator" in (await e2b.answer_header("Server"))
