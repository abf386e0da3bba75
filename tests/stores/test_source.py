"""Companies' buckets as manifests see them: any key, one version, nothing outside of the prefix."""

from __future__ import annotations

import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import pytest

from activities.store.port import ObjectChanged, ObjectExists, ObjectMissing, StoreError
from activities.store.remote import PIECE, Bucket
from activities.store.source import BucketSource, SourceObject
from tests.stores.conftest import Server
from tests.stores.servers import GcsServer, S3Server

ODD = [
    "in/a b+c&d=e?f#g.txt",
    "in/Zusammenfassung – Größe.pdf",
    "in/カルテ/診断書 (1).txt",
    "in/100%25.txt",
    "in/'quoted' \"too\".csv",
]


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    """A stream."""
    for part in parts:
        yield part


async def listed(source: BucketSource, prefix: str) -> dict[str, SourceObject]:
    """All below a prefix, by key."""
    return {found.key: found async for found in source.list(prefix)}


async def read(source: BucketSource, found: SourceObject, offset: int = 0) -> bytes:
    """All that is streamed."""
    return b"".join([piece async for piece in source.stream(found.key, found.version, offset)])


async def test_any_key_is_listed_read_written_and_signed(bucket: Bucket) -> None:
    """Spaces, marks and scripts come back as they were, in the listing, in a stream and in a URL."""
    source = BucketSource(bucket, "in/")
    for key in ODD:
        await source.upload(key, chunks(key.encode()), overwrite=False)
    found = await listed(source, "in/")
    assert sorted(found) == sorted(ODD)
    for key in ODD:
        assert await read(source, found[key]) == key.encode()
        with urllib.request.urlopen(await source.presign(key, 60)) as answer:
            assert answer.read() == key.encode()


async def test_directory_markers_are_listed_as_what_they_are(bucket: Bucket) -> None:
    """Consoles make objects `dir/` of size 0 to show a folder. (SeaweedFS makes a real folder of one, and does not list it.)"""
    if bucket.place.startswith(("s3:", "r2:")):
        pytest.skip("SeaweedFS does not list markers")
    bucket.put("in/dir/", b"", False, None)
    bucket.put("in/dir/a", b"1", False, None)
    found = await listed(BucketSource(bucket, "in/"), "in/")
    assert {key: one.size for key, one in found.items()} == {"in/dir/": 0, "in/dir/a": 1}


async def test_exactly_the_listed_version_is_read(bucket: Bucket) -> None:
    """Never a newer one, also when it changes between two pieces, nor one that is gone."""
    source = BucketSource(bucket)
    await source.upload("big", chunks(b"1" * (PIECE + 5)), overwrite=False)
    found = (await listed(source, ""))["big"]
    assert await read(source, found, PIECE) == b"11111"
    assert await read(source, found, PIECE + 5) == b""
    pieces = source.stream("big", found.version)
    assert await anext(pieces) == b"1" * PIECE
    await source.upload("big", chunks(b"2" * (PIECE + 5)), overwrite=True)
    with pytest.raises(ObjectChanged, match="big"):
        await anext(pieces)
    with pytest.raises(ObjectChanged, match="big"):
        await read(source, found)
    bucket.delete("big")
    with pytest.raises((ObjectMissing, ObjectChanged), match="big"):
        await read(source, found)


@pytest.mark.parametrize("size", [3, PIECE + 1])
async def test_an_upload_that_may_not_overwrite_does_not(server: Server, size: int) -> None:
    """Small or in parts."""
    if isinstance(server, GcsServer) and size > PIECE:
        pytest.skip("fake-gcs-server ignores conditions of resumable uploads; test_faults shows that the condition is sent")
    bucket = server.bucket(server.make())
    source = BucketSource(bucket)
    await source.upload("out/a", chunks(b"1" * size), overwrite=False)
    with pytest.raises(ObjectExists, match="out/a"):
        await source.upload("out/a", chunks(b"2" * size), overwrite=False)
    assert bucket.read("out/a", 0, 5, None)[:3] == b"111"
    await source.upload("out/a", chunks(b"3" * size), overwrite=True)
    assert bucket.read("out/a", 0, 5, None)[:3] == b"333"
    bucket.close()


async def test_nothing_outside_of_the_prefix_can_be_named(bucket: Bucket) -> None:
    """Neither plainly nor with parts that a client would fold."""
    bucket.put("other/secret", b"s", False, None)
    source = BucketSource(bucket, "in/")
    for key in ("other/secret", "in", "", "in/../other/secret", "in/./a", "in/.."):
        with pytest.raises(StoreError, match=r"outside of the prefix|a key with \. or \.\."):
            [piece async for piece in source.stream(key, "1")]
        with pytest.raises(StoreError, match=r"outside of the prefix|a key with \. or \.\."):
            await source.upload(key, chunks(b"x"), overwrite=True)
        with pytest.raises(StoreError, match=r"outside of the prefix|a key with \. or \.\."):
            await source.presign(key, 60)
    with pytest.raises(StoreError, match="outside of the prefix"):
        await listed(source, "other/")
    with pytest.raises(StoreError, match="outside of the prefix"):
        await listed(source, "")
    assert bucket.read("other/secret", 0, None, None) == b"s"


async def test_a_listing_goes_on_where_its_page_ended(bucket: Bucket) -> None:
    """Each object once, whatever the size of a page."""
    for n in range(5):
        bucket.put(f"in/{n}", b"", False, None)
    found, token = bucket.page("in/", None, 2)
    pages = [found]
    while token is not None:
        found, token = bucket.page("in/", token, 2)
        pages.append(found)
    assert [one.key for page in pages for one in page] == [f"in/{n}" for n in range(5)]
    assert len(pages) >= 3


async def test_a_signed_url_ends_and_gives_one_object(server: Server) -> None:
    """Not before its time, and nothing beside its object. (fake-gcs-server checks neither.)"""
    if isinstance(server, GcsServer):
        pytest.skip("fake-gcs-server does not check signatures")
    bucket = server.bucket(server.make())
    bucket.put("a", b"1", False, None)
    bucket.put("b", b"2", False, None)
    url = bucket.presign("a", 1)
    with urllib.request.urlopen(url) as answer:
        assert answer.read() == b"1"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url.replace("/a?", "/b?"))
    await asyncio.sleep(1.6)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url)
    with pytest.raises(StoreError, match="between 1 and 604800"):
        bucket.presign("a", 604801)
    bucket.close()


async def test_r2_is_a_store_too(s3_server: S3Server) -> None:
    """With its region, in parts, and with its name in messages."""
    bucket = s3_server.bucket(s3_server.make(), scheme="r2")
    data = os.urandom(PIECE + 1)
    await BucketSource(bucket).upload("a", chunks(data), overwrite=False)
    assert bucket.read("a", 0, None, None) == data
    with pytest.raises(ObjectMissing, match=f"{bucket.place}/b: no such object"):
        bucket.read("b", 0, None, None)
    assert bucket.place.startswith("r2://")
    bucket.close()
