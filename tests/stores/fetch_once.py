"""A process that fetches one manifest, to be killed, or to be measured: `fetch_once.py DESK MANIFEST` with the desk's directory
and the manifest as JSON. Prints how many files there are, and the memory that the process
had before and at most, in bytes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from activities.store.s3 import S3Bucket, S3Credential
from tests.manifest_support import Desk


async def main(home: str, manifest: str) -> None:
    """Fetch."""
    S3Bucket("any", endpoint="http://127.0.0.1:1", credential=S3Credential("a", "b")).close()
    idle = memory("VmRSS")
    result = await Desk(Path(home)).fetch(json.loads(manifest))
    print(json.dumps({"files": result.snapshot.files, "idle_bytes": idle, "most_bytes": memory("VmHWM")}))


def memory(field: str) -> int:
    """A number of /proc/self/status. (ru_maxrss is no use: a process inherits it from the one that started it.)"""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
