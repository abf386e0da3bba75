"""`python -m tests.emulators.e2b [PORT]`: the emulator alone, until it is interrupted."""

import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path

from tests.emulators.e2b.server import API_KEY, Emulator


async def main(port: int) -> None:
    """Serve for ever."""
    with tempfile.TemporaryDirectory() as directory:
        async with Emulator(Path(directory), port=port) as emulator:
            print(f"E2B_API_KEY={API_KEY}\nE2B_API_URL={emulator.url}\nE2B_SANDBOX_URL={emulator.url}", flush=True)
            await asyncio.Event().wait()


with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
