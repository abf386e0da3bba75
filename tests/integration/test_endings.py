"""A run that is cancelled, or whose provider fails, at an awkward moment: whatever was made for it is ended, and soon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from temporalio.client import WorkflowFailureError

from tests.integration.away_support import Away, allow, stack_away
from tests.integration.helpers import scheduled
from tests.integration.stack import Handle
from tests.integration.test_durability import until

E2B = {"sandbox": {"provider": "e2b"}}
BUSY = {"code": "unavailable", "message": "busy"}


@pytest.fixture(scope="module")
async def away(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Away]:
    """One for all tests, each of which leaves nothing at either service."""
    async with stack_away(tmp_path_factory.mktemp("endings"), tmp_path_factory.mktemp("services")) as serving:
        yield serving


@pytest.fixture(autouse=True)
def no_faults_are_left(away: Away) -> None:
    """Those of one test are not those of the next."""
    away.e2b.emulator.faults.waiting.clear()


async def cancelled(away: Away, handle: Handle, seconds: float = 40) -> list[str]:
    """Cancel a run, and return what it did when it is over and nothing of it is left."""
    await handle.cancel()
    with contextlib.suppress(WorkflowFailureError):
        await asyncio.wait_for(handle.result(), seconds)
    await until(away.nothing_is_left, "what was made for the run is ended")
    return await scheduled(handle)


async def collecting(handle: Handle) -> None:
    """Return when a run begins to collect its results."""
    async with asyncio.timeout(60):
        while (await handle.query("status"))["activity"] != "collecting results":
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("scenario", ["works-and-fails", "works-and-ends"])
async def test_cancelled_while_results_are_collected(away: Away, scenario: str) -> None:
    """Also when the run has failed already: its sandbox is ended, and its end written down."""
    handle = await away.stack.start(scenario, E2B)
    await collecting(handle)
    await away.e2b.fault(".*", delay=3, times=3)
    await asyncio.sleep(0.3)
    done = await cancelled(away, handle)
    assert "close_sandbox" in done and done[-1] == "record_end"


async def test_cancelled_while_the_ending_is_tried_again(away: Away) -> None:
    """The ending goes on: it is wanted all the more."""
    before = away.e2b.asked("DELETE /sandboxes")
    await away.e2b.fault("DELETE /sandboxes", status=503, body={"code": 503, "message": "busy"}, times=2)
    handle = await away.stack.start("works-and-ends", E2B)
    await until(lambda: away.e2b.asked("DELETE /sandboxes") > before, "it was asked to end the sandbox", 60)
    await asyncio.sleep(0.3)
    await cancelled(away, handle)


async def test_cancelled_while_the_making_is_tried_again(away: Away) -> None:
    """The sandbox is there, and no answer has told the run."""
    await away.e2b.fault("process.Process/Start", status=503, body=BUSY, times=1)
    handle = await away.stack.start("works-and-ends", E2B)
    await until(lambda: bool(away.boxes), "it is made", 60)
    await until(lambda: not away.e2b.emulator.faults.waiting, "the fault was met", 60)
    await asyncio.sleep(0.4)
    assert "end_strays" in await cancelled(away, handle)


@pytest.mark.soak
async def test_a_provider_that_made_a_sandbox_and_failed_keeps_none(away: Away) -> None:
    """The run goes on with the fallback, and what the first one made is ended when it answers again, at the latest at the end."""
    await away.e2b.fault("process.Process/Start", status=503, body=BUSY, times=99)
    handle = await away.stack.start("works-and-ends", {"sandbox": {"provider": "e2b", "fallback": "modal"}})
    result = await away.stack.finish(handle, 120)
    assert result["status"] == "completed"
    await until(away.nothing_is_left, "neither has a sandbox")
    assert "end_strays" in await scheduled(handle)


async def test_cancelled_while_a_pause_hangs(away: Away) -> None:
    """The run does not wait for a service that keeps what it is about to end."""
    await away.e2b.fault("/pause$", delay=100, times=5)
    before = away.pauses()
    agent = {"sandbox": {"provider": "e2b", "idle_seconds": 1}, "approvals": {"tools": {"shell": "prompt"}}}
    handle = await away.stack.start("a-process-beside", agent)
    await allow(away.stack, handle, 1)
    await away.stack.until(handle, 60, step=2, state="awaiting_approval")
    await until(lambda: away.pauses() > before, "it is being paused", 60)
    await asyncio.sleep(0.5)
    await cancelled(away, handle, 25)
