"""The cache of a remote store's blobs: never wrong, never larger than allowed, never in the way."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activities.store.cache import CachedStore
from activities.store.local import LocalStore
from activities.store.port import ObjectMissing
from contracts.base import sha256_hex


class Counted(LocalStore):
    """A store that counts what is read of it."""

    reads = 0

    async def get(self, key: str) -> bytes:
        """See ObjectStore."""
        self.reads += 1
        return await super().get(key)

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        """See ObjectStore."""
        self.reads += 1
        async for chunk in super().stream(key):
            yield chunk


@pytest.fixture
def far(tmp_path: Path) -> Counted:
    """The store behind."""
    return Counted(tmp_path / "far")


@pytest.fixture
def near(far: Counted, tmp_path: Path) -> CachedStore:
    """A cache of a megabyte before it."""
    return CachedStore(far, tmp_path / "near", 1_000_000)


def key_of(data: bytes) -> str:
    """The key of a blob."""
    digest = sha256_hex(data)
    return f"blobs/{digest[:2]}/{digest}"


def copy_of(tmp_path: Path, data: bytes) -> Path:
    """Where its copy lies."""
    digest = sha256_hex(data)
    return tmp_path / "near" / digest[:2] / digest


def size_of(directory: Path) -> int:
    """The bytes of all files."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


async def read(store: CachedStore, key: str) -> bytes:
    """All that is streamed."""
    return b"".join([chunk async for chunk in store.stream(key)])


async def test_a_blob_is_fetched_once(near: CachedStore, far: Counted) -> None:
    """Whole or streamed, whichever came first."""
    for data in (b"one", b"two" * 100_000, b""):
        await far.put(key_of(data), data)
    assert [await near.get(key_of(b"one")), await read(near, key_of(b"one"))] == [b"one"] * 2
    assert [await read(near, key_of(b"two" * 100_000)), await near.get(key_of(b"two" * 100_000))] == [b"two" * 100_000] * 2
    assert [await near.get(key_of(b"")), await read(near, key_of(b""))] == [b""] * 2
    assert far.reads == 3


async def test_what_was_written_here_is_not_fetched(near: CachedStore, far: Counted) -> None:
    """The next step reads what the last one wrote."""
    await near.put(key_of(b"one"), b"one")
    assert (await near.get(key_of(b"one")), far.reads) == (b"one", 0)


@pytest.mark.parametrize("damage", [b"onf", b"on", b"onee", b""])
async def test_a_damaged_copy_is_dropped_and_fetched_again(
    near: CachedStore, far: Counted, tmp_path: Path, damage: bytes
) -> None:
    """Whatever is wrong with it; the next reader has a good one."""
    await near.put(key_of(b"one"), b"one")
    for fetch in (near.get, lambda key: read(near, key)):
        copy_of(tmp_path, b"one").write_bytes(damage)
        assert await fetch(key_of(b"one")) == b"one"
        assert copy_of(tmp_path, b"one").read_bytes() == b"one"
    assert far.reads == 2


async def test_a_damaged_object_is_not_kept(near: CachedStore, far: Counted, tmp_path: Path) -> None:
    """It is passed on as it is, for the reader to refuse; once the store is mended all is well."""
    await far.put(key_of(b"one"), b"bad")
    assert (await near.get(key_of(b"one")), await read(near, key_of(b"one"))) == (b"bad", b"bad")
    assert not copy_of(tmp_path, b"one").exists()
    await far.put(key_of(b"one"), b"one")
    assert await near.get(key_of(b"one")) == b"one"


async def test_only_blobs_are_kept(near: CachedStore, far: Counted, tmp_path: Path) -> None:
    """Records and staging change."""
    for key in ("records/aa/" + "a" * 64, "staging/x", "blobs/short"):
        await far.put(key, b"1")
        assert await near.get(key) == b"1"
        await far.put(key, b"2")
        assert (await near.get(key), await read(near, key)) == (b"2", b"2")
    assert size_of(tmp_path / "near") == 0


async def test_whether_a_blob_exists_is_asked_of_the_store(near: CachedStore, far: Counted) -> None:
    """Who believed a copy would refer to a blob that the store has lost."""
    await near.put(key_of(b"one"), b"one")
    await far.delete(key_of(b"one"))
    assert await near.head(key_of(b"one")) is None
    assert [found.key async for found in near.list("")] == []


