"""Objects as files: which keys there may be, and what a prefix reaches. On listings of our own: no server has odd ones."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from temporalio.exceptions import ApplicationError

from activities.governance.secrets import Secrets
from activities.store.port import ObjectChanged, StoreUnavailable
from activities.store.remote import Calls
from activities.store.source import SourceObject
from activities.workspace import fetch, lazy
from activities.workspace.fetch_tree import check_name
from activities.workspace.sources.port import Found
from contracts.base import BadInput
from contracts.manifest import Manifest
from tests.manifest_support import Desk, files_of


class Objects:
    """A SourceBucket of these objects. It lists everything that starts with a prefix, in the order given."""

    def __init__(self, objects: dict[str, bytes], sizes: dict[str, int] | None = None) -> None:
        self.objects = objects
        self.sizes = sizes or {}
        self.read: list[str] = []
        self.faults = 0

    async def list(self, prefix: str) -> AsyncIterator[SourceObject]:
        """See SourceBucket."""
        for key, data in self.objects.items():
            if key.startswith(prefix):
                yield SourceObject(key, self.sizes.get(key, len(data)), 1.0, f"v{data.hex()[:40]}")

    async def stream(self, key: str, version: str, offset: int = 0) -> AsyncIterator[bytes]:
        """See SourceBucket."""
        self.read.append(key)
        data = self.objects[key]
        if version != f"v{data.hex()[:40]}":
            raise ObjectChanged(f"fake://{key}: is another version now; read it again")
        if self.faults:
            self.faults -= 1
            yield data[offset : offset + 1]
            raise StoreUnavailable(f"fake://{key}: the connection failed; try again")
        for at in range(offset, len(data), 1 << 20):
            yield data[at : at + (1 << 20)]

    async def upload(self, key: str, chunks: AsyncIterator[bytes], *, overwrite: bool) -> None:
        """See SourceBucket."""
        raise NotImplementedError

    async def presign(self, key: str, seconds: int) -> str:
        """See SourceBucket."""
        return f"https://files.example.com/{key}?sig={seconds}"

    def close(self) -> None:
        """See OpenBucket."""


class Shelf(Desk):
    """A desk whose buckets are all this one."""

    bucket: Objects


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """A tools worker."""
    shelf = Shelf(tmp_path)
    monkeypatch.setattr(fetch, "open_bucket", lambda entry, secrets: shelf.bucket)
    monkeypatch.setattr(lazy, "open_bucket", lambda entry, secrets: shelf.bucket)
    return shelf


def bucket(prefix: str, **fields: Any) -> dict[str, Any]:
    """A bucket entry."""
    return {"type": "s3", "bucket": "claims", "prefix": prefix, **({"allow_whole_bucket": True} if not prefix else {}), **fields}


async def taken(shelf: Shelf, objects: dict[str, bytes], prefix: str, **fields: Any) -> dict[str, bytes | None]:
    """What an entry makes of objects."""
    shelf.bucket = Objects(objects)
    return await shelf.entries(**{"in": bucket(prefix, **fields)})


async def refusal(shelf: Shelf, objects: dict[str, bytes], prefix: str, agent: Any = None, **fields: Any) -> str:
    """How an entry is refused; nothing was read, and nothing is left."""
    shelf.bucket = Objects(objects, fields.pop("sizes", None))
    with pytest.raises(ApplicationError) as caught:
        await shelf.fetch({"entries": {"in": bucket(prefix, **fields)}}, **(agent or {}))
    assert caught.value.type == "BadInput"
    assert caught.value.message.startswith("manifest.entries.in")
    assert shelf.bucket.read == []
    assert shelf.spooled() == []
    return caught.value.message


async def test_a_prefix_is_a_hard_boundary(shelf: Shelf) -> None:
    """`claims/2026` is that object or that directory, and never what only begins so (mastra-ai/mastra#17613)."""
    objects = {"claims/2026-old/x": b"no", "claims/2026.pdf": b"no", "claims/2026/a": b"yes", "claims/20267": b"no"}
    assert await taken(shelf, objects, "claims/2026") == {"in": None, "in/a": b"yes"}
    assert await taken(shelf, objects, "claims/2026/") == {"in": None, "in/a": b"yes"}
    assert await taken(shelf, objects, "claims/2026.pdf") == {"in": b"no"}
    assert await taken(shelf, {"claims/2026": b"one", "claims/2026-old/x": b""}, "claims/2026") == {"in": b"one"}
    for prefix in ("claims/202", "Claims/2026", "claims/2026/a/"):
        assert f"s3://claims/{prefix}: no object is there; correct" in await refusal(shelf, objects, prefix)
    assert list(await taken(shelf, objects, "")) == [
        *("in", "in/claims", "in/claims/2026", "in/claims/2026-old", "in/claims/2026.pdf", "in/claims/20267"),
        *("in/claims/2026/a", "in/claims/2026-old/x"),
    ]


async def test_markers_of_directories_are_directories(shelf: Shelf) -> None:
    """`dir/` of no bytes, and an empty `dir` that has others below it (mlflow/mlflow#25137, rclone/rclone#753)."""
    objects = {"d/": "", "d/f": "abc", "empty/": "", "z": ""}
    given_objects = {key: value.encode() for key, value in objects.items()}
    expected = {"in": None, "in/d": None, "in/d/f": b"abc", "in/empty": None, "in/z": b""}
    assert await taken(shelf, given_objects, "") == expected
    assert await taken(shelf, {f"p/{key}": data for key, data in given_objects.items()}, "p") == expected
    assert await taken(shelf, {"p/": b"", "p/a": b"1"}, "p/") == {"in": None, "in/a": b"1"}
    assert await taken(shelf, {"p/": b""}, "p/") == {"in": None}
    assert await taken(shelf, {"p/d": b"", "p/d/": b"", "p/d/f": b"1"}, "p/") == {"in": None, "in/d": None, "in/d/f": b"1"}
    assert await taken(shelf, {"p": b"", "p/a": b"1"}, "p") == {"in": None, "in/a": b"1"}


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("p/../x", "has '.' or '..' for a part"),
        ("p/./x", "has '.' or '..' for a part"),
        ("p/a/..", "has '.' or '..' for a part"),
        ("p//etc/passwd", "begins with /"),
        ("p/a//b", "has an empty part"),
        ("p/a//", "has an empty part"),
        ("p/a\0b", "holds a NUL character"),
        ("p/..\\x", "holds a backslash"),
        ("p/" + "ü" * 128, "has a part of more than 255 bytes"),
        ("p/" + "a/" * 130 + "b", "lies deeper than 128 directories"),
        ("p/\ud800", "is no text"),
    ],
)
async def test_a_key_that_is_no_path_is_named(shelf: Shelf, key: str, told: str) -> None:
    """With what is wrong and what to do; who leaves it out has the rest."""
    objects = {key: b"x", "p/good": b"y"}
    message = await refusal(shelf, objects, "p/")
    assert f"{key!r} {told}" in message
    assert message.endswith("rename it, or leave it out with exclude")
    assert await taken(shelf, objects, "p/", include=["good"]) == {"in": None, "in/good": b"y"}


