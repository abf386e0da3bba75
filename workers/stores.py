"""Building the object store that the settings name."""

from __future__ import annotations

from pathlib import Path

from activities.store.cache import CachedStore
from activities.store.local import LocalStore
from activities.store.port import ObjectStore
from activities.store.remote import Bucket, RemoteStore
from contracts.base import BadInput
from workers.settings import Settings, StorePlace

_CREDENTIALS = {
    "local": set[str](),
    "s3": {"store_access_key_id", "store_secret_key", "store_session_token"},
    "r2": {"store_access_key_id", "store_secret_key", "store_session_token"},
    "azure": {"store_secret_key", "store_sas"},
    "gs": {"store_credentials_file"},
}
"""The settings that each kind of store takes its credential from."""


def open_store(settings: Settings) -> ObjectStore:
    """Open the store of CAISSON_STORE, with its cache when it is remote. Raises BadInput naming the variable, or StoreError."""
    place = settings.store_place
    _check_credentials(settings, place)
    if place.kind == "local":
        return LocalStore(Path(place.bucket))
    store = RemoteStore(open_bucket(settings, place), place.prefix)
    if settings.store_cache_mb == 0:
        return store
    return CachedStore(store, settings.store_cache, settings.store_cache_mb * 10**6)


def open_bucket(settings: Settings, place: StorePlace) -> Bucket:
    """Open a bucket with the settings' credential. An SDK is imported only for the kind of store that is used."""
    endpoint = settings.store_endpoint
    if place.kind == "azure":
        from activities.store.azure import AzureBucket, AzureCredential

        key, sas = _plain(settings, "store_secret_key"), _plain(settings, "store_sas")
        azure = AzureCredential(key, sas) if key or sas else None
        return AzureBucket(place.account, place.bucket, endpoint=endpoint, credential=azure)
    if place.kind == "gs":
        from activities.store.gcs import GcsBucket, GcsCredential

        file = settings.store_credentials_file
        try:
            google = None if file is None else GcsCredential(file.read_text())
        except (OSError, UnicodeError) as error:
            raise BadInput(
                f"CAISSON_STORE_CREDENTIALS_FILE: {file} cannot be read ({error}); name a readable key file"
            ) from error
        return GcsBucket(place.bucket, endpoint=endpoint, credential=google)
    from activities.store.s3 import S3Bucket, S3Credential

    secret, amazon = _plain(settings, "store_secret_key"), None
    if settings.store_access_key_id and secret:
        amazon = S3Credential(settings.store_access_key_id, secret, _plain(settings, "store_session_token"))
    if place.kind == "r2":
        endpoint = endpoint or f"https://{place.account}.r2.cloudflarestorage.com"
        return S3Bucket(place.bucket, endpoint=endpoint, region=settings.store_region or "auto", credential=amazon, scheme="r2")
    return S3Bucket(place.bucket, endpoint=endpoint, region=settings.store_region, credential=amazon)


def _plain(settings: Settings, field: str) -> str | None:
    value = getattr(settings, field)
    return None if value is None else value.get_secret_value()


def _variable(field: str) -> str:
    return f"CAISSON_{field.upper()}"


def _check_credentials(settings: Settings, place: StorePlace) -> None:
    """Refuse a credential that would not be used, or is half given: it would else be told much later, as a denied request."""
    given = {field for field in set().union(*_CREDENTIALS.values()) if getattr(settings, field) is not None}
    for field in sorted(given - _CREDENTIALS[place.kind]):
        raise BadInput(
            f"{_variable(field)}: a {place.kind} store ({settings.store}) does not use it; unset it, or set CAISSON_STORE"
        )
    if place.kind in ("s3", "r2") and given:
        for field in ("store_access_key_id", "store_secret_key"):
            if field not in given:
                raise BadInput(f"{_variable(field)}: not set, but {_variable(min(given))} is; set both, or neither")
    if {"store_secret_key", "store_sas"} <= given:
        raise BadInput("CAISSON_STORE_SAS: CAISSON_STORE_SECRET_KEY is set too; set one of them")
    if place.kind == "local" and settings.store_endpoint is not None:
        raise BadInput(
            f"CAISSON_STORE_ENDPOINT: a local store ({settings.store}) does not use it; unset it, or set CAISSON_STORE"
        )
