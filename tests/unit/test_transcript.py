"""The transcript: an append-only chain that is read in few reads, and says when it is damaged."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activities.model.transcript import SEGMENT_CAP, Entry, TranscriptStore
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.store.port import ObjectDamaged, ObjectMissing
from contracts.blob import BlobRef


class CountingStore(LocalStore):
    """A store that counts its reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: Counter[str] = Counter()

    async def get(self, key: str) -> bytes:
        self.reads[key.partition("/")[0]] += 1
        return await super().get(key)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    """A store of its own."""
    return CountingStore(tmp_path)


def entry(step: int, text: str = "") -> Entry:
    """What a person said at a step."""
    return Entry(step, "user", {"type": "message", "role": "user", "content": f"{step} {text}"})


def fresh(store: LocalStore) -> TranscriptStore:
    """The transcripts as a process that has just started sees them."""
    return TranscriptStore(BlobStore(store))


async def written(store: LocalStore, sizes: list[int], text: str = "") -> tuple[BlobRef, list[Entry]]:
    """Append steps of so many entries each; return the head and all entries."""
    transcripts, head, everything = fresh(store), None, list[Entry]()
    for step, size in enumerate(sizes, start=1):
        new = tuple(entry(step, f"{n} {text}") for n in range(size))
        head = await transcripts.append(head, new, {"step": step})
        everything.extend(new)
    assert head is not None
    return head, everything


def head_of(ref: BlobRef, root: Path) -> dict[str, Any]:
    """A head as stored."""
    value: dict[str, Any] = json.loads((root / "blobs" / ref.digest[:2] / ref.digest).read_bytes())
    return value


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=30))
async def test_what_was_appended_is_loaded_in_order(tmp_path: Path, sizes: list[int]) -> None:
    """Whatever the segments were merged into."""
    store = LocalStore(tmp_path)
    head, everything = await written(store, sizes)
    assert list(await fresh(store).load(head)) == everything


async def test_no_head_is_an_empty_transcript(store: CountingStore) -> None:
    """A run that has not begun has nothing to load."""
    assert await fresh(store).load(None) == ()
    assert not store.reads


async def test_a_thousand_steps_are_read_in_about_ten_reads(store: CountingStore) -> None:
    """A fresh process reads O(log n) segments, and the head."""
    head, _ = await written(store, [1] * 1000)
    store.reads.clear()
    await fresh(store).load(head)
    assert store.reads.total() <= 2 + math.ceil(math.log2(1000))


async def test_a_step_in_the_same_process_reads_nothing(store: CountingStore) -> None:
    """The last transcripts stay in memory."""
    transcripts = fresh(store)
    head = await transcripts.append(None, (entry(1),), None)
    head = await transcripts.append(head, (entry(2),), None)
    assert len(await transcripts.load(head)) == 2
    assert not store.reads


async def test_memory_holds_only_the_last_transcripts(store: CountingStore) -> None:
    """An older one is read again, and is the same."""
    transcripts = TranscriptStore(BlobStore(store), capacity=2)
    heads = [await transcripts.append(None, (entry(n),), None) for n in range(3)]
    assert [await transcripts.load(head) for head in heads] == [(entry(n),) for n in range(3)]
    assert store.reads.total() >= 2


async def test_large_segments_are_not_rewritten(store: CountingStore, tmp_path: Path) -> None:
    """Above the cap a segment stays as it is, so that a long transcript costs what is new."""
    half = "x" * (SEGMENT_CAP // 2 + 100)
    head, everything = await written(store, [1] * 6, half)
    assert len(head_of(head, tmp_path)["segments"]) == 6
    assert list(await fresh(store).load(head)) == everything


async def test_appending_again_gives_the_same_head(store: CountingStore) -> None:
    """A retried activity writes nothing new."""
    first = await fresh(store).append(None, (entry(1),), {"response_id": "r"})
    assert await fresh(store).append(None, (entry(1),), {"response_id": "r"}) == first


async def test_heads_form_a_chain(store: CountingStore, tmp_path: Path) -> None:
    """Each names the one before it, and what is recorded of its model call."""
    transcripts = fresh(store)
    first = await transcripts.append(None, (entry(1),), {"response_id": "a"})
    second = await transcripts.append(first, (entry(2),), {"response_id": "b"})
    stored = [head_of(ref, tmp_path) for ref in (first, second)]
    assert [one["previous"] for one in stored] == [None, first.digest]
    assert [one["call"] for one in stored] == [{"response_id": "a"}, {"response_id": "b"}]


async def test_a_run_may_be_continued_in_two_ways(store: CountingStore) -> None:
    """An earlier head stays what it was, so that a fork does not disturb the run it came from."""
    transcripts = fresh(store)
    base = await transcripts.append(None, (entry(1),), None)
    left = await transcripts.append(base, (entry(2, "left"),), None)
    right = await transcripts.append(base, (entry(2, "right"),), None)
    loaded = [await fresh(store).load(head) for head in (base, left, right)]
    assert loaded == [(entry(1),), (entry(1), entry(2, "left")), (entry(1), entry(2, "right"))]


async def test_a_damaged_segment_is_named(store: CountingStore, tmp_path: Path) -> None:
    """A transcript is never read with something else in it."""
    head, _ = await written(store, [3])
    (segment,) = head_of(head, tmp_path)["segments"]
    path = tmp_path / "blobs" / segment["digest"][:2] / segment["digest"]
    path.write_bytes(path.read_bytes().replace(b"user", b"root"))
    with pytest.raises(ObjectDamaged, match=segment["digest"]):
        await fresh(store).load(head)


async def test_a_missing_segment_is_named(store: CountingStore, tmp_path: Path) -> None:
    """A transcript with a gap is not loaded."""
    head, _ = await written(store, [3])
    (segment,) = head_of(head, tmp_path)["segments"]
    (tmp_path / "blobs" / segment["digest"][:2] / segment["digest"]).unlink()
    with pytest.raises(ObjectMissing, match=segment["digest"]):
        await fresh(store).load(head)


async def test_a_head_whose_count_is_wrong_is_damaged(store: CountingStore, tmp_path: Path) -> None:
    """Each blob may be whole while the chain is not."""
    blobs = BlobStore(store)
    head, _ = await written(store, [3])
    forged = await blobs.put_json({**head_of(head, tmp_path), "count": 4})
    with pytest.raises(ObjectDamaged, match="3 entries found of 4"):
        await TranscriptStore(blobs).load(forged)
