"""Manifests against real object storage, through whole runs: what comes in, what is told, what goes out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from contracts.blob import BlobRef
from tests.integration.stack import Stack, make_stack
from tests.integration.test_durability import artifact
from tests.stores.servers import S3_CREDENTIAL, S3Server, seaweedfs


@dataclass
class Company:
    """A company's storage, and a stack that keeps its blobs there as well."""

    stack: Stack
    server: S3Server
    bucket: str

    def entry(self, prefix: str, **more: Any) -> dict[str, Any]:
        """A place below a prefix."""
        return {
            "type": "s3",
            "bucket": self.bucket,
            "prefix": prefix,
            "secret": "claims",
            "endpoint": self.server.endpoint,
            **more,
        }

    def get(self, key: str) -> bytes:
        """An object's bytes."""
        body: bytes = self.server.admin.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return body


@pytest.fixture(scope="module")
async def company(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Company]:
    """SeaweedFS, a secret for it, and a stack."""
    state, secrets = tmp_path_factory.mktemp("company"), tmp_path_factory.mktemp("secrets")
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        bucket = server.make()
        key = {"access_key_id": S3_CREDENTIAL.access_key_id, "secret_access_key": S3_CREDENTIAL.secret_key}
        (secrets / "claims").write_text(json.dumps({**key, "endpoint": server.endpoint}))
        (secrets / "claims").chmod(0o600)
        environ = {
            "CAISSON_STORE": f"s3://{bucket}/blobs",
            "CAISSON_STORE_ENDPOINT": server.endpoint,
            "CAISSON_STORE_ACCESS_KEY_ID": S3_CREDENTIAL.access_key_id,
            "CAISSON_STORE_SECRET_KEY": S3_CREDENTIAL.secret_key,
            "CAISSON_SECRETS": str(secrets),
        }
        made = make_stack(state, environ)
        async with made.dev:
            yield Company(made, server, bucket)
        await made.sweep()


async def test_a_run_reads_a_bucket_and_delivers_into_one(company: Company) -> None:
    """Files come in pinned, large ones when they are asked for; outputs go out whole, sealed by `_caisson.json`."""
    put = company.server.admin.put_object
    put(Bucket=company.bucket, Key="claims/2026/a.txt", Body=b"from the bucket\n")
    put(Bucket=company.bucket, Key="claims/2026-old/b.txt", Body=b"not this one")
    put(Bucket=company.bucket, Key="big/one.bin", Body=bytes(100_000))
    manifest = {
        "entries": {
            "claims": company.entry("claims/2026", description="this year's claims"),
            "big": company.entry("big/", mode="lazy"),
        },
        "outputs": [{"path": "outputs", "to": company.entry("results/{run_id}/")}],
    }
    handle = await company.stack.start("from-a-bucket", manifest=manifest)
    result = await company.stack.finish(handle)
    assert (result["status"], result["reason"]) == ("completed", None)
    assert await artifact(company.stack, result, "outputs/copied") == b"from the bucket\n100000\n"
    assert result["delivery"]["complete"] is True
    assert company.get(f"results/{handle.id}/copied") == b"from the bucket\n100000\n"
    sealed = json.loads(company.get(f"results/{handle.id}/_caisson.json"))
    assert handle.id in json.dumps(sealed)
    sources = json.loads(await company.stack.dev.blobs.get(BlobRef.model_validate(result["inputs"])))
    assert "claims/2026/a.txt" in json.dumps(sources)
    assert "2026-old" not in json.dumps(sources)

    # The same again, pinned: first unchanged, then with another object under the key.
    pinned = {**manifest, "pins": result["inputs"]}
    again = await company.stack.finish(await company.stack.start("from-a-bucket", manifest=pinned))
    assert again["status"] == "completed"
    put(Bucket=company.bucket, Key="claims/2026/a.txt", Body=b"another text!!!\n")
    error = await company.stack.failure(await company.stack.start("from-a-bucket", manifest=pinned))
    assert error.type == "BadInput"
    assert "manifest.entries.claims" in error.message
    assert "a.txt" in error.message


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"secret": "no-such"}, "secret 'no-such'"),
        ({"prefix": "nothing/here/"}, "manifest.entries.claims"),
        ({"bucket": "no-such-bucket"}, "manifest.entries.claims"),
    ],
)
async def test_a_manifest_that_cannot_be_satisfied_fails_before_the_model_is_asked(
    company: Company, change: dict[str, Any], told: str
) -> None:
    """Entry, reason and remedy; no model call, no sandbox left."""
    entry = {**company.entry("claims/2026"), **change}
    handle = await company.stack.start("from-a-bucket", manifest={"entries": {"claims": entry}})
    error = await company.stack.failure(handle)
    assert error.type == "BadInput"
    assert told in error.message
    assert S3_CREDENTIAL.secret_key not in error.message
    assert company.stack.journal(handle) == []
    assert company.stack.sandboxes() == []
