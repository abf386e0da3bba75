"""Keeping the record of a sandbox's connections when the sandbox is closed."""

from __future__ import annotations

import json
from collections import Counter

import structlog

from activities.store.blobs import BlobStore
from contracts.blob import BlobRef
from contracts.sandbox import SandboxRef

_log = structlog.stdlib.get_logger("caisson.egress")
SHOWN = 100


async def keep_egress(blobs: BlobStore, sandbox: SandboxRef, data: bytes, before: BlobRef | None = None) -> BlobRef | None:
    """Store a record, after that of the run's sandboxes before, and return its name; None when there is none.

    Logs a line for what was refused. A closing that is repeated after the sandbox is gone finds no record there any more, and
    gets the one that was kept.
    """
    name = f"egress/{sandbox.provider}/{sandbox.id}/{sandbox.nonce}"
    if not data:
        kept = await blobs.get_record(name)
        return BlobRef.model_validate(kept) if kept is not None else before
    for (host, port, reason), times in refusals(data).most_common(SHOWN):
        _log.warning("connection refused", sandbox=sandbox.id, host=host, port=port, reason=reason, times=times)
    whole = data if before is None else _whole_lines(await blobs.get(before)) + data
    kept = await blobs.put_record(name, (await blobs.put(whole)).model_dump(mode="json"))
    return BlobRef.model_validate(kept)


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def refusals(data: bytes) -> Counter[tuple[str | None, int | None, str]]:
    """Count the refused connections of a record by host, port and reason. A last line that is cut off is left out."""
    lines = (json.loads(line) for line in data.splitlines(keepends=True) if line.endswith(b"\n"))
    return Counter((line.get("host"), line.get("port"), line["reason"]) for line in lines if line["verdict"] == "refused")
