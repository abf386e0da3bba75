"""Many snapshots at one time: each waits for the store, and none takes from it what it waits for."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.workspace.scan import HostScanner
from activities.workspace.snapshots import Contents, SnapshotStore


async def test_more_snapshots_than_threads_all_finish(tmp_path: Path) -> None:
    """With two threads in the pool, twelve snapshots that each wait for the store."""
    # On a loop of its own: that of the session must not be left with two threads.
    await asyncio.to_thread(asyncio.run, _twelve(tmp_path))


async def _twelve(tmp_path: Path) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    store = SnapshotStore(BlobStore(LocalStore(tmp_path / "store")))

    async def one(n: int) -> int:
        workspace = tmp_path / str(n)
        workspace.mkdir()
        for part in range(3):
            (workspace / str(part)).write_bytes(bytes([n, part]) * 500_000)
        scanner = HostScanner(workspace)
        try:
            return (await store.save(scanner.scan(), Contents(), None)).files
        finally:
            scanner.close()

    async with asyncio.timeout(60):
        assert await asyncio.gather(*(one(n) for n in range(12))) == [3] * 12
