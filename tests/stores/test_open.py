"""CAISSON_STORE and its like: which store is opened, with what credential, and what is said of settings that cannot be meant."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from activities.store.blobs import BlobStore
from activities.store.cache import CachedStore
from activities.store.local import LocalStore
from activities.store.port import StoreDenied, StoreError
from client.doctor import _check_store
from client.finding import State
from contracts.base import BadInput
from tests.stores.servers import AZURE_ACCOUNT, AZURE_KEY, S3_CREDENTIAL, AzureServer, GcsServer, S3Server
from workers.connect import open_blobs
from workers.settings import StorePlace, load_settings
from workers.stores import open_bucket, open_store

S3 = {"CAISSON_STORE_ACCESS_KEY_ID": S3_CREDENTIAL.access_key_id, "CAISSON_STORE_SECRET_KEY": S3_CREDENTIAL.secret_key}


@pytest.mark.parametrize(
    ("store", "place"),
    [
        ("dir/store", StorePlace("local", "dir/store")),
        ("./s3:store", StorePlace("local", "./s3:store")),
        ("file:///var/store", StorePlace("local", "/var/store")),
        ("s3://my.bucket", StorePlace("s3", "my.bucket")),
        ("s3://my-bucket/a/b/", StorePlace("s3", "my-bucket", "a/b")),
        ("r2://0123abcd/my-bucket/a", StorePlace("r2", "my-bucket", "a", "0123abcd")),
        ("gs://my_bucket/a", StorePlace("gs", "my_bucket", "a")),
        ("azure://acct/box/a/b", StorePlace("azure", "box", "a/b", "acct")),
    ],
)
def test_a_store_is_named_by_one_text(store: str, place: StorePlace) -> None:
    """A directory, or a service's scheme."""
    assert load_settings({"CAISSON_STORE": store}).store_place == place


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"CAISSON_STORE": "s3://"}, "CAISSON_STORE: .*'' is no bucket's name; give s3://BUCKET/PREFIX"),
        ({"CAISSON_STORE": "azure://acct"}, "CAISSON_STORE: .*give azure://ACCOUNT/CONTAINER/PREFIX"),
        ({"CAISSON_STORE": "s3://bucket/a b"}, "CAISSON_STORE: .*the prefix 'a b' may have"),
        ({"CAISSON_STORE": "s3://key:wordword@bucket"}, r"CAISSON_STORE: .*holds no credential; .*found \(hidden\)"),
        (
            {"CAISSON_STORE": "s3:/bucket"},
            r"CAISSON_STORE: .*neither a store nor a directory; give a directory, s3://.*or \./ before",
        ),
        ({"CAISSON_STORE": "s3:bucket"}, "CAISSON_STORE: .*neither a store nor a directory"),
        ({"CAISSON_STORE": "file:store"}, "CAISSON_STORE: .*neither a store nor a directory"),
        ({"CAISSON_STORE": "file://host/store"}, "CAISSON_STORE: .*such as file:///var/lib/caisson"),
        ({"CAISSON_STORE": " "}, "CAISSON_STORE: .*it is empty, or has white space around it"),
        ({"CAISSON_STORE": "store\0"}, "CAISSON_STORE: .*control characters"),
        ({"CAISSON_STORE_ENDPOINT": "http://key:wordword@host"}, r"CAISSON_STORE_ENDPOINT: .*without a credential.*\(hidden\)"),
        ({"CAISSON_STORE_REGION": "eu west"}, "CAISSON_STORE_REGION: "),
        ({"CAISSON_STORE_CACHE_MB": "-1"}, "CAISSON_STORE_CACHE_MB: "),
    ],
)
def test_a_bad_setting_is_named_with_what_is_expected(variables: dict[str, str], told: str) -> None:
    """When the worker starts; a credential in the wrong place is not shown."""
    with pytest.raises(BadInput, match=told) as caught:
        load_settings(variables)
    assert "wordword" not in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"CAISSON_STORE": "s3://bucket", "CAISSON_STORE_ACCESS_KEY_ID": "id"}, "CAISSON_STORE_SECRET_KEY: not set, but"),
        ({"CAISSON_STORE": "s3://bucket", "CAISSON_STORE_SECRET_KEY": "wordword"}, "CAISSON_STORE_ACCESS_KEY_ID: not set, but"),
        ({"CAISSON_STORE": "s3://bucket", "CAISSON_STORE_SAS": "wordword"}, "CAISSON_STORE_SAS: a s3 store .*does not use it"),
        ({"CAISSON_STORE": "dir", **S3}, "CAISSON_STORE_ACCESS_KEY_ID: a local store"),
        ({"CAISSON_STORE": "dir", "CAISSON_STORE_ENDPOINT": "http://host"}, "CAISSON_STORE_ENDPOINT: a local store"),
        (
            {"CAISSON_STORE": "azure://a/b12", "CAISSON_STORE_SAS": "wordword", "CAISSON_STORE_SECRET_KEY": "wordword"},
            "CAISSON_STORE_SAS: CAISSON_STORE_SECRET_KEY is set too",
        ),
        (
            {"CAISSON_STORE": "gs://bucket", "CAISSON_STORE_CREDENTIALS_FILE": "/no/file"},
            "CAISSON_STORE_CREDENTIALS_FILE: /no/file cannot be read",
        ),
    ],
)
def test_a_credential_that_would_not_be_used_is_refused(variables: dict[str, str], told: str) -> None:
    """It would else be told much later, as a denied request. Its value is not shown."""
    settings = load_settings(variables)
    with pytest.raises(BadInput, match=told) as caught:
        open_store(settings)
    assert "wordword" not in f"{caught.value} {settings!r} {settings.model_dump_json()}"


