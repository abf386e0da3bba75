"""Scanning a workspace that lies on this host: only what moved since the last scan is looked at closely, and read.

Sandboxed code may change the tree while it is scanned. Every name is reached from an open directory, never through a link, and
a file is what it is when it has been opened; so the worst that a race gives is a state that the file had at some moment.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from activities.workspace.host_files import GONE, OPEN_DIRECTORY, OPEN_FILE, coarse_now, open_content, open_folder, xattrs_of
from activities.workspace.ignore import Ignore, pattern_lines
from activities.workspace.ingest import Content, Link, Pending, Unreadable, Vanished
from activities.workspace.snapshots import Scan, Skipped
from activities.workspace.tree import FILE, HARD_LINK, PERMISSIONS, SYMLINK, Directory, Entry, Xattrs, kept_time

IGNORE_FILE = ".caissonignore"
MAX_IGNORE_BYTES = 64 << 10
MAX_DEPTH = 128
"""Levels of directories. What lies deeper is skipped and listed."""
_TICK = 0.012
"""Seconds within which the kernel's coarse clock moves on: one tick at 100 Hz, and a bit."""
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

Key = tuple[int, int, int, int, int, int]
"""ctime, inode, size, mtime, mode, links. While these stay, the content does: the kernel sets ctime, and nobody else can."""


@dataclass(slots=True, eq=False)
class Seen:
    """One directory as a scan saw it, and the directory of the tree that was made of it."""

    own: Key
    path: str
    listing: dict[str, Key] = field(default_factory=dict)
    below: dict[str, Seen] = field(default_factory=dict)
    targets: dict[str, bytes] = field(default_factory=dict)
    xattrs: Xattrs = ()
    excluded: set[str] = field(default_factory=set)
    """Names that were left out, those of directories with a slash."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    leaders: dict[str, str] = field(default_factory=dict)
    """Names that are hard links of a file seen under another path, with that path."""
    unsure: set[str] = field(default_factory=set)
    """Names that may have changed since without a trace in their key, because it happened within one tick of the clock. The
    directory's own, for its attributes, is "."."""
    has_stale_links: bool = False
    """Whether it holds a hard link of a file that is to be read anew, so that the link may have to become the file."""
    directory: Directory = field(default_factory=Directory)
    lines: tuple[str, ...] = ()
    """Of the root: the patterns that were left out."""


