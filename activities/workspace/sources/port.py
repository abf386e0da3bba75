"""What every source of a manifest offers: a list of what it has, pinned, and the content of each, exactly as it was listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from activities.workspace.ingest import Content
from contracts.base import BadInput

TIME_OF_NO_FILE = 946_684_800_000_000_000
"""The modification time of what has none: 2000-01-01, always the same, so that equal manifests make equal workspaces; and no
earlier, because zip archives cannot hold times before 1980."""

DIRECTORIES_FOR_A_FILE = 8
"""How many directories a source may have for each file that the limits allow. More is nothing that people made: trees of git that
name each other, and links to directories, make millions of them of a few bytes."""


class SourceChanged(BadInput):
    """The source does not have what it had when it was listed, or when it was pinned; the message names what."""


@dataclass(frozen=True, slots=True)
class Found:
    """Something a source has.

    `path` is where it belongs, relative to the entry's place; '' is the place itself. `name` is what the source calls it (a key,
    a path), `version` what pins it (an ETag, a generation, a blob id of git; '' where there is none). `open` gives the content
    and is called in a thread, once; None for a directory. A symlink has its text in `target` instead.
    """

    path: str
    name: str
    version: str = ""
    size: int = 0
    mtime: int = TIME_OF_NO_FILE
    executable: bool = False
    open: Callable[[], Content] | None = None
    target: bytes | None = None

    @property
    def is_directory(self) -> bool:
        """Whether it has no content of its own."""
        return self.open is None and self.target is None

    @property
    def file_name(self) -> str:
        """The last part of its name: by that the entry's patterns judge a file which is the source itself."""
        return self.name.rpartition("/")[2]


class Bound:
    """Counts what a source lists, files and directories apart. `where` says of what, in an error."""

    def __init__(self, most_files: int, where: str) -> None:
        self._most_files, self._where = most_files, where
        self._files = self._directories = 0

    def count(self, *, is_directory: bool) -> None:
        """Count one more. Raises BadInput when there are too many."""
        self._files += not is_directory
        self._directories += is_directory
        if self._files > self._most_files:
            raise BadInput(f"{self._where} has more than {self._most_files} files; narrow it, or raise the limits of files")
        most = (self._most_files + 1) * DIRECTORIES_FOR_A_FILE
        if self._directories > most:
            raise BadInput(
                f"{self._where} has more than {most} directories for at most {self._most_files} files; narrow it, or leave "
                "some out with exclude"
            )


class Source(Protocol):
    """One entry's source.

    Raises BadInput, in `find` or in `open`, with the reason and the remedy (whoever calls puts the entry's place before it), and
    StoreUnavailable or OSError for what may go well at another time.
    """

    async def find(self, most_files: int) -> list[Found]:
        """List everything that there is, in the order of the paths. Stops with BadInput once there are more than `most_files`."""

    def pin(self) -> str:
        """Return what pins the source as a whole, such as the commit; '' where each file has its own version."""

    async def close(self) -> None:
        """Let go of connections and temporary files."""
