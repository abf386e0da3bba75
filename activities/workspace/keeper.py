"""Keeping workspaces: a snapshot of a sandbox's, and a snapshot restored into a sandbox, whatever its provider.

What a worker remembers here of a sandbox only saves work. One that remembers nothing reads the whole workspace once more, and
comes to the same snapshot.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from activities.sandbox.port import HostSandbox, Sandbox, SandboxGone, SandboxUnavailable
from activities.sandbox.registry import ProviderRegistry
from activities.store.blobs import BlobStore
from activities.threads import to_end
from activities.workspace.remote_scan import RemoteWorkspace
from activities.workspace.restore import move_into, restore_tree
from activities.workspace.scan import HostScanner, Seen
from activities.workspace.snapshots import Contents, Snapshot, SnapshotStore, entries_of
from contracts.sandbox import SandboxRef
from contracts.snapshot import SnapshotRef

AT_ONCE = 8
"""Snapshots and restores that go on at one time: each reads, hashes and packs."""
REMEMBERED = 256
"""Sandboxes that a worker remembers the files of."""


@dataclass(slots=True)
class _Known:
    """What this worker knows of one sandbox's workspace as it was at its last snapshot."""

    ref: SnapshotRef | None = None
    seen: Seen | None = None
    contents: Contents = field(default_factory=Contents)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class WorkspaceKeeper:
    """Snapshots and restores the workspaces of a worker's sandboxes."""

    def __init__(self, providers: ProviderRegistry, blobs: BlobStore) -> None:
        self._providers = providers
        self.store = SnapshotStore(blobs)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def snapshot(self, sandbox: Sandbox, base: SnapshotRef | None, excludes: tuple[str, ...] = ()) -> SnapshotRef:
        """Store what the workspace holds now. `base` is the run's snapshot before this one; the same one means no change.

        Raises SandboxError or StoreError; what was stored before stays as it is.
        """
        known = self._of(sandbox)
        async with known.lock, self._turns:
            tree = None
            if known.ref != base or (base is not None and known.seen is None):
                known.seen, known.ref = None, base
                if base is not None:
                    tree = await self.store.load(base)
                    known.contents.add(entries_of(tree.root))
            if self._is_on_host(sandbox):
                return await self._snapshot_on_host(_on_host(sandbox), known, base, tree, excludes)
            remote = RemoteWorkspace(sandbox)
            async with remote.scan(known.seen, tree.root if tree is not None else None, excludes) as (scan, seen):
                ref = await self.store.save(scan, known.contents, base)
            known.seen, known.ref = seen, ref
            return ref

    async def restore(
        self,
        sandbox: Sandbox,
        ref: SnapshotRef,
        excludes: tuple[str, ...] = (),
        *,
        keep: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Make the workspace of a sandbox that nobody works in what it was at a snapshot, and return how many files it has.

        With `keep`, what lies at the top of the workspace and is not in the snapshot stays. All of the snapshot is written and
        checked beside the workspace before anything in it changes. Raises SandboxError or StoreError.
        """
        known = self._of(sandbox)
        async with known.lock, self._turns:
            tree = await self.store.load(ref)
            if not self._is_on_host(sandbox):
                known.seen, known.ref = None, None
                remote = RemoteWorkspace(sandbox)
                count, known.seen = await remote.restore(self.store.blobs, tree.root, excludes, keep=keep, progress=progress)
                known.contents.add(entries_of(tree.root))
                known.ref = None if known.seen is None else ref
                return count
            host = _on_host(sandbox)
            place, trash = host.scratch / "restored", host.scratch / "replaced"
            try:
                count = await restore_tree(self.store.blobs, tree.root, place, owner=host.owner, progress=progress)
                known.seen, known.ref = None, None
                await to_end(partial(move_into, place, host.workspace, trash, keep=keep))
                known.contents.add(entries_of(tree.root))
                if not keep:
                    known.seen = await to_end(_look_at_restored, host, excludes, tree)
                    known.ref = None if known.seen is None else ref
            except FileNotFoundError as error:
                raise SandboxGone(f"sandbox {sandbox.ref.id} went away while its workspace was restored") from error
            except OSError as error:
                raise SandboxUnavailable(f"the workspace of {sandbox.ref.id} cannot be replaced: {error}") from error
            return count

    async def holds(self, sandbox: Sandbox, ref: SnapshotRef, excludes: tuple[str, ...] = ()) -> bool:
        """Whether the workspace of a new sandbox is surely what it was at a snapshot: every file is read there, and hashed.

        Raises SandboxError or StoreError.
        """
        return (await self.snapshot(sandbox, ref, excludes)).id == ref.id

    def forget(self, sandbox: SandboxRef) -> None:
        """Drop what is known of a sandbox that is gone."""
        self._known.pop(sandbox.id + sandbox.nonce, None)

    async def _snapshot_on_host(
        self,
        host: HostSandbox,
        known: _Known,
        base: SnapshotRef | None,
        tree: Snapshot | None,
        excludes: tuple[str, ...],
    ) -> SnapshotRef:
        try:
            begin = partial(HostScanner, host.workspace, excludes, known.seen, tree.root if tree is not None else None)
            scanner = await to_end(begin, undo=HostScanner.close)
        except FileNotFoundError as error:
            raise SandboxGone(f"sandbox {host.ref.id} is gone, and its workspace with it") from error
        try:
            scan = await to_end(scanner.scan)
            ref = await self.store.save(scan, known.contents, base)
        finally:
            scanner.close()
        # A dying sandbox's workspace is removed file by file; what was seen of it meanwhile must not count.
        await host.extend(0)
        known.seen, known.ref = scanner.seen, ref
        return ref

    def _is_on_host(self, sandbox: Sandbox) -> bool:
        return self._providers.get(sandbox.ref.provider).capabilities.host_files

    def _of(self, sandbox: Sandbox) -> _Known:
        key = sandbox.ref.id + sandbox.ref.nonce
        known = self._known.setdefault(key, _Known())
        self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return known


def _look_at_restored(host: HostSandbox, excludes: tuple[str, ...], tree: Snapshot) -> Seen | None:
    """Return what a scan of a workspace that was just restored sees, or None when it is not surely what was restored."""
    scanner = HostScanner(host.workspace, excludes, None, tree.root, restored=True)
    try:
        scan = scanner.scan()
    finally:
        scanner.close()
    return None if scan.pending else scanner.seen


def _on_host(sandbox: Sandbox) -> HostSandbox:
    return cast("HostSandbox", sandbox)
