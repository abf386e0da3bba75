"""Run in a process of its own: all objects of a prefix into a directory with boto3 and threads, nothing more. Prints JSON."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3  # type: ignore[import-untyped]
from botocore.config import Config  # type: ignore[import-untyped]

THREADS = 10
"""As many as boto3's own transfers and `aws s3 sync` use."""


def main(place: dict[str, str], target: Path) -> dict[str, float]:
    """Return the seconds, from the making of the client on."""
    started = time.perf_counter()
    client = boto3.client(
        "s3",
        endpoint_url=place["endpoint"],
        region_name="us-east-1",
        aws_access_key_id=place["access_key_id"],
        aws_secret_access_key=place["secret_access_key"],
        config=Config(signature_version="s3v4", max_pool_connections=2 * THREADS),
    )
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=place["bucket"], Prefix=place["prefix"])
    keys = [found["Key"] for page in pages for found in page.get("Contents", ())]

    def fetch(key: str) -> None:
        path = target / key.removeprefix(place["prefix"])
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(place["bucket"], key, str(path))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fetch, keys))
    return {"seconds": time.perf_counter() - started}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]), Path(sys.argv[2]))))
