"""Objects of a company's bucket: of one prefix, each exactly in the version that was listed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Protocol

from activities.governance.secrets import Secrets
from activities.store.port import ObjectChanged, ObjectMissing, StoreDenied, StoreError, StoreUnavailable
from activities.store.remote import Bucket
from activities.store.source import BucketSource, SourceBucket, SourceObject
from activities.threads import to_end
from activities.workspace.fetch_spool import RunSpool, identity_of
from activities.workspace.ingest import Content
from activities.workspace.sources.port import Bound, Found, SourceChanged
from activities.workspace.sources.select import Selection
from contracts.base import BadInput
from contracts.manifest import BucketEntry, BucketTarget

_S3 = {"access_key_id", "secret_access_key", "session_token", "endpoint"}
_FIELDS = {
    "s3": _S3,
    "r2": _S3,
    "azure": {"account_key", "sas_token", "endpoint"},
    "gcs": {"service_account", "endpoint"},
}
_ACCOUNT_FILE = {
    *("type", "project_id", "private_key_id", "private_key", "client_email", "client_id", "auth_uri", "token_uri"),
    *("auth_provider_x509_cert_url", "client_x509_cert_url", "universe_domain"),
}
"""The fields of a Google service account's key file, which may be the secret as it is."""


class OpenBucket(SourceBucket, Protocol):
    """A bucket whose connections somebody has to close."""

    def close(self) -> None:
        """Close them. Blocks."""


def place_of(entry: BucketEntry | BucketTarget) -> str:
    """Return what people call the place of an entry or a target, without any credential."""
    account = f"{entry.account}/" if entry.account else ""
    return f"{entry.type}://{account}{entry.bucket}/{entry.prefix}"


def open_bucket(entry: BucketEntry | BucketTarget, secrets: Secrets, prefix: str | None = None) -> BucketSource:
    """Open the bucket of an entry or a target, of which nothing outside `prefix` can be named. Blocks. Raises BadInput."""
    with told(entry):
        return BucketSource(_bucket(entry, secrets), entry.prefix if prefix is None else prefix)


def _bucket(entry: BucketEntry | BucketTarget, secrets: Secrets) -> Bucket:
    fields = {} if entry.secret is None else _credential(entry, secrets)
    if entry.endpoint is not None and fields.get("endpoint", "").rstrip("/") != entry.endpoint.rstrip("/"):
        # Some credentials (tokens, a SAS) are sent as they are: whoever writes a manifest must not choose to whom.
        raise BadInput(
            f".endpoint: {entry.endpoint} is not the `endpoint` that the secret names; "
            "name a secret whose file has this endpoint, so that its credential goes nowhere else"
        )
    if entry.type == "azure":
        from activities.store.azure import AzureBucket, AzureCredential

        if entry.account is None:
            raise BadInput(".account: required for azure, but missing; name the storage account")
        key, sas = fields.get("account_key"), fields.get("sas_token")
        azure = AzureCredential(key, sas) if key or sas else None
        return AzureBucket(entry.account, entry.bucket, endpoint=entry.endpoint, credential=azure)
    if entry.type == "gcs":
        from activities.store.gcs import GcsBucket, GcsCredential

        account = fields.get("service_account")
        return GcsBucket(entry.bucket, endpoint=entry.endpoint, credential=GcsCredential(account) if account else None)
    from activities.store.s3 import S3Bucket, S3Credential

    amazon = None
    if fields:
        amazon = S3Credential(fields["access_key_id"], fields["secret_access_key"], fields.get("session_token"))
    if entry.type == "r2":
        if entry.account is None and entry.endpoint is None:
            raise BadInput(".account: required for r2, but missing; name the account, or an endpoint")
        endpoint = entry.endpoint or f"https://{entry.account}.r2.cloudflarestorage.com"
        return S3Bucket(entry.bucket, endpoint=endpoint, region=entry.region or "auto", credential=amazon, scheme="r2")
    return S3Bucket(entry.bucket, endpoint=entry.endpoint, region=entry.region, credential=amazon)


def _credential(entry: BucketEntry | BucketTarget, secrets: Secrets) -> dict[str, str]:
    """Return the fields of an entry's secret, as text. Raises BadInput."""
    name = entry.secret or ""
    known = _FIELDS[entry.type]
    fields = secrets.fields(name, known | _ACCOUNT_FILE if entry.type == "gcs" else known)
    if entry.type == "gcs" and "private_key" in fields:
        account = {key: value for key, value in fields.items() if key in _ACCOUNT_FILE}
        fields = {"service_account": account, **({"endpoint": fields["endpoint"]} if "endpoint" in fields else {})}
    if isinstance(fields.get("service_account"), dict):
        fields["service_account"] = json.dumps(fields["service_account"])
    needed = {"access_key_id", "secret_access_key"} if entry.type in ("s3", "r2") else set()
    if entry.type == "gcs":
        needed = {"service_account"}
    if entry.type == "azure" and len({"account_key", "sas_token"} & fields.keys()) != 1:
        raise BadInput(f"secret {name!r}: give one of account_key and sas_token")
    for field in sorted(needed | fields.keys()):
        value = fields.get(field)
        if not isinstance(value, str) or not value:
            raise BadInput(f"secret {name!r}: {field} must be text, in quotes if it looks like a number, but is missing or none")
    return {field: str(value) for field, value in fields.items()}


