"""What `apply_patch` reads of a workspace, and how much of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from activities.sandbox.port import FileChange, FileView, Sandbox
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.tools import patch_activity
from activities.tools.patch_look import MAX_FILE_BYTES, MAX_TOTAL_BYTES, look_at
from activities.tools.patch_parse import PatchFault, parse_patch
from contracts.sandbox import SandboxRef


class Files:
    """A workspace of which only sizes are known, each file being a sparse one. It keeps what was looked at."""

    ref = SandboxRef(provider="local", id="here", nonce="1", queue="here")

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.looks: list[tuple[list[str], int]] = []
        self.changed: list[FileChange] = []

    async def look(self, paths: Sequence[str], max_bytes: int) -> dict[str, FileView]:
        """See Sandbox."""
        self.looks.append((list(paths), max_bytes))
        return {path: self._view(path, max_bytes) for path in paths}

    async def change(self, changes: Sequence[FileChange]) -> None:
        """See Sandbox."""
        self.changed += changes

    def _view(self, path: str, max_bytes: int) -> FileView:
        if path not in self.sizes:
            return FileView("missing")
        size = self.sizes[path]
        return FileView("file", 0o644, size, b"x\n" if size <= max_bytes else None)


async def look(files: Files, operations: str) -> dict[str, FileView]:
    """Look at what operations need."""
    return await look_at(cast("Sandbox", files), parse_patch(f"*** Begin Patch\n{operations}*** End Patch\n"))


def updates(names: Sequence[str]) -> str:
    """Write an update of each file."""
    return "".join(f"*** Update File: {name}\n@@\n-x\n+y\n" for name in names)


async def test_only_what_is_updated_is_read() -> None:
    """Files that are deleted, added or moved onto are looked at without their content, and a patch without updates looks once."""
    files = Files({"gone": 15_000_000, "old": 2, "there": 15_000_000})
    await look(files, "*** Delete File: gone\n*** Update File: old\n*** Move to: there\n*** Add File: d/new\n+x\n")
    assert files.looks == [(["gone", "old", "there", "d", "d/new"], -1), (["old"], MAX_FILE_BYTES)]
    files.looks.clear()
    await look(files, "".join(f"*** Delete File: gone{number}\n" for number in range(60)))
    assert [limit for _, limit in files.looks] == [-1]


async def test_a_patch_reads_no_more_than_its_limit() -> None:
    """The file with which the limit is passed is named, before any content is read."""
    names = [f"big{number}" for number in range(5)]
    files = Files(dict.fromkeys(names, 15_000_000))
    with pytest.raises(PatchFault, match=f"have 75000000 bytes together, and with big4 more than the {MAX_TOTAL_BYTES}"):
        await look(files, updates(names))
    assert len(files.looks) == 1
    assert len(await look(files, updates(names[:4]))) == 4


async def test_files_of_any_size_are_read_in_bounded_looks() -> None:
    """No look could bring more than the limit, even if every file grew meanwhile to what the look allows."""
    names = [f"f{number}" for number in range(100)]
    files = Files({**dict.fromkeys(names, 1000), "f99": 15_000_000})
    views = await look(files, updates(names))
    assert all(views[name].data is not None for name in names)
    assert [len(paths) for paths, _ in files.looks] == [100, 99, 1]
    assert all(len(paths) * limit <= MAX_TOTAL_BYTES for paths, limit in files.looks)


async def test_a_file_that_grows_meanwhile_is_refused() -> None:
    """A file that became too large between the two looks is told as what it is."""
    files = Files({"log": 10})
    first = files.look

    async def growing(paths: Sequence[str], max_bytes: int) -> dict[str, FileView]:
        views = await first(paths, max_bytes)
        files.sizes["log"] = MAX_FILE_BYTES + 1
        return views

    files.look = growing  # type: ignore[method-assign]
    with pytest.raises(PatchFault, match="log grew to 16777217 bytes while it was read"):
        await look(files, updates(["log"]))


async def test_parsing_and_placing_do_not_hold_up_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both run on a thread of their own, so that heartbeats go on."""
    threads: list[threading.Thread] = []
    for name in ("parse_patch", "plan_patch"):
        inner = getattr(patch_activity, name)

        def traced(*given: Any, inner: Any = inner) -> Any:
            threads.append(threading.current_thread())
            return inner(*given)

        monkeypatch.setattr(patch_activity, name, traced)
    files, blobs = Files({"f": 2}), BlobStore(LocalStore(tmp_path))
    patch = f"*** Begin Patch\n{updates(['f'])}*** End Patch\n"
    told = await patch_activity.patch_workspace(cast("Sandbox", files), blobs, "job", patch)
    assert told == ("applied:\nM f", False)
    assert files.changed == [FileChange("f", b"y\n")]
    assert len(threads) == 2
    assert threading.main_thread() not in threads
