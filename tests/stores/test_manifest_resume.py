"""Fetching much: in parallel, in bounded memory, and not from the beginning again after a kill."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from activities.store.remote import Bucket
from activities.store.source import BucketSource
from activities.workspace.fetch_save import CHUNK_FILES
from activities.workspace.fetch_spool import Spool
from contracts.base import BadInput
from tests.manifest_support import Desk, files_of
from tests.stores.proxy import Proxy, Slow
from tests.stores.servers import S3_CREDENTIAL, S3Server

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bucket(s3_server: S3Server) -> Iterator[Bucket]:
    """A bucket with many small objects and one large one."""
    name = s3_server.make()
    opened = s3_server.bucket(name)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: opened.put(f"small/{n // 100:02}/{n:05}.txt", b"%d " % n * 50, False, None), range(3000)))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda n: opened.put(f"large/{n}", content(n, 60), False, None), range(2)))
    yield opened
    opened.close()


def content(seed: int, mib: int) -> bytes:
    """Bytes that do not compress, the same for the same seed."""
    return random.Random(seed).randbytes(mib * MIB)


def entry(bucket: Bucket, endpoint: str, prefix: str, **fields: Any) -> dict[str, Any]:
    """An entry of a bucket, through an endpoint."""
    name = bucket.place.removeprefix("s3://")
    return {"type": "s3", "bucket": name, "prefix": prefix, "secret": "claims", "endpoint": endpoint, **fields}


def desk_of(home: Path, endpoint: str) -> Desk:
    """A desk with the secret for an endpoint."""
    desk = Desk(home)
    keys = {"access_key_id": S3_CREDENTIAL.access_key_id, "secret_access_key": S3_CREDENTIAL.secret_key}
    desk.secret("claims", {**keys, "endpoint": endpoint})
    return desk


def start(desk: Desk, manifest: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Fetch in a process of its own."""
    command = [sys.executable, "-m", "tests.stores.fetch_once", str(desk.home), json.dumps(manifest)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})


