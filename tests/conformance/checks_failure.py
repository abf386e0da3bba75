"""When the sandbox, and not the command in it, fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine

import pytest

from activities.sandbox.port import SandboxError, SandboxGone, SandboxUnavailable
from tests.conformance.box import Box, own, shared
from tests.conformance.checks_processes import until_running
from tests.conformance.subjects import NotShown, Subject

CALLS: dict[str, Callable[[Box], Coroutine[object, object, object]]] = {
    "exec": lambda box: box.sh("echo ran"),
    "exec of a finished job": lambda box: box.sh("true", job="old"),
    "progress": lambda box: box.sandbox.progress("old"),
    "kill_job": lambda box: box.sandbox.kill_job("old"),
    "read": lambda box: box.content("f"),
    "write": lambda box: box.sandbox.write("f", b"x"),
    "look": lambda box: box.sandbox.look(["f"], 1),
    "walk": lambda box: box.sandbox.walk(""),
    "extend": lambda box: box.sandbox.extend(10),
}


async def check_a_dead_machine_is_gone(subject: Subject) -> None:
    """Whatever is asked of a dead sandbox raises SandboxGone, and never looks like output (SH18)."""
    async with own(subject) as box:
        await box.sandbox.write("f", b"x")
        await box.sh("true", job="old")
        await subject.kill_machine(box.ref)
        for name, call in CALLS.items():
            with pytest.raises(SandboxGone):
                await call(box)
                pytest.fail(f"{name} answered")
        for provider in (subject.provider, await subject.other()):
            with pytest.raises(SandboxGone):
                await (await provider.attach(box.ref)).look(["f"], 1)


async def check_a_waiting_call_is_told(subject: Subject) -> None:
    """A call that waits for a command is told soon that its sandbox died."""
    async with own(subject) as box:
        job = box.job()
        waiting = asyncio.create_task(box.sh("echo begun; sleep 60", job=job, timeout=90))
        await until_running(box, job)
        await subject.kill_machine(box.ref)
        began = time.monotonic()
        with pytest.raises(SandboxGone):
            await waiting
        assert time.monotonic() - began < 30


async def check_a_cancellation_is_heard(subject: Subject) -> None:
    """A cancelled call ends as one, also at the sandbox's death, and not as a fault that may be tried again."""
    for delay in (0.0, 0.002, 0.01, 0.03, 0.1):
        async with own(subject) as box:
            await box.sh("true", job="old")
            callers = [asyncio.create_task(_ask_for_ever(box)) for _ in range(3)]
            await asyncio.sleep(0.1)
            if delay:
                await subject.kill_machine(box.ref)
            await asyncio.sleep(delay)
            for caller in callers:
                caller.cancel()
            await asyncio.wait(callers, timeout=10)
            heard = [caller.cancelled() for caller in callers]
            for caller in callers:
                while not caller.done():
                    caller.cancel()
                    await asyncio.wait([caller], timeout=1)
            assert all(heard), delay


async def _ask_for_ever(box: Box) -> None:
    while True:
        with contextlib.suppress(SandboxError):
            await box.sandbox.progress("old")
        await asyncio.sleep(0)


async def check_its_key_gives_a_new_one(subject: Subject) -> None:
    """The key of a sandbox that died gives a new, empty one, and the handle of the old one stays gone."""
    key = subject.key()
    async with own(subject, key=key) as box:
        await box.sandbox.write("f", b"x")
        await subject.kill_machine(box.ref)
        second = await subject.create(key=key)
        try:
            assert second.nonce != box.ref.nonce
            assert (await (await subject.provider.attach(second)).look(["f"], 1))["f"].kind == "missing"
            with pytest.raises(SandboxGone):
                await (await subject.provider.attach(box.ref)).look(["f"], 1)
        finally:
            await subject.provider.kill(second)


async def check_an_unreachable_service_is_unavailable(subject: Subject) -> None:
    """What cannot be reached now is not gone: the call may be tried again, and then works."""
    if subject.unreachable is None:
        raise NotShown("there is no service between worker and sandbox that could be cut off")
    box = await shared(subject)
    await subject.unreachable(True)
    try:
        for call in (CALLS["exec"], CALLS["look"]):
            with pytest.raises(SandboxUnavailable):
                await call(box)
        with pytest.raises(SandboxUnavailable):
            await (await subject.provider.attach(box.ref)).look(["f"], 1)
    finally:
        await subject.unreachable(False)
    assert (await box.sh("echo again")).stdout == b"again\n"