class HostScanner:
    """Scans one workspace, once. `before` is what the last scan that was stored saw of the same workspace, or None.

    Without it, `base` may be the tree of the snapshot before, whose directories are not stored again where they are the same.
    With `restored`, the workspace is one that `base` has just been restored to and nobody has worked in, so that files which
    look the same are the same. A scan that is given up changes nothing of what the one before it saw. Close it when its content
    has been read.
    """

    def __init__(
        self,
        workspace: Path,
        excludes: tuple[str, ...] = (),
        before: Seen | None = None,
        base: Directory | None = None,
        *,
        restored: bool = False,
    ) -> None:
        self._root = os.open(workspace, OPEN_DIRECTORY)
        self._given = excludes
        self._before = before
        self._base = before.directory if before is not None else base
        self._restored = restored
        self._ignore: Ignore | None = None
        self._decided = False
        self._linked: dict[int, list[tuple[bytes, Seen, str, Seen | None]]] = {}
        self._links: dict[str, list[Link]] = {}
        self._folder: tuple[str, int] = "", self._root
        self._pending: list[Pending] = []
        self._skipped: list[Skipped] = []
        self._device = 0
        self._clock = 0
        self._newest = 0
        self.seen: Seen | None = None
        """What this scan saw, for the next one; once the scan is stored."""

    def close(self) -> None:
        """Let go of the workspace."""
        self._leave_folder()
        os.close(self._root)

    def scan(self) -> Scan:
        """Look at the whole workspace."""
        own, fault = _ignore_lines(self._root)
        lines = (*self._given, *own)
        self._skipped += [(os.fsencode(IGNORE_FILE), fault)] if fault else []
        self._ignore = Ignore(lines) if lines else None
        self._decided = self._before is not None and self._before.lines == lines
        status = os.fstat(self._root)
        self._device, self._clock = status.st_dev, coarse_now()
        seen = self.seen = Seen(_key(status), "", lines=lines)
        self._list(self._root, seen, self._before, 0)
        self._find_links()
        root = self._build(seen, self._before, self._base)
        for pending in self._pending:
            pending.links = self._links.get(os.fsdecode(pending.path), ()) if self._links else ()
        self._let_the_clock_tick()
        return Scan(root, self._pending, self._skipped, lines)

    # --- looking

    def _list(self, fd: int, seen: Seen, before: Seen | None, depth: int) -> None:
        folders: list[str] = []
        listing = seen.listing
        is_excluded = self._filter(seen, before)
        with os.scandir(fd) as found:
            for item in found:
                name = item.name
                try:
                    status = item.stat(follow_symlinks=False)
                except OSError as error:
                    if error.errno not in GONE:
                        seen.skipped.append((name, error.strerror or "it cannot be looked at"))
                    continue
                mode = status.st_mode
                if is_excluded is not None and is_excluded(name, mode):
                    continue
                listing[name] = key = _key(status)
                if key[0] > self._newest:
                    self._newest = key[0]
                if stat.S_ISREG(mode):
                    if key[5] > 1:
                        self._linked.setdefault(key[1], []).append((os.fsencode(_join(seen.path, name)), seen, name, before))
                elif stat.S_ISDIR(mode):
                    folders.append(name)
                elif stat.S_ISLNK(mode):
                    self._read_target(fd, seen, name, key, before)
                else:
                    del listing[name]
                    seen.skipped.append((name, _KINDS.get(stat.S_IFMT(mode), "no regular file")))
        is_same = before is not None and before.own == seen.own and "." not in before.unsure
        seen.xattrs = before.xattrs if is_same and before is not None else xattrs_of(fd)
        if seen.own[0] >= self._clock:
            seen.unsure.add(".")
        for name in folders:
            self._list_below(fd, seen, name, before.below.get(name) if before else None, depth + 1)

    def _filter(self, seen: Seen, before: Seen | None) -> Callable[[str, int], bool] | None:
        ignore = self._ignore
        if ignore is None:
            return None
        known = before if self._decided else None

        def is_excluded(name: str, mode: int) -> bool:
            if known is not None and name in known.listing and stat.S_IFMT(known.listing[name][4]) == stat.S_IFMT(mode):
                return False
            is_directory = stat.S_ISDIR(mode)
            marked = f"{name}/" if is_directory else name
            if (known is not None and marked in known.excluded) or ignore.excludes(
                _join(seen.path, name), is_directory=is_directory
            ):
                seen.excluded.add(marked)
                return True
            return False

        return is_excluded

    def _list_below(self, fd: int, seen: Seen, name: str, before: Seen | None, depth: int) -> None:
        if depth >= MAX_DEPTH:
            self._drop(seen, name, f"deeper than {MAX_DEPTH} directories")
            return
        below = Seen(seen.listing[name], _join(seen.path, name))
        try:
            child = os.open(name, OPEN_DIRECTORY, dir_fd=fd)
        except OSError as error:
            if error.errno in GONE:
                del seen.listing[name]
                return
            # The directory itself is kept; what it holds cannot be.
            seen.skipped.append((name, f"what it holds cannot be read: {error.strerror}"))
            seen.below[name] = below
            return
        try:
            status = os.fstat(child)
            if status.st_dev != self._device:
                self._drop(seen, name, "another file system")
                return
            # What the open directory says counts: the name may have been given to another since it was listed.
            below.own = seen.listing[name] = _key(status)
            self._list(child, below, before, depth)
        finally:
            os.close(child)
        seen.below[name] = below

    @staticmethod
    def _drop(seen: Seen, name: str, why: str) -> None:
        del seen.listing[name]
        seen.skipped.append((name, why))

    def _read_target(self, fd: int, seen: Seen, name: str, key: Key, before: Seen | None) -> None:
        if before is not None and before.listing.get(name) == key and name not in before.unsure:
            seen.targets[name] = before.targets[name]
            return
        try:
            seen.targets[name] = os.fsencode(os.readlink(name, dir_fd=fd))
        except OSError:
            del seen.listing[name]
        else:
            if key[0] >= self._clock:
                seen.unsure.add(name)

    def _find_links(self) -> None:
        """Of the names of one file, the first by path is the file; the others are links to it."""
        for names in self._linked.values():
            names.sort(key=lambda item: item[0])
            leader, first, first_name, before = names[0]
            is_kept = before is not None and _is_unmoved(first, before, first_name) and first_name not in before.leaders
            for _, seen, name, _ in names[1:]:
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
        new = seen.directory = Directory(seen.own[4] & PERMISSIONS, kept_time(seen.own[3]), seen.xattrs, before=stored)
        for name, key in seen.listing.items():
            raw = os.fsencode(name)
            if raw in below:
                new.children[raw] = below[raw]
                continue
            kept = children.get(raw)
            if isinstance(kept, Entry) and self._is_kept(seen, before, name, key, kept) and name not in seen.leaders:
                new.children[raw] = kept
            else:
                new.children[raw] = self._entry(seen, name, key, new)
        return new

    def _is_kept(self, seen: Seen, before: Seen | None, name: str, key: Key, entry: Entry) -> bool:
        if before is None:
            return self._restored and _looks_like(entry, seen, name, key)
        return _is_unmoved(seen, before, name) and before.leaders.get(name) == seen.leaders.get(name)

    def _entry(self, seen: Seen, name: str, key: Key, parent: Directory) -> Entry:
        ctime, _, size, _, mode, _ = key
        mtime = kept_time(key[3])
        if name in seen.targets:
            return Entry(SYMLINK, 0o777, mtime, target=seen.targets[name])
        path = os.fsencode(_join(seen.path, name))
        if name in seen.leaders:
            link = Entry(HARD_LINK, target=os.fsencode(seen.leaders[name]))
            self._links.setdefault(seen.leaders[name], []).append(
                Link(path, parent, os.fsencode(name), link, partial(self._open, seen, name))
            )
            return link
        entry = Entry(FILE, mode & PERMISSIONS, mtime, size)
        reading = Pending(path, parent, os.fsencode(name), entry, size, key[1], partial(self._open, seen, name))
        reading.settle = partial(self._settle, seen, name, ctime)
        self._pending.append(reading)
        return entry

    def _settle(self, seen: Seen, name: str, ctime: int, content: Content) -> None:
        """Note whether a file that has been read is surely still what was read, as long as its key stays."""
        if _key(os.fstat(content.fd))[0] != ctime or ctime >= self._clock:
            seen.unsure.add(name)

    def _open(self, seen: Seen, name: str) -> Content:
        """Open a file to read it. The directory stays open for the next, which is mostly in the same."""
        try:
            if self._folder[0] != seen.path:
                self._leave_folder()
                self._folder = seen.path, open_folder(self._root, os.fsencode(seen.path))
            return open_content(self._folder[1], name)
        except (Vanished, Unreadable):
            seen.unsure.add(name)  # the next scan tries again
            raise

    def _leave_folder(self) -> None:
        if self._folder[1] != self._root:
            os.close(self._folder[1])
        self._folder = "", self._root

    def _let_the_clock_tick(self) -> None:
        """Wait until any later write to what is about to be read, or was just restored, must show in its ctime: a few
        milliseconds at most."""
        until = time.monotonic() + _TICK
        while (self._pending or self._restored) and coarse_now() <= self._newest and time.monotonic() < until:
            time.sleep(0.001)
        self._clock = coarse_now()


