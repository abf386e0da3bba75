"""`apply_patch` in a real sandbox: paths that cannot be looked at are told to the model, and end no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.tools.patch_activity import patch_workspace
from tests.sandbox.local_support import Local


async def test_a_path_that_cannot_be_looked_at_is_told_to_the_model(local: Local, tmp_path: Path) -> None:
    """Files and directories without permissions, and a link that leads to itself, refuse the patch."""
    await local.sh("echo hi > u; mkdir d; chmod 000 u d; ln -s l l; ln -s / root; echo hi > ok")
    blobs = BlobStore(LocalStore(tmp_path / "store"))

    async def told(operations: str) -> tuple[str, bool]:
        patch = f"*** Begin Patch\n*** Update File: ok\n@@\n-hi\n+ho\n{operations}*** End Patch\n"
        return await patch_workspace(local.sandbox, blobs, operations, patch)

    for operations, said in {
        "*** Update File: u\n@@\n-hi\n+ho\n": "u: Permission denied",
        "*** Add File: d/x\n+x\n": "d/x: Permission denied",
        "*** Add File: l/x\n+x\n": "l/x: l is a link to 'l': patch the file under its real path instead",
        "*** Update File: root/etc/passwd\n@@\n-hi\n+ho\n": (
            "root/etc/passwd: root is a link to '/': patch the file under its real path instead"
        ),
    }.items():
        assert await told(operations) == (f"apply_patch: nothing was changed. {said}", True)
    assert (local.workspace / "ok").read_bytes() == b"hi\n"


@pytest.mark.parametrize("content", ["hi", ""])
async def test_a_file_that_cannot_be_read_can_be_deleted(local: Local, tmp_path: Path, content: str) -> None:
    """Deleting needs no content."""
    await local.sh(f"printf '{content}' > u; chmod 000 u")
    blobs = BlobStore(LocalStore(tmp_path / "store"))
    patch = "*** Begin Patch\n*** Delete File: u\n*** End Patch\n"
    assert await patch_workspace(local.sandbox, blobs, "job", patch) == ("applied:\nD u", False)
    assert not (local.workspace / "u").exists()
