"""What every store does, on every store: the port's docstrings, one by one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator

import pytest

from activities.store.blobs import BlobStore
from activities.store.port import ObjectChanged, ObjectExists, ObjectMissing, ObjectStore, StoreError
from activities.store.remote import PIECE


async def chunks(*parts: bytes, fault: Exception | None = None) -> AsyncIterator[bytes]:
    """A stream, which may break off."""
    for part in parts:
        yield part
    if fault is not None:
        raise fault


async def read(store: ObjectStore, key: str) -> bytes:
    """All that is streamed."""
    return b"".join([chunk async for chunk in store.stream(key)])


async def keys(store: ObjectStore, prefix: str = "") -> list[str]:
    """All keys that start so."""
    return [found.key async for found in store.list(prefix)]


@pytest.mark.parametrize("data", [b"", b"\0\xff\r\n", b"x" * 100_000])
async def test_what_was_put_is_got(store: ObjectStore, data: bytes) -> None:
    """Byte for byte, whole or streamed."""
    await store.put("a/b", data)
    assert (await store.get("a/b"), await read(store, "a/b")) == (data, data)


async def test_the_head_tells_size_time_and_version(store: ObjectStore) -> None:
    """The version is another after each change; the listing tells the same."""
    await store.put("a/b", b"123")
    first = await store.head("a/b")
    await store.put("a/b", b"4567")
    second = await store.head("a/b")
    assert first is not None
    assert second is not None
    assert (first.key, first.size, second.size) == ("a/b", 3, 4)
    assert abs(second.modified - time.time()) < 5
    assert first.version != second.version
    assert [(found.key, found.size, found.version) async for found in store.list("")] == [("a/b", 4, second.version)]


async def test_a_missing_object_is_missing_in_every_way(store: ObjectStore) -> None:
    """Reading raises and names the key, the head is None, deleting is no error, twice."""
    with pytest.raises(ObjectMissing, match="a/b"):
        await store.get("a/b")
    with pytest.raises(ObjectMissing, match="a/b"):
        await store.get_range("a/b", 0, 1)
    with pytest.raises(ObjectMissing, match="a/b"):
        await read(store, "a/b")
    with pytest.raises(ObjectMissing, match="a/b"):
        await store.put("a/b", b"x", if_version="1")
    assert await store.head("a/b") is None
    await store.delete("a/b")
    await store.delete("a/b")


async def test_what_was_deleted_is_missing(store: ObjectStore) -> None:
    """At once, for reading, listing and create-only."""
    await store.put("a", b"1")
    await store.delete("a")
    assert (await store.head("a"), await keys(store)) == (None, [])
    await store.put("a", b"2", create_only=True)
    assert await store.get("a") == b"2"


async def test_a_create_only_put_leaves_what_is_there(store: ObjectStore) -> None:
    """It says that the key is taken, and names it."""
    await store.put("a/b", b"first", create_only=True)
    with pytest.raises(ObjectExists, match="a/b"):
        await store.put("a/b", b"second", create_only=True)
    assert await store.get("a/b") == b"first"


async def test_one_of_twenty_create_only_puts_wins(store: ObjectStore) -> None:
    """Whoever comes second is told so, and the first bytes stay whole."""

    async def put(n: int) -> int | None:
        try:
            await store.put("record", str(n).encode() * 10_000, create_only=True)
        except ObjectExists:
            return None
        return n

    won = [n for n in await asyncio.gather(*(put(n) for n in range(20))) if n is not None]
    assert len(won) == 1
    assert await store.get("record") == str(won[0]).encode() * 10_000


async def test_of_many_writers_that_saw_one_version_one_replaces_it(store: ObjectStore) -> None:
    """The rest are told, and none of them is lost without a word."""
    await store.put("head", b"0")
    seen = await store.head("head")
    assert seen is not None

    async def put(n: int) -> int | None:
        try:
            await store.put("head", b"%d" % n, if_version=seen.version)
        except ObjectChanged:
            return None
        return n

    won = [n for n in await asyncio.gather(*(put(n) for n in range(1, 9))) if n is not None]
    assert [await store.get("head")] == [b"%d" % n for n in won]


async def test_a_stale_version_changes_nothing(store: ObjectStore) -> None:
    """Nor does one that the store never gave."""
    await store.put("a", b"1")
    seen = await store.head("a")
    assert seen is not None
    await store.put("a", b"22")
    for version in (seen.version, "never-given"):
        with pytest.raises(ObjectChanged):
            await store.put("a", b"333", if_version=version)
    assert await store.get("a") == b"22"


async def test_a_range_is_read_alone(store: ObjectStore) -> None:
    """From where it is asked, and no further than the object goes."""
    await store.put("a", b"0123456789")
    spans = [(0, 3), (3, 4), (8, 10), (9, 1), (10, 5), (50, 1), (4, 0)]
    assert [await store.get_range("a", *span) for span in spans] == [b"012", b"3456", b"89", b"9", b"", b"", b""]
    await store.put("empty", b"")
    assert await store.get_range("empty", 0, 5) == b""


@pytest.mark.parametrize("size", [0, PIECE, PIECE + 1, 2 * PIECE])
async def test_a_stream_of_any_size_becomes_one_object(store: ObjectStore, size: int) -> None:
    """Around the size of a part, where an upload is begun and where its last part is full."""
    data = os.urandom(size)
    await store.put_stream("a/b", chunks(data[: size // 3], b"", data[size // 3 :]))
    found = await store.head("a/b")
    assert found is not None
    assert found.size == size
    assert await read(store, "a/b") == data


async def test_a_stream_replaces_what_was_there(store: ObjectStore) -> None:
    """As a put does."""
    await store.put("a", b"old")
    await store.put_stream("a", chunks(b"n" * (PIECE + 5)))
    assert await store.get("a") == b"n" * (PIECE + 5)


@pytest.mark.parametrize("size", [5, PIECE + 5])
async def test_a_stream_that_breaks_off_leaves_what_was_there(store: ObjectStore, size: int) -> None:
    """A reader never sees half an object, also when parts had been sent."""
    await store.put("a", b"old")
    with pytest.raises(ValueError, match="cut"):
        await store.put_stream("a", chunks(b"n" * size, fault=ValueError("cut")))
    with pytest.raises(ValueError, match="cut"):
        await store.put_stream("b", chunks(b"n" * size, fault=ValueError("cut")))
    assert (await store.get("a"), await keys(store)) == (b"old", ["a"])


async def test_a_cancelled_stream_leaves_nothing(store: ObjectStore) -> None:
    """A run that is stopped while it uploads."""
    sent = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"n" * (PIECE + 5)
        sent.set()
        await asyncio.sleep(60)

    upload = asyncio.create_task(store.put_stream("a", endless()))
    await sent.wait()
    upload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upload
    assert await keys(store) == []


async def test_keys_are_listed_in_order(store: ObjectStore) -> None:
    """By the values of their bytes. (SeaweedFS would put `b-3` after `b/1`, folder by folder; S3 itself does not.)"""
    for key in ("b/2", "b/1", "a/1", "c", "B"):
        await store.put(key, b"")
    assert await keys(store) == ["B", "a/1", "b/1", "b/2", "c"]


async def test_keys_are_listed_by_prefix(store: ObjectStore) -> None:
    """A prefix is text, not a directory."""
    for key in ("b/2", "b/1", "a/1", "b-3"):
        await store.put(key, b"")
    assert [sorted(await keys(store, prefix)) for prefix in ("b/", "b", "x")] == [["b/1", "b/2"], ["b-3", "b/1", "b/2"], []]


async def test_a_key_that_could_leave_the_store_is_refused(store: ObjectStore) -> None:
    """Every operation checks it, and nothing is written."""
    bad = [
        "",
        "/etc/passwd",
        "a/",
        "a//b",
        "..",
        "a/../b",
        "../x",
        "./a",
        "a/.",
        "a\0b",
        "a b",
        "a\n",
        "\n",
        "ä",
        "a\\b",
        "~",
        "a%2fb",
    ]
    for key in bad:
        for operation in (
            store.put(key, b"x"),
            store.put_stream(key, chunks(b"x")),
            store.get(key),
            store.get_range(key, 0, 1),
            read(store, key),
            store.head(key),
            store.delete(key),
        ):
            with pytest.raises(StoreError, match="object key"):
                await operation
    assert await keys(store) == []


async def test_blobs_records_and_staging_work_on_it(store: ObjectStore) -> None:
    """What Caisson does with a store."""
    blobs = BlobStore(store)
    ref = await blobs.put_chunks("run/file", chunks(b"ab", b"cd"))
    assert await blobs.get(ref) == b"abcd"
    both = await asyncio.gather(blobs.put_record("call/1", {"n": 1}), blobs.put_record("call/1", {"n": 2}))
    assert both[0] == both[1] == await blobs.get_record("call/1")
    assert await keys(store, "staging/") == []
