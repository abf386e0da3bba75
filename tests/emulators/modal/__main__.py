"""`python -m tests.emulators.modal`: the emulator alone, until it is interrupted."""

import asyncio
import contextlib
import tempfile
from pathlib import Path

from tests.emulators.modal.server import TOKEN_ID, TOKEN_SECRET, Emulator


async def main() -> None:
    """Serve for ever."""
    with tempfile.TemporaryDirectory() as directory:
        async with Emulator(Path(directory)) as emulator:
            token = f"MODAL_TOKEN_ID={TOKEN_ID}\nMODAL_TOKEN_SECRET={TOKEN_SECRET}"
            print(f"{token}\nMODAL_SERVER_URL={emulator.url}", flush=True)
            await asyncio.Event().wait()


with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(main())
