"""Run by the peers' Python: openai-agents' local snapshot of a workspace, saved, saved again, and resumed. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path


async def main(tree: Path) -> dict[str, float]:
    """Return milliseconds of each, the bytes of the archive, and the most resident memory in MiB."""
    from agents.sandbox.manifest import Manifest  # type: ignore[import-not-found]
    from agents.sandbox.sandboxes.unix_local import UnixLocalSandboxClient  # type: ignore[import-not-found]
    from agents.sandbox.snapshot import LocalSnapshotSpec  # type: ignore[import-not-found]

    client = UnixLocalSandboxClient()
    times: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        workspace = root / "workspace"
        spec = LocalSnapshotSpec(base_path=root / "snapshots")
        session = await client.create(manifest=Manifest(root=str(workspace)), snapshot=spec)
        await session.start()
        shutil.copytree(tree, workspace, dirs_exist_ok=True)
        for name in ("first_ms", "one_changed_ms"):
            os.sync()
            started = time.perf_counter()
            await session.stop()
            times[name] = (time.perf_counter() - started) * 1e3
            changed = next(path for path in sorted(workspace.rglob("*")) if path.is_file())
            changed.write_bytes(os.urandom(changed.stat().st_size))
        stored = sum(path.stat().st_size for path in (root / "snapshots").rglob("*"))
        state = session.state
        shutil.rmtree(workspace)
        os.sync()
        started = time.perf_counter()
        resumed = await client.resume(state)
        await resumed.start()
        times["restore_ms"] = (time.perf_counter() - started) * 1e3
        if sum(path.is_file() for path in workspace.rglob("*")) != sum(path.is_file() for path in tree.rglob("*")):
            raise RuntimeError("not all files were restored")
    with Path("/proc/self/status").open() as status:
        memory = next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))
    return {**times, "stored_bytes": stored, "memory_mib": memory}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
