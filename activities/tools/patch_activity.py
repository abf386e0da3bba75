"""Applying a patch to a sandbox's workspace, so that an interrupted application is finished and never half done."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from pydantic import JsonValue

from activities.sandbox.port import FileChange, FileFault, Sandbox
from activities.store.blobs import BlobStore
from activities.tools.patch_look import look_at
from activities.tools.patch_parse import PatchFault, parse_patch
from activities.tools.patch_plan import plan_patch
from contracts.blob import BlobRef


async def patch_workspace(sandbox: Sandbox, blobs: BlobStore, job_id: str, patch: str) -> tuple[str, bool]:
    """Apply `patch` and return what the model is told, and whether it failed.

    The plan (every file's new content) is recorded before the first file changes. A retry finds it and makes the same changes
    again, which gives the same files whatever the interrupted attempt had done.
    """
    # A new sandbox has the files of the last snapshot, which may not be those that a plan for a lost one was made for.
    name = f"patch/{job_id}/{sandbox.ref.id}/{sandbox.ref.nonce}"
    recorded = await blobs.get_record(name)
    if recorded is None:
        try:
            # Large inputs take seconds, and heartbeats go on meanwhile.
            operations = await asyncio.to_thread(parse_patch, patch)
            views = await look_at(sandbox, operations)
            plan = await asyncio.to_thread(plan_patch, operations, views)
        except (PatchFault, FileFault) as fault:
            return f"apply_patch: nothing was changed. {fault}", True
        changes: list[JsonValue] = []
        for change in plan.changes:
            blob = None if change.data is None else (await blobs.put(change.data)).model_dump()
            changes.append({"path": change.path, "blob": blob, "mode": change.mode})
        recorded = await blobs.put_record(name, {"changes": changes, "summary": plan.summary})
    record = cast("dict[str, Any]", recorded)
    try:
        await sandbox.change([await _change(blobs, change) for change in record["changes"]])
    except FileFault as fault:
        return f"apply_patch: nothing was changed. {fault}", True
    return f"applied:\n{record['summary']}", False


async def _change(blobs: BlobStore, change: dict[str, Any]) -> FileChange:
    data = None if change["blob"] is None else await blobs.get(BlobRef.model_validate(change["blob"]))
    return FileChange(path=change["path"], data=data, mode=change["mode"])
