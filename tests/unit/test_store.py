"""The object store in a local directory, and blobs, records and text on top of it."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.store.port import ObjectChanged, ObjectDamaged, ObjectExists, ObjectMissing, StoreError, StoreUnavailable
from contracts.base import sha256_hex
from contracts.blob import INLINE_LIMIT, BlobRef, Text, preview_of, whole_characters


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store of its own."""
    return LocalStore(tmp_path / "store")


@pytest.fixture
def blobs(store: LocalStore) -> BlobStore:
    """Blobs in it."""
    return BlobStore(store)


async def chunks(*parts: bytes, fault: Exception | None = None) -> AsyncIterator[bytes]:
    """A stream, which may break off."""
    for part in parts:
        yield part
    if fault is not None:
        raise fault


async def keys(store: LocalStore, prefix: str = "") -> list[str]:
    """All keys that start so."""
    return [found.key async for found in store.list(prefix)]


async def size_of(store: LocalStore, key: str) -> int | None:
    """The size that the store tells."""
    found = await store.head(key)
    return None if found is None else found.size


def files(store_root: Path) -> list[str]:
    """Every file there is, whatever its name."""
    return sorted(path.relative_to(store_root).as_posix() for path in store_root.rglob("*") if path.is_file())


def file_of(root: Path, ref: BlobRef) -> Path:
    """Where a blob lies."""
    return root / "store" / "blobs" / ref.digest[:2] / ref.digest


async def test_what_was_put_is_got(store: LocalStore) -> None:
    """Byte for byte, with its size."""
    await store.put("a/b", b"\0\xff")
    assert (await store.get("a/b"), await size_of(store, "a/b")) == (b"\0\xff", 2)


async def test_a_later_put_replaces_and_leaves_no_temporary_file(store: LocalStore, tmp_path: Path) -> None:
    """A key holds the last whole object."""
    await store.put("a", b"1")
    await store.put("a", b"22")
    assert (await store.get("a"), files(tmp_path)) == (b"22", ["store/a"])


async def test_only_the_owner_may_look_into_the_store(tmp_path: Path) -> None:
    """Transcripts and company files are nobody else's."""
    LocalStore(tmp_path / "made")
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700


async def test_a_missing_object_is_missing_in_every_way(store: LocalStore) -> None:
    """Reading raises, the size is None, deleting is no error."""
    with pytest.raises(ObjectMissing, match="no object a/b"):
        await store.get("a/b")
    with pytest.raises(ObjectMissing):
        [chunk async for chunk in store.stream("a/b")]
    assert await store.head("a/b") is None
    await store.delete("a/b")


async def test_a_stream_that_breaks_off_leaves_nothing(store: LocalStore, tmp_path: Path) -> None:
    """A reader never sees half an object, and what was there stays."""
    await store.put("a", b"old")
    with pytest.raises(ValueError, match="cut"):
        await store.put_stream("a", chunks(b"new", b"er", fault=ValueError("cut")))
    assert (await store.get("a"), files(tmp_path)) == (b"old", ["store/a"])


async def test_a_write_that_fails_leaves_what_was_there(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is said to be one, and costs no object."""
    await store.put("a", b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(StoreUnavailable, match="object a: No space left on device"):
        await store.put("a", b"new")
    assert (await store.get("a"), files(tmp_path)) == (b"old", ["store/a"])


async def test_one_of_many_create_only_puts_wins(store: LocalStore) -> None:
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


async def test_a_put_replaces_only_the_version_it_names(store: LocalStore) -> None:
    """Of many writers that all saw one version, one wins; the rest are told."""
    await store.put("head", b"0")
    seen = await store.head("head")
    assert seen is not None

    async def put(n: int) -> int | None:
        try:
            await store.put("head", b"%d" % n, if_version=seen.version)
        except ObjectChanged:
            return None
        return n

    won = [n for n in await asyncio.gather(*(put(n) for n in range(1, 20))) if n is not None]
    assert [await store.get("head")] == [b"%d" % n for n in won]


async def test_a_range_is_read_alone(store: LocalStore) -> None:
    """From where it is asked, and no further than the object goes."""
    await store.put("a", b"0123456789")
    assert await store.get_range("a", 3, 4) == b"3456"
    assert await store.get_range("a", 8, 10) == b"89"
    with pytest.raises(ObjectMissing):
        await store.get_range("b", 0, 1)


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "a/", "a//b", "..", "a/../b", "../x", "./a", "a/.", "a\0b", "a b", "a\n", "\n", "ä", "a\\b", "~"]
)
async def test_a_key_that_could_leave_the_store_is_refused(store: LocalStore, tmp_path: Path, key: str) -> None:
    """Every operation checks it, and nothing is written."""
    with pytest.raises(StoreError, match="object key"):
        await store.put(key, b"x")
    with pytest.raises(StoreError, match="object key"):
        await store.get(key)
    with pytest.raises(StoreError, match="object key"):
        await store.delete(key)
    assert files(tmp_path) == []


async def test_keys_are_listed_by_prefix_in_order(store: LocalStore) -> None:
    """What is still being written is no object."""
    for key in ("b/2", "b/1", "a/1", "c"):
        await store.put(key, b"")
    assert (await keys(store), await keys(store, "b/")) == (["a/1", "b/1", "b/2", "c"], ["b/1", "b/2"])


async def test_a_store_that_cannot_be_made_says_where(tmp_path: Path) -> None:
    """A file in its place is told with a remedy."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnavailable, match=r"store directory .*/file: .*; make it writable or name another"):
        LocalStore(tmp_path / "file")


async def test_equal_bytes_are_stored_once(blobs: BlobStore, store: LocalStore) -> None:
    """A blob is named by its digest."""
    one, other = await blobs.put(b"same"), await blobs.put(b"same")
    assert one == other == BlobRef(digest=sha256_hex(b"same"), size=4)
    assert len(await keys(store, "blobs/")) == 1


@pytest.mark.parametrize(
    "damage", [lambda data: bytes([data[0] ^ 1]) + data[1:], lambda data: data[:-1], lambda data: data + b"x"]
)
async def test_a_damaged_blob_is_never_returned(blobs: BlobStore, tmp_path: Path, damage: object) -> None:
    """One flipped bit, one byte less and one more are each noticed, whole or streamed."""
    ref = await blobs.put(b"the true bytes")
    path = file_of(tmp_path, ref)
    assert callable(damage)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ObjectDamaged, match=ref.digest):
        await blobs.get(ref)
    with pytest.raises(ObjectDamaged, match=ref.digest):
        [chunk async for chunk in blobs.stream(ref)]


