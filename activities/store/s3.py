"""Buckets of Amazon S3, Cloudflare R2 and servers that speak S3, through boto3.

Sources: S3 API reference ("Error responses", "Conditional writes", "Multipart upload limits"), and for R2
developers.cloudflare.com/r2/api/s3: region `auto`, no default checksums, all parts of an upload of one size but the last.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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

_MOST_PARTS = 10_000
_CONFLICTS = 5


@dataclass(frozen=True)
class S3Credential:
    """An access key, and the session token of a temporary one."""

    access_key_id: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


_CHECK_KEY = "check the access key and its secret (CAISSON_STORE_ACCESS_KEY_ID, CAISSON_STORE_SECRET_KEY)"
_ALLOW = "allow this credential s3:GetObject, s3:PutObject, s3:DeleteObject and s3:ListBucket there"
_FRESH = "give a fresh one (CAISSON_STORE_SESSION_TOKEN and its key), or use a role that renews itself"
_REFUSED = {
    "NoSuchBucket": ("there is no such bucket", "make it, or correct its name"),
    "InvalidBucketName": ("no bucket can have this name", "correct its name"),
    "AccessDenied": ("access denied", _ALLOW),
    "403": ("access denied", f"{_CHECK_KEY}, or {_ALLOW}"),
    "AllAccessDisabled": ("access to the bucket is disabled", "ask the provider why"),
    "InvalidAccessKeyId": ("the access key is not known there", _CHECK_KEY),
    "SignatureDoesNotMatch": ("the secret does not belong to the access key", _CHECK_KEY),
    "Unauthorized": ("the credential is not accepted", _CHECK_KEY),
    "ExpiredToken": ("the session token has expired", _FRESH),
    "TokenRefreshRequired": ("the session token has expired", _FRESH),
    "InvalidToken": ("the session token is not valid", _FRESH),
    # The answer to a HEAD has no body, so this is all S3 says there of an expired token.
    "400": ("the request was refused without a reason", _FRESH),
    "RequestTimeTooSkewed": ("this machine's clock is wrong by more than 15 minutes", "set it, by NTP for instance"),
    "PermanentRedirect": ("the bucket is in another region", "set CAISSON_STORE_REGION to that region"),
    "301": ("the bucket is in another region", "set CAISSON_STORE_REGION to that region"),
    "AuthorizationHeaderMalformed": ("the bucket is in another region", "set CAISSON_STORE_REGION to that region"),
}
_MISSING = {"NoSuchKey", "NoSuchVersion", "404"}
_CHANGED = {"PreconditionFailed", "412"}
_TRANSIENT = {"RequestTimeout", "RequestTimeoutException", "OperationAborted", "BadDigest", "Throttling", "TooManyRequests"}
_CONFLICT = "ConditionalRequestConflict"
_ARCHIVED = "InvalidObjectState"


class S3Bucket:
    """One bucket. Without a credential boto3 looks for one itself: environment, shared files, the role of the instance."""

    def __init__(
        self,
        name: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        credential: S3Credential | None = None,
        scheme: str = "s3",
    ) -> None:
        boto3 = load_sdk("boto3")
        self._botocore = load_sdk("botocore.exceptions")
        # What botocore lets through of its HTTP client, when a body breaks off, and of its parser, when a proxy answers HTML.
        self._broken = (load_sdk("urllib3.exceptions").HTTPError, load_sdk("botocore.parsers").ResponseParserError)
        self.place = f"{scheme}://{name}"
        self._name = name
        config = load_sdk("botocore.config").Config(
            signature_version="s3v4",
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            max_pool_connections=THREADS,
            retries={"total_max_attempts": 1, "mode": "standard"},
            # Not every server knows the newer checksums; Content-MD5, which is sent below, all do.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path" if endpoint else "auto"},
            ignore_configured_endpoint_urls=True,
        )
        keys = {}
        if credential is not None:
            keys["aws_access_key_id"] = credential.access_key_id
            keys["aws_secret_access_key"] = credential.secret_key
            if credential.session_token is not None:
                keys["aws_session_token"] = credential.session_token
        with self._translated(""):
            # A session of its own: boto3's default one is not safe to share between threads.
            session = boto3.Session(region_name=region or ("us-east-1" if endpoint else None), **keys)
            self._client: Any = session.client("s3", endpoint_url=endpoint, config=config)

    def put(self, key: str, data: bytes, create_only: bool, if_version: str | None) -> None:
        """See Bucket."""
        condition = _condition(create_only, if_version)
        for attempt in range(_CONFLICTS):
            try:
                with self._translated(key, create_only):
                    self._client.put_object(Bucket=self._name, Key=key, Body=data, ContentMD5=_md5(data), **condition)
                return
            except _ConflictError:
                # Two conditional writes met and S3 made neither certain: it asks to try again (409).
                time.sleep(0.05 * 2**attempt)
        raise StoreUnavailable(f"{self.place}/{key}: other writers are at this key; try again")

    def read(self, key: str, offset: int, length: int | None, version: str | None) -> bytes:
        """See Bucket."""
        wanted = {}
        if offset or length is not None:
            wanted["Range"] = f"bytes={offset}-" + ("" if length is None else str(offset + length - 1))
        if version is not None:
            wanted["IfMatch"] = f'"{version}"'
        try:
            with self._translated(key), self._client.get_object(Bucket=self._name, Key=key, **wanted)["Body"] as body:
                data: bytes = body.read()
                return data
        except _EndedError:
            return b""

    def head(self, key: str) -> ObjectInfo | None:
        """See Bucket."""
        try:
            with self._translated(key):
                found = self._client.head_object(Bucket=self._name, Key=key)
        except ObjectMissing:
            return None
        return ObjectInfo(key, found["ContentLength"], found["LastModified"].timestamp(), found["ETag"].strip('"'))

    def delete(self, key: str) -> None:
        """See Bucket."""
        with self._translated(key):
            self._client.delete_object(Bucket=self._name, Key=key)

    def page(self, prefix: str, token: str | None, limit: int | None) -> tuple[list[ObjectInfo], str | None]:
        """See Bucket."""
        after = {} if token is None else {"ContinuationToken": token}
        with self._translated(prefix):
            found = self._client.list_objects_v2(Bucket=self._name, Prefix=prefix, MaxKeys=limit or 1000, **after)
        following = found.get("NextContinuationToken") if found.get("IsTruncated") else None
        if found.get("IsTruncated") and following is None:
            raise StoreError(f"{self.place}/{prefix}: the listing says that it goes on, but not where; report it to the store")
        listed = [
            ObjectInfo(one["Key"], one["Size"], one["LastModified"].timestamp(), one["ETag"].strip('"'))
            for one in found.get("Contents", [])
        ]
        return listed, following

    def presign(self, key: str, seconds: int) -> str:
        """See Bucket. A URL made with a temporary credential ends with it."""
        check_seconds(seconds)
        with self._translated(key):
            asked = {"Bucket": self._name, "Key": key}
            url: str = self._client.generate_presigned_url("get_object", Params=asked, ExpiresIn=seconds)
        return url

    def upload(self, key: str, create_only: bool) -> S3Upload:
        """See Bucket."""
        with self._translated(key):
            begun = self._client.create_multipart_upload(Bucket=self._name, Key=key)
        return S3Upload(self, key, begun["UploadId"], create_only)

    def close(self) -> None:
        """See Bucket."""
        self._client.close()

    @contextmanager
    def _translated(self, key: str, create_only: bool = False) -> Iterator[None]:
        """Raise boto3's errors as the port's. Without their cause, which may hold what was signed."""
        known = self._botocore
        where = f"{self.place}/{key}"
        try:
            yield
        except known.ClientError as error:
            raise _translate(where, error.response, create_only) from None
        except (known.NoCredentialsError, known.PartialCredentialsError, known.CredentialRetrievalError) as error:
            raise StoreDenied(
                f"{where}: no credential was found ({type(error).__name__}); set CAISSON_STORE_ACCESS_KEY_ID and "
                "CAISSON_STORE_SECRET_KEY, or give this machine a role"
            ) from None
        except (known.HTTPClientError, known.ConnectionError, known.IncompleteReadError, *self._broken) as error:
            raise StoreUnavailable(f"{where}: the connection failed ({type(error).__name__}); try again") from None
        except (known.BotoCoreError, ValueError) as error:
            raise StoreError(f"{where}: {error}") from None


class S3Upload:
    """A multipart upload. Parts that a killed process leaves are for the bucket's lifecycle rule to remove."""

    repeatable = True

    def __init__(self, bucket: S3Bucket, key: str, upload_id: str, create_only: bool) -> None:
        self._bucket, self._key, self._id, self._create_only = bucket, key, upload_id, create_only
        self._client, self._name = bucket._client, bucket._name
        self._parts: list[dict[str, Any]] = []

    def send(self, part: bytes) -> None:
        """See Upload."""
        number = len(self._parts) + 1
        if number > _MOST_PARTS:
            raise StoreError(f"{self._bucket.place}/{self._key}: larger than {_MOST_PARTS * PIECE >> 30} GiB; store it in pieces")
        with self._bucket._translated(self._key):
            sent = self._client.upload_part(
                Bucket=self._name, Key=self._key, UploadId=self._id, PartNumber=number, Body=part, ContentMD5=_md5(part)
            )
        self._parts.append({"PartNumber": number, "ETag": sent["ETag"]})

    def finish(self, last: bytes) -> None:
        """See Upload."""
        self.send(last)
        condition = _condition(self._create_only, None)
        try:
            with self._bucket._translated(self._key, self._create_only):
                self._client.complete_multipart_upload(
                    Bucket=self._name, Key=self._key, UploadId=self._id, MultipartUpload={"Parts": self._parts}, **condition
                )
        except _ConflictError:
            raise StoreUnavailable(f"{self._bucket.place}/{self._key}: other writers are at this key; try again") from None

    def abort(self) -> None:
        """See Upload."""
        try:
            with self._bucket._translated(self._key):
                self._client.abort_multipart_upload(Bucket=self._name, Key=self._key, UploadId=self._id)
        except StoreError:
            return  # the lifecycle rule removes it


