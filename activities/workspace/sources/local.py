"""Files of the harness's own host, below the roots that its operator allows. No link leads out of them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from activities.threads import to_end
from activities.workspace.host_files import OPEN_DIRECTORY, OPEN_FILE, open_below
from activities.workspace.ingest import Content
from activities.workspace.scan import MAX_DEPTH
from activities.workspace.sources.port import Bound, Found, SourceChanged
from activities.workspace.sources.select import Selection
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
            single = self._file(root, os.path.relpath(top, root), "")
            return [single] if self._selection.takes(single.file_name, is_directory=False) else []
        return sorted(self._walk(root, top, Bound(most_files, str(top))), key=lambda item: item.path)

    def _allowed(self, path: str) -> tuple[Path, Path]:
        """Resolve a path to a real one below an allowed root, whatever links lie on the way; return both."""
        shown = ", ".join(map(str, self._roots)) or "none"
        inside, fault = False, ""
        for root in self._roots:
            real = Path(os.path.realpath(root / path))
            if not real.is_relative_to(root):
                continue
            inside = True
            try:
                real.stat()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    fault = error.strerror or str(error)
            else:
                return root, real
        if fault:
            raise BadInput(f".path: {_cut(path)} cannot be read ({fault}); correct the path, or give the tools worker access")
        if inside:
            raise BadInput(f".path: {path!r} does not exist below the allowed roots ({shown}); correct the path")
        raise BadInput(f".path: {path!r} is not below an allowed root ({shown}); move the data, or set CAISSON_LOCAL_ROOTS")

    def _walk(self, root: Path, top: Path, bound: Bound) -> Iterator[Found]:
        waiting: list[tuple[str, Path, tuple[Path, ...]]] = [("", top, (top,))]
        while waiting:
            path, folder, above = waiting.pop()
            if len(above) > MAX_DEPTH + 1:
                raise BadInput(f"{folder} lies deeper than {MAX_DEPTH} directories; leave it out with exclude")
            bound.count(is_directory=True)
            if self._selection.takes(path, is_directory=True):
                yield Found(path, path)
            try:
                with os.scandir(folder) as listed:
                    children = sorted(listed, key=lambda child: child.name)
            except OSError as error:
                raise _unreadable(str(folder), error) from error
            for child in children:
                below = f"{path}/{child.name}" if path else child.name
                is_directory = _leads_to_directory(child)
                if self._selection.leaves_out(below, is_directory=is_directory):
                    continue
                # A link is followed by its real path: what is opened later is reached through no link.
                fault, real = (None, Path(child.path)) if not child.is_symlink() else _target(child, top, above)
                if fault is not None:
                    if self._selection.takes(below, is_directory=is_directory):
                        raise BadInput(f"{child.path} is a link {fault}; leave it out with exclude, or copy what it names")
                elif is_directory:
                    waiting.append((below, real, (*above, real)))
                elif self._selection.takes(below, is_directory=False):
                    bound.count(is_directory=False)
                    yield self._file(root, str(real.relative_to(root)), below)

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
            path or self._entry.path.rstrip("/"),
            size=status.st_size,
            mtime=status.st_mtime_ns,
            executable=bool(status.st_mode & 0o111),
            open=partial(_open, root, real, status.st_size),
        )


def _leads_to_directory(child: os.DirEntry[str]) -> bool:
    try:
        return child.is_dir()
    except OSError:  # links in a circle
        return False


def _target(link: os.DirEntry[str], top: Path, above: Sequence[Path]) -> tuple[str | None, Path]:
    """Return why a link is not followed, or None, and the real path of what it names."""
    real = Path(os.path.realpath(link.path))
    if not real.is_relative_to(top):
        return f"that leaves {top}", real
    if real in above:
        return "to a directory that it lies in itself", real
    if not real.exists():
        return "to nothing", real
    return None, real


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


def _cut(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "...")


def _unreadable(path: str, error: OSError) -> BadInput:
    return BadInput(f"{path} cannot be read: {error.strerror}; give the tools worker access to it")
