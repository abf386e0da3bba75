"""Snapshots and restores of workspaces that lie on no host of ours: through the sandbox port alone, in a handful of calls.

A snapshot lists the whole workspace inside the sandbox (one call), reads the listing (one), compares it with the one before,
has what moved put into a bundle (one), and reads that (one). What is wanted goes along with the command, or when it is long
in a file (one more); much content comes in several bundles. Where the worker has forgotten the listing but has the snapshot, the
listing comes with the digest of every file, so that only content which the snapshot lacks crosses the wire.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from activities.sandbox.port import Sandbox, SandboxQuota, SandboxUnavailable
from activities.store.blobs import BlobStore
from activities.workspace.ingest import Content, Pending
from activities.workspace.remote_call import Helper, Keeps, RemoteLimits, escaped, split
from activities.workspace.remote_content import FrameReader, Spool
from activities.workspace.remote_listing import Listing, parse_listing
from activities.workspace.remote_restore import Sender
from activities.workspace.remote_tar import TarReader, TarSender
from activities.workspace.remote_tree import Reading, TreeMaker, not_there
from activities.workspace.scan import MAX_DEPTH, Seen
from activities.workspace.snapshots import Scan
from activities.workspace.tree import Directory, totals

_INLINE = 24 << 10
"""Characters of a list that go along with a command: some providers make one argument of it, and Linux takes 128 KiB at most."""
_LEAVE = 1 << 30
"""Bytes of this host's disk that are left to others."""
_CLEAR_FROM = 1 << 20
"""A bundle of less is left in the sandbox until the next snapshot rather than removed by a call of its own."""


