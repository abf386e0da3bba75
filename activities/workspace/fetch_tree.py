"""From what sources have to the tree of a workspace: names, limits, modes and places, all checked before anything is fetched."""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from activities.workspace.scan import MAX_DEPTH
from activities.workspace.sources.port import TIME_OF_NO_FILE, Found
from activities.workspace.tree import FILE, SYMLINK, Directory, Entry, kept_time
from contracts.base import BadInput
from contracts.manifest import InlineEntry, ManifestEntry, ManifestLimits

MODES = ("copy", "lazy", "presigned")
"""What `mode` of a bucket entry may be beside a file's mode."""
_NOTED = 20


@dataclass(slots=True, eq=False)
class Planned:
    """A file that is to be fetched: where it comes from and where it goes."""

    place: str
    path: str
    found: Found
    mode: int
    parent: Directory
    name: bytes
    entry: Entry
    identity: str = ""
    """What names its spool file, and in a worker's notes for the next one; '' where there is nothing to go on with."""
    is_remote: bool = False


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Put an entry's place before whatever it is refused with. A message that begins with . goes on with a field's name."""
    try:
        yield
    except BadInput as error:
        told = str(error)
        raise type(error)(f"manifest.entries.{place}{told if told.startswith('.') else ': ' + told}") from None


class TreeBuilder:
    """Puts the files of all entries into one tree."""

    def __init__(self, limits: ManifestLimits) -> None:
        self.root = Directory(mtime=TIME_OF_NO_FILE)
        self.files: list[Planned] = []
        self._limits = limits
        self._count = self._bytes = 0
        self._folders: dict[str, Directory] = {}

    def check_limits(self, place: str, entry: ManifestEntry, files: Sequence[Found], *, contents: bool = True) -> None:
        """Count what an entry brings. Raises BadInput naming the entry, the limit, and what to do."""
        count, size = len(files), sum(found.size for found in files) if contents else 0
        if not isinstance(entry, InlineEntry):
            for what, most, here in (("files", entry.max_files, count), ("bytes", entry.max_bytes, size)):
                if most is not None and here > most:
                    raise BadInput(
                        f"manifest.entries.{place}: {here} {what}, more than its max_{what} of {most}; raise that, or narrow "
                        "the entry with include and exclude"
                    )
        self._count += count
        self._bytes += size
        limits = self._limits
        for what, most, total in (("files", limits.max_files, self._count), ("bytes", limits.max_bytes, self._bytes)):
            if total > most:
                raise BadInput(
                    f"manifest.entries.{place}: more than {most} {what} in all; raise manifest.limits.max_{what}, or give less"
                )

    def add(self, place: str, entry: ManifestEntry, found: Found) -> Planned | None:
        """Put one thing into its place; return it if there is content to fetch. Raises BadInput naming what is in the way."""
        path = f"{place}/{found.path}" if found.path else place
        folder, _, name = path.rpartition("/")
        if found.open is None and found.target is None:
            self._folder(place, entry, path, found.name)
            return None
        parent = self._folder(place, entry, folder, found.name)
        raw = os.fsencode(name)
        there = parent.children.get(raw)
        if there is not None:
            what = "a directory" if isinstance(there, Directory) else "a file"
            raise BadInput(
                f"manifest.entries.{place}: {found.name or path!r} would lie at {path!r}, where {what} is; leave one out"
            )
        if found.target is not None:
            parent.children[raw] = Entry(SYMLINK, 0o777, kept_time(found.mtime), target=found.target)
            return None
        planned = Planned(place, path, found, mode_of(entry, found), parent, raw, Entry(FILE))
        parent.children[raw] = planned.entry
        self.files.append(planned)
        return planned

    def _folder(self, place: str, entry: ManifestEntry, path: str, key: str) -> Directory:
        """Return the directory at a path, made with those above it where they are missing."""
        known = self._folders.get(path)
        if known is not None:
            return known
        here, at = self.root, ""
        for part in path.split("/") if path else ():
            at = f"{at}/{part}" if at else part
            below = here.children.get(os.fsencode(part))
            if below is None:
                # The directories above an entry are nobody's, and stay as directories are.
                is_own = at == place or at.startswith(place + "/")
                mode = 0o555 if entry.read_only and is_own else 0o755
                below = here.children[os.fsencode(part)] = Directory(mode=mode, mtime=TIME_OF_NO_FILE)
            if not isinstance(below, Directory):
                raise BadInput(
                    f"manifest.entries.{place}: {key or path!r} needs a directory at {at!r}, where a file is; leave one out"
                )
            here = below
        self._folders[path] = here
        return here


def mode_of(entry: ManifestEntry, found: Found) -> int:
    """Return the mode of an entry's file."""
    own = 0o755 if found.executable else 0o644
    mode = own if entry.mode is None or entry.mode in MODES else int(entry.mode, 8)
    return mode & ~0o222 if entry.read_only else mode


def check_name(place: str, found: Found, *, is_key: bool = False) -> None:
    """Refuse what cannot be a path below an entry's place. Raises BadInput naming it as its source does.

    `is_key`: it is no name that a file has already, so that a backslash may well stand for a /.
    """
    fault = _fault(found.path)
    if fault is None and is_key and "\\" in found.path:
        fault = "holds a backslash"
    if fault is None and place.count("/") + found.path.count("/") + 2 > MAX_DEPTH:
        fault = f"lies deeper than {MAX_DEPTH} directories"
    if fault is not None:
        raise BadInput(f"manifest.entries.{place}: {found.name!r} {fault}; rename it, or leave it out with exclude")


def _fault(path: str) -> str | None:
    if not path:
        return None
    if path.startswith("/"):
        return "begins with / below the entry's source"
    if "\0" in path:
        return "holds a NUL character"
    parts = path.split("/")
    if "" in parts:
        return "has an empty part between two /, or is a directory with content"
    if "." in parts or ".." in parts:
        return "has '.' or '..' for a part"
    try:
        if any(len(os.fsencode(part)) > 255 for part in parts):
            return "has a part of more than 255 bytes"
    except UnicodeEncodeError:
        return "is no text that a file's name can be"
    return None


@dataclass(slots=True)
class Alike:
    """Finds paths that are one on systems that fold case or Unicode forms. In a workspace they are different files."""

    _seen: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def look(self, path: str) -> None:
        """Note a path that differs from an earlier one in case or Unicode form only; the first of them."""
        first = self._seen.setdefault(unicodedata.normalize("NFC", path).casefold(), path)
        if first != path and len(self.notes) < _NOTED:
            self.notes.append(f"{first!r} and {path!r} differ only in case or Unicode form; both are there")