@pytest.mark.parametrize(
    ("objects", "told"),
    [
        ({"p/a": b"1", "p/a/b": b"2"}, "'p/a/b' needs a directory at 'in/a', where a file is"),
        ({"p/a/": b"", "p/a": b"1"}, "'p/a/' needs a directory at 'in/a', where a file is"),
        ({"p/a/": b"content", "p/b": b"1"}, "'p/a/' has an empty part between two /, or is a directory with content"),
    ],
)
async def test_keys_that_collide_are_named(shelf: Shelf, objects: dict[str, bytes], told: str) -> None:
    """A file and a directory cannot have one name."""
    assert told in await refusal(shelf, objects, "p/")


async def test_an_object_and_a_directory_of_the_prefix_itself(shelf: Shelf) -> None:
    """Which one is meant is for the manifest to say."""
    message = await refusal(shelf, {"p": b"1", "p/a": b"2"}, "p")
    assert "'p' is an object, and others are below 'p/'; end the prefix with /" in message


async def test_a_marker_of_the_prefix_hides_no_object(shelf: Shelf) -> None:
    """`p//` is not the object `p/`, whichever comes first."""
    for objects in ({"p/": b"content", "p//": b""}, {"p//": b"", "p/": b"content"}):
        assert "'p/' begins with /" in await refusal(shelf, objects, "p/")