def test_a_directory_needs_no_cache(tmp_path: Path) -> None:
    """It is near already."""
    assert isinstance(open_store(load_settings({"CAISSON_STORE": str(tmp_path / "store")})), LocalStore)


async def test_blobs_are_kept_on_any_store(
    s3_server: S3Server, azure_server: AzureServer, gcs_server: GcsServer, tmp_path: Path
) -> None:
    """By configuration alone, below the prefix, with a cache; and the doctor finds the store well."""
    key_file = tmp_path / "key.json"
    key_file.write_text(gcs_server.credential.service_account)
    for variables, server in (
        ({"CAISSON_STORE": f"s3://{s3_server.shared}/open", "CAISSON_STORE_ENDPOINT": s3_server.endpoint, **S3}, s3_server),
        ({"CAISSON_STORE": f"r2://acct/{s3_server.shared}/open2", "CAISSON_STORE_ENDPOINT": s3_server.endpoint, **S3}, s3_server),
        (
            {
                "CAISSON_STORE": f"azure://{AZURE_ACCOUNT}/{azure_server.shared}/open",
                "CAISSON_STORE_ENDPOINT": azure_server.endpoint,
                "CAISSON_STORE_SECRET_KEY": AZURE_KEY,
            },
            azure_server,
        ),
        (
            {
                "CAISSON_STORE": f"gs://{gcs_server.shared}/open",
                "CAISSON_STORE_ENDPOINT": gcs_server.endpoint,
                "CAISSON_STORE_CREDENTIALS_FILE": str(key_file),
            },
            gcs_server,
        ),
    ):
        settings = load_settings({**variables, "CAISSON_STORE_CACHE": str(tmp_path / variables["CAISSON_STORE"][:2])})
        blobs = open_blobs(settings)
        assert isinstance(blobs, BlobStore)
        assert isinstance(blobs.objects, CachedStore)
        ref = await blobs.put(b"a blob of the store")
        prefix = settings.store_place.prefix
        assert await blobs.get(ref) == b"a blob of the store"
        assert server.opened.read(f"{prefix}/blobs/{ref.digest[:2]}/{ref.digest}", 0, None, None) == b"a blob of the store"
        assert [path.name for path in settings.store_cache.rglob("*") if path.is_file() and path.name != ".lock"] == [ref.digest]
        finding = await _check_store(settings)
        assert (finding.state, finding.found) == (State.OK, f"{settings.store} can be written and read")


async def test_the_doctor_tells_what_is_wrong_with_a_store(s3_server: S3Server) -> None:
    """With the service's reason, and the remedy."""
    wrong = {**S3, "CAISSON_STORE_SECRET_KEY": "wrong", "CAISSON_STORE_ENDPOINT": s3_server.endpoint}
    finding = await _check_store(load_settings({"CAISSON_STORE": f"s3://{s3_server.shared}", **wrong}))
    assert finding.state is State.FAIL
    assert "the secret does not belong to the access key" in finding.found
    assert "docs/stores.md" in finding.remedy
    finding = await _check_store(load_settings({"CAISSON_STORE": "s3://bucket", "CAISSON_STORE_SECRET_KEY": "x"}))
    assert "CAISSON_STORE_ACCESS_KEY_ID: not set" in finding.found


@pytest.mark.parametrize(
    ("store", "module", "extra"),
    [("azure://acct/box", "azure.storage.blob", "azure"), ("gs://bucket", "google.cloud.storage", "gcs")],
)
def test_a_missing_sdk_names_the_extra(monkeypatch: pytest.MonkeyPatch, store: str, module: str, extra: str) -> None:
    """What to install stands in the error."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StoreError, match=rf"{module} is not installed.*pip install 'caisson\[{extra}\]'"):
        open_bucket(load_settings({}), StorePlace.parse(store))


def test_no_credential_at_all_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the SDK's own search finds none either: it is not guessed."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(StoreDenied, match="no credential was found; set CAISSON_STORE_CREDENTIALS_FILE"):
        open_store(load_settings({"CAISSON_STORE": "gs://bucket"}))


async def test_no_credential_for_s3_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At the first call."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    store = open_store(load_settings({"CAISSON_STORE": "s3://bucket", "CAISSON_STORE_ENDPOINT": "http://127.0.0.1:9"}))
    with pytest.raises(StoreDenied, match=r"no credential was found .*CAISSON_STORE_ACCESS_KEY_ID"):
        await store.get("a")
