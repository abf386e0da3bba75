"""The example of a provider of one's own, as the documentation shows it: examples/own_provider."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

from contracts.sandbox import SandboxRef
from tests.conformance.subjects import NotHere, Subject

SOURCE = Path(__file__).parents[2] / "examples/own_provider/acme_sandboxes/__init__.py"


def example() -> ModuleType:
    """Load the example's module."""
    spec = importlib.util.spec_from_file_location("acme_sandboxes", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def subject(tmp_path: Path) -> AsyncIterator[Subject]:
    """Yield it."""
    for tool in ("bwrap", "nsenter"):
        if shutil.which(tool) is None:
            raise NotHere(f"{tool} is missing: apt-get install bubblewrap util-linux")
    module = example()
    root = tmp_path / "acme"
    provider = module.AcmeProvider(root)

    async def kill_machine(ref: SandboxRef) -> None:
        pid = module.AcmeMachine(ref, root / ref.id).pid()
        os.kill(pid, signal.SIGKILL)
        while Path("/proc", str(pid)).exists():
            await asyncio.sleep(0.01)

    try:
        yield Subject("acme", provider, "real engine", kill_machine, again=lambda: module.AcmeProvider(root))
    finally:
        for ref in await provider.list({}):
            await provider.kill(ref)