async def test_a_blob_of_another_length_is_written_again(blobs: BlobStore, tmp_path: Path) -> None:
    """What a crash of the disk cut short does not stay for ever under a good name."""
    ref = await blobs.put(b"the true bytes")
    file_of(tmp_path, ref).write_bytes(b"the")
    assert await blobs.get(await blobs.put(b"the true bytes")) == b"the true bytes"


async def test_a_stream_becomes_one_blob_and_leaves_no_staging(blobs: BlobStore, store: LocalStore) -> None:
    """Its name is the digest of all its chunks."""
    ref = await blobs.put_chunks("run/file", chunks(b"ab", b"", b"cd"))
    assert ref == BlobRef(digest=sha256_hex(b"abcd"), size=4)
    assert [chunk async for chunk in blobs.stream(ref)] == [b"abcd"]
    assert await keys(store, "staging/") == []


async def test_a_stream_that_breaks_off_becomes_no_blob(blobs: BlobStore, store: LocalStore) -> None:
    """A partial artifact is never stored."""
    with pytest.raises(ValueError, match="cut"):
        await blobs.put_chunks("run/file", chunks(b"ab", fault=ValueError("cut")))
    assert await keys(store) == []


async def test_the_first_value_of_a_record_stays(blobs: BlobStore) -> None:
    """Two attempts of one activity go on with the same value."""
    both = await asyncio.gather(blobs.put_record("call/1", {"n": 1}), blobs.put_record("call/1", {"n": 2}))
    assert both[0] == both[1] == await blobs.get_record("call/1")
    assert await blobs.get_record("call/2") is None


@pytest.mark.parametrize("name", ["../../etc", "Läufe/ラン", "a\nb", "x" * 5000, ""])
async def test_a_record_may_have_any_name(blobs: BlobStore, store: LocalStore, name: str) -> None:
    """Names hold run ids, which people choose freely."""
    await blobs.put_record(name, [name])
    assert await blobs.get_record(name) == [name]
    assert all(key.startswith("records/") for key in await keys(store))


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec=None)))
async def test_any_text_is_held_and_can_travel(blobs: BlobStore, text: str) -> None:
    """Also one that no UTF-8 can hold, which would end the activity that returns it."""
    held = await blobs.put_text(text)
    assert Text.model_validate_json(held.model_dump_json()) == held
    assert await blobs.get_text(held) == await blobs.get_text(held.reference()) == whole_characters(text)


@pytest.mark.parametrize(
    ("length", "inline", "stored"),
    [(0, True, False), (256, True, False), (257, True, True), (INLINE_LIMIT, True, True), (INLINE_LIMIT + 1, False, True)],
)
async def test_where_a_text_is_held_follows_from_its_length(blobs: BlobStore, length: int, inline: bool, stored: bool) -> None:
    """Short text stays in history, long text leaves it, what lies between is both."""
    held = await blobs.put_text("x" * length)
    assert (held.inline is not None, held.blob is not None) == (inline, stored)


async def test_the_length_of_a_text_is_counted_in_bytes(blobs: BlobStore) -> None:
    """History holds bytes, not characters."""
    assert (await blobs.put_text("漢" * (INLINE_LIMIT // 3 + 1))).inline is None


@given(st.text(max_size=2000), st.integers(20, 400))
def test_a_preview_is_bounded_and_keeps_both_ends(text: str, limit: int) -> None:
    """A short text is its own preview."""
    shown = preview_of(text, limit)
    assert len(shown) <= limit + 40
    assert shown == text or (shown.startswith(text[: limit // 2]) and shown.endswith(text[-(limit // 2) :]))
