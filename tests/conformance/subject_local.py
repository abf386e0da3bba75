"""The local provider, on real bubblewrap."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from activities.governance.egress_process import proxy_command
from activities.sandbox.providers.local import LocalProvider
from contracts.sandbox import SandboxRef
from tests.conformance.subjects import NotHere, Subject


async def subject(tmp_path: Path) -> AsyncIterator[Subject]:
    """Yield it."""
    if shutil.which("bwrap") is None:
        raise NotHere("bubblewrap is missing: apt-get install bubblewrap")
    root = tmp_path / "state"

    def make() -> LocalProvider:
        return LocalProvider(root, proxy=proxy_command(()))

    provider = make()
    try:
        yield Subject("local", provider, "real engine", lambda ref: end(provider, ref), again=make)
    finally:
        for ref in await provider.list({}):
            await provider.kill(ref)


async def end(provider: LocalProvider, ref: SandboxRef) -> None:
    """Kill process 1 of a sandbox, and wait until it is dead."""
    record = provider._state.load(ref.id)
    assert record is not None
    os.kill(record.pid, signal.SIGKILL)
    while record.is_alive():
        await asyncio.sleep(0.01)
