"""Sweeps that are raced by writers, killed in their middle, or let loose on any set of runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activities.store import guard
from activities.store.blobs import BlobStore, blob_key
from activities.store.catalogue import FORGOTTEN
from activities.store.guard import ANNOUNCEMENT, FRESH_SECONDS
from activities.store.local import LocalStore
from activities.store.removal import SweepStopped
from contracts.base import sha256_hex
from contracts.run import CheckpointChoice
from tests.sweep_support import DROP, FOREVER, HOUR, Made, World

DATA = b"the same again, a day later"
KEY = blob_key(sha256_hex(DATA))


@contextlib.contextmanager
def quick(announced: float) -> Iterator[None]:
    """Let sweeps announce for a shorter time, and writers look as much more often."""
    before = guard.ANNOUNCED_SECONDS, guard.LOOK_SECONDS
    guard.ANNOUNCED_SECONDS, guard.LOOK_SECONDS = announced, announced / 3
    try:
        yield
    finally:
        guard.ANNOUNCED_SECONDS, guard.LOOK_SECONDS = before


class Gates(LocalStore):
    """A local store that stops at chosen calls until it is let go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reached: dict[str, asyncio.Event] = {}
        self.opened: dict[str, asyncio.Event] = {}
        self.puts = 0

    def stop_at(self, call: str, key: str) -> None:
        """Stop the next such call."""
        self.reached[f"{call} {key}"], self.opened[f"{call} {key}"] = asyncio.Event(), asyncio.Event()

    async def at(self, call: str, key: str) -> None:
        """Wait until somebody stands there."""
        await asyncio.wait_for(self.reached[f"{call} {key}"].wait(), 10)

    def let(self, call: str, key: str) -> None:
        """Let go on."""
        self.opened[f"{call} {key}"].set()

    async def _pass(self, call: str, key: str) -> None:
        name = f"{call} {key}"
        if name in self.reached and not self.reached[name].is_set():
            self.reached[name].set()
            await self.opened[name].wait()

    async def put(self, key: str, data: bytes, *, create_only: bool = False, if_version: str | None = None) -> None:
        await self._pass("put", key)
        await super().put(key, data, create_only=create_only, if_version=if_version)
        self.puts += key == KEY

    async def put_stream(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        await super().put_stream(key, chunks)
        self.puts += key == KEY

    async def delete(self, key: str) -> None:
        await self._pass("delete", key)
        await super().delete(key)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A store whose calls can be stopped."""
    with quick(0.3):
        made = World(tmp_path)
        made.objects = Gates(made.store_root)
        made.blobs = BlobStore(made.objects)
        yield made


def gates(world: World) -> Gates:
    """Its store."""
    assert isinstance(world.objects, Gates)
    return world.objects


async def test_a_blob_that_is_found_is_made_young_again(world: World) -> None:
    """At most once in half an hour, however often it is put; and what is damaged by a cut is written again at once."""
    await world.blobs.put(DATA)
    world.age(FRESH_SECONDS - 60)
    await world.blobs.put(DATA)
    assert gates(world).puts == 1
    world.age(120)
    for _ in range(3):
        await world.blobs.put(DATA)
    assert gates(world).puts == 2
    found = await world.objects.head(KEY)
    assert found is not None and time.time() - found.modified < 30


@pytest.mark.parametrize("how", ["put", "put_chunks", "put_surely"])
async def test_a_blob_that_is_written_the_instant_before_it_is_removed_is_there_afterwards(world: World, how: str) -> None:
    """The sweep has looked, and is about to remove what it saw; the writer writes it; then it is removed."""
    ref = await world.blobs.put(DATA)
    world.age(25 * HOUR)
    gates(world).stop_at("delete", KEY)
    sweeping = asyncio.create_task(world.sweep(FOREVER))
    await gates(world).at("delete", KEY)
    writing = asyncio.create_task(write(world.blobs, how))
    await until(lambda: gates(world).puts == 2)
    await asyncio.sleep(0.1)
    assert not writing.done()
    gates(world).let("delete", KEY)
    await sweeping
    await writing
    assert await world.blobs.get(ref) == DATA
    assert await world.keys("sweep/") == {"sweep/clock"}


async def test_a_write_that_takes_long_notices_the_sweep_that_began_meanwhile(world: World) -> None:
    """The writer looked before the announcement, and its bytes arrive only between the sweep's last look and the removal."""
    ref = await world.blobs.put(DATA)
    world.age(25 * HOUR)
    gates(world).stop_at("put", KEY)
    gates(world).stop_at("delete", KEY)
    writing = asyncio.create_task(world.blobs.put(DATA))
    await gates(world).at("put", KEY)
    sweeping = asyncio.create_task(world.sweep(FOREVER))
    await gates(world).at("delete", KEY)
    gates(world).let("put", KEY)
    await asyncio.sleep(0.2)
    gates(world).let("delete", KEY)
    await sweeping
    await writing
    assert await world.blobs.get(ref) == DATA


async def test_a_quick_write_in_the_time_of_the_announcement_is_seen_by_the_sweep(world: World) -> None:
    """It waits for nobody."""
    ref = await world.blobs.put(DATA)
    world.age(25 * HOUR)
    plan = await world.plan(FOREVER)
    assert [info.key for info in plan.remove["blobs"]] == [KEY]
    await world.blobs.put(b"something else, so that the writer has just looked")
    sweeping = asyncio.create_task(world.sweep(FOREVER))
    await until(lambda: (world.store_root / ANNOUNCEMENT).exists())
    began = time.monotonic()
    await world.blobs.put(DATA)
    assert time.monotonic() - began < 0.25
    await sweeping
    assert await world.blobs.get(ref) == DATA


async def test_the_announcement_of_a_sweep_that_was_killed_holds_nobody_up_for_ever(world: World) -> None:
    """A writer waits while it may be true; another sweep refuses; after ten minutes neither does."""
    ref = await world.blobs.put(DATA)
    world.age(25 * HOUR)
    await world.objects.put(ANNOUNCEMENT, KEY.encode())
    writing = asyncio.create_task(BlobStore(world.objects).put(DATA))
    await until(lambda: gates(world).puts == 2)
    await asyncio.sleep(0.5)
    assert not writing.done()
    garbage = await world.blobs.put(b"garbage")
    os.utime(world.room.blob(garbage.digest), (0, 0))
    with pytest.raises(SweepStopped, match="another sweep of this store is removing objects"):
        await world.sweep(FOREVER)
    world.age(11 * 60)
    await asyncio.wait_for(writing, 5)
    await world.sweep(FOREVER)
    assert await world.keys("blobs/") == {KEY}
    assert await world.blobs.get(ref) == DATA


async def test_many_writers_and_sweeps_at_once(world: World) -> None:
    """Whatever comes of a put is there when the put has returned, and as long as a grace afterwards."""
    dice = random.Random(5)
    contents = [f"content {n}".encode() * 9 for n in range(30)]
    for data in contents:
        await world.blobs.put(data)
    world.age(30 * HOUR)
    over = asyncio.Event()

    async def writer(data: bytes) -> None:
        """Write one content again and again, which nobody else does: whoever makes it old gives it away."""
        blobs, key = BlobStore(world.objects), blob_key(sha256_hex(data))
        while not over.is_set():
            ref = await blobs.put(data)
            for _ in range(5):
                assert await blobs.get(ref) == data
                await asyncio.sleep(0.03)
            os.utime(world.store_root / key, (0, 0))
            await asyncio.sleep(dice.random() / 5)

    tasks = [asyncio.create_task(writer(data)) for data in contents]
    removed = 0
    for _ in range(8):
        await asyncio.sleep(0.2)
        removed += len((await world.sweep(FOREVER)).remove["blobs"])
    over.set()
    await asyncio.gather(*tasks)
    assert removed > 10


async def write(blobs: BlobStore, how: str) -> None:
    """Write DATA in one of the ways there are."""

    async def chunks() -> AsyncIterator[bytes]:
        yield DATA

    match how:
        case "put":
            await blobs.put(DATA)
        case "put_chunks":
            await blobs.put_chunks("name", chunks())
        case _:
            ref = await BlobStore(blobs.objects, "elsewhere").put(DATA)
            await blobs.put_surely(ref, DATA)


async def until(condition: Any) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


class Killed(BaseException):
    """The process ends here."""


class Mortal(LocalStore):
    """A local store whose process dies after so many removals and records that were moved."""

    left = 1_000_000

    async def delete(self, key: str) -> None:
        await super().delete(key)
        self._live()

    async def put(self, key: str, data: bytes, *, create_only: bool = False, if_version: str | None = None) -> None:
        await super().put(key, data, create_only=create_only, if_version=if_version)
        if key.startswith(FORGOTTEN):
            self._live()

    def _live(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


async def test_a_sweep_that_is_killed_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    """After any removal and any record that is moved; nothing that is kept is ever gone, and in the end all else is."""
    with quick(0), contextlib.ExitStack() as stack:
        died = 0
        for left in range(1, 60, 2):
            memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
            world = World(tmp_path / str(left), Path(memory))
            world.objects = mortal = Mortal(world.store_root)
            world.blobs = BlobStore(mortal)
            kept = await world.ended("kept", steps=1)
            await world.ended("dropped", {"keep": "no"}, days_ago=9, steps=2)
            trimmed = await world.ended("trimmed", {"trim": "yes"}, steps=3)
            rules = [*DROP, {"label": {"trim": "yes"}, "keep": "forever", "checkpoints": 1}]
            mortal.left = left
            for _ in range(4):
                world.age(2 * HOUR)
                try:
                    await world.sweep(rules)
                except Killed:
                    died += 1
                await world.is_whole(kept)
            await world.is_whole(trimmed, {3})
            assert await world.keys("blobs/") == await world.needed()
            assert await world.keys("sweep/") == {"sweep/clock"}
            if mortal.left > 0:
                break
        assert died == left // 2 > 8


RUN = st.fixed_dictionaries(
    {
        "labels": st.dictionaries(st.sampled_from(["team", "kind"]), st.sampled_from(["a", "b"]), max_size=2),
        "steps": st.lists(
            st.dictionaries(st.sampled_from(["f", "g", "d/h", "d/e/i"]), st.none() | st.integers(0, 3), max_size=3), max_size=3
        ),
        "origin": st.none() | st.tuples(st.integers(0, 9), st.integers(0, 3)),
        "ending": st.sampled_from(["ended", "ended", "ended", "terminated", "open"]),
        "days_ago": st.sampled_from([0, 2, 5, 40]),
    }
)
RULE = st.fixed_dictionaries(
    {"keep": st.sampled_from(["forever", {"days": 3}, {"days": 30}, {"last": 1}, {"last": 2}])},
    optional={
        "label": st.dictionaries(st.sampled_from(["team", "kind"]), st.sampled_from(["a", "b"]), min_size=1, max_size=1),
        "checkpoints": st.integers(1, 2),
    },
)


@settings(max_examples=25, deadline=None)
@given(st.lists(RUN, min_size=1, max_size=6), st.lists(RULE, max_size=3))
async def test_any_runs_under_any_policy(drawn: list[dict[str, Any]], rules: list[dict[str, Any]]) -> None:
    """Each checkpoint that is left comes back byte for byte; open runs and those no rule fits are whole; nothing else is left."""
    with (
        quick(0),
        tempfile.TemporaryDirectory(dir="/dev/shm") as root,
        tempfile.TemporaryDirectory(dir="/dev/shm") as store,
    ):
        world = World(Path(root), Path(store))
        runs: list[Made] = []
        waiting: list[tuple[Made, Made, int]] = []
        for number, one in enumerate(drawn):
            await make(world, runs, waiting, number, one)
        for _ in range(3):
            world.age(2 * HOUR)
            await world.sweep(rules)
        await check(world, runs, waiting, drawn, rules)


async def make(world: World, runs: list[Made], waiting: list[tuple[Made, Made, int]], number: int, one: dict[str, Any]) -> None:
    """Make one run: with steps of its own, or waiting for its first after a checkpoint of another."""
    able = [run for run in runs if run.checkpoints]
    origin = None
    if one["origin"] is not None and able:
        origin = able[one["origin"][0] % len(able)]
        step = sorted(origin.checkpoints)[one["origin"][1] % len(origin.checkpoints)]
        choice = CheckpointChoice(run_id=origin.start.run_id, step=step)
    # A worker that starts a run finds what the store has long had.
    world.age(3 * HOUR)
    run = await world.begin(f"run-{number}", one["labels"], choice if origin else None)
    runs.append(run)
    if origin is not None and one["steps"]:
        # As a worker does: the origin's workspace, then its checkpoint as the fork's own first.
        first = origin.checkpoints[step]
        if first.snapshot is not None:
            await world.room.restore(first.snapshot, run.place)
        await world.write_down(run, first)
    elif origin is not None:
        waiting.append((run, origin, step))
    for files in one["steps"]:
        await world.step(run, {name: None if seed is None else bytes([seed]) * 700 for name, seed in files.items()}, str(number))
    if one["ending"] == "ended":
        await world.end(run, one["days_ago"], f"artifact {number % 2}".encode())
    elif one["ending"] == "terminated":
        world.close(run)
    await world.blobs.put(f"garbage {number}".encode())


async def check(
    world: World,
    runs: list[Made],
    waiting: list[tuple[Made, Made, int]],
    drawn: list[dict[str, Any]],
    rules: list[dict[str, Any]],
) -> None:
    """Compare what is left with what was made."""
    left = {start.run_id async for start in world.checkpoints.runs()}
    for run, one in zip(runs, drawn, strict=True):
        fitting = [rule for rule in rules if rule.get("label", {}).items() <= one["labels"].items()]
        must_be_whole = one["ending"] == "open" or not fitting
        if run.start.run_id in left:
            steps = set(await world.checkpoints.steps_of(run.start))
            assert not run.checkpoints or max(run.checkpoints) in steps
            await world.is_whole(run, None if must_be_whole else steps)
        else:
            assert not must_be_whole
            assert isinstance(fitting[0]["keep"], dict)
    for fork, origin, step in waiting:
        if (fork.start.run_id, "c") in world.temporal.open:
            await world.comes_back(origin, step, origin.checkpoints[step])
    blobs, needed = await world.keys("blobs/"), await world.needed()
    assert needed <= blobs
    if not world.temporal.open:
        assert blobs == needed
        assert await world.keys("sweep/") == {"sweep/clock"}
