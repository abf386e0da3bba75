"""Buckets of Google Cloud Storage, through google-cloud-storage (extra `gcs`).

Source: cloud.google.com/storage/docs/json_api/v1/status-codes and .../request-preconditions.
An object's version is its generation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from activities.store.port import (
    ObjectChanged,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreUnavailable,
)
from activities.store.remote import CONNECT_SECONDS, PIECE, READ_SECONDS, THREADS, check_seconds, load_sdk

_TIMEOUT = (CONNECT_SECONDS, READ_SECONDS)
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


@dataclass(frozen=True)
class GcsCredential:
    """The JSON text of a service account's key file."""

    service_account: str = field(repr=False)


_CHECK_KEY = "check the key file (CAISSON_STORE_CREDENTIALS_FILE) and this machine's clock"
_ALLOW = "give this account the role Storage Object User (roles/storage.objectUser) on the bucket"


class GcsBucket:
    """One bucket. Without a credential google-auth looks for one itself: environment, `gcloud`, the instance's account."""

    def __init__(self, name: str, *, endpoint: str | None = None, credential: GcsCredential | None = None) -> None:
        storage = load_sdk("google.cloud.storage", "gcs")
        self._known = load_sdk("google.api_core.exceptions", "gcs")
        self._auth = load_sdk("google.auth.exceptions", "gcs")
        self._requests = load_sdk("requests", "gcs")
        # What the SDK lets through of its HTTP client, when a body breaks off.
        self._broken = load_sdk("urllib3.exceptions").HTTPError
        self._media = load_sdk("google.cloud.storage.exceptions", "gcs")
        self.place = f"gs://{name}"
        self._endpoint = endpoint
        options = {} if endpoint is None else {"api_endpoint": endpoint}
        with self._translated(""):
            credentials, project = self._credentials(credential)
            # The project matters to none of the calls made here; the SDK insists on one.
            self._client = storage.Client(project=project or "unused", credentials=credentials, client_options=options)
            # Else the SDK asks for the bucket's metadata in the background, for traces, which this role may not even read.
            self._client._bucket_metadata_cache = None
            for scheme in ("https://", "http://"):
                self._client._http.mount(scheme, self._requests.adapters.HTTPAdapter(pool_maxsize=THREADS))
            self._bucket = self._client.bucket(name)
        # A part of a resumable upload can only be repeated by the SDK, which asks the service how much of it has arrived.
        self._part_retry = load_sdk("google.cloud.storage.retry", "gcs").DEFAULT_RETRY.with_delay(0.3, 1.0).with_timeout(5.0)

    def put(self, key: str, data: bytes, create_only: bool, if_version: str | None) -> None:
        """See Bucket."""
        generation = _generation(create_only, if_version)
        if generation is not None and generation < 0:
            raise ObjectChanged(f"{self.place}/{key}: {if_version!r} is no generation of it")
        with self._translated(key, create_only):
            self._bucket.blob(key).upload_from_string(
                data, "application/octet-stream", if_generation_match=generation, retry=None, timeout=_TIMEOUT
            )

    def read(self, key: str, offset: int, length: int | None, version: str | None) -> bytes:
        """See Bucket."""
        whole = offset == 0 and length is None
        span = {} if whole else {"start": offset, "end": None if length is None else offset + length - 1}
        generation = _generation(False, version)
        if generation is not None and generation < 0:
            raise ObjectChanged(f"{self.place}/{key}: {version!r} is no generation of it")
        blob = self._bucket.blob(key)
        try:
            with self._translated(key):
                # Raw: what is stored compressed is given so, for sizes and digests are those of the stored bytes. Only the whole
                # object has a checksum to compare with.
                data: bytes = blob.download_as_bytes(
                    raw_download=True,
                    if_generation_match=generation,
                    checksum="auto" if whole else None,
                    retry=None,
                    timeout=_TIMEOUT,
                    **span,
                )
        except _EndedError:
            return b""
        if generation is not None and blob.generation is not None and int(blob.generation) != generation:
            raise ObjectChanged(f"{self.place}/{key}: is another version now; read it again")
        return data

    def head(self, key: str) -> ObjectInfo | None:
        """See Bucket."""
        blob = self._bucket.blob(key)
        try:
            with self._translated(key):
                blob.reload(retry=None, timeout=_TIMEOUT)
        except ObjectMissing:
            return None
        return _info(blob)

    def delete(self, key: str) -> None:
        """See Bucket."""
        try:
            with self._translated(key):
                self._bucket.blob(key).delete(retry=None, timeout=_TIMEOUT)
        except ObjectMissing:
            return

    def page(self, prefix: str, token: str | None, limit: int | None) -> tuple[list[ObjectInfo], str | None]:
        """See Bucket."""
        with self._translated(prefix, listing=True):
            found = self._client.list_blobs(
                self._bucket, prefix=prefix or None, page_token=token, page_size=limit or 1000, retry=None, timeout=_TIMEOUT
            )
            listed = [_info(blob) for blob in next(found.pages, ())]
            following: str | None = found.next_page_token
        return listed, following or None

    def presign(self, key: str, seconds: int) -> str:
        """See Bucket. Needs a service account's key, which signs here, without a request."""
        check_seconds(seconds)
        expiry = datetime.now(UTC) + timedelta(seconds=seconds)
        try:
            with self._translated(key):
                url: str = self._bucket.blob(key).generate_signed_url(
                    expiry, version="v4", api_access_endpoint=self._endpoint or "https://storage.googleapis.com"
                )
        except AttributeError:
            raise StoreError(
                f"{self.place}/{key}: only a service account's key can sign a URL; set CAISSON_STORE_CREDENTIALS_FILE to its file"
            ) from None
        return url

    def upload(self, key: str, create_only: bool) -> GcsUpload:
        """See Bucket."""
        condition = {"if_generation_match": 0} if create_only else {}
        writer = self._bucket.blob(key).open(
            "wb",
            chunk_size=PIECE,
            retry=self._part_retry,
            timeout=_TIMEOUT,
            content_type="application/octet-stream",
            **condition,
        )
        return GcsUpload(self, key, writer, create_only)

    def close(self) -> None:
        """See Bucket."""
        self._client.close()

    def _credentials(self, given: GcsCredential | None) -> tuple[object, str | None]:
        if given is None:
            found: tuple[object, str | None] = load_sdk("google.auth", "gcs").default(scopes=[_SCOPE])
            return found
        account = load_sdk("google.oauth2.service_account", "gcs").Credentials
        try:
            made = account.from_service_account_info(json.loads(given.service_account), scopes=[_SCOPE])
        except (ValueError, KeyError, self._auth.GoogleAuthError):
            # Without the cause: it may quote the key.
            raise StoreDenied(f"{self.place}: the key file holds no service account's key; download it anew as JSON") from None
        return made, made.project_id

    @contextmanager
    def _translated(self, key: str, create_only: bool = False, listing: bool = False) -> Iterator[None]:
        """Raise the SDK's errors as the port's, without their cause, which may hold what was signed."""
        where = f"{self.place}/{key}"
        auth, media, requests = self._auth, self._media, self._requests.exceptions
        try:
            yield
        except self._known.GoogleAPICallError as error:
            raise _translate(where, int(error.code or 0), str(error.message), create_only, listing) from None
        except media.InvalidResponse as error:
            answer = error.response
            raise _translate(where, int(answer.status_code), answer.text, create_only, listing) from None
        except auth.DefaultCredentialsError:
            raise StoreDenied(
                f"{where}: no credential was found; set CAISSON_STORE_CREDENTIALS_FILE, or give this machine a service account"
            ) from None
        except auth.RefreshError as error:
            if error.retryable:
                raise StoreUnavailable(f"{where}: no access token could be had now; try again") from None
            raise StoreDenied(f"{where}: the credential is not accepted or has expired; {_CHECK_KEY}") from None
        except (auth.TransportError, media.DataCorruption, requests.RequestException, self._broken, OSError) as error:
            raise StoreUnavailable(f"{where}: the connection failed ({type(error).__name__}); try again") from None
        except (self._known.GoogleAPIError, auth.GoogleAuthError) as error:
            raise StoreError(f"{where}: {type(error).__name__}; try again, and report it if it stays") from None


