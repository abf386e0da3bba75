"""The portable sandbox, on machines made from a real local sandbox: the proof of it, with Python in the image and without."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from activities.sandbox.providers.local import LocalProvider
from tests.conformance.local_machine import PortableProvider
from tests.conformance.subject_local import end
from tests.conformance.subjects import NotHere, Subject


async def subject_python(tmp_path: Path) -> AsyncIterator[Subject]:
    """Yield the flavour with bash, coreutils and Python."""
    async for one in _subject(tmp_path, "python"):
        yield one


async def subject_busybox(tmp_path: Path) -> AsyncIterator[Subject]:
    """Yield the flavour with nothing but BusyBox."""
    if shutil.which("busybox") is None:
        raise NotHere("BusyBox is missing: apt-get install busybox-static")
    async for one in _subject(tmp_path, "busybox"):
        yield one


async def _subject(tmp_path: Path, image: str) -> AsyncIterator[Subject]:
    if shutil.which("bwrap") is None:
        raise NotHere("bubblewrap is missing: apt-get install bubblewrap")
    local = LocalProvider(tmp_path / "state")

    def make() -> PortableProvider:
        return PortableProvider(LocalProvider(tmp_path / "state"), busybox=image == "busybox")

    try:
        yield Subject(f"portable-{image}", make(), "real engine", lambda ref: end(local, ref), image=image, again=make)
    finally:
        for ref in await local.list({}):
            await local.kill(ref)
