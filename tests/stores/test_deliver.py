"""Outputs that are delivered to a company's bucket, on real servers: all of them, once, and never over what is another's."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from activities.store.port import StoreUnavailable
from activities.store.remote import PIECE
from activities.store.source import BucketSource
from activities.workspace.deliver import safe_run_id
from contracts.blob import BlobRef
from tests.manifest_support import Desk
from tests.stores.servers import S3Server
from tests.stores.test_manifest_entries import Company, company, secret_of

__all__ = ["company"]


def output(company: Company, path: str = "outputs", prefix: str = "results/{run_id}/", **fields: Any) -> dict[str, Any]:
    """An output that goes to the company's bucket."""
    return {"path": path, "to": company.entry(prefix, **fields)}


async def objects(company: Company) -> dict[str, bytes]:
    """All that is in the bucket."""
    source = BucketSource(company.bucket)
    return {found.key: company.bucket.read(found.key, 0, None, None) async for found in source.list("")}


async def index(company: Company) -> BlobRef:
    """Some artifacts."""
    files = {
        "outputs/a.txt": b"1",
        "outputs/d/Größe 1.csv": b"22",
        "outputs/empty": b"",
        "outputs-too/x": b"no",
        "report.md": b"r",
    }
    return await company.desk.index(files)


async def test_every_artifact_arrives_with_a_record(company: Company) -> None:
    """Below the prefix, in which {run_id} is a safe name; the record of digests comes last."""
    made = await index(company)
    result = await company.desk.deliver(made, output(company), output(company, "report.md", "reports/"), run_id="run 1/ü")
    assert (result.complete, result.delivered, result.total_bytes, result.missing) == (True, 4, 4, ())
    found = await objects(company)
    record = json.loads(found.pop("results/run_1__/_caisson.json"))
    assert json.loads(found.pop("reports/_caisson.json"))["objects"][0]["path"] == "report.md"
    assert found == {
        "results/run_1__/a.txt": b"1",
        "results/run_1__/d/Größe 1.csv": b"22",
        "results/run_1__/empty": b"",
        "reports/report.md": b"r",
    }
    assert (record["run_id"], record["complete"]) == ("run 1/ü", True)
    assert record["objects"][0] == {
        "key": "results/run_1__/a.txt",
        "path": "outputs/a.txt",
        "size": 1,
        "sha256": hashlib.sha256(b"1").hexdigest(),
    }
    assert [name.rpartition("/")[0].endswith(("run_1__", "reports")) for name in result.destinations] == [True, True]


async def test_delivering_again_changes_nothing(company: Company) -> None:
    """A retry after a crash, at whatever point, ends as if nothing had happened."""
    made = await index(company)
    first = await company.desk.deliver(made, output(company))
    before = {found.key: found.version async for found in BucketSource(company.bucket).list("")}
    assert await company.desk.deliver(made, output(company)) == first
    assert {found.key: found.version async for found in BucketSource(company.bucket).list("")} == before
    company.bucket.delete("results/run/_caisson.json")
    company.bucket.delete("results/run/a.txt")
    assert await company.desk.deliver(made, output(company)) == first
    assert (await objects(company))["results/run/a.txt"] == b"1"
    assert json.loads((await objects(company))["results/run/_caisson.json"])["complete"] is True


async def test_another_run_s_object_stays(company: Company) -> None:
    """The rest is delivered, but never reported as done, and no record says so."""
    company.put("results/a.txt", b"another's")
    company.put("results/empty", b"x")
    result = await company.desk.deliver(await index(company), output(company, prefix="results/"))
    assert (result.complete, result.delivered, result.missing_count, result.destinations) == (False, 1, 2, ())
    assert (
        "'results/a.txt': an object with other content is there; give each run its own prefix with {run_id}" in result.missing[0]
    )
    found = await objects(company)
    assert (found["results/a.txt"], found["results/empty"]) == (b"another's", b"x")
    assert "results/_caisson.json" not in found


async def test_another_run_s_delivery_is_not_mixed_with(company: Company) -> None:
    """Where its record lies, nothing is written at all."""
    await company.desk.deliver(await index(company), output(company, prefix="results/"), run_id="first")
    before = await objects(company)
    other = await company.desk.index({"outputs/b.txt": b"2"})
    result = await company.desk.deliver(other, output(company, prefix="results/"), run_id="second")
    assert (result.complete, result.delivered) == (False, 0)
    assert "'results/_caisson.json': another delivery is there" in result.missing[0]
    assert await objects(company) == before


