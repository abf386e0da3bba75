"""Run by the peers' Python: sessions and commands of openai-agents' `UnixLocal` sandbox, which isolates nothing. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from statistics import median


async def main(sandboxes: int, commands: int) -> dict[str, float]:
    """Return the medians in milliseconds of making a session and of running `true` in it."""
    from agents.sandbox.manifest import Manifest  # type: ignore[import-not-found]
    from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient  # type: ignore[import-not-found]

    client = UnixLocalSandboxClient()
    made: list[float] = []
    ran: list[float] = []
    with tempfile.TemporaryDirectory() as root:
        for number in range(sandboxes):
            started = time.perf_counter()
            session = await client.create(manifest=Manifest(root=f"{root}/{number}"))
            await session.start()
            made.append(time.perf_counter() - started)
            for _ in range(commands):
                started = time.perf_counter()
                await session.exec("true", shell=False)
                ran.append(time.perf_counter() - started)
            await session.stop()
            await client.delete(session)
    return {"create_ms": median(made) * 1e3, "true_ms": median(ran) * 1e3}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))))
