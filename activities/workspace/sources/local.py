"""Files of the harness's own host, below the roots that its operator allows. No link leads out of them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from activities.workspace.host_files import OPEN_DIRECTORY, OPEN_FILE, open_below
from activities.workspace.ingest import Content
from activities.workspace.scan import MAX_DEPTH
from activities.workspace.sources.port import Found, SourceChanged
from activities.workspace.sources.select import Selection
from activities.workspace.threads import to_end
from contracts.base import BadInput
from contracts.manifest import LocalEntry


class LocalSource:
    """A file or directory below one of `roots`, whose own paths are real ones."""

    def __init__(self, entry: LocalEntry, roots: Sequence[Path]) -> None:
        self._entry = entry
        self._roots = roots
        self._selection = Selection(entry.include, entry.exclude)

    async def find(self, most_files: int) -> list[Found]:
        """See Source. What the entry leaves out is not looked at."""
        return await to_end(self._find, most_files)

    def pin(self) -> str:
        """See Source."""
        return ""

    async def close(self) -> None:
        """See Source."""

    def _find(self, most_files: int) -> list[Found]:
        root, top = self._allowed(self._entry.path)
        if not top.is_dir():
            return [self._file(root, os.path.relpath(top, root), "")]
        found: list[Found] = []
        for item in self._walk(root, top):
            found.append(item)
            if len(found) > most_files + 1:
                raise BadInput(f"{top} has more than {most_files} files; narrow it, or raise the limits of files")
        return sorted(found, key=lambda item: item.path)

    def _allowed(self, path: str) -> tuple[Path, Path]:
        """Resolve a path to a real one below an allowed root, whatever links lie on the way; return both."""
        shown = ", ".join(map(str, self._roots)) or "none"
        inside = False
        for root in self._roots:
            real = Path(os.path.realpath(root / path))
            if real.is_relative_to(root):
                inside = True
                if real.exists():
                    return root, real
        if inside:
            raise BadInput(f".path: {path!r} does not exist below the allowed roots ({shown}); correct the path")
        raise BadInput(f".path: {path!r} is not below an allowed root ({shown}); move the data, or set CAISSON_LOCAL_ROOTS")

    def _walk(self, root: Path, top: Path) -> Iterator[Found]:
        base = os.path.relpath(top, root)
        waiting = [("", str(top), 0)]
        while waiting:
            path, folder, depth = waiting.pop()
            if depth > MAX_DEPTH:
                raise BadInput(f"{folder} lies deeper than {MAX_DEPTH} directories; leave it out with exclude")
            if self._selection.takes(path, is_directory=True):
                yield Found(path, path)
            try:
                with os.scandir(folder) as listed:
                    children = sorted(listed, key=lambda child: child.name)
            except OSError as error:
                raise _unreadable(folder, error) from error
            for child in children:
                below = f"{path}/{child.name}" if path else child.name
                if child.is_dir(follow_symlinks=False):
                    if not self._selection.leaves_out(below, is_directory=True):
                        waiting.append((below, child.path, depth + 1))
                elif self._selection.takes(below, is_directory=False):
                    if child.is_symlink():
                        yield self._file(root, str(_target(Path(child.path), top).relative_to(root)), below)
                    else:
                        yield self._file(root, below if base == "." else f"{base}/{below}", below)

    def _file(self, root: Path, real: str, path: str) -> Found:
        """Describe a file at `real`, relative to its root, that belongs at `path` below the entry's place."""
        try:
            status = os.lstat(f"{root}/{real}")
        except OSError as error:
            raise _unreadable(f"{root}/{real}", error) from error
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"{root}/{real} is no regular file; leave it out")
        return Found(
            path,
            path,
            size=status.st_size,
            mtime=status.st_mtime_ns,
            executable=bool(status.st_mode & 0o111),
            open=partial(_open, root, real, status.st_size),
        )


def _target(link: Path, top: Path) -> Path:
    real = Path(os.path.realpath(link))
    if not real.is_relative_to(top):
        raise BadInput(f"{link} is a link that leaves {top}; remove it, or copy what it names")
    if not real.is_file():
        raise BadInput(f"{link} is a link to no file; remove it, or copy what it names")
    return real


def _open(root: Path, real: str, size: int) -> Content:
    """Open a file again, from its root and through no link: a directory may have become one since it was listed."""
    try:
        folder = os.open(root, OPEN_DIRECTORY)
        try:
            fd = open_below(folder, os.fsencode(real), OPEN_FILE)
        finally:
            os.close(folder)
    except OSError as error:
        raise _unreadable(f"{root}/{real}", error) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        os.close(fd)
        raise SourceChanged(f"{root}/{real} was changed while it was read; try again when nobody writes to it")
    return Content(fd, size, status.st_mtime_ns, status.st_mode & 0o777)


def _unreadable(path: str, error: OSError) -> BadInput:
    return BadInput(f"{path} cannot be read: {error.strerror}; give the tools worker access to it")