class RemoteWorkspace:
    """The workspace of one sandbox that is reached through the port."""

    def __init__(self, sandbox: Sandbox, limits: RemoteLimits | None = None) -> None:
        self._limits = limits or RemoteLimits()
        self._helper = Helper(sandbox, self._limits)

    @asynccontextmanager
    async def scan(
        self, before: Seen | None, base: Directory | None, excludes: tuple[str, ...] = ()
    ) -> AsyncIterator[tuple[Scan, Seen]]:
        """Give what the workspace holds and what to remember of it. The content is on this host until the end of the context.

        Raises SandboxError.
        """
        hashes = before is None and base is not None
        keeps = await self._helper.call("list", str(MAX_DEPTH), str(self._limits.entries), "1" if hashes else "0")
        maker, scan, seen = await self._make(keeps, excludes, before, base)
        async with self._fetched(maker.readings, keeps) as spool, self._fetched(_of_links(spool.missing()), keeps):
            yield scan, seen

    @asynccontextmanager
    async def _fetched(self, readings: list[Reading], keeps: Keeps) -> AsyncIterator[Spool]:
        self._check_room(readings)
        spool = await asyncio.to_thread(Spool, readings)
        try:
            await self._fetch(readings, spool, keeps)
            await asyncio.to_thread(spool.settle)
            yield spool
        finally:
            await asyncio.to_thread(spool.close)

    async def restore(
        self,
        blobs: BlobStore,
        root: Directory,
        excludes: tuple[str, ...] = (),
        *,
        keep: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> tuple[int, Seen | None]:
        """Make the workspace what `root` says; return how many files that are, and what to remember of it, if that is certain.

        All of it is written and checked beside the content of the workspace before that changes. Raises SandboxError or
        StoreError.
        """
        keeps = await self._helper.call("look")
        make: type[Sender] | type[TarSender] = Sender if keeps.python else TarSender
        sender = make(blobs, root, self._helper, self._limits.part_bytes, keeps)
        parts, digest = await sender.send(progress)
        given = (str(parts), digest, "1" if keep else "0", str(MAX_DEPTH), str(self._limits.entries))
        keeps = await self._helper.call("unpack", *given)
        files, _ = totals(root)
        if keep:
            return files, None
        maker, _, seen = await self._make(keeps, excludes, None, root, restored=True)
        return files, seen if not maker.readings else None

    async def _make(
        self, keeps: Keeps, excludes: tuple[str, ...], before: Seen | None, base: Directory | None, *, restored: bool = False
    ) -> tuple[TreeMaker, Scan, Seen]:
        most = self._limits.listing_bytes
        packed = b"".join([data async for data in self._helper.read("listing", most)])

        def work() -> tuple[TreeMaker, Scan, Seen]:
            listing: Listing = parse_listing(packed, most, self._limits.entries, in_seconds=not keeps.python)
            maker = TreeMaker(
                listing,
                keeps,
                excludes,
                before,
                base,
                reserved=self._helper.reserved,
                file_bytes=self._limits.file_bytes,
                restored=restored,
            )
            return maker, *maker.make()

        return await asyncio.to_thread(work)

    def _check_room(self, readings: list[Reading]) -> None:
        total = sum(reading.pending.size for reading in readings)
        if total > self._limits.total_bytes:
            raise SandboxQuota(
                f"{total} bytes of the workspace are to be stored, and {self._limits.total_bytes} is the most; "
                "leave large files out in .caissonignore"
            )
        room = shutil.disk_usage(tempfile.gettempdir()).free - _LEAVE
        if total > max(room, 0) and total > _CLEAR_FROM:
            raise SandboxUnavailable(
                f"this worker's {tempfile.gettempdir()} has no room for {total} bytes of a workspace; make room"
            )

    async def _fetch(self, readings: list[Reading], spool: Spool, keeps: Keeps) -> None:
        """Bring the content of all files into the spool."""
        if not readings:
            return
        spans = _spans(readings, self._limits.round_bytes if keeps.python else self._limits.total_bytes)
        rounds = split([length for _, _, length in spans], self._limits.round_bytes)
        for number, (start, count) in enumerate(rounds):
            here = spans[start : start + count]
            numbers = [index for index, _, _ in here]
            paths = [readings[index].pending.path for index in numbers]
            if keeps.python:
                fields = [b"%d %d\0%s\0" % (at, length, path) for (_, at, length), path in zip(here, paths, strict=True)]
            else:
                fields = [b"./%s\0" % path for path in paths]
            wanted = b"".join(fields)
            inline = escaped(wanted) if len(wanted) <= _INLINE else ""
            if not inline or len(inline) > _INLINE:
                inline = ""
                await self._helper.write("wanted", wanted)
            await self._helper.call("pack", "0", str(count), *([inline] if inline else []))
            reader = (FrameReader if keeps.python else TarReader)(spool, readings, numbers)
            size = sum(length for _, _, length in here)
            # Frames and headers are a few hundred bytes for each file, its name and attributes aside.
            most = size + size // 8 + sum(len(path) for path in paths) * 4 + count * (64 << 10) + (1 << 20)
            async for data in self._helper.read("bundle", most):
                await asyncio.to_thread(reader.feed, data)
            reader.end()
            if number == len(rounds) - 1 and size > _CLEAR_FROM:
                await self._helper.call("clear")


def _of_links(missing: list[Reading]) -> list[Reading]:
    """Return readings of the other names of files whose first has gone, so that one of those can become the file."""
    readings: list[Reading] = []
    for reading in missing:
        for link in reading.pending.links:
            own = Pending(link.path, link.parent, link.name, link.entry, reading.pending.size, reading.pending.inode, not_there)
            # By a name that is bound now: what arrives is opened through the reading.
            link.open = partial(_open, own)
            readings.append(Reading(own, reading.folder, reading.name, reading.ctime))
    return sorted(readings, key=lambda reading: reading.pending.path)


def _open(pending: Pending) -> Content:
    return pending.open()


def _spans(readings: list[Reading], most: int) -> list[tuple[int, int, int]]:
    """Return (number, offset, length) that together are all content, none longer than `most`."""
    spans: list[tuple[int, int, int]] = []
    for number, reading in enumerate(readings):
        size = reading.pending.size
        spans += [(number, at, min(most, size - at)) for at in range(0, size, most)] or [(number, 0, 0)]
    return spans
