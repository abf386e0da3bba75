"""What a store's faults become: repeated once where that is safe, then one of the port's errors, with a remedy and no secret."""

from __future__ import annotations

import asyncio
import json
import secrets
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from activities.store import azure, gcs, remote, s3
from activities.store.azure import AzureBucket, AzureCredential
from activities.store.gcs import GcsBucket, GcsCredential
from activities.store.port import ObjectChanged, ObjectExists, StoreDenied, StoreError, StoreUnavailable
from activities.store.remote import PIECE, Bucket, Calls, RemoteStore
from activities.store.s3 import S3Bucket, S3Credential
from activities.store.source import BucketSource
from tests.stores.conftest import Server
from tests.stores.proxy import Answer, Cut, Fault, Proxy, Slow
from tests.stores.servers import AZURE_ACCOUNT, AZURE_KEY, S3_CREDENTIAL, AzureServer, GcsServer, S3Server

SECRETS = (S3_CREDENTIAL.secret_key, AZURE_KEY, "PRIVATE KEY", "wrongsecret", "sig=", "c2VjcmV0", "session-token-value")
Open = Callable[..., tuple[RemoteStore, Proxy]]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSE", 0.01)
    monkeypatch.setattr(s3, "_CONFLICTS", 3)
    # Azure's SDK waits a second before it reads a broken body again.
    monkeypatch.setattr("azure.storage.blob._download.time", SimpleNamespace(sleep=lambda seconds: None))


@pytest.fixture
def opened(server: Server) -> Iterator[Open]:
    """A store of each service behind a proxy, holding `a` = 100 KB of x."""
    with ExitStack() as stack:

        def make(*faults: Fault, always: Fault | None = None) -> tuple[RemoteStore, Proxy]:
            prefix = secrets.token_hex(6)
            server.opened.put(f"{prefix}/a", b"x" * 100_000, False, None)
            proxy = stack.enter_context(Proxy(server.port, list(faults), always))
            endpoint = proxy.endpoint + (f"/{AZURE_ACCOUNT}" if isinstance(server, AzureServer) else "")
            store = RemoteStore(server.bucket(server.shared, endpoint=endpoint), prefix)
            stack.callback(store.close)
            return store, proxy

        yield make


def xml(code: str, message: str = "told") -> bytes:
    """An error as S3 and Azure write it."""
    return f'<?xml version="1.0" encoding="utf-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()


def refusal(status: int, code: str) -> Answer:
    """An error of S3 or Azure."""
    return Answer(status, xml(code), {"Content-Type": "application/xml", "x-ms-error-code": code})


def google(status: int, message: str) -> Answer:
    """An error of Google."""
    body = json.dumps({"error": {"code": status, "message": message, "errors": [{"reason": "told"}]}})
    return Answer(status, body.encode(), {"Content-Type": "application/json"})


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    """A stream."""
    for part in parts:
        yield part


@pytest.mark.parametrize(
    "fault",
    [refusal(503, "SlowDown"), refusal(429, "TooManyRequests"), refusal(500, "InternalError"), Answer(502, b"<html>"), Cut(1000)],
    ids=["503", "429", "500", "html", "cut"],
)
async def test_a_passing_fault_is_not_noticed(opened: Open, fault: Fault) -> None:
    """Throttling, a failing server and a connection cut in the middle of a body: read again, once."""
    store, proxy = opened(fault)
    assert await store.get("a") == b"x" * 100_000
    assert len(proxy.requests) == 2


@pytest.mark.parametrize(
    "fault",
    [refusal(503, "ServerBusy"), refusal(429, "SlowDown"), Answer(500, b""), Cut(1000)],
    ids=["503", "429", "500", "cut"],
)
async def test_a_lasting_fault_is_told_as_unavailable(opened: Open, server: Server, fault: Fault) -> None:
    """After two requests: Temporal does the rest. Half an object is never returned."""
    store, proxy = opened(always=fault)
    with pytest.raises(StoreUnavailable, match=r"/a: .*try again"):
        await store.get("a")
    # Azure's SDK reads a body that breaks off three times itself, and cannot be told not to.
    assert len(proxy.requests) == (6 if isinstance(server, AzureServer) and isinstance(fault, Cut) else 2)