async def test_markers_of_directories_are_no_files(shelf: Shelf) -> None:
    """They do not count against the limit of files, but have one of their own."""
    shelf.bucket = Objects({"p/": b"", "p/d/": b"", "p/d/a": b"a", "p/d/b": b"b"})
    result = await shelf.fetch({"entries": {"in": bucket("p/")}, "limits": {"max_files": 2}})
    assert files_of(await shelf.tree(result)) == {"in/d/a": b"a", "in/d/b": b"b"}
    many = {f"p/{number}/": b"" for number in range(30)}
    shelf.bucket = Objects(many)
    with pytest.raises(ApplicationError, match="has more than 24 directories for at most 2 files"):
        await shelf.fetch({"entries": {"in": bucket("p/")}, "limits": {"max_files": 2}})


@pytest.mark.parametrize("patterns", [{"include": ["*.pdf"]}, {"exclude": ["one.*"]}])
async def test_patterns_judge_a_single_object_by_its_name(shelf: Shelf, patterns: dict[str, Any]) -> None:
    """As they would if the prefix were its directory."""
    assert "include and exclude leave none of 1 objects" in await refusal(shelf, {"p/one.csv": b"1"}, "p/one.csv", **patterns)
    assert await taken(shelf, {"p/two.pdf": b"2"}, "p/two.pdf", **patterns) == {"in": b"2"}


async def test_names_of_any_script_are_kept(shelf: Shelf) -> None:
    """Spaces, control characters, marks, and names that differ in case or Unicode form only, which is noted."""
    names = ["a b", "тест", "診断書 (1).txt", "100%25", "line\nbreak", "A", "a", "-rf", "~", "*", ".hidden", "é", "e\u0301"]
    shelf.bucket = Objects({f"p/{name}": name.encode() for name in names})
    result = await shelf.fetch({"entries": {"in": bucket("p/")}})
    assert files_of(await shelf.tree(result)) == {f"in/{name}": name.encode() for name in names}
    notes = (await shelf.sources(result))["in"].notes
    assert sorted(notes) == [
        "'A' and 'a' differ only in case or Unicode form; both are there",
        "'e\u0301' and 'é' differ only in case or Unicode form; both are there",
    ]


@given(st.text(st.characters(codec="utf-8"), max_size=30))
@settings(max_examples=500, deadline=None)
def test_what_is_accepted_as_a_name_stays_below_its_place(path: str) -> None:
    """Whatever the key: it is refused, or the path is its own normal form and leads nowhere else."""
    import posixpath

    try:
        check_name("in", Found(path, path))
    except BadInput:
        return
    assert posixpath.normpath(f"in/{path}") == (f"in/{path}" if path else "in")


async def test_a_store_that_lists_what_was_not_asked_for_is_not_believed(shelf: Shelf) -> None:
    """The boundary does not depend on the server."""

    class Liar(Objects):
        async def list(self, prefix: str) -> AsyncIterator[SourceObject]:
            yield SourceObject("other/secret", 1, 1.0, "v")

    shelf.bucket = Liar({})
    with pytest.raises(ApplicationError, match="lists 'other/secret', which is outside of the prefix"):
        await shelf.fetch({"entries": {"in": bucket("p/")}})


class _Pages:
    """A bucket of the pages of a recorded listing (getmoto/moto#7283, kestra-io/kestra#8384)."""

    place = "s3://claims"

    def __init__(self, pages: list[dict[str, Any]]) -> None:
        self.pages = pages
        self.asked = 0

    def page(self, prefix: str, token: str | None, limit: int | None) -> tuple[list[SourceObject], str | None]:
        """The page of a token; the last one again and again."""
        tokens = [None, *(page.get("NextContinuationToken") for page in self.pages)]
        found = self.pages[min(self.asked, len(self.pages) - 1)]
        assert token in tokens
        self.asked += 1
        listed = [SourceObject(one["Key"], one["Size"], 1.0, "v") for one in found.get("Contents", [])]
        return listed, found.get("NextContinuationToken") if found["IsTruncated"] else None


