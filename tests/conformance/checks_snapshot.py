"""Snapshots of the workspace, taken from one sandbox and restored in another by the harness's own keeper."""

from __future__ import annotations

import tempfile
from pathlib import Path

from activities.sandbox.registry import ProviderRegistry
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.workspace.keeper import WorkspaceKeeper
from tests.conformance.box import own
from tests.conformance.subjects import Subject

FILL = r"""
mkdir -p a/b empty "spa ce"; echo hello >a/f; head -c 300000 /dev/urandom >a/random; seq 1 20000 >large
ln -s /etc/passwd absolute; ln -s ../f a/b/relative; ln a/f a/hard; chmod 600 a/f; chmod 755 large; mkdir -m 700 shut; : >zero
"""
LIST = r"""
find . | sort | while read -r p; do stat -c '%n %a %F' "$p"; done; find . -type f | sort | tr '\n' '\0' | xargs -0 sha256sum
readlink absolute; readlink a/b/relative
"""


async def check_a_workspace_moves_to_another_sandbox(subject: Subject) -> None:
    """What a workspace holds is the same in a new sandbox, and a second snapshot finds what has changed since (SN04)."""
    with tempfile.TemporaryDirectory() as directory:
        registry = ProviderRegistry({subject.provider.name: lambda: subject.provider})
        keeper = WorkspaceKeeper(registry, BlobStore(LocalStore(Path(directory) / "store")))
        async with own(subject) as first, own(subject) as second:
            await first.sh(FILL)
            one = await keeper.snapshot(first.sandbox, None)
            await first.text("echo more >a/new; rm large")
            two = await keeper.snapshot(first.sandbox, one)
            assert two != one
            assert await keeper.snapshot(first.sandbox, two) == two
            second.name = first.name
            for snapshot in (one, two):
                await keeper.restore(second.sandbox, snapshot)
                again = await keeper.snapshot(second.sandbox, snapshot)
                assert (again.files, again.total_bytes) == (snapshot.files, snapshot.total_bytes)
                assert again.id == snapshot.id or subject.image != "python"  # BusyBox keeps times to the second
            assert await second.text(LIST) == await first.text(LIST)
            assert await second.text("cat a/new; ls large 2>/dev/null; true") == "more\n"
