"""Two trees of snapshots compared, and what stands in a tree told to people and programs.

Names in a tree were chosen by sandboxed code: they are bytes, not text, and may hold anything.
"""

from __future__ import annotations

import codecs
import stat
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from pydantic import JsonValue

from activities.workspace.tree import DIRECTORY, FILE, HARD_LINK, SYMLINK, Directory, Entry
from client.show import clean

Node = Entry | Directory
Fill = Callable[[Iterable[Directory]], Awaitable[None]]
"""Gives directories their children, as `activities.workspace.read.TreeReader.fill` does."""
_NAMES = {FILE: "file", DIRECTORY: "directory", SYMLINK: "symlink", HARD_LINK: "hard link"}
_TYPES = {FILE: stat.S_IFREG, DIRECTORY: stat.S_IFDIR, SYMLINK: stat.S_IFLNK, HARD_LINK: stat.S_IFREG}
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
"""Control characters as the signs that Unicode has for showing them, so that they neither act nor vanish."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Change:
    """What differs at one path: `before` is None where it was added, `after` where it was removed."""

    path: bytes
    before: Node | None
    after: Node | None

    @property
    def kind(self) -> Literal["added", "removed", "changed"]:
        """Which of the three it is."""
        return "added" if self.before is None else "removed" if self.after is None else "changed"

    @property
    def aspects(self) -> tuple[str, ...]:
        """What of it changed: `type`, `content`, `target`, `mode`, `attributes`. Empty unless it is `changed`."""
        return () if self.before is None or self.after is None else differences(self.before, self.after)


def kind_of(node: Node) -> int:
    """Return which kind of thing stands in a tree."""
    return DIRECTORY if isinstance(node, Directory) else node.kind


def differences(before: Node, after: Node) -> tuple[str, ...]:
    """Say in which aspects two things differ for a person. Times do not count, nor what a directory holds."""
    if kind_of(before) != kind_of(after):
        return ("type",)
    found: list[str] = []
    if isinstance(before, Entry) and isinstance(after, Entry):
        found += ["content"] if (before.size, before.digest) != (after.size, after.digest) else []
        found += ["target"] if before.target != after.target else []
    found += ["mode"] if before.mode != after.mode else []
    return (*found, *(["attributes"] if before.xattrs != after.xattrs else []))


async def compare(before: Directory | None, after: Directory | None, fill: Fill) -> list[Change]:
    """Return what differs between two stored trees, in the order of the paths. None stands for a tree that holds nothing.

    Directories of the same digest hold the same, so `fill` is not asked for them. A renamed file is one removed and one added.
    """
    changes = [Change(b"", before, after)] if before and after and differences(before, after) else []
    level = _deeper([(b"", before, after)])
    while level:
        await fill([side for _, *sides in level for side in sides if side is not None])
        below: list[tuple[bytes, Node | None, Node | None]] = []
        for path, old, new in level:
            olds, news = (side.children if side else {} for side in (old, new))
            for name in olds.keys() | news.keys():
                was, now = olds.get(name), news.get(name)
                full = path + b"/" + name if path else name
                if was is None or now is None or differences(was, now):
                    changes.append(Change(full, was, now))
                below.append((full, was, now))
        level = _deeper(below)
    return sorted(changes, key=lambda change: change.path.split(b"/"))


def _deeper(
    pairs: Iterable[tuple[bytes, Node | None, Node | None]],
) -> list[tuple[bytes, Directory | None, Directory | None]]:
    """Return the pairs in which a directory stands that may hold something else than the other."""
    found = []
    for path, was, now in pairs:
        old, new = (side if isinstance(side, Directory) else None for side in (was, now))
        if (old or new) and not (old and new and old.digest == new.digest):
            found.append((path, old, new))
    return found


def visible(text: str) -> str:
    """Make text from a sandbox safe for a terminal without hiding any of it: what would act is shown as a sign."""
    return clean(text.translate(_PICTURES))


def decoded(data: bytes) -> str:
    """Return bytes as text; those that are no UTF-8 as `\\xff`."""
    return data.decode("utf-8", "backslashreplace")


class TerminalText:
    """Makes a text that comes in pieces safe for a terminal."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def __call__(self, data: bytes, *, final: bool = False) -> bytes:
        """Return what a terminal may be given of the next piece; `final`: nothing follows."""
        # The line ends of other systems are no surprise, and would put a sign at the end of every line.
        return visible(self._decoder.decode(data, final).replace("\r\n", "\n")).encode("utf-8", "replace")


def shown_path(path: bytes) -> str:
    """Return a path, or where a link leads, as one line for a terminal."""
    return visible(decoded(path).replace("\n", "␊").replace("\t", "␉"))


def shown_mode(node: Node) -> str:
    """Write type and permissions as `ls -l` does."""
    return stat.filemode(_TYPES[kind_of(node)] | node.mode)


def shown_time(mtime: int) -> str:
    """Write nanoseconds since 1970 as a UTC time."""
    return (_EPOCH + timedelta(seconds=mtime // 10**9)).strftime("%Y-%m-%d %H:%M:%SZ")


def shown_name(path: bytes, node: Node) -> str:
    """Write a path as a list shows it: a directory with its slash, a link with where it leads."""
    name = shown_path(path) or "."
    if isinstance(node, Directory):
        return name if name == "." else f"{name}/"
    led = {SYMLINK: f" -> {shown_path(node.target)}", HARD_LINK: f" (same file as {shown_path(node.target)})"}
    return name + led.get(node.kind, "")


def kind_name(node: Node) -> str:
    """Return `file`, `directory`, `symlink` or `hard link`."""
    return _NAMES[kind_of(node)]


def text_of(path: bytes) -> str:
    """Return a path for JSON; bytes that are no UTF-8 as Python's `surrogateescape` has them, so that none is lost."""
    return path.decode("utf-8", "surrogateescape")


def as_json(node: Node) -> dict[str, JsonValue]:
    """Tell a program what stands in a tree."""
    told: dict[str, JsonValue] = {"type": kind_name(node), "mode": f"{node.mode:04o}"}
    if isinstance(node, Entry) and node.kind == FILE:
        told |= {"size": node.size, "sha256": node.digest.hex()}
    if isinstance(node, Entry) and node.kind in (SYMLINK, HARD_LINK):
        told["target"] = text_of(node.target)
    time = _EPOCH + timedelta(microseconds=node.mtime // 1000)
    return told | {"mtime": time.isoformat().replace("+00:00", "Z")}