def _pages(name: str) -> list[dict[str, Any]]:
    keys = [{"Key": f"k/{n:04}.txt", "Size": 1} for n in range(2500)]
    if name == "loop_listing.json":
        return [{"IsTruncated": True, "NextContinuationToken": "same", "Contents": keys[:1]}] * 2
    return [
        {"IsTruncated": True, "NextContinuationToken": "1", "Contents": keys[:1000]},
        {"IsTruncated": True, "NextContinuationToken": "2", "Contents": []},
        {"IsTruncated": True, "NextContinuationToken": "3", "Contents": keys[1000:2000]},
        {"IsTruncated": False, "Contents": keys[2000:]},
    ]


class Paged(Objects):
    """Objects of one byte behind the store's own paging."""

    def __init__(self, pages: _Pages) -> None:
        super().__init__({})
        self.calls = Calls(pages)  # type: ignore[arg-type]

    async def list(self, prefix: str) -> AsyncIterator[SourceObject]:
        """Through the store's pager."""
        async for found in self.calls.list(prefix):
            yield found

    async def stream(self, key: str, version: str, offset: int = 0) -> AsyncIterator[bytes]:
        """One byte."""
        yield b"x"


async def test_every_page_arrives_and_a_circle_is_an_error(shelf: Shelf) -> None:
    """2500 keys with an empty page between; a token that comes twice ends the listing."""
    shelf.bucket = Paged(_Pages(_pages("listing.json")))
    tree = files_of(await shelf.entries(**{"in": bucket("k/")}))
    assert (len(tree), min(tree), max(tree)) == (2500, "in/0000.txt", "in/2499.txt")
    pages = _Pages(_pages("loop_listing.json"))
    shelf.bucket = Paged(pages)
    with pytest.raises(ApplicationError, match=r"manifest\.entries\.in: .* one continuation token twice"):
        await shelf.fetch({"entries": {"in": bucket("", allow_whole_bucket=True)}})
    assert pages.asked <= 4


async def test_presigned_writes_a_url_that_the_sandbox_may_reach(shelf: Shelf) -> None:
    """Of exactly one object, whose content is not read; the host must be in the network policy."""
    objects = {"p/a.pdf": b"1" * 100, "p/b.pdf": b"2"}
    network: dict[str, Any] = {"sandbox": {"network": {"allow": ["*.example.com"]}}}
    shelf.bucket = Objects(objects)
    entry = bucket("p/", mode="presigned", include=["a.pdf"], presigned_seconds=600)
    result = await shelf.fetch({"entries": {"doc/claim.pdf": entry}}, **network)
    assert await shelf.tree(result) == {"doc": None, "doc/claim.pdf.url": b"https://files.example.com/p/a.pdf?sig=600\n"}
    assert shelf.bucket.read == []
    assert result.listing == "doc/claim.pdf.url (a URL of the object (100 B), which is valid for a while)"
    (file,) = (await shelf.sources(result))["doc/claim.pdf"].files
    assert (file.name, file.size, file.sha256) == ("p/a.pdf", 100, "")
    message = await refusal(shelf, objects, "p/", mode="presigned", include=["a.pdf"])
    assert "add files.example.com to sandbox.network.allow, or take mode: copy" in message
    assert "exactly one object, and there are 2" in await refusal(shelf, objects, "p/", agent=network, mode="presigned")


