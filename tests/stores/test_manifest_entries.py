"""Bucket entries of manifests, on real servers: what is taken, what is pinned, what is refused."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.store.remote import Bucket
from tests.manifest_support import Desk, files_of
from tests.stores.conftest import REMOTE, SERVERS, Server
from tests.stores.servers import AZURE_ACCOUNT, AZURE_KEY, S3_CREDENTIAL, AzureServer, GcsServer

PLANTED = "pl4nted-canary-0123456789"


@dataclass
class Company:
    """A company's bucket, and the desk of a tools worker that has the secret for it."""

    kind: str
    bucket: Bucket
    name: str
    endpoint: str
    desk: Desk

    def put(self, key: str, data: bytes) -> None:
        """Write an object."""
        self.bucket.put(key, data, False, None)

    def entry(self, prefix: str, **fields: Any) -> dict[str, Any]:
        """An entry of this bucket."""
        account = {"account": AZURE_ACCOUNT} if self.kind == "azure" else {}
        return {
            "type": self.kind,
            "bucket": self.name,
            "prefix": prefix,
            "secret": "claims",
            "endpoint": self.endpoint,
            **account,
            **fields,
        }

    async def refusal(self, **entries: dict[str, Any]) -> str:
        """How a manifest is refused."""
        with pytest.raises(ApplicationError) as caught:
            await self.desk.fetch({"entries": entries})
        assert caught.value.type == "BadInput", caught.value
        assert caught.value.non_retryable
        assert self.desk.spooled() == []
        return caught.value.message


def secret_of(kind: str, server: Server, endpoint: str) -> dict[str, object]:
    """The secret's document, as docs/manifest.md has it."""
    if isinstance(server, AzureServer):
        return {"account_key": AZURE_KEY, "endpoint": endpoint}
    if isinstance(server, GcsServer):
        return {"service_account": server.account, "endpoint": endpoint}
    return {
        "access_key_id": S3_CREDENTIAL.access_key_id,
        "secret_access_key": S3_CREDENTIAL.secret_key,
        "endpoint": endpoint,
    }


@pytest.fixture(params=REMOTE)
def company(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Company]:
    """Of each service."""
    server: Server = request.getfixturevalue(SERVERS[request.param])
    kind = "gcs" if request.param == "gs" else request.param
    name = server.make()
    desk = Desk(tmp_path)
    desk.secret("claims", secret_of(kind, server, server.endpoint))
    company = Company(kind, server.bucket(name), name, server.endpoint, desk)
    yield company
    company.bucket.close()


async def test_a_prefix_becomes_a_directory(company: Company) -> None:
    """With what include and exclude leave, and nothing of the prefix's neighbours (MF12, mastra-ai/mastra#17613)."""
    for key in ("team-a/ok.txt", "team-a/2026/a.pdf", "team-a/2026/Größe – 1.pdf", "team-a/drafts/b.pdf"):
        company.put(key, key.encode())
    company.put("team-b/secret.txt", b"no")
    company.put("team-abc/other.txt", b"no")
    result = await company.desk.fetch(
        {
            "entries": {
                "data": company.entry("team-a/"),
                "some": company.entry("team-a", include=["*.pdf"], exclude=["drafts/"], read_only=True),
                "one.pdf": company.entry("team-a/2026/a.pdf", mode="0600"),
            }
        }
    )
    assert files_of(await company.desk.tree(result)) == {
        "data/ok.txt": b"team-a/ok.txt",
        "data/2026/a.pdf": b"team-a/2026/a.pdf",
        "data/2026/Größe – 1.pdf": "team-a/2026/Größe – 1.pdf".encode(),
        "data/drafts/b.pdf": b"team-a/drafts/b.pdf",
        "some/2026/a.pdf": b"team-a/2026/a.pdf",
        "some/2026/Größe – 1.pdf": "team-a/2026/Größe – 1.pdf".encode(),
        "one.pdf": b"team-a/2026/a.pdf",
    }
    modes = await company.desk.modes(result)
    assert (modes["some/2026/a.pdf"], modes["some/2026"], modes["one.pdf"]) == (0o444, 0o555, 0o600)
    source = (await company.desk.sources(result))["one.pdf"]
    account = f"{AZURE_ACCOUNT}/" if company.kind == "azure" else ""
    assert source.source == f"{company.kind}://{account}{company.name}/team-a/2026/a.pdf"
    assert source.files[0].version
    planted = [str(value)[:60].encode() for name, value in json.loads((company.desk.secrets / "claims").read_text()).items()]
    stored = [path.read_bytes() for path in (company.desk.home / "store").rglob("*") if path.is_file()]
    assert not [secret for secret in planted[:2] for data in stored if secret in data and b"http" not in secret]
    assert "no object is there; correct the bucket, the prefix or the patterns" in await company.refusal(x=company.entry("team"))


async def test_markers_are_directories(company: Company) -> None:
    """Of consoles, which make objects `dir/` (MF07). SeaweedFS makes a directory of one itself."""
    for key in ("in/d/", "in/empty/"):
        company.put(key, b"")
    company.put("in/d/f", b"abc")
    company.put("in/z", b"")
    tree = await company.desk.entries(data=company.entry("in/"))
    tree.pop("data/empty", None)
    assert tree == {"data": None, "data/d": None, "data/d/f": b"abc", "data/z": b""}


