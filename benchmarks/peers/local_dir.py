"""Run by the peers' Python, in the directory above a tree: openai-agents' `LocalDir` of it into a new workspace. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path


async def main(tree: str, rounds: int) -> dict[str, float]:
    """Return the seconds of the median round, and the most resident memory in MiB."""
    from agents.sandbox.entries import LocalDir  # type: ignore[import-not-found]
    from agents.sandbox.manifest import Manifest  # type: ignore[import-not-found]
    from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient  # type: ignore[import-not-found]

    client = UnixLocalSandboxClient()
    times = []
    wanted = sum(path.is_file() for path in Path(tree).rglob("*"))
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=".") as place:
            root = Path(place).resolve() / "workspace"
            os.sync()
            started = time.perf_counter()
            session = await client.create(manifest=Manifest(root=str(root), entries={"inputs": LocalDir(src=Path(tree))}))
            await session.start()
            times.append(time.perf_counter() - started)
            if sum(path.is_file() for path in root.rglob("*")) != wanted:
                raise RuntimeError("not all files were copied")
            shutil.rmtree(root)
    with Path("/proc/self/status").open() as status:
        memory = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))
    return {"seconds": sorted(times)[len(times) // 2], "memory_mib": memory}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2])))))