class _ConflictError(StoreError):
    """S3 asks to repeat a conditional write."""


class _EndedError(StoreError):
    """The range begins where the object has ended."""


def _condition(create_only: bool, if_version: str | None) -> dict[str, str]:
    if create_only:
        return {"IfNoneMatch": "*"}
    return {} if if_version is None else {"IfMatch": f'"{if_version}"'}


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _translate(where: str, response: dict[str, dict[str, object]], create_only: bool) -> StoreError:
    code = str(response.get("Error", {}).get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    status = status if isinstance(status, int) else 0
    if code in _MISSING:
        return ObjectMissing(f"{where}: no such object")
    if code in _CHANGED:
        return (
            ObjectExists(f"{where}: exists") if create_only else ObjectChanged(f"{where}: is another version now; read it again")
        )
    if code == _CONFLICT:
        return _ConflictError(where)
    if code == _ARCHIVED:
        return StoreError(f"{where}: is archived ({code}); restore it first, or exclude it")
    if status == 416:
        return _EndedError(where)
    if code in _REFUSED:
        reason, remedy = _REFUSED[code]
        return StoreDenied(f"{where}: {reason} ({code}); {remedy}")
    if status >= 500 or status == 429 or code in _TRANSIENT:
        return StoreUnavailable(f"{where}: the store is busy or failing ({code or status}); try again")
    if status in (401, 403):
        return StoreDenied(f"{where}: refused ({code}); {_CHECK_KEY}, or {_ALLOW}")
    return StoreError(f"{where}: the store answered {status} {code}")