async def test_overwrite_replaces_and_never_leaves_an_old_record(company: Company, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it goes on the record says that it is not complete."""
    await company.desk.deliver(await index(company), output(company, prefix="results/"), run_id="first")
    seen: list[object] = []
    plain = BucketSource.upload

    async def looking(self: BucketSource, key: str, chunks: AsyncIterator[bytes], *, overwrite: bool) -> None:
        if not key.endswith("_caisson.json"):
            seen.append(json.loads(company.bucket.read("results/_caisson.json", 0, None, None))["complete"])
        await plain(self, key, chunks, overwrite=overwrite)

    monkeypatch.setattr(BucketSource, "upload", looking)
    other = await company.desk.index({"outputs/a.txt": b"new"})
    result = await company.desk.deliver(other, output(company, prefix="results", overwrite=True), run_id="second")
    assert result.complete
    assert seen == [False]
    found = await objects(company)
    assert found["results/a.txt"] == b"new"
    assert json.loads(found["results/_caisson.json"])["run_id"] == "second"


async def test_large_artifacts_go_in_parts(company: Company) -> None:
    """And are read back to be compared when they are there already."""
    data = bytes(range(256)) * (PIECE // 256) + b"end"
    made = await company.desk.index({"outputs/big": data})
    assert (await company.desk.deliver(made, output(company))).complete
    assert company.bucket.read("results/run/big", 0, None, None) == data
    assert (await company.desk.deliver(made, output(company))).complete


async def test_what_cannot_be_delivered_is_told(company: Company) -> None:
    """A missing secret, a missing bucket, an artifact that the store has lost: each with its destination, none raised."""
    made = await index(company)
    result = await company.desk.deliver(made, output(company, secret="nobody"), output(company, "report.md", "reports/"))
    assert (result.complete, result.delivered, len(result.destinations)) == (False, 1, 1)
    assert "secret 'nobody': there is no such file" in result.missing[0]
    result = await company.desk.deliver(made, output(company, bucket="missing-" + "0" * 12))
    assert not result.complete
    assert "check the secret 'claims'" in result.missing[0]
    lost = BlobRef(digest=hashlib.sha256(b"22").hexdigest(), size=2)
    await company.desk.blobs.objects.delete(f"blobs/{lost.digest[:2]}/{lost.digest}")
    result = await company.desk.deliver(made, output(company))
    assert (result.complete, result.delivered, result.missing_count) == (False, 2, 1)
    assert "the artifact 'outputs/d/Größe 1.csv' cannot be read from the run's store" in result.missing[0]
    assert "results/run/_caisson.json" not in await objects(company)


async def test_artifacts_of_one_key_are_refused(company: Company) -> None:
    """Two outputs that would be one object, or one that is named like the record."""
    made = await company.desk.index({"a/x": b"1", "b/x": b"2", "c/_caisson.json": b"3"})
    with pytest.raises(Exception, match=r"'b/x' and 'a/x' would both become 'results/run/x'"):
        await company.desk.deliver(made, output(company, "a"), output(company, "b"))
    with pytest.raises(Exception, match="and the record of the delivery would both become"):
        await company.desk.deliver(made, output(company, "c"))


async def test_a_delivery_that_was_killed_is_finished_by_the_next(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its uploads in turn: before it, and after it when nobody has heard."""
    name = s3_server.make()
    desk = Desk(tmp_path)
    desk.secret("claims", secret_of("s3", s3_server, s3_server.endpoint))
    here = Company("s3", s3_server.bucket(name), name, s3_server.endpoint, desk)
    made = await desk.index({f"outputs/{n}": b"%d" % n for n in range(3)})
    plain = BucketSource.upload
    for after in (False, True):
        for stop_at in range(4):
            uploads = 0

            async def upload(self: BucketSource, key: str, chunks: AsyncIterator[bytes], *, overwrite: bool) -> None:
                nonlocal uploads
                uploads += 1
                if uploads <= stop_at + (1 if after else 0):  # noqa: B023 - called within this round
                    await plain(self, key, chunks, overwrite=overwrite)
                if uploads > stop_at:  # noqa: B023
                    raise StoreUnavailable("the connection failed")

            monkeypatch.setattr(BucketSource, "upload", upload)
            target = output(here, prefix=f"{after}-{stop_at}/")
            with pytest.raises(StoreUnavailable):
                await desk.deliver(made, target)
            monkeypatch.setattr(BucketSource, "upload", plain)
            result = await desk.deliver(made, target)
            assert (result.complete, result.delivered) == (True, 3)
    here.bucket.close()


@pytest.mark.parametrize(
    ("run_id", "safe"), [("run-1", "run-1"), ("a b/c", "a_b_c"), ("..", "__"), (".", "_"), ("ü.x", "_.x"), ("a\0", "a_")]
)
def test_a_run_id_in_a_prefix_leads_nowhere_else(run_id: str, safe: str) -> None:
    """People choose run ids freely."""
    assert safe_run_id(run_id) == safe


async def test_ten_thousand_small_artifacts_are_no_matter(s3_server: S3Server, tmp_path: Path) -> None:
    """500 of them here, beside each other."""
    name = s3_server.make()
    desk = Desk(tmp_path)
    desk.secret("claims", secret_of("s3", s3_server, s3_server.endpoint))
    here = Company("s3", s3_server.bucket(name), name, s3_server.endpoint, desk)
    made = await desk.index({f"outputs/{n:04}": b"%d" % n for n in range(500)})
    result = await asyncio.wait_for(desk.deliver(made, output(here)), 60)
    assert (result.complete, result.delivered) == (True, 500)
    here.bucket.close()
