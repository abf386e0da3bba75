"""Which of a source's files an entry takes: `include` and `exclude`, as .gitignore has patterns, relative to the source."""

from __future__ import annotations

from collections.abc import Iterable

from activities.workspace.ignore import Ignore


class _Fits:
    """Whether patterns fit a path or a directory that it lies in; directories are asked about once."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._rules = Ignore(patterns)
        self._folders: dict[str, bool] = {}

    def __call__(self, path: str, is_directory: bool) -> bool:
        if is_directory:
            found = self._folders.get(path)
            if found is None:
                found = self._folders[path] = self._ask(path, True)
            return found
        return self._ask(path, False)

    def _ask(self, path: str, is_directory: bool) -> bool:
        folder = path.rpartition("/")[0]
        return (bool(folder) and self(folder, True)) or self._rules.excludes(path, is_directory=is_directory)


class Selection:
    """What of a source is wanted. Time grows with pattern and path only, whatever the patterns are."""

    def __init__(self, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> None:
        include, exclude = tuple(include), tuple(exclude)
        self._include = _Fits(include) if include else None
        self._exclude = _Fits(exclude) if exclude else None

    def __bool__(self) -> bool:
        """Whether anything might be left out."""
        return self._include is not None or self._exclude is not None

    def takes(self, path: str, *, is_directory: bool) -> bool:
        """Whether a file or a directory itself is wanted. `path` is relative to the source, or the name of a file that is all of
        the source; '' is a directory that is the source, always wanted."""
        if not path:
            return True
        if self._include is not None and not self._include(path, is_directory):
            return False
        return not self.leaves_out(path, is_directory=is_directory)

    def leaves_out(self, path: str, *, is_directory: bool) -> bool:
        """Whether `exclude` fits: then nothing in a directory is wanted either."""
        return bool(path) and self._exclude is not None and self._exclude(path, is_directory)