async def test_lazy_names_files_and_brings_each_when_it_is_asked_for(shelf: Shelf) -> None:
    """In the version that was listed, and nothing beside."""
    shelf.bucket = Objects({"p/a.txt": b"one", "p/d/b.txt": b"two" * 1_000_000, "other": b"no"})
    entries = {"in": bucket("p/", mode="lazy"), "x": {"type": "inline", "text": "x"}}
    result = await shelf.fetch({"entries": entries, "limits": {"max_bytes": 1000}})
    names = [{"path": "a.txt", "size": 3}, {"path": "d/b.txt", "size": 3_000_000}]
    tree = await shelf.tree(result)
    assert sorted(tree) == ["in", "in/.caisson-lazy.json", "x"]
    assert json.loads(tree["in/.caisson-lazy.json"] or b"") == names
    assert shelf.bucket.read == []
    assert "names only, in .caisson-lazy.json" in result.listing
    assert result.lazy is not None
    known = Manifest.model_validate({"entries": entries}).entries

    async def content(path: str) -> bytes:
        assert result.lazy is not None
        return await shelf.blobs.get(await lazy.fetch_lazy(shelf.blobs, Secrets(None), known, result.lazy, path))

    assert await content("in/a.txt") == b"one"
    assert await content("in/d/b.txt") == b"two" * 1_000_000
    for path in ("in/c.txt", "in/../other", "in", "in/"):
        with pytest.raises(BadInput, match="lists the paths there are"):
            await content(path)
    with pytest.raises(BadInput, match="is not below an entry"):
        await content("other")
    shelf.bucket.objects["p/a.txt"] = b"new"
    with pytest.raises(BadInput, match="is another version now since it was listed"):
        await content("in/a.txt")


async def test_a_lazy_entry_of_a_single_object_has_it_by_its_name(shelf: Shelf) -> None:
    """The place is the directory of the list, so that the object itself cannot lie there."""
    shelf.bucket = Objects({"p/one.bin": b"123"})
    entries = {"in": bucket("p/one.bin", mode="lazy")}
    result = await shelf.fetch({"entries": entries})
    names = (await shelf.tree(result))["in/.caisson-lazy.json"]
    assert json.loads(names or b"") == [{"path": "one.bin", "size": 3}]
    assert result.lazy is not None
    known = Manifest.model_validate({"entries": entries}).entries
    fetched = await lazy.fetch_lazy(shelf.blobs, Secrets(None), known, result.lazy, "in/one.bin")
    assert await shelf.blobs.get(fetched) == b"123"


async def test_lazy_files_are_judged_as_copied_ones_are(shelf: Shelf) -> None:
    """They must all have room beside each other and the list, and count for the limits of all entries."""
    assert "'p/a/b' needs a directory" in await refusal(shelf, {"p/a": b"1", "p/a/b": b"2"}, "p/", mode="lazy")
    assert "where a file is" in await refusal(shelf, {"p/.caisson-lazy.json": b"1"}, "p/", mode="lazy")
    shelf.bucket = Objects({f"p/{number}": b"x" for number in range(8)})
    entries = {"a": bucket("p/", mode="lazy"), "b": bucket("p/", mode="lazy")}
    with pytest.raises(ApplicationError, match=r"entries\.b: more than 15 files in all"):
        await shelf.fetch({"entries": entries, "limits": {"max_files": 15}})
    await shelf.fetch({"entries": entries, "limits": {"max_files": 16}})


async def test_a_connection_that_breaks_is_taken_up_where_it_broke(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few times; then the attempt fails, to be tried again, and keeps what it has."""
    from activities.workspace import fetch_spool

    monkeypatch.setattr(fetch_spool, "_PAUSE", 0.001)
    objects = {"p/large": bytes(range(256)) * 8192, "p/small": b"small"}
    shelf.bucket = Objects(objects)
    shelf.bucket.faults = 3
    tree = await shelf.entries(**{"in": bucket("p/")})
    assert files_of(tree) == {"in/large": objects["p/large"], "in/small": b"small"}
    assert shelf.spooled() == []
    shelf.bucket.faults = 9
    with pytest.raises(StoreUnavailable):
        await shelf.fetch({"entries": {"in": bucket("p/large")}})
    assert [path.stat().st_size for path in shelf.spooled()] == [4]
    shelf.bucket.faults = 0
    assert files_of(await shelf.entries(**{"in": bucket("p/large")})) == {"in": objects["p/large"]}
    assert shelf.spooled() == []
