"""Containers of Azure Blob Storage, through azure-storage-blob (extra `azure`).

Source of the codes: learn.microsoft.com/rest/api/storageservices/blob-service-error-codes and common-rest-api-error-codes.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import quote

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

if TYPE_CHECKING:
    from azure.core.exceptions import HttpResponseError
    from azure.storage.blob import BlobProperties, ContainerClient

_MOST_BLOCKS = 50_000


@dataclass(frozen=True)
class AzureCredential:
    """An account key, or a shared access signature for the container."""

    account_key: str | None = field(default=None, repr=False)
    sas: str | None = field(default=None, repr=False)


_CHECK_KEY = "check the account key or SAS (CAISSON_STORE_SECRET_KEY, CAISSON_STORE_SAS) and its expiry, and this machine's clock"
_ALLOW = "give this credential the role Storage Blob Data Contributor, or a SAS with read, add, create, write, delete and list"
_REFUSED = {
    "ContainerNotFound": ("there is no such container", "make it, or correct its name"),
    "ContainerDisabled": ("the container is disabled", "ask the provider why"),
    "ResourceNotFound": ("there is no such container", "make it, or correct its name"),
    "AuthenticationFailed": ("the credential is not accepted", _CHECK_KEY),
    "InvalidAuthenticationInfo": ("the credential is not accepted", _CHECK_KEY),
    "NoAuthenticationInformation": ("no credential was given", _CHECK_KEY),
    "AuthorizationFailure": ("access denied", f"{_CHECK_KEY}, the account's firewall, or {_ALLOW}"),
    "AuthorizationPermissionMismatch": ("access denied", _ALLOW),
    "AuthorizationServiceMismatch": ("the SAS is not for blobs", _ALLOW),
    "AuthorizationResourceTypeMismatch": ("the SAS is not for objects and containers", _ALLOW),
    "InsufficientAccountPermissions": ("access denied", _ALLOW),
    "AccountIsDisabled": ("the account is disabled", "ask the provider why"),
    "KeyBasedAuthenticationNotPermitted": ("the account takes no keys", "leave the key out and give this machine an identity"),
}
_MISSING = {"BlobNotFound"}
_ARCHIVED = {"BlobArchived", "BlobBeingRehydrated"}
_EXISTS = {"BlobAlreadyExists", "UnauthorizedBlobOverwrite"}
_CHANGED = {"ConditionNotMet", "TargetConditionNotMet", "SourceConditionNotMet"}
_TRANSIENT = {"ServerBusy", "InternalError", "OperationTimedOut", "ContainerBeingDeleted", "Md5Mismatch", "InvalidBlockList"}
"""InvalidBlockList: another writer finished this blob meanwhile, which discards all blocks sent before."""


class AzureBucket:
    """One container. Without a credential azure-identity looks for one itself: environment, managed identity, `az login`."""

    def __init__(
        self, account: str, container: str, *, endpoint: str | None = None, credential: AzureCredential | None = None
    ) -> None:
        blob = load_sdk("azure.storage.blob", "azure")
        self._core = load_sdk("azure.core.exceptions", "azure")
        self._if_same = load_sdk("azure.core", "azure").MatchConditions.IfNotModified
        self._make_sas = blob.generate_blob_sas
        self.place = f"azure://{account}/{container}"
        self._account, self._container = account, container
        self._key = None if credential is None else credential.account_key
        requests = load_sdk("requests", "azure")
        session = requests.Session()
        for scheme in ("https://", "http://"):
            session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=THREADS))
        transport = load_sdk("azure.core.pipeline.transport", "azure").RequestsTransport
        with self._translated(""):
            self._client: ContainerClient = blob.ContainerClient(
                endpoint or f"https://{account}.blob.core.windows.net",
                container,
                credential=_credential(account, credential),
                transport=transport(
                    session=session,
                    connection_timeout=CONNECT_SECONDS,
                    read_timeout=READ_SECONDS,
                    connection_data_block_size=1 << 20,
                ),
                retry_total=0,
                max_single_get_size=4 * PIECE,
                max_chunk_get_size=PIECE,
            )

    def put(self, key: str, data: bytes, create_only: bool, if_version: str | None) -> None:
        """See Bucket."""
        client = self._client.get_blob_client(key)
        with self._translated(key, create_only):
            if if_version is None:
                client.upload_blob(data, overwrite=not create_only, validate_content=True)
            else:
                etag = f'"{if_version}"'
                client.upload_blob(data, overwrite=True, validate_content=True, etag=etag, match_condition=self._if_same)

    def read(self, key: str, offset: int, length: int | None, version: str | None) -> bytes:
        """See Bucket."""
        pinned = {} if version is None else {"etag": f'"{version}"', "match_condition": self._if_same}
        try:
            with self._translated(key):
                # Compressed content is given as it is stored: sizes and digests are those of the stored bytes.
                found = self._client.get_blob_client(key).download_blob(offset, length, decompress=False, **pinned)
                data: bytes = found.readall()
                return data
        except _EndedError:
            return b""

    def head(self, key: str) -> ObjectInfo | None:
        """See Bucket."""
        try:
            with self._translated(key):
                return _info(self._client.get_blob_client(key).get_blob_properties())
        except ObjectMissing:
            return None

    def delete(self, key: str) -> None:
        """See Bucket."""
        try:
            with self._translated(key):
                self._client.get_blob_client(key).delete_blob(delete_snapshots="include")
        except ObjectMissing:
            return

    def page(self, prefix: str, token: str | None, limit: int | None) -> tuple[list[ObjectInfo], str | None]:
        """See Bucket."""
        with self._translated(prefix):
            pages = self._client.list_blobs(name_starts_with=prefix or None, results_per_page=limit or 5000).by_page(token)
            listed = [_info(found) for found in next(pages, iter(()))]
            following: str | None = getattr(pages, "continuation_token", None)
        return listed, following or None

    def presign(self, key: str, seconds: int) -> str:
        """See Bucket. Only an account key can sign for one blob; a SAS would have to be given away whole."""
        check_seconds(seconds)
        if self._key is None:
            raise StoreError(f"{self.place}/{key}: only an account key can sign a URL; set CAISSON_STORE_SECRET_KEY to one")
        signature = self._make_sas(
            self._account,
            self._container,
            key,
            account_key=self._key,
            permission="r",
            expiry=datetime.now(UTC) + timedelta(seconds=seconds),
        )
        return f"{self._client.url}/{quote(key, safe='/~')}?{signature}"

    def upload(self, key: str, create_only: bool) -> AzureUpload:
        """See Bucket."""
        return AzureUpload(self, key, create_only)

    def close(self) -> None:
        """See Bucket."""
        self._client.close()

    @contextmanager
    def _translated(self, key: str, create_only: bool = False) -> Iterator[None]:
        """Raise the SDK's errors as the port's. Without their cause: it may hold a URL, and in it the SAS."""
        known = self._core
        where = f"{self.place}/{key}"
        try:
            yield
        except known.ClientAuthenticationError as error:
            # Of the service (with an answer), or of azure-identity, which found nothing.
            if error.response is not None:
                raise _translate(where, error, create_only) from None
            raise StoreDenied(
                f"{where}: no credential was found; set CAISSON_STORE_SECRET_KEY or CAISSON_STORE_SAS, "
                "or give this machine an identity"
            ) from None
        except known.HttpResponseError as error:
            # A body that breaks off comes as one of these too, with the status of the answer that began well.
            if error.response is None or error.response.status_code < 300:
                raise StoreUnavailable(f"{where}: the connection failed ({type(error).__name__}); try again") from None
            raise _translate(where, error, create_only) from None
        except (known.ServiceRequestError, known.ServiceResponseError) as error:
            raise StoreUnavailable(f"{where}: the connection failed ({type(error).__name__}); try again") from None
        except (known.AzureError, ValueError) as error:
            raise StoreError(f"{where}: {type(error).__name__}; check the account key, the endpoint and the name") from None


class AzureUpload:
    """Blocks, then their list. Azure removes blocks that no list names after a week; there is no other way to abort."""

    repeatable = True

    def __init__(self, bucket: AzureBucket, key: str, create_only: bool) -> None:
        self._bucket, self._key, self._create_only = bucket, key, create_only
        self._client = bucket._client.get_blob_client(key)
        # Two writers of one blob must not take each other's blocks for their own.
        self._name, self._blocks = secrets.token_hex(8), list[str]()

    def send(self, part: bytes) -> None:
        """See Upload."""
        if len(self._blocks) == _MOST_BLOCKS:
            raise StoreError(
                f"{self._bucket.place}/{self._key}: larger than {_MOST_BLOCKS * PIECE >> 30} GiB; store it in pieces"
            )
        block = base64.b64encode(f"{self._name}{len(self._blocks):08d}".encode()).decode()
        with self._bucket._translated(self._key):
            self._client.stage_block(block, part, validate_content=True)
        self._blocks.append(block)

    def finish(self, last: bytes) -> None:
        """See Upload."""
        self.send(last)
        blocks = [load_sdk("azure.storage.blob", "azure").BlobBlock(block) for block in self._blocks]
        condition = {"match_condition": load_sdk("azure.core", "azure").MatchConditions.IfMissing} if self._create_only else {}
        with self._bucket._translated(self._key, self._create_only):
            self._client.commit_block_list(blocks, **condition)

    def abort(self) -> None:
        """See Upload."""


class _EndedError(StoreError):
    """The range begins where the blob has ended."""


def _credential(account: str, given: AzureCredential | None) -> object:
    if given is not None and given.account_key is not None:
        return {"account_name": account, "account_key": given.account_key}
    if given is not None and given.sas is not None:
        return load_sdk("azure.core.credentials", "azure").AzureSasCredential(given.sas.removeprefix("?"))
    return load_sdk("azure.identity", "azure").DefaultAzureCredential()


def _info(found: BlobProperties) -> ObjectInfo:
    return ObjectInfo(found.name, found.size, found.last_modified.timestamp(), found.etag.strip('"'))


def _translate(where: str, error: HttpResponseError, create_only: bool) -> StoreError:
    given = getattr(error, "error_code", None) or ""
    code = str(getattr(given, "value", given))
    status = error.status_code or 0
    if code in _EXISTS or (create_only and code in _CHANGED):
        return ObjectExists(f"{where}: exists")
    if code in _CHANGED or status == 412:
        return ObjectChanged(f"{where}: is another version now; read it again")
    if code in _MISSING or (status == 404 and not code):
        return ObjectMissing(f"{where}: no such object")
    if code in _ARCHIVED:
        return StoreError(f"{where}: is archived ({code}); bring it to another tier first, or exclude it")
    if status == 416:
        return _EndedError(where)
    if code in _REFUSED:
        reason, remedy = _REFUSED[code]
        return StoreDenied(f"{where}: {reason} ({code}); {remedy}")
    if status >= 500 or status == 429 or code in _TRANSIENT:
        return StoreUnavailable(f"{where}: the store is busy or failing ({code or status}); try again")
    if status in (401, 403):
        return StoreDenied(f"{where}: refused ({code or status}); {_CHECK_KEY}")
    return StoreError(f"{where}: the store answered {status} {code}")