@contextmanager
def told(entry: BucketEntry | BucketTarget) -> Iterator[None]:
    """Raise what a bucket raises as what an entry is refused with. StoreUnavailable stays, since it may pass."""
    try:
        yield
    except StoreUnavailable:
        raise
    except (ObjectChanged, ObjectMissing) as error:
        raise SourceChanged(f"{_reason(error)} since it was listed; try again when nobody writes to it") from None
    except StoreDenied as error:
        remedy = (
            "name a secret in `secret`, or give the tools worker an identity that is allowed there"
            if entry.secret is None
            else f"check the secret {entry.secret!r}, what it is allowed there, and the entry's bucket, region and endpoint"
        )
        raise BadInput(f"{_reason(error)}; {remedy}") from None
    except StoreError as error:
        told = str(error)
        # The store's own settings are named there, which have nothing to do with an entry.
        raise BadInput(f"{_reason(error)}; see docs/manifest.md" if "CAISSON_STORE" in told else told) from None


def _reason(error: StoreError) -> str:
    return str(error).partition("; ")[0]


class BucketFiles:
    """The objects of a bucket entry. `name` is what tells the entry from every other one of the run."""

    def __init__(self, entry: BucketEntry, name: str, opens: Callable[[], OpenBucket], spool: RunSpool) -> None:
        self._entry = entry
        self._name = name
        self._opens = opens
        self._spool = spool
        self._selection = Selection(entry.include, entry.exclude)
        self._opened: OpenBucket | None = None
        self._loop = asyncio.get_running_loop()

    async def find(self, most_files: int) -> list[Found]:
        """See Source. Objects that the entry leaves out are neither kept nor judged."""
        listed = 0
        objects: list[tuple[str, SourceObject]] = []
        bound = Bound(most_files, self._place)
        with told(self._entry):
            async for path, info in self._list(await self._bucket()):
                listed += 1
                judged = path.removesuffix("/") if path else info.key.rpartition("/")[2]
                if self._selection.takes(judged, is_directory=path.endswith("/")):
                    objects.append((path, info))
                    bound.count(is_directory=path.endswith("/") and not info.size)
        if not objects:
            what = f"include and exclude leave none of {listed} objects" if listed else "no object is there"
            raise BadInput(f"{self._place}: {what}; correct the bucket, the prefix or the patterns")
        return self._found(objects)

    def pin(self) -> str:
        """See Source. Each object has its own version."""
        return ""

    async def close(self) -> None:
        """See Source."""
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)

    async def presign(self, found: Found) -> str:
        """Return a URL of one object. Raises BadInput."""
        with told(self._entry):
            return await (await self._bucket()).presign(found.name, self._entry.presigned_seconds)

    @property
    def _place(self) -> str:
        return place_of(self._entry)

    async def _bucket(self) -> OpenBucket:
        if self._opened is None:
            self._opened = await to_end(self._opens, undo=lambda bucket: bucket.close())
        return self._opened

    async def _list(self, bucket: SourceBucket) -> AsyncIterator[tuple[str, SourceObject]]:
        """Yield (path below the prefix, object); '' is the object of that key itself, '/' a marker `prefix/`.

        A prefix without / at its end stands for the object of that key and the directory of that name, never for other keys
        that begin so.
        """
        folder = prefix = self._entry.prefix
        if prefix and not prefix.endswith("/"):
            folder = prefix + "/"
            async with aclosing(_generator(bucket.list(prefix))) as listed:
                # The shortest key comes first in every service's order, so that one look is enough.
                async for info in listed:
                    if info.key == prefix:
                        yield "", info
                    break
        async for info in bucket.list(folder):
            if not info.key.startswith(folder):
                raise BadInput(
                    f"{self._place}: the store lists {info.key!r}, which is outside of the prefix; report it to the store"
                )
            yield info.key[len(folder) :] or "/", info

    def _found(self, objects: list[tuple[str, SourceObject]]) -> list[Found]:
        """Tell files from what only shows a directory: `dir/` of no bytes, and an empty `dir` with others below it."""
        folders = {parent for path, _ in objects for parent in _parents(path)}
        single = next((info for path, info in objects if not path), None)
        if single is not None and len(objects) > 1:
            if single.size:
                raise BadInput(
                    f"the key {single.key!r} is an object, and others are below {single.key + '/'!r}; "
                    "end the prefix with / to have those, or rename the object"
                )
            folders.add("")
        found = []
        for path, info in sorted(objects, key=lambda item: (item[0], item[1].key)):
            if info.size == 0 and (path.endswith("/") or path in folders):
                found.append(Found(path.removesuffix("/"), info.key, info.version))
            else:
                found.append(Found(path, info.key, info.version, info.size, open=partial(self._open, info)))
        return found

    def _open(self, info: SourceObject) -> Content:
        # In a thread, while the loop goes on.
        return asyncio.run_coroutine_threadsafe(self._download(info), self._loop).result()

    async def _download(self, info: SourceObject) -> Content:
        bucket = await self._bucket()
        with told(self._entry):
            return await self._spool.fill(
                identity_of(self._name, info.key, info.version),
                info.size,
                lambda offset: bucket.stream(info.key, info.version, offset),
                f"{self._place}: {info.key!r}",
            )


async def _generator(listed: AsyncIterator[SourceObject]) -> AsyncGenerator[SourceObject, None]:
    async for info in listed:
        yield info


def _parents(path: str) -> Iterator[str]:
    at = path.find("/")
    while at > 0:
        yield path[:at]
        at = path.find("/", at + 1)