def kill_when(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    """Kill a process, without a chance to clean up, once something is so."""
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, "it was done before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def gets(proxy: Proxy) -> list[str]:
    """The paths of the objects that were asked for."""
    return [request.target for request in proxy.requests if request.method == "GET" and "list-type" not in request.target]


async def test_a_large_object_goes_on_from_its_spool_file(bucket: Bucket, s3_server: S3Server, tmp_path: Path) -> None:
    """After kill -9 only the rest is read, of the same version, and nothing stays behind."""
    with Proxy(s3_server.port) as proxy:
        desk = desk_of(tmp_path, proxy.endpoint)
        manifest = {"entries": {"in/big": entry(bucket, proxy.endpoint, "large/0")}}
        kill_when(start(desk, manifest), lambda: sum(path.stat().st_size for path in desk.spooled()) >= 16 * MIB)
        (left,) = desk.spooled()
        held = left.stat().st_size
        assert 16 * MIB <= held <= 60 * MIB
        assert left.stat().st_mode & 0o777 == 0o600
        assert desk.spool.stat().st_mode & 0o777 == 0o700
        proxy.requests.clear()
        result = await desk.fetch(manifest)
        starts = [
            int(request.headers["range"].removeprefix("bytes=").split("-")[0])
            for request in proxy.requests
            if "range" in request.headers
        ]
        assert held == 60 * MIB or min(starts) == held
        assert all("if-match" in request.headers for request in proxy.requests if "range" in request.headers)
        (file,) = (await desk.sources(result))["in/big"].files
        assert file.sha256 == hashlib.sha256(content(0, 60)).hexdigest()
        assert desk.spooled() == []


async def test_a_large_object_that_was_replaced_is_read_anew(s3_server: S3Server, tmp_path: Path) -> None:
    """What lies in the spool is of another version, and is not taken for it."""
    opened = s3_server.bucket(s3_server.make())
    opened.put("big", content(7, 40), False, None)
    with Proxy(s3_server.port) as proxy:
        desk = desk_of(tmp_path, proxy.endpoint)
        manifest = {"entries": {"big": entry(opened, proxy.endpoint, "big")}}
        kill_when(start(desk, manifest), lambda: sum(path.stat().st_size for path in desk.spooled()) >= 8 * MIB)
        opened.put("big", content(8, 40), False, None)
        result = await desk.fetch(manifest)
        (file,) = (await desk.sources(result))["big"].files
        assert file.sha256 == hashlib.sha256(content(8, 40)).hexdigest()
    opened.close()


async def test_small_objects_go_on_from_the_last_note(bucket: Bucket, s3_server: S3Server, tmp_path: Path) -> None:
    """After kill -9 no object of a chunk that was noted is read again, and the workspace is what it would have been."""
    with Proxy(s3_server.port) as proxy:
        desk = desk_of(tmp_path, proxy.endpoint)
        manifest = {"entries": {"in": entry(bucket, proxy.endpoint, "small/")}}
        records = desk.home / "store" / "records"
        # A note that is only being written has another name.
        kill_when(start(desk, manifest), lambda: any(path.is_file() for path in records.rglob("[!.]*")))
        proxy.requests.clear()
        began = time.monotonic()
        result = await desk.fetch(manifest)
        print(f"the rest: {len(gets(proxy))} requests, {time.monotonic() - began:.1f} s")
        assert len(gets(proxy)) <= 3000 - CHUNK_FILES
        assert result.snapshot.files == 3000
        tree = files_of(await desk.tree(result))
        assert tree["in/07/00742.txt"] == b"742 " * 50
    (tmp_path / "fresh").mkdir()
    fresh = desk_of(tmp_path / "fresh", s3_server.endpoint)
    whole = await fresh.fetch({"entries": {"in": entry(bucket, s3_server.endpoint, "small/")}})
    assert whole.snapshot.id == result.snapshot.id


async def test_thousands_of_small_objects_take_seconds(bucket: Bucket, s3_server: S3Server, tmp_path: Path) -> None:
    """2,000 at a time, with progress that names entry, files and bytes."""
    desk = desk_of(tmp_path, s3_server.endpoint)
    began = time.monotonic()
    result = await desk.fetch({"entries": {"in": entry(bucket, s3_server.endpoint, "small/", include=["0*/", "1*/"])}})
    took = time.monotonic() - began
    print(f"2,000 objects: {took:.1f} s")
    assert result.snapshot.files == 2000
    assert took < 60
    assert desk.spooled() == []


async def test_downloads_run_beside_each_other(bucket: Bucket, s3_server: S3Server, tmp_path: Path) -> None:
    """48 objects, each half a second away, take no half a minute; the heartbeat tells how far it is."""
    with Proxy(s3_server.port, always=Slow(0.5)) as proxy:
        desk = desk_of(tmp_path, proxy.endpoint)
        began = time.monotonic()
        patterns = [f"{n:05}.txt" for n in range(48)]
        result = await desk.fetch({"entries": {"in": entry(bucket, proxy.endpoint, "small/00/", include=patterns)}})
        assert result.snapshot.files == 48
        assert time.monotonic() - began < 12
    told = [details[0] for details in desk.beats if details and isinstance(details[0], dict) and "files" in details[0]]
    assert all(one["entry"] == "in" and one["of_files"] == 48 and one["bytes"] <= one["of_bytes"] for one in told)


async def test_a_large_object_needs_little_memory(s3_server: S3Server, tmp_path: Path) -> None:
    """200 MB, of which a process never holds more than pieces of the download and packs on their way to the store."""
    opened = s3_server.bucket(s3_server.make())

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield os.urandom(MIB)

    await BucketSource(opened).upload("big", chunks(), overwrite=False)
    desk = desk_of(tmp_path, s3_server.endpoint)
    process = start(desk, {"entries": {"big": entry(opened, s3_server.endpoint, "big")}})
    output, _ = await asyncio.to_thread(process.communicate)
    found = json.loads(output)
    print(f"most memory: {found['most_bytes'] / 1e6:.0f} MB, idle {found['idle_bytes'] / 1e6:.0f} MB")
    assert found["files"] == 1
    assert found["most_bytes"] - found["idle_bytes"] < 130e6
    opened.close()


async def test_a_fetch_that_is_cancelled_ends_at_once(bucket: Bucket, s3_server: S3Server, tmp_path: Path) -> None:
    """Though requests are under way; the next attempt goes on."""
    with Proxy(s3_server.port, always=Slow(1.0)) as proxy:
        desk = desk_of(tmp_path, proxy.endpoint)
        manifest = {"entries": {"in": entry(bucket, proxy.endpoint, "large/")}}
        fetching = asyncio.create_task(desk.fetch(manifest))
        while not desk.spooled():
            await asyncio.sleep(0.05)
        began = time.monotonic()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert time.monotonic() - began < 10
        proxy.always = None
        assert (await desk.fetch(manifest)).snapshot.files == 2
        assert desk.spooled() == []


def test_the_spool_is_private_and_swept(tmp_path: Path) -> None:
    """What nobody has touched for a day goes; a directory that others may write to is refused."""
    old = tmp_path / "spool" / secrets.token_hex(4)
    old.parent.mkdir(mode=0o700)
    old.write_bytes(b"x")
    (old.parent / "folder").mkdir()
    (old.parent / "folder" / "file").write_bytes(b"x")
    new = old.with_name("new")
    new.write_bytes(b"x")
    for path in (old, old.parent / "folder"):
        os.utime(path, (1, 1))
    Spool(tmp_path / "spool").of("run")
    assert list((tmp_path / "spool").iterdir()) == [new]
    (tmp_path / "spool").chmod(0o755)
    with pytest.raises(BadInput, match=r"CAISSON_SPOOL: .* is not a directory of this user's alone"):
        Spool(tmp_path / "spool").of("run")
    (tmp_path / "link").symlink_to(tmp_path / "spool")
    with pytest.raises(BadInput, match="is not a directory of this user's alone"):
        Spool(tmp_path / "link").of("run")