async def test_what_is_deleted_here_is_gone(near: CachedStore) -> None:
    """The copy goes with the object."""
    await near.put(key_of(b"one"), b"one")
    await near.delete(key_of(b"one"))
    with pytest.raises(ObjectMissing):
        await near.get(key_of(b"one"))


async def test_the_cache_stays_within_its_bound(near: CachedStore, tmp_path: Path) -> None:
    """The least recently read goes first, and one blob larger than all of it is not kept."""
    blobs = [bytes([n]) * 100_000 for n in range(30)]
    for n, data in enumerate(blobs):
        await near.put(key_of(data), data)
        for kept in blobs[: n + 1]:
            if copy_of(tmp_path, kept).exists() and kept != blobs[0]:
                os.utime(copy_of(tmp_path, kept), (1000 + kept[0], 1000 + kept[0]))
        await near.get(key_of(blobs[0]))
    assert size_of(tmp_path / "near") <= 1_000_000
    assert copy_of(tmp_path, blobs[0]).exists()
    assert copy_of(tmp_path, blobs[-1]).exists()
    assert not copy_of(tmp_path, blobs[1]).exists()
    large = b"x" * 1_000_001
    await near.put(key_of(large), large)
    assert await read(near, key_of(large)) == large
    assert not copy_of(tmp_path, large).exists()


async def test_what_a_killed_writer_left_is_removed(near: CachedStore, tmp_path: Path) -> None:
    """After an hour: a younger one may still be written."""
    (tmp_path / "near/aa").mkdir(parents=True)
    old, young = tmp_path / "near/aa/.writing-1", tmp_path / "near/aa/.writing-2"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    os.utime(old, (1000, 1000))
    await near.put(key_of(b"one"), b"one")
    assert (old.exists(), young.exists()) == (False, True)


async def test_a_stream_that_is_left_or_breaks_leaves_no_copy(near: CachedStore, far: Counted, tmp_path: Path) -> None:
    """Nor a temporary file."""
    data = b"x" * (3 << 20)
    await far.put(key_of(data), data)
    stream = near.stream(key_of(data))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert size_of(tmp_path / "near") == 0


async def test_a_cache_that_cannot_be_written_costs_only_the_copies(far: Counted, tmp_path: Path) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "file").write_text("x")
    broken = CachedStore(far, tmp_path / "file" / "cache", 1_000_000)
    await broken.put(key_of(b"one"), b"one")
    assert (await broken.get(key_of(b"one")), await read(broken, key_of(b"one"))) == (b"one", b"one")
    await broken.delete(key_of(b"one"))


async def test_only_the_owner_may_look_into_the_cache(near: CachedStore, tmp_path: Path) -> None:
    """Blobs are company files and transcripts here, too."""
    await near.put(key_of(b"one"), b"one")
    assert stat.S_IMODE((tmp_path / "near").stat().st_mode) == 0o700


_READER = """
import asyncio, sys
from pathlib import Path
from activities.store.cache import CachedStore
from activities.store.local import LocalStore
from contracts.base import sha256_hex

async def main() -> None:
    store = CachedStore(LocalStore(Path(sys.argv[1])), Path(sys.argv[2]), 300_000)
    for turn in range(3):
        for n in range(40):
            data = bytes([n]) * 20_000
            key = f"blobs/{sha256_hex(data)[:2]}/{sha256_hex(data)}"
            assert await store.get(key) == data
            assert b"".join([chunk async for chunk in store.stream(key)]) == data

asyncio.run(main())
"""


async def test_processes_share_a_cache_that_is_too_small(far: Counted, tmp_path: Path) -> None:
    """Each evicts what the others read and write; none ever gets a wrong byte, and the bound holds within their slack."""
    for n in range(40):
        data = bytes([n]) * 20_000
        await far.put(key_of(data), data)
    command = [sys.executable, "-c", _READER, str(tmp_path / "far"), str(tmp_path / "near")]
    readers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(3)]
    for reader in readers:
        _, errors = reader.communicate(timeout=60)
        assert reader.returncode == 0, errors.decode()
    assert size_of(tmp_path / "near") <= 300_000 + 3 * (300_000 // 16 + 20_000)
