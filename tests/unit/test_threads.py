"""Threads of callers that are cancelled: waited for, and what they made is put away."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from activities.threads import to_end


def _slowly(path: Path) -> int:
    time.sleep(0.2)
    return os.open(path, os.O_RDONLY)


async def test_what_was_made_for_nobody_is_undone(tmp_path: Path) -> None:
    """A file that a thread opens for a caller that is gone is closed, once the thread is done."""
    closed: list[int] = []

    def close(fd: int) -> None:
        closed.append(fd)
        os.close(fd)

    task = asyncio.create_task(to_end(_slowly, tmp_path, undo=close))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(closed) == 1
    fd = await to_end(_slowly, tmp_path, undo=close)
    os.close(fd)
    assert len(closed) == 1


async def test_a_failure_for_nobody_is_not_undone(tmp_path: Path) -> None:
    """There is nothing to undo."""
    task = asyncio.create_task(to_end(_slowly, tmp_path / "gone", undo=os.close))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