async def test_pins_hold_and_a_changed_object_is_named(company: Company) -> None:
    """By its version before anything is read, and what is missing or new as well."""
    company.put("in/a", b"1")
    company.put("in/b", b"2")
    entries = {"data": company.entry("in/")}
    first = await company.desk.fetch({"entries": entries})
    assert first.sources is not None
    pinned = {"entries": entries, "pins": first.sources.model_dump()}
    again = await company.desk.fetch(pinned, run_id="again")
    assert (again.snapshot.id, again.sources) == (first.snapshot.id, first.sources)
    company.put("in/b", b"3")
    with pytest.raises(ApplicationError, match=r"manifest\.entries\.data: 'in/b' has version .* and was pinned as"):
        await company.desk.fetch(pinned)
    company.bucket.delete("in/b")
    with pytest.raises(ApplicationError, match=r"manifest\.entries\.data: 'in/b' is not there any more"):
        await company.desk.fetch(pinned)


async def test_an_object_that_changes_under_way_is_named(company: Company, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the listing and the download: never a newer version than the one that was listed."""
    from activities.workspace import fetch_save

    company.put("in/a", b"1" * 2_000_000)
    plain = fetch_save.Fetching.run

    async def meanwhile(fetching: Any, tree: Any) -> Any:
        company.put("in/a", b"2" * 2_000_000)
        return await plain(fetching, tree)

    monkeypatch.setattr(fetch_save.Fetching, "run", meanwhile)
    message = await company.refusal(data=company.entry("in/"))
    assert message.startswith("manifest.entries.data: ")
    assert "in/a: is another version now since it was listed; try again when nobody writes to it" in message


async def test_a_wrong_secret_names_entry_and_secret(company: Company) -> None:
    """And never its value, nor settings that have nothing to do with it."""
    wrong: dict[str, dict[str, object]] = {
        "azure": {"account_key": "UGw0bnRlZC1jYW5hcnktMDEyMzQ1Njc4OQ=="},
        "gcs": {"service_account": {"type": "service_account", "private_key": PLANTED, "client_email": "a@b.c"}},
    }
    s3 = {"access_key_id": S3_CREDENTIAL.access_key_id, "secret_access_key": PLANTED}
    company.desk.secret("claims", {**wrong.get(company.kind, s3), "endpoint": company.endpoint})
    company.put("in/a", b"1")
    message = await company.refusal(data=company.entry("in/"))
    assert message.startswith("manifest.entries.data: ")
    assert "check the secret 'claims'" in message
    for hidden in (PLANTED, "UGw0bnRl", "CAISSON_STORE", "canary"):
        assert hidden not in message
    assert "secret 'nobody': there is no such file" in await company.refusal(data=company.entry("in/", secret="nobody"))
    company.desk.secret("claims", {"password": PLANTED})
    message = await company.refusal(data=company.entry("in/"))
    assert "1 of its fields are not known" in message
    assert PLANTED not in message


async def test_a_credential_goes_to_no_endpoint_but_its_own(company: Company) -> None:
    """Whoever writes a manifest cannot have a token sent to a server of their choice."""
    told = "is not the `endpoint` that the secret names"
    assert told in await company.refusal(data=company.entry("in/", endpoint="http://127.0.0.1:9/evil"))
    assert told in await company.refusal(data={**company.entry("in/"), "secret": None})


async def test_a_bucket_that_is_not_there_is_named(company: Company) -> None:
    """With what to check."""
    message = await company.refusal(data=company.entry("in/", bucket="missing-" + secrets.token_hex(6)))
    assert message.startswith("manifest.entries.data: ")
    assert "check the secret 'claims'" in message


async def test_presigned_needs_the_host_in_the_policy(company: Company) -> None:
    """A local server's address can be in none, so this is refused, with the host to add."""
    company.put("in/a", b"1")
    message = await company.refusal(data=company.entry("in/a", mode="presigned"))
    assert "the URL is of host 127.0.0.1, which the sandbox may not reach; add 127.0.0.1 to sandbox.network.allow" in message


async def test_lazy_brings_one_file_when_it_is_asked_for(company: Company) -> None:
    """From the real store, by the path in the workspace."""
    from activities.governance.secrets import Secrets
    from activities.workspace.lazy import fetch_lazy
    from contracts.manifest import Manifest

    company.put("in/d/a b.txt", b"lazy content")
    entries = {"data": company.entry("in/", mode="lazy")}
    result = await company.desk.fetch({"entries": entries})
    tree = await company.desk.tree(result)
    assert json.loads(tree["data/.caisson-lazy.json"] or b"") == [{"path": "d/a b.txt", "size": 12}]
    assert result.lazy is not None
    known = Manifest.model_validate({"entries": entries}).entries
    blob = await fetch_lazy(company.desk.blobs, Secrets(company.desk.secrets), known, result.lazy, "data/d/a b.txt")
    assert await company.desk.blobs.get(blob) == b"lazy content"
