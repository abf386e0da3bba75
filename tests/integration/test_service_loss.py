"""A sandbox that its service does not know any more: nothing is asked of it again and again, and the run goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.helpers import Gate, gate_of
from tests.integration.stack import Stack
from tests.integration.test_chaos import sandbox_of, serving_e2b
from tests.integration.test_durability import artifact

MOST = 4
"""Requests to a dead sandbox and about it: a call, a second look whether it has ended, and the request to end it."""


@pytest.fixture
async def gate(crewless: Stack) -> AsyncIterator[Gate]:
    """A tool that holds the run until the test lets it go on."""
    async with gate_of(crewless) as made:
        yield made


async def test_a_sandbox_that_is_not_found_is_replaced(
    crewless: Stack, gate: Gate, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """404 means gone: it is not tried again, the workspace is restored into another, and the call is made there.

    From temporalio/sdk-python#1548.
    """
    async with serving_e2b(crewless, tmp_path_factory.mktemp("e2b")) as (service, _):
        emulator = service.emulator
        agent = {"tools": ["shell", *gate.agent["tools"]], "sandbox": {"provider": "e2b"}}
        handle = await crewless.start("lost-at-the-gate", agent)
        await gate.reached()
        ref = await sandbox_of(handle)
        assert ref is not None
        await service.outside(ref, "kill")
        before = len(emulator.faults.asked_of)
        gate.released.set()
        result = await crewless.finish(handle)
        assert (result["status"], result["recoveries"]) == ("completed", 1)
        assert await artifact(crewless, result, "outputs/log") == b"one\ntwo\n"
        assert crewless.answered(handle) == [1, 2, 3, 4]
        assert emulator.faults.asked_of[before:].count(ref.id) <= MOST, emulator.faults.requests[-40:]