class GcsUpload:
    """A resumable upload. The service forgets one that is not finished after a week."""

    repeatable = False

    def __init__(self, bucket: GcsBucket, key: str, writer: Any, create_only: bool) -> None:
        self._bucket, self._key, self._writer, self._create_only = bucket, key, writer, create_only

    def send(self, part: bytes) -> None:
        """See Upload."""
        with self._bucket._translated(self._key, self._create_only):
            self._writer.write(part)

    def finish(self, last: bytes) -> None:
        """See Upload."""
        with self._bucket._translated(self._key, self._create_only):
            if len(last) == PIECE:
                # The writer sends a full buffer at once and cannot then say that it was the last.
                self._writer.write(last[:-1])
                self._writer.write(last[-1:])
            else:
                self._writer.write(last)
            self._writer.close()

    def abort(self) -> None:
        """See Upload."""
        try:
            with self._bucket._translated(self._key):
                self._writer.terminate()
        except StoreError:
            return  # forgotten after a week


class _EndedError(StoreError):
    """The range begins where the object has ended."""


def _generation(create_only: bool, version: str | None) -> int | None:
    """Return the generation to ask for: 0 stands for no object, -1 for a text that is no generation."""
    if create_only:
        return 0
    if version is None:
        return None
    return int(version) if version.isascii() and version.isdigit() and int(version) > 0 else -1


def _info(blob: Any) -> ObjectInfo:
    return ObjectInfo(blob.name, blob.size, blob.updated.timestamp(), str(blob.generation))


def _translate(where: str, status: int, message: str, create_only: bool, listing: bool) -> StoreError:
    if status == 404 and (listing or "bucket does not exist" in message):
        return StoreDenied(f"{where}: there is no such bucket; make it, or correct its name")
    if status == 404:
        return ObjectMissing(f"{where}: no such object")
    if status == 412:
        return (
            ObjectExists(f"{where}: exists") if create_only else ObjectChanged(f"{where}: is another version now; read it again")
        )
    if status == 416:
        return _EndedError(where)
    if status == 401:
        return StoreDenied(f"{where}: the credential is not accepted; {_CHECK_KEY}")
    if status == 403:
        return StoreDenied(f"{where}: access denied; {_ALLOW}")
    if status >= 500 or status in (408, 429):
        return StoreUnavailable(f"{where}: the store is busy or failing ({status}); try again")
    return StoreError(f"{where}: the store answered {status}")
