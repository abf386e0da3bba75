"""Putting a sandbox away where its provider can do better than end it: E2B pauses it, Modal keeps its files as an image."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpclib.const import Status

from tests.integration.away_support import Away, allow, stack_away, waiting
from tests.integration.helpers import failed_tasks, last_request, outputs_of, scheduled
from tests.integration.stack import Handle, Stack
from tests.integration.test_chaos import sandbox_of
from tests.integration.test_durability import artifact, until
from tests.integration.test_recovery import notes_of


@pytest.fixture(scope="module")
async def away(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Away]:
    """One for all tests, each of which leaves nothing at either service."""
    async with stack_away(tmp_path_factory.mktemp("away"), tmp_path_factory.mktemp("services")) as serving:
        yield serving


async def done(stack: Stack, handle: Handle, step: int = 2) -> tuple[dict[str, Any], str]:
    """Let the run go on to its end, which is right. Return its result, and what its second command has said."""
    for number in range(step, 4):
        await allow(stack, handle, number)
    result = await stack.finish(handle, 90)
    assert (result["status"], result["output"]) == ("completed", "done"), result["reason"]
    for name, content in (("one", b"one\n"), ("two", b"two\n"), ("three", b"one\ntwo\n")):
        assert await artifact(stack, result, f"outputs/{name}") == content
    assert stack.answered(handle) == [1, 2, 3, 4]
    assert await failed_tasks(handle) == []
    said = [output for _, output in outputs_of(await last_request(stack, handle))][1]
    assert "one\n640\n" in said
    return result, said


async def test_a_paused_sandbox_goes_on_with_its_processes(away: Away) -> None:
    """It is made once and restored never; the time that it is paused is not counted; and it ends with the run.

    It is paused twice, and has what was written after the first time: from e2b-dev/E2B#884, e2b-dev/E2B#736 and e2b-dev/E2B#1104.
    """
    handle = await waiting(away, "e2b", away.one_is_paused)
    async with asyncio.timeout(10):  # the run hears of it a moment later
        while "(the sandbox is paused)" not in (status := await handle.query("status"))["activity"]:
            await asyncio.sleep(0.05)
    assert status["activity"].startswith("waiting for approval: $ echo two")
    ref = await sandbox_of(handle)
    assert ref is not None and list(away.boxes) == [ref.id], "it is still the run's, so that no sweep takes it"
    # Another worker, after a while: nothing of the old one's memory is needed.
    await away.crew.stop()
    await away.crew.start()
    await asyncio.sleep(3)
    await allow(away.stack, handle, 2)
    await away.stack.until(handle, 60, step=3)
    await until(away.one_is_paused, "it is paused again")
    result, said = await done(away.stack, handle, 3)
    assert "lives" in said
    asked = await scheduled(handle)
    assert (asked.count("open_sandbox"), asked.count("restore_workspace"), result["recoveries"]) == (1, 0, 0)
    assert asked.count("resume_sandbox") >= 2
    assert result["usage"]["sandbox_seconds"] < result["usage"]["wall_seconds"] - 3
    assert "The sandbox was paused" in (await notes_of(away.stack, handle))[0]
    assert away.nothing_is_left()


async def test_a_sandbox_that_is_lost_while_it_is_paused_comes_back_from_the_store(away: Away) -> None:
    """The pause only saves work: what counts is the snapshot that was taken before it."""
    handle = await waiting(away, "e2b", away.one_is_paused)
    ref = await sandbox_of(handle)
    assert ref is not None
    await away.e2b.outside(ref, "kill")
    result, said = await done(away.stack, handle)
    assert "died" in said
    assert result["recoveries"] == 1
    assert "The sandbox was lost" in (await notes_of(away.stack, handle))[0]
    assert away.nothing_is_left()


async def test_a_sandbox_that_cannot_be_paused_is_ended(away: Away) -> None:
    """A plan without pauses, or a service that does not answer: the portable way, and nothing is left."""
    await away.e2b.fault("/pause$", status=403, body={"code": 403, "message": "pausing is not in your plan"}, times=9)
    asked = away.pauses()
    handle = await waiting(away, "e2b", away.nothing_is_left)
    away.e2b.emulator.faults.waiting.clear()
    assert away.pauses() > asked
    _, said = await done(away.stack, handle)
    assert "died" in said
    assert "put away" in (await notes_of(away.stack, handle))[0]
    assert away.nothing_is_left()


@pytest.mark.soak
@pytest.mark.parametrize("answer", ["/pause$", "/connect$"])
async def test_an_answer_that_is_lost_is_asked_for_again(away: Away, answer: str) -> None:
    """What was asked for has been done: it is neither undone nor done to another sandbox."""
    if answer == "/pause$":
        await away.e2b.fault(answer, drop="after")
    handle = await waiting(away, "e2b", away.one_is_paused)
    if answer == "/connect$":
        await away.e2b.fault(answer, drop="after")
    result, said = await done(away.stack, handle)
    assert "lives" in said
    assert ((await scheduled(handle)).count("open_sandbox"), result["recoveries"]) == (1, 0)
    assert away.nothing_is_left()


@pytest.mark.soak
async def test_an_image_that_cannot_be_made_costs_a_restore(away: Away) -> None:
    """And one that cannot be removed is left to end by itself; the run is none the worse."""
    account = away.modal.emulator.account
    away.modal.emulator.faults.add("TaskSnapshotFilesystem", status=Status.UNIMPLEMENTED)
    handle = await waiting(away, "modal", away.nothing_is_left)
    away.modal.emulator.faults.add("ImageDelete", status=Status.PERMISSION_DENIED)
    await allow(away.stack, handle, 2)
    await away.stack.until(handle, 60, step=3)
    await until(away.one_is_kept, "this time it is kept")
    _, said = await done(away.stack, handle, 3)
    assert "died" in said and "cached" not in said
    assert not account.running()
    for image in list(account.kept):
        await away.modal.provider.remove_image(image)


async def test_nothing_stays_at_the_provider_when_that_is_not_wanted(away: Away) -> None:
    """`snapshots.native: false`: the sandbox is ended, and comes back from the store."""
    asked = away.pauses()
    handle = await waiting(away, "e2b", away.nothing_is_left, snapshots={"native": False})
    _, said = await done(away.stack, handle)
    assert "died" in said
    assert away.pauses() == asked, "none was asked for"
    assert (await scheduled(handle)).count("restore_workspace") >= 1


async def test_a_run_that_is_cancelled_while_its_sandbox_is_paused_leaves_nothing(away: Away) -> None:
    """A paused sandbox costs money too."""
    handle = await waiting(away, "e2b", away.one_is_paused)
    await handle.cancel()
    await until(away.nothing_is_left, "the paused sandbox is ended")


@pytest.mark.soak
async def test_a_pause_takes_a_run_over_the_end_of_a_lifetime(away: Away) -> None:
    """Where time is counted from a resume, no process is lost at the end of a lifetime, and nothing is restored."""
    agent = {"sandbox": {"provider": "e2b", "limits": {"lifetime_seconds": 10}}}
    handle = await away.stack.start("longer-than-a-lifetime", agent)
    result = await away.stack.finish(handle, 120)
    assert result["status"] == "completed"
    assert await artifact(away.stack, result, "outputs/log") == b"1\n2\n3\n4\n5\n6\n7\n8\n"
    asked = await scheduled(handle)
    assert (asked.count("open_sandbox"), asked.count("restore_workspace"), result["recoveries"]) == (1, 0, 0)
    assert asked.count("resume_sandbox") >= 1
    assert away.stack.answered(handle) == list(range(1, 10))


async def test_the_next_sandbox_is_made_of_an_image_of_the_last(away: Away) -> None:
    """Its files are looked at and not sent again, and the image is removed with it."""
    handle = await waiting(away, "modal", away.one_is_kept)
    (image,) = away.modal.emulator.account.kept
    await allow(away.stack, handle, 2)
    await away.stack.until(handle, 60, step=3)
    assert [box.asked.definition.image_id for box in away.modal.emulator.account.running()] == [image]
    _, said = await done(away.stack, handle, 3)
    assert "cached" in said, "what no snapshot holds is there, so nothing was restored"
    assert "died" in said
    note = (await notes_of(away.stack, handle))[0]
    assert "put away" in note and "Processes and sessions that were running are gone" in note
    assert away.nothing_is_left()


async def test_an_image_that_is_gone_costs_a_restore(away: Away) -> None:
    """It has ended by itself, or somebody has removed it."""
    handle = await waiting(away, "modal", away.one_is_kept)
    (image,) = away.modal.emulator.account.kept
    await away.modal.provider.remove_image(image)
    result, said = await done(away.stack, handle)
    assert "died" in said and "cached" not in said
    assert result["recoveries"] == 0
    assert away.nothing_is_left()


async def test_an_image_with_other_files_than_the_snapshot_is_not_trusted(away: Away) -> None:
    """What a process has written since the snapshot, or somebody into the image, is not the run's workspace."""
    handle = await waiting(away, "modal", away.one_is_kept)
    (files,) = away.modal.emulator.account.kept.values()
    (files / "workspace/outputs/one").write_text("ONE\n")
    (files / "workspace/outputs/more").write_text("more\n")
    result, _ = await done(away.stack, handle)
    names = [one["path"] for one in result["artifacts"]["first"]]
    assert sorted(names) == ["outputs/one", "outputs/three", "outputs/two"]
    assert away.nothing_is_left()


async def test_a_run_that_ends_while_there_is_only_an_image_removes_it(away: Away) -> None:
    """What a service keeps of somebody's files ends with the run."""
    handle = await waiting(away, "modal", away.one_is_kept)
    async with asyncio.timeout(20):  # the run hears of it a moment later
        while await sandbox_of(handle) is not None:
            await asyncio.sleep(0.05)
    await handle.cancel()
    await until(away.nothing_is_left, "the image is removed")
