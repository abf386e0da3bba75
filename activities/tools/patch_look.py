"""Looking at the files that a patch names: what stands at every path first, then the content of those that it updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from activities.sandbox.port import FileFault, FileView, Sandbox
from activities.tools.patch_parse import PatchFault, PatchOperation
from activities.tools.patch_plan import paths_to_look_at, paths_to_read, refuse_blocked

MAX_FILE_BYTES: Final = 16 << 20
"""The largest file that a patch may change."""

MAX_TOTAL_BYTES: Final = 64 << 20
"""The most that the files which one patch changes may have together. The worker holds them all."""

_NO_CONTENT: Final = -1
"""The limit of a look that opens no file, not even an empty one."""


async def look_at(sandbox: Sandbox, operations: Sequence[PatchOperation]) -> dict[str, FileView]:
    """Return the views that `plan_patch` needs. Raises PatchFault or FileFault where they cannot be had, or are too much."""
    paths = paths_to_look_at(operations)
    try:
        views = await sandbox.look(paths, _NO_CONTENT)
    except FileFault:
        views = await _look_step_by_step(sandbox, operations, paths)
    for operation in operations:
        # Before any content: what lies behind a link is not read.
        refuse_blocked(operation, views)
    sizes = {
        path: views[path].size
        for path in paths_to_read(operations)
        if views[path].kind == "file" and views[path].size <= MAX_FILE_BYTES
    }
    _refuse_too_much(sizes)
    for batch in _batches(sizes):
        # A file may grow between two looks, so each look has a bound of its own.
        found = await sandbox.look(batch, min(MAX_FILE_BYTES, MAX_TOTAL_BYTES // len(batch)))
        for path, view in found.items():
            if view.kind == "file" and view.data is None:
                raise PatchFault(
                    f"{path} grew to {view.size} bytes while it was read: send the patch again when it is not written to"
                )
            sizes[path] = view.size
        views |= found
        _refuse_too_much(sizes)
    return views


async def _look_step_by_step(sandbox: Sandbox, operations: Sequence[PatchOperation], paths: Sequence[str]) -> dict[str, FileView]:
    """Look at the directories above before what is in them, so that a link is told as such and not by what it leads to."""
    views: dict[str, FileView] = {}
    depths = {path: path.count("/") for path in paths}
    for depth in sorted(set(depths.values())):
        views |= await sandbox.look([path for path in paths if depths[path] == depth], _NO_CONTENT)
        for operation in operations:
            refuse_blocked(operation, views)
    return views


def _refuse_too_much(sizes: Mapping[str, int]) -> None:
    total = 0
    for path, size in sizes.items():
        total += size
        if total > MAX_TOTAL_BYTES:
            raise PatchFault(
                f"the files that the patch updates have {sum(sizes.values())} bytes together, and with {path} more than the "
                f"{MAX_TOTAL_BYTES} that one patch may read: send it as several patches"
            )


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Give the paths in groups that are within the limit even if each of its files were as large as the largest."""
    batch: list[str] = []
    for path in sorted(sizes, key=lambda path: sizes[path]):
        if batch and sizes[path] * (len(batch) + 1) > MAX_TOTAL_BYTES:
            yield batch
            batch = []
        batch.append(path)
    if batch:
        yield batch
