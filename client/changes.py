"""What changed between two workspaces, told with the lines of the texts; content is read only of files that differ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pydantic import JsonValue

from activities.workspace.read import TreeReader, read_file
from activities.workspace.tree import FILE, HARD_LINK, SYMLINK, Entry
from client.moments import Moment, without_link
from client.show import size
from client.textdiff import is_binary, unified
from client.trees import Change, Node, as_json, kind_name, kind_of, shown_mode, shown_name, shown_path, text_of

MAX_TEXT = 1 << 20
"""Bytes of a file, up to which its lines are compared."""
_AT_ONCE = 8


@dataclass(frozen=True)
class Told:
    """One change. `lines` is the unified diff of its text, as it is in the files; `note` says why there is none, or not all."""

    change: Change
    detail: str
    lines: tuple[str, ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        """The path, safe for a terminal."""
        node = self.change.after or self.change.before
        return "" if node is None else shown_name(self.change.path, node)

    def as_json(self) -> dict[str, JsonValue]:
        """The same for programs."""
        change = self.change
        return {
            "path": text_of(change.path) or ".",
            "change": change.kind,
            "aspects": list(change.aspects),
            "before": None if change.before is None else as_json(change.before),
            "after": None if change.after is None else as_json(change.after),
            "diff": "".join(self.lines) or None,
            "note": self.note or None,
        }


async def tell_all(
    reader: TreeReader, moments: tuple[Moment, Moment], changes: Sequence[Change], *, lines: int | None
) -> AsyncIterator[Told]:
    """Tell of each change in order, with at most `lines` lines of each text (0: all), or without content when it is None.

    Raises StoreError.
    """
    for begin in range(0, len(changes), _AT_ONCE):
        group = changes[begin : begin + _AT_ONCE]
        for told in await asyncio.gather(*(_tell(reader, moments, change, lines) for change in group)):
            yield told


async def _tell(reader: TreeReader, moments: tuple[Moment, Moment], change: Change, lines: int | None) -> Told:
    detail = _detail(change)
    kinds = {kind_of(side) for side in (change.before, change.after) if side is not None}
    # A further name of a file that is there, or was, has no content of its own to show.
    if lines is None or not kinds <= ({FILE, HARD_LINK} if change.kind == "changed" else {FILE}):
        return Told(change, detail)
    old, new = [await _file(reader, *side) for side in zip(moments, (change.before, change.after), strict=True)]
    if (old and old.digest) == (new and new.digest):
        return Told(change, detail)
    if max(side.size for side in (old, new) if side) > MAX_TEXT:
        return Told(change, detail, note=f"larger than {size(MAX_TEXT)}, so its lines are not compared")
    before, after = [await _content(reader, side) for side in (old, new)]
    if is_binary(before) or is_binary(after):
        return Told(change, detail, note="binary")
    return await asyncio.to_thread(_compared, change, detail, before, after, lines)


def _compared(change: Change, detail: str, before: bytes, after: bytes, most: int) -> Told:
    name = shown_path(change.path)
    heads = (
        f"--- {'/dev/null' if change.before is None else 'a/' + name}\n",
        f"+++ {'/dev/null' if change.after is None else 'b/' + name}\n",
    )
    hunks = unified(before, after)
    shown = tuple(islice(hunks, most)) if most else tuple(hunks)
    left = sum(1 for _ in hunks)
    note = f"{left:,} more lines; --lines 0 shows all" if left else ""
    return Told(change, detail, heads + shown if shown else (), note)


async def _content(reader: TreeReader, entry: Entry | None) -> bytes:
    if entry is None:
        return b""
    return b"".join([chunk async for chunk in read_file(reader.blobs, entry)])


async def _file(reader: TreeReader, moment: Moment, node: Node | None) -> Entry | None:
    found = None if node is None else await without_link(reader, moment, node)
    return found if isinstance(found, Entry) and found.kind == FILE else None


def _detail(change: Change) -> str:
    """Say in a few words what is new, gone or other."""
    before, after = change.before, change.after
    if before is None or after is None:
        node = before or after
        return size(node.size) if isinstance(node, Entry) and node.kind == FILE else ""
    words = {
        "type": f"was a {kind_name(before)}, is a {kind_name(after)}",
        "mode": f"{shown_mode(before)} → {shown_mode(after)}",
        "attributes": "extended attributes",
    }
    if isinstance(before, Entry) and isinstance(after, Entry):
        led = shown_path(before.target)
        words["content"] = _sizes(before.size, after.size)
        words["target"] = f"led to {led}" if after.kind == SYMLINK else f"was the same file as {led}"
    return ", ".join(words[aspect] for aspect in change.aspects)


def _sizes(before: int, after: int) -> str:
    if before == after:
        return f"still {size(after)}"
    told = size(before), size(after)
    return f"{told[0]} → {told[1]}" if told[0] != told[1] else f"{before:,} → {after:,} B"
