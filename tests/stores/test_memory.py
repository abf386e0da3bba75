"""Streams hold pieces of an object in memory, never all of it."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from activities.store.remote import PIECE, RemoteStore
from tests.stores.conftest import Server
from tests.stores.servers import AzureServer, S3Server

_SIZE = 64 << 20
_MOST = 6 * PIECE


@pytest.mark.parametrize("chunk", [1 << 20, _SIZE // 2], ids=["small", "huge"])
async def test_a_large_stream_is_sent_and_read_in_bounded_memory(server: Server, chunk: int) -> None:
    """64 MiB each way within 48 MiB, beside the two chunks that whoever streams holds."""
    if chunk > PIECE and not isinstance(server, S3Server):
        pytest.skip("that a chunk is split does not depend on the service")
    store = RemoteStore(server.opened, "memory")
    sent, received = hashlib.sha256(), hashlib.sha256()

    async def chunks() -> AsyncIterator[bytes]:
        for n in range(_SIZE // chunk):
            data = bytes([n]) * chunk
            sent.update(data)
            yield data

    tracemalloc.start()
    try:
        await store.put_stream("big", chunks())
        async for piece in store.stream("big"):
            received.update(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    await store.delete("big")
    assert sent.hexdigest() == received.hexdigest()
    # Azure's SDK makes a list of as many places as a piece has bytes, and uses few of them: address space, not memory.
    unused = 8 * PIECE if isinstance(server, AzureServer) else 0
    assert peak - unused - (2 * chunk if chunk > PIECE else 0) < _MOST, f"{peak >> 20} MiB"