def _is_unmoved(seen: Seen, before: Seen, name: str) -> bool:
    return before.listing.get(name) == seen.listing[name] and name not in before.unsure


def _is_same(seen: Seen, before: Seen) -> bool:
    return (
        before.own == seen.own
        and not before.unsure
        and not seen.has_stale_links
        and before.listing == seen.listing
        and before.leaders == seen.leaders
        and before.below.keys() == seen.below.keys()
    )


def _looks_like(entry: Entry, seen: Seen, name: str, key: Key) -> bool:
    if name in seen.leaders:
        return entry.kind == HARD_LINK and entry.target == os.fsencode(seen.leaders[name])
    if name in seen.targets:
        return entry.kind == SYMLINK and (entry.target, entry.mtime) == (seen.targets[name], kept_time(key[3]))
    return entry.kind == FILE and (entry.size, entry.mtime, entry.mode) == (key[2], kept_time(key[3]), key[4] & PERMISSIONS)


def _key(status: os.stat_result) -> Key:
    return status.st_ctime_ns, status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode, status.st_nlink


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def ignore_fault(mode: int, size: int) -> str:
    """Say why the patterns of a .caissonignore are not followed, or return ''. It is stored all the same."""
    what = ""
    if stat.S_ISLNK(mode):
        what = "a link"
    elif stat.S_ISDIR(mode):
        what = "a directory"
    elif stat.S_ISREG(mode) and size > MAX_IGNORE_BYTES:
        what = f"of more than {MAX_IGNORE_BYTES} bytes"
    return f"its patterns are not followed: it is {what}, and not a file of at most {MAX_IGNORE_BYTES >> 10} KiB" if what else ""


def _ignore_lines(root: int) -> tuple[tuple[str, ...], str]:
    """Return the patterns of the workspace's own .caissonignore, and if there are none, why."""
    try:
        status = os.stat(IGNORE_FILE, dir_fd=root, follow_symlinks=False)
        if fault := ignore_fault(status.st_mode, status.st_size):
            return (), fault
        fd = os.open(IGNORE_FILE, OPEN_FILE, dir_fd=root)
    except OSError:
        return (), ""
    with os.fdopen(fd, "rb") as file:
        # Of what is no file, or cannot be read, the scan itself tells.
        text = file.read(MAX_IGNORE_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    return tuple(pattern_lines(os.fsdecode(text))), ""
