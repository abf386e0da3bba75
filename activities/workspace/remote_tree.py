"""Making a tree of a listing: what did not move since the last listing is taken over, and only the rest is read.

It decides as `HostScanner` does on the worker's own host, so that the same workspace gives the same tree.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from activities.workspace.ignore import Ignore
from activities.workspace.ingest import Content, Link, Pending, Vanished
from activities.workspace.remote_call import Keeps
from activities.workspace.remote_listing import Listing, Row, good_path, refuse
from activities.workspace.scan import IGNORE_FILE, MAX_DEPTH, Key, Seen, ignore_fault
from activities.workspace.snapshots import Scan, Skipped, entries_of
from activities.workspace.tree import FILE, HARD_LINK, PERMISSIONS, SYMLINK, Directory, Entry, kept_time

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


@dataclass(slots=True, eq=False)
class Reading:
    """A file whose content is to be fetched, with where it was seen, and its ctime then."""

    pending: Pending
    folder: Seen
    name: str
    ctime: int


class TreeMaker:
    """Makes the tree of one listing, once. `before`, `base`, `excludes` and `restored` are as for HostScanner.

    `reserved` is a name at the top that is no part of the workspace; files of more than `file_bytes` are skipped.
    """

    def __init__(
        self,
        listing: Listing,
        keeps: Keeps,
        excludes: tuple[str, ...],
        before: Seen | None,
        base: Directory | None,
        *,
        reserved: str,
        file_bytes: int,
        restored: bool = False,
    ) -> None:
        self._listing = listing
        self._keeps = keeps
        self._lines = (*excludes, *listing.ignore)
        self._ignore = Ignore(self._lines) if self._lines else None
        self._before = before
        self._base = before.directory if before is not None else base
        self._decided = before is not None and before.lines == self._lines
        self._reserved = os.fsencode(reserved)
        self._file_bytes = file_bytes
        self._restored = restored
        self._known: dict[bytes, Entry] = {}
        if before is None and base is not None and listing.digests:
            # Only content that this workspace had before: a lie about a digest brings a sandbox nothing that it did not have.
            self._known = {entry.digest: entry for entry in entries_of(base) if entry.kind == FILE}
        self._former: dict[str, Seen | None] = {}
        self._linked: dict[int, list[tuple[bytes, Seen, str]]] = {}
        self._links: dict[bytes, list[Link]] = {}
        self._skipped: list[Skipped] = []
        self.readings: list[Reading] = []
        """The files whose content is to be fetched, in the order of their paths."""

    def make(self) -> tuple[Scan, Seen]:
        """Return the tree, whose pending files have no content yet, and what to remember of it. Raises SandboxUnavailable."""
        rows = self._listing.rows
        seen = self._look(rows)
        self._find_links()
        root = self._build(seen, self._before, self._base)
        self.readings.sort(key=lambda reading: reading.pending.path)
        for reading in self.readings:
            reading.pending.links = self._links.get(reading.pending.path, ())
        for row in rows:
            if row.path == IGNORE_FILE.encode() and (fault := ignore_fault(row.key[4], row.key[2])):
                self._skipped.append((row.path, fault))
        if lost := self._keeps.lost:
            self._skipped.append((b"", lost))
        return Scan(root, [reading.pending for reading in self.readings], self._skipped, self._lines), seen

    # --- looking

    def _look(self, rows: list[Row]) -> Seen:
        top = rows[0]
        if not stat.S_ISDIR(top.key[4]):
            raise refuse("a workspace that is no directory")
        if b"" in self._listing.faults:
            raise refuse(f"the workspace cannot be read: {self._listing.faults[b'']}")
        root = Seen(top.key, "", lines=self._lines, xattrs=self._listing.attributes.get(b"", ()))
        self._former[""] = self._before
        folders: dict[bytes, Seen | None] = {b"": root}
        for row in rows[1:]:
            parent, _, raw = row.path.rpartition(b"/")
            if not good_path(row.path) or parent not in folders:
                raise refuse(f"the path {row.path[:100]!r}")
            folder = folders[parent]
            is_folder = stat.S_ISDIR(row.key[4])
            if is_folder and row.path in folders:
                raise refuse(f"twice the path {row.path[:100]!r}")
            below = None
            if folder is not None and not (folder is root and raw == self._reserved):
                below = self._one(folder, os.fsdecode(raw), row, top.device)
            if is_folder:
                folders[row.path] = below
        return root

    def _one(self, folder: Seen, name: str, row: Row, device: int) -> Seen | None:
        """Take one row into its directory, and return what it is if it is a directory to look into."""
        key, mode = row.key, row.key[4]
        if name in folder.listing:
            raise refuse(f"twice the path {row.path[:100]!r}")
        if self._is_excluded(folder, name, mode):
            return None
        fault = self._listing.faults.get(row.path)
        if stat.S_ISDIR(mode):
            if row.path.count(b"/") + 1 >= MAX_DEPTH:
                folder.skipped.append((name, f"deeper than {MAX_DEPTH} directories"))
                return None
            if row.device != device:
                folder.skipped.append((name, "another file system"))
                return None
            if fault is not None:
                # The directory itself is kept; what it holds cannot be.
                folder.skipped.append((name, f"what it holds cannot be read: {fault}"))
            below = folder.below[name] = Seen(key, os.fsdecode(row.path), xattrs=self._listing.attributes.get(row.path, ()))
            former = self._former[folder.path]
            self._former[below.path] = former.below.get(name) if former is not None else None
            folder.listing[name] = key
            if key[0] >= self._listing.now:
                below.unsure.add(".")
            return below
        if stat.S_ISREG(mode):
            if key[2] > self._file_bytes:
                folder.skipped.append((name, f"larger than {self._file_bytes} bytes"))
                return None
            if key[5] > 1:
                self._linked.setdefault(key[1], []).append((row.path, folder, name))
        elif stat.S_ISLNK(mode):
            target = self._listing.links.get(row.path)
            if target is None:  # gone meanwhile
                return None
            folder.targets[name] = target
        else:
            folder.skipped.append((name, _KINDS.get(stat.S_IFMT(mode), "no regular file")))
            return None
        folder.listing[name] = key
        if key[0] >= self._listing.now:
            # It may change again with the same ctime. Of a file whose content is fetched, the bundle knows better.
            folder.unsure.add(name)
        return None

    def _is_excluded(self, folder: Seen, name: str, mode: int) -> bool:
        if self._ignore is None:
            return False
        known = self._former[folder.path] if self._decided else None
        if known is not None and name in known.listing and stat.S_IFMT(known.listing[name][4]) == stat.S_IFMT(mode):
            return False
        is_directory = stat.S_ISDIR(mode)
        marked = f"{name}/" if is_directory else name
        if (known is not None and marked in known.excluded) or self._ignore.excludes(
            _join(folder.path, name), is_directory=is_directory
        ):
            folder.excluded.add(marked)
            return True
        return False

    def _find_links(self) -> None:
        """Of the names of one file, the first by path is the file; the others are links to it."""
        for names in self._linked.values():
            names.sort(key=lambda item: item[0])
            leader, first, first_name = names[0]
            before = self._former[first.path]
            is_kept = before is not None and _is_unmoved(first, before, first_name) and first_name not in before.leaders
            for _, seen, name in names[1:]:
                seen.leaders[name] = os.fsdecode(leader)
                seen.has_stale_links |= not is_kept

    # --- making the new tree

    def _build(self, seen: Seen, before: Seen | None, old: Directory | None) -> Directory:
        """Return the directory of the new tree: the very one of the tree before where nothing in it moved."""
        children = {} if old is None else old.children
        below: dict[bytes, Directory] = {}
        for name, child in seen.below.items():
            former = children.get(os.fsencode(name))
            former = former if isinstance(former, Directory) else None
            below[os.fsencode(name)] = self._build(child, before.below.get(name) if before else None, former)
        self._skipped += [(os.fsencode(_join(seen.path, name)), why) for name, why in seen.skipped]
        is_same = before is not None and old is not None and _is_same(seen, before)
        if is_same and old is not None and all(children.get(name) is child for name, child in below.items()):
            seen.directory = old
            return old
        # What was made of a restored workspace was never stored itself.
        stored = old if old is None or old.frame is not None else old.before
        new = seen.directory = Directory(seen.own[4] & PERMISSIONS, self._time(seen.own[3]), seen.xattrs, before=stored)
        for name, key in seen.listing.items():
            raw = os.fsencode(name)
            kept = children.get(raw)
            if raw in below:
                new.children[raw] = below[raw]
            elif isinstance(kept, Entry) and self._is_kept(seen, before, name, key, kept) and name not in seen.leaders:
                new.children[raw] = kept
            else:
                new.children[raw] = self._entry(seen, name, key, new)
        return new

    def _is_kept(self, seen: Seen, before: Seen | None, name: str, key: Key, entry: Entry) -> bool:
        if before is None:
            return self._restored and self._looks_like(entry, seen, name, key)
        return _is_unmoved(seen, before, name) and before.leaders.get(name) == seen.leaders.get(name)

    def _looks_like(self, entry: Entry, seen: Seen, name: str, key: Key) -> bool:
        mtime = self._time(entry.mtime)
        if name in seen.leaders:
            return entry.kind == HARD_LINK and entry.target == os.fsencode(seen.leaders[name])
        if name in seen.targets:
            is_same = entry.kind == SYMLINK and entry.target == seen.targets[name]
            return is_same and entry.mtime == self._link_time(key[3])
        same_time = mtime == self._time(key[3]) and mtime == entry.mtime
        return entry.kind == FILE and same_time and (entry.size, entry.mode) == (key[2], key[4] & PERMISSIONS)

    def _entry(self, seen: Seen, name: str, key: Key, parent: Directory) -> Entry:
        ctime, _, size, mtime, mode, _ = key
        path = os.fsencode(_join(seen.path, name))
        if name in seen.targets:
            return Entry(SYMLINK, 0o777, self._link_time(mtime), target=seen.targets[name])
        if name in seen.leaders:
            link = Entry(HARD_LINK, target=os.fsencode(seen.leaders[name]))
            self._links.setdefault(os.fsencode(seen.leaders[name]), []).append(
                Link(path, parent, os.fsencode(name), link, not_there)
            )
            return link
        entry = Entry(FILE, mode & PERMISSIONS, self._time(mtime), size)
        known = self._known.get(self._listing.digests.get(path, b""))
        if known is not None and known.size == size:
            entry.digest, entry.pieces = known.digest, known.pieces
            entry.xattrs = self._listing.attributes.get(path, ())
            return entry
        pending = Pending(path, parent, os.fsencode(name), entry, size, key[1], not_there)
        self.readings.append(Reading(pending, seen, name, ctime))
        return entry

    def _time(self, mtime: int) -> int:
        return kept_time(mtime if self._keeps.nanoseconds else mtime - mtime % 10**9)

    def _link_time(self, mtime: int) -> int:
        return self._time(mtime) if self._keeps.link_times else 0


def not_there() -> Content:
    """Open a file that is not there any more."""
    raise Vanished


def _is_unmoved(seen: Seen, before: Seen, name: str) -> bool:
    return before.listing.get(name) == seen.listing[name] and name not in before.unsure


def _is_same(seen: Seen, before: Seen) -> bool:
    return (
        before.own == seen.own
        and not before.unsure
        and not seen.has_stale_links
        and before.listing == seen.listing
        and before.leaders == seen.leaders
        and before.xattrs == seen.xattrs
        and before.below.keys() == seen.below.keys()
    )


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
