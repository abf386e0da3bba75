"""Paths that are given to the helper, and what it says of files."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence

from activities.sandbox.port import FileChange, FileFault, FileView, SandboxUnavailable
from activities.sandbox.portable_call import Answer
from contracts.sandbox import WORKSPACE

_MAX_PATH = 4000
"""Bytes of a path. A system takes 4095, with the workspace before it."""
_ROW = re.compile(rb"(.*?)//([0-9a-f]+) (\d+)\n", re.DOTALL)


def normal(path: str) -> str:
    """Return a workspace path in its normal form, which it must already have. The workspace itself is ''. Raises FileFault."""
    if path in ("", "."):
        return ""
    if path.startswith("/") or any(part in ("", ".", "..") for part in path.split("/")):
        raise FileFault(f"{path}: give a path relative to {WORKSPACE}, without '.', '..', '//' or a slash at its end")
    if "\0" in path:
        raise FileFault(f"{path!r}: a path cannot hold a NUL byte")
    check_name(path)
    return path


def check_name(path: str) -> None:
    """Refuse what no file system takes as a name. Raises FileFault."""
    try:
        too_long = any(len(part.encode("utf-8", "surrogateescape")) > 255 for part in path.split("/"))
    except UnicodeEncodeError as error:
        raise FileFault(f"{path!r}: is no path: {error.reason}") from error
    if too_long or len(path.encode("utf-8", "surrogateescape")) > _MAX_PATH:
        raise FileFault(f"{path[:300]}: File name too long")


def check_write(path: str) -> None:
    """Refuse a path that names no file. Raises FileFault."""
    if "\0" in path or path.rpartition("/")[2] in ("", ".", ".."):
        raise FileFault(f"{path!r}: names no file")
    check_name(path)


def check_changes(changes: Sequence[FileChange]) -> None:
    """Refuse changes that name one path twice, or a file below another file that is written. Raises FileFault."""
    written = {change.path for change in changes if change.data is not None}
    if len({change.path for change in changes}) != len(changes):
        raise FileFault("a path is named twice in one set of changes; merge its changes")
    for change in changes:
        if not normal(change.path):
            raise FileFault(f"{change.path or '.'}: is the workspace itself")
    for path in written:
        parent = path
        while parent := parent.rpartition("/")[0]:
            if parent in written:
                raise FileFault(f"{parent}: is written as a file and also holds {path}")


def views_of_look(paths: Sequence[str], answer: Answer) -> dict[str, FileView]:
    """Return what a look found. Raises SandboxUnavailable when the answer makes no sense."""
    try:
        if "entries" in answer.words:
            data = answer.parts(answer.words["lengths"])
            entries = answer.words["entries"]
            return {
                path: FileView(entry[1], entry[2], entry[3], content, entry[4])
                for path, entry, content in zip(paths, entries, data, strict=True)
            }
        views: dict[str, FileView] = {}
        rows = answer.words["views"]
        data = answer.parts([length for *_, length in rows])
        for path, (kind, mode, size, _), content in zip(paths, rows, data, strict=True):
            is_link = kind == "symlink"
            views[path] = FileView(
                kind=kind,
                mode=mode,
                size=size,
                data=None if is_link else content,
                target=(content or b"").decode("utf-8", "surrogateescape") if is_link else None,
            )
        return views
    except (KeyError, ValueError, TypeError) as error:
        raise SandboxUnavailable(f"what stands at some paths cannot be understood: {error!r}") from error


def views_of_walk(top: str, answer: Answer) -> list[tuple[str, FileView]]:
    """Return what a walk found, sorted. Raises SandboxUnavailable when the answer makes no sense."""
    try:
        if "entries" in answer.words:
            found = [(entry[0], FileView(entry[1], entry[2], entry[3], None, entry[4])) for entry in answer.words["entries"]]
        else:
            found = _rows(top, answer.body, answer.words["rows"])
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise SandboxUnavailable(f"a listing cannot be understood: {error!r}") from error
    return sorted(found, key=lambda entry: entry[0])


def _rows(top: str, body: bytes, length: int) -> list[tuple[str, FileView]]:
    """Return the entries of a listing: `./PATH//MODE SIZE` a line, then names and targets of links, NUL behind each."""
    words = body[length:].split(b"\0")
    targets = dict(zip(words[::2], words[1::2], strict=False))  # of links; a directory that cannot be listed is named there too
    found: list[tuple[str, FileView]] = []
    for row in _ROW.finditer(body[:length]):
        raw, mode_text, size = row.groups()
        mode = int(mode_text, 16)
        name = os.fsdecode(raw[2:])
        kind = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}.get(stat.S_IFMT(mode), "other")
        kind = "closed directory" if kind == "directory" and raw in targets else kind
        found.append(
            (
                f"{top}/{name}" if top else name,
                FileView(
                    kind=kind,
                    mode=stat.S_IMODE(mode),
                    size=int(size) if kind == "file" else 0,
                    target=targets[raw].decode("utf-8", "surrogateescape") if kind == "symlink" else None,
                ),
            )
        )
    return found
