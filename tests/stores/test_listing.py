"""Listings as services really give them: pages without objects, and answers that would send a reader in a circle.

The servers that run here give none of these, so the answers are written out and read by the real SDKs over a socket.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from activities.store.azure import AzureBucket, AzureCredential
from activities.store.gcs import GcsBucket
from activities.store.port import StoreError
from activities.store.remote import Bucket, RemoteStore
from activities.store.s3 import S3Bucket
from tests.stores.proxy import Answer, Proxy
from tests.stores.servers import AZURE_KEY, S3_CREDENTIAL, GcsServer


def s3_page(keys: list[str], token: str | None) -> Answer:
    """A page of a listing, as S3 writes it."""
    objects = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size><ETag>&quot;e&quot;</ETag>"
        "<LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"
        for key in keys
    )
    more = f"<IsTruncated>{str(token is not None).lower()}</IsTruncated>"
    more += f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return Answer(200, f"<ListBucketResult>{more}{objects}</ListBucketResult>".encode(), {"Content-Type": "application/xml"})


def azure_page(keys: list[str], token: str | None) -> Answer:
    """A page of a listing, as Azure writes it."""
    blobs = "".join(
        f"<Blob><Name>{key}</Name><Properties><Last-Modified>Fri, 02 Jan 2026 03:04:05 GMT</Last-Modified><Etag>e</Etag>"
        "<Content-Length>1</Content-Length><BlobType>BlockBlob</BlobType></Properties></Blob>"
        for key in keys
    )
    body = f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{token or ''}</NextMarker></EnumerationResults>"
    return Answer(200, body.encode(), {"Content-Type": "application/xml"})


def google_page(keys: list[str], token: str | None) -> Answer:
    """A page of a listing, as Google writes it."""
    items = [{"name": key, "size": "1", "generation": "7", "updated": "2026-01-02T03:04:05.000Z"} for key in keys]
    body: dict[str, object] = {"kind": "storage#objects", **({"nextPageToken": token} if token else {})}
    return Answer(200, json.dumps(body | ({"items": items} if items else {})).encode(), {"Content-Type": "application/json"})


@pytest.fixture(params=["s3", "azure", "gs"])
def answered(request: pytest.FixtureRequest) -> Iterator[Callable[[list[tuple[list[str], str | None]]], RemoteStore]]:
    """A store of each service whose listing has these pages."""
    with ExitStack() as stack:

        def make(pages: list[tuple[list[str], str | None]]) -> RemoteStore:
            write = {"s3": s3_page, "azure": azure_page, "gs": google_page}[request.param]
            proxy = stack.enter_context(Proxy(faults=[write(*page) for page in pages]))
            bucket: Bucket
            if request.param == "s3":
                bucket = S3Bucket("bucket", endpoint=proxy.endpoint, credential=S3_CREDENTIAL)
            elif request.param == "azure":
                bucket = AzureBucket("acct", "box", endpoint=f"{proxy.endpoint}/acct", credential=AzureCredential(AZURE_KEY))
            else:
                gcs_server: GcsServer = request.getfixturevalue("gcs_server")
                bucket = GcsBucket("bucket", endpoint=proxy.endpoint, credential=gcs_server.credential)
            store = RemoteStore(bucket)
            stack.callback(store.close)
            return store

        yield make


async def test_an_empty_page_is_not_the_end(answered: Callable[[list[tuple[list[str], str | None]]], RemoteStore]) -> None:
    """Services give pages without an object, and a token to go on with."""
    store = answered([([], "t1"), (["a"], "t2"), ([], "t3"), (["b"], None)])
    assert [found.key async for found in store.list("")] == ["a", "b"]


async def test_a_listing_that_goes_in_a_circle_is_an_error(
    answered: Callable[[list[tuple[list[str], str | None]]], RemoteStore],
) -> None:
    """And not a loop without end."""
    store = answered([(["a"], "t1"), (["b"], "t2"), (["a"], "t1")])
    with pytest.raises(StoreError, match="gave one continuation token twice"):
        [found async for found in store.list("")]


async def test_a_listing_that_ends_without_saying_where_it_goes_on_is_an_error() -> None:
    """What is left out of a listing would be taken for deleted."""
    body = b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"
    with Proxy(always=Answer(200, body, {"Content-Type": "application/xml"})) as proxy:
        store = RemoteStore(S3Bucket("bucket", endpoint=proxy.endpoint, credential=S3_CREDENTIAL))
        with pytest.raises(StoreError, match="not where"):
            [found async for found in store.list("")]
        store.close()