async def test_a_server_that_is_away_is_unavailable(opened: Open) -> None:
    """Nothing listens."""
    store, proxy = opened()
    proxy.__exit__(None, None, None)
    with pytest.raises(StoreUnavailable, match="the connection failed"):
        await store.put("b", b"1")


async def test_a_conditional_put_is_sent_once(opened: Open) -> None:
    """Its second try would meet its own first one, and tell a writer that somebody else has written."""
    for condition in ({"create_only": True}, {"if_version": "1"}):
        store, proxy = opened(always=refusal(503, "SlowDown"))
        with pytest.raises(StoreUnavailable):
            await store.put("b", b"1", **condition)
        assert len(proxy.requests) == 1


async def test_a_slow_server_is_waited_for_and_a_stuck_one_is_not(
    server: Server, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends by its timeout."""
    store, _ = opened(Slow(0.4))
    assert len(await store.get("a")) == 100_000
    monkeypatch.setattr(s3, "READ_SECONDS", 0.3)
    monkeypatch.setattr(azure, "READ_SECONDS", 0.3)
    monkeypatch.setattr(gcs, "_TIMEOUT", (5, 0.3))
    store, _ = opened(always=Slow(0.8))
    with pytest.raises(StoreUnavailable, match="the connection failed"):
        await store.get("a")


async def test_a_part_that_fails_is_sent_again(opened: Open) -> None:
    """An upload of many parts does not begin anew for one of them."""
    store, proxy = opened()

    async def parts() -> AsyncIterator[bytes]:
        yield b"y" * (PIECE + 1)
        proxy.faults.append(refusal(503, "SlowDown"))
        yield b"y" * PIECE

    await store.put_stream("b", parts())
    assert not proxy.faults
    found = await store.head("b")
    assert found is not None
    assert found.size == 2 * PIECE + 1


async def test_an_upload_that_fails_is_aborted(s3_server: S3Server) -> None:
    """Parts that nobody finishes cost money for ever."""
    name = s3_server.make()
    with Proxy(s3_server.port) as proxy:
        store = RemoteStore(s3_server.bucket(name, endpoint=proxy.endpoint))

        async def failing() -> AsyncIterator[bytes]:
            yield b"y" * (PIECE + 1)
            proxy.faults.extend([refusal(503, "SlowDown")] * 2)
            yield b"y" * PIECE

        with pytest.raises(StoreUnavailable):
            await store.put_stream("b", failing())
        store.close()
        assert [request.method for request in proxy.requests][-1] == "DELETE"
    assert "Uploads" not in s3_server.admin.list_multipart_uploads(Bucket=name)


async def test_a_conditional_upload_in_parts_sends_its_condition_to_google(gcs_server: GcsServer) -> None:
    """The emulator ignores it, so what is asked is looked at."""
    name = gcs_server.make()
    with Proxy(gcs_server.port) as proxy:
        source = BucketSource(gcs_server.bucket(name, endpoint=proxy.endpoint))
        await source.upload("a", chunks(b"y" * (PIECE + 1)), overwrite=False)
        source.close()
        begun = [request.target for request in proxy.requests if request.method == "POST"]
        assert len(begun) == 1
        assert "uploadType=resumable&ifGenerationMatch=0" in begun[0]


async def test_two_conditional_writes_that_meet_are_tried_again(s3_server: S3Server) -> None:
    """S3 answers 409 when it cannot tell who was first."""
    with Proxy(s3_server.port, [refusal(409, "ConditionalRequestConflict")] * 2) as proxy:
        store = RemoteStore(s3_server.bucket(s3_server.shared, endpoint=proxy.endpoint), "meet")
        await store.put("a", b"1", create_only=True)
        proxy.faults.append(refusal(409, "ConditionalRequestConflict"))
        with pytest.raises(ObjectExists):
            await store.put("a", b"2", create_only=True)
        proxy.always = refusal(409, "ConditionalRequestConflict")
        with pytest.raises(StoreUnavailable, match="other writers are at this key"):
            await store.put("b", b"2", create_only=True)
        store.close()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (refusal(403, "AccessDenied"), "access denied .*allow this credential s3:GetObject"),
        (refusal(403, "RequestTimeTooSkewed"), "this machine's clock is wrong .*; set it"),
        (refusal(400, "ExpiredToken"), "the session token has expired .*give a fresh one"),
        (refusal(403, "InvalidAccessKeyId"), "the access key is not known there .*CAISSON_STORE_ACCESS_KEY_ID"),
        (refusal(403, "SomethingNew"), r"refused \(SomethingNew\)"),
        (refusal(401, "Unauthorized"), "the credential is not accepted"),
        (refusal(404, "NoSuchBucket"), "there is no such bucket .*make it"),
    ],
)
async def test_what_s3_refuses_is_denied_with_a_remedy(answer: Answer, told: str) -> None:
    """At the first request; trying again changes nothing."""
    with Proxy(always=answer) as proxy:
        bucket = S3Bucket("bucket", endpoint=proxy.endpoint, credential=S3Credential("id", "wrongsecret", "session-token-value"))
        await denied(bucket, told, "s3://bucket/a")
        assert len(proxy.requests) == 1


async def test_what_is_archived_is_told() -> None:
    """No credential is at fault."""
    with Proxy(always=refusal(403, "InvalidObjectState")) as proxy:
        calls = Calls(S3Bucket("bucket", endpoint=proxy.endpoint, credential=S3_CREDENTIAL))
        with pytest.raises(StoreError, match=r"archived \(InvalidObjectState\); restore it first, or exclude it") as caught:
            [piece async for piece in calls.pieces("a", "v", 0, None)]
        assert not isinstance(caught.value, StoreDenied)
        calls.close()
    with Proxy(always=refusal(409, "BlobArchived")) as proxy:
        sas = AzureCredential(sas="sv=2024-01-01&sig=c2VjcmV0")
        calls = Calls(AzureBucket("acct", "box", endpoint=f"{proxy.endpoint}/acct", credential=sas))
        with pytest.raises(StoreError, match=r"archived \(BlobArchived\)"):
            [piece async for piece in calls.pieces("a", "v", 0, None)]
        calls.close()


async def test_an_expired_token_is_told_where_s3_tells_nothing() -> None:
    """The answer to a HEAD has no body."""
    with Proxy(always=refusal(400, "ExpiredToken")) as proxy:
        store = RemoteStore(S3Bucket("bucket", endpoint=proxy.endpoint, credential=S3_CREDENTIAL))
        with pytest.raises(StoreDenied, match="CAISSON_STORE_SESSION_TOKEN"):
            await store.head("a")
        store.close()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (refusal(403, "AuthenticationFailed"), "the credential is not accepted .*this machine's clock"),
        (refusal(403, "AuthorizationPermissionMismatch"), "access denied .*Storage Blob Data Contributor"),
        (refusal(403, "AuthorizationFailure"), "firewall"),
        (refusal(404, "ContainerNotFound"), "there is no such container"),
        (refusal(403, "SomethingNew"), r"refused \(SomethingNew\)"),
    ],
)
async def test_what_azure_refuses_is_denied_with_a_remedy(answer: Answer, told: str) -> None:
    """With a SAS, which is part of each URL and in no message."""
    with Proxy(always=answer) as proxy:
        sas = AzureCredential(sas="sv=2024-01-01&sig=c2VjcmV0")
        await denied(AzureBucket("acct", "box", endpoint=f"{proxy.endpoint}/acct", credential=sas), told, "azure://acct/box/a")
        assert len(proxy.requests) == 1


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (google(401, "Invalid Credentials"), "the credential is not accepted"),
        (google(403, "does not have storage.objects.get access"), "access denied; .*roles/storage.objectUser"),
        (google(404, "The specified bucket does not exist."), "there is no such bucket"),
    ],
)
async def test_what_google_refuses_is_denied_with_a_remedy(gcs_server: GcsServer, answer: Answer, told: str) -> None:
    """At the first request."""
    with Proxy(always=answer) as proxy:
        bucket = GcsBucket("bucket", endpoint=proxy.endpoint, credential=gcs_server.credential)
        await denied(bucket, told, "gs://bucket/a")


async def test_a_service_account_that_gets_no_token_is_denied(gcs_server: GcsServer) -> None:
    """Its key was revoked, or the clock is wrong: Google calls both an invalid grant."""
    answer = Answer(400, b'{"error": "invalid_grant"}', {"Content-Type": "application/json"})
    with Proxy(always=answer) as tokens:
        account = {**gcs_server.account, "token_uri": f"{tokens.endpoint}/token"}
        bucket = GcsBucket("bucket", endpoint=gcs_server.endpoint, credential=GcsCredential(json.dumps(account)))
        await denied(bucket, "not accepted or has expired; check the key file .*clock", "gs://bucket/a")


async def test_a_key_file_that_is_none_is_told_without_quoting_it(gcs_server: GcsServer) -> None:
    """Neither broken JSON nor a broken key."""
    for text in ("{", "{}", json.dumps({**gcs_server.account, "private_key": "PRIVATE KEY wrongsecret"})):
        with pytest.raises(StoreDenied, match="the key file holds no service account's key") as caught:
            GcsBucket("bucket", credential=GcsCredential(text))
        clean("".join(traceback.format_exception(caught.value)))


async def test_a_wrong_key_is_denied_by_the_real_servers(s3_server: S3Server, azure_server: AzureServer) -> None:
    """They check signatures. (fake-gcs-server does not.)"""
    name = s3_server.make()
    for credential in (S3Credential("nobody", "wrongsecret"), S3Credential(S3_CREDENTIAL.access_key_id, "wrongsecret")):
        await denied(
            S3Bucket(name, endpoint=s3_server.endpoint, credential=credential), "CAISSON_STORE_SECRET_KEY", f"s3://{name}/a"
        )
    wrong = AzureCredential("wrongsecret+0000")
    box = AzureBucket(AZURE_ACCOUNT, azure_server.make(), endpoint=azure_server.endpoint, credential=wrong)
    await denied(box, "CAISSON_STORE_SECRET_KEY", box.place)


async def test_a_bucket_that_is_not_there_is_denied_whatever_is_asked(server: Server) -> None:
    """Also where the service says only 'not found': a head that is None would send a worker looking for a lost blob."""
    store = RemoteStore(server.bucket("no-such-bucket"))
    for asked in (store.head("a"), store.get("a"), store.get_range("a", 0, 1), store.put("a", b"")):
        with pytest.raises(StoreDenied, match=r"no-such-bucket.*there is no such (bucket|container)"):
            await asked
    with pytest.raises(StoreDenied, match="there is no such"):
        [found async for found in store.list("")]
    store.close()


async def denied(bucket: Bucket, told: str, place: str) -> None:
    """Reading is denied so, by name, and no secret is in the error or what led to it."""
    store = RemoteStore(bucket)
    with pytest.raises(StoreDenied, match=told) as caught:
        await store.get("a")
    store.close()
    assert place in str(caught.value)
    clean("".join(traceback.format_exception(caught.value)))


def clean(text: str) -> None:
    """No credential is in it."""
    assert not [secret for secret in SECRETS if secret in text], text


async def test_an_unreachable_azure_shows_no_sas() -> None:
    """Its SDK puts the URL, with the SAS in it, into what it says of a failed connection."""
    with Proxy(always=Cut(0)) as proxy:
        endpoint = f"{proxy.endpoint}/acct"
    store = RemoteStore(AzureBucket("acct", "box", endpoint=endpoint, credential=AzureCredential(sas="sv=1&sig=c2VjcmV0")))
    with pytest.raises(StoreUnavailable) as caught:
        await store.get("a")
    store.close()
    clean("".join(traceback.format_exception(caught.value)))


async def test_a_changed_object_is_not_pieced_together(opened: Open) -> None:
    """A stream of the port, too, is of one version."""
    store, _ = opened()
    await store.put("big", b"1" * (PIECE + 1))
    pieces = store.stream("big")
    await anext(pieces)
    await store.put("big", b"2" * (PIECE + 1))
    with pytest.raises(ObjectChanged):
        await anext(pieces)


async def test_many_calls_at_once_take_turns(opened: Open) -> None:
    """More than there are threads."""
    store, _ = opened()
    assert {len(data) for data in await asyncio.gather(*(store.get("a") for _ in range(50)))} == {100_000}
