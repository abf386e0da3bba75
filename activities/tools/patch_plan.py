"""Decide what a patch changes in the files as they are: all of it, or a PatchFault and nothing. Pure.

Files stay byte for byte what they were except for the lines the patch removes and adds: encoding, byte order mark, line ends,
presence of a final line end, mode, and the characters of context lines that matched only loosely.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from activities.sandbox.port import FileChange, FileView
from activities.tools.patch_parse import (
    ADDED,
    CONTEXT,
    AddFile,
    DeleteFile,
    PatchFault,
    PatchOperation,
    UpdateFile,
    shown,
)
from activities.tools.patch_place import Placement, place_hunks
from activities.tools.patch_text import FileLine, FileText, encoded

_MODE_OF_A_NEW_FILE: Final = 0o644
_PERMISSIONS: Final = 0o777
_MISSING: Final = FileView("missing")
_ANOTHER_PATH: Final = "give another path, or remove it with a command first"


@dataclass(frozen=True)
class PatchPlan:
    """The changes a patch makes, and what the model is told when they are made.

    `summary` has a line for each operation, in the order of the patch: `A path`, `M path`, `D path` or `R old -> new`, each
    followed by an indented note for each hunk that did not match exactly.
    """

    changes: tuple[FileChange, ...]
    summary: str


def paths_to_look_at(operations: Sequence[PatchOperation]) -> tuple[str, ...]:
    """Return the workspace paths that `plan_patch` needs views of: those the patch names and every directory above them."""
    paths: dict[str, None] = {}
    for operation in operations:
        for path in _named(operation):
            paths |= dict.fromkeys((*_above(path), path))
    return tuple(paths)


def paths_to_read(operations: Sequence[PatchOperation]) -> tuple[str, ...]:
    """Return those of the paths whose content `plan_patch` needs, where they are regular files: the ones that are updated."""
    return tuple(operation.path for operation in operations if isinstance(operation, UpdateFile))


def refuse_blocked(operation: PatchOperation, views: Mapping[str, FileView]) -> None:
    """Refuse a path that stands below something that is no directory, as far as `views` tells. Raises PatchFault."""
    for path in _named(operation):
        for directory in _above(path):
            view = views.get(directory, _MISSING)
            if view.kind == "symlink":
                raise PatchFault(f"{path}: {directory} is {_link(view)}: patch the file under its real path instead")
            if view.kind not in ("missing", "directory"):
                raise PatchFault(f"{path}: {directory} is {_described(view)}, not a directory: give another path")


def plan_patch(operations: Sequence[PatchOperation], views: Mapping[str, FileView]) -> PatchPlan:
    """Return what `operations` change in a workspace whose files are as `views` says, or refuse all of them.

    `views` has the paths of `paths_to_look_at`, each as `Sandbox.look` gives it; one it lacks counts as missing. Raises
    PatchFault naming the first operation that cannot be done.
    """
    _refuse_collisions(operations)
    changes: list[FileChange] = []
    summary: list[str] = []
    for operation in operations:
        refuse_blocked(operation, views)
        if isinstance(operation, AddFile):
            made, told = _add(operation, views)
        elif isinstance(operation, DeleteFile):
            made, told = _delete(operation, views)
        else:
            made, told = _update(operation, views)
        changes += made
        summary += told
    return PatchPlan(tuple(changes), "\n".join(summary))


def _named(operation: PatchOperation) -> tuple[str, ...]:
    if isinstance(operation, UpdateFile) and operation.move_to not in (None, operation.path):
        return operation.path, operation.move_to
    return (operation.path,)


def _above(path: str) -> Iterator[str]:
    for index, character in enumerate(path):
        if character == "/":
            yield path[:index]


def _refuse_collisions(operations: Sequence[PatchOperation]) -> None:
    named = Counter(path for operation in operations for path in _named(operation))
    for path, times in named.items():
        if times > 1:
            raise PatchFault(
                f"{path} is named by {times} operations of the patch: put all its changes into one operation, or send a "
                "second patch"
            )
        for directory in _above(path):
            if directory in named:
                raise PatchFault(f"{directory} is a file in one operation of the patch and the directory of {path} in another")


def _link(view: FileView) -> str:
    return f"a link to {shown(view.target or '')}"


def _described(view: FileView) -> str:
    return {"directory": "a directory", "file": "a regular file", "symlink": _link(view)}.get(view.kind, "a special file")


def _regular(path: str, views: Mapping[str, FileView]) -> FileView:
    view = views.get(path, _MISSING)
    if view.kind == "file":
        return view
    if view.kind == "missing":
        raise PatchFault(f"{path} does not exist: correct the path, or make the file with *** Add File")
    if view.kind == "symlink":
        raise PatchFault(f"{path} is {_link(view)}: patch the file under its real path instead")
    raise PatchFault(f"{path} is {_described(view)}: only regular files can be patched")


def _content(path: str, view: FileView) -> bytes:
    if view.data is None:
        raise PatchFault(f"{path} is too large to patch ({view.size} bytes): change it with a command instead")
    return view.data


def _refuse_existing(path: str, views: Mapping[str, FileView], advice: str) -> None:
    view = views.get(path, _MISSING)
    if view.kind != "missing":
        raise PatchFault(f"{path} exists already and is {_described(view)}: {advice if view.kind == 'file' else _ANOTHER_PATH}")


def _add(operation: AddFile, views: Mapping[str, FileView]) -> tuple[list[FileChange], list[str]]:
    _refuse_existing(operation.path, views, "change it with *** Update File, or give another path")
    data = encoded(operation.path, operation.content, "utf-8")
    return [FileChange(operation.path, data, _MODE_OF_A_NEW_FILE)], [f"A {operation.path}"]


def _delete(operation: DeleteFile, views: Mapping[str, FileView]) -> tuple[list[FileChange], list[str]]:
    path = operation.path
    view = views.get(path, _MISSING)
    if view.kind == "symlink":
        raise PatchFault(
            f"{path} is {_link(view)}, and a patch deletes only regular files: name the file under its real path, or remove the "
            "link with a command"
        )
    _regular(path, views)
    return [FileChange(path, None)], [f"D {path}"]


def _update(operation: UpdateFile, views: Mapping[str, FileView]) -> tuple[list[FileChange], list[str]]:
    path = operation.path
    view = _regular(path, views)
    target = operation.move_to or path
    if target != path:
        _refuse_existing(target, views, "a move replaces nothing; give another path")
    data = _content(path, view)
    told = [f"M {path}" if target == path else f"R {path} -> {target}"]
    if operation.hunks:
        file = FileText.read(path, data, operation.hunks)
        placements = place_hunks(path, operation.hunks, [line.text for line in file.lines])
        told += [
            f"  hunk {placement.hunk.number} matched at line {placement.start + 1} {placement.how}; its '+' lines are as given"
            for placement in placements
            if placement.how
        ]
        data = file.encode(path, _edited(path, file, placements))
    changes = [FileChange(target, data, view.mode & _PERMISSIONS)]
    if target != path:
        changes.append(FileChange(path, None))
    return changes, told


def _edited(path: str, file: FileText, placements: Sequence[Placement]) -> list[FileLine]:
    result: list[FileLine] = []
    done = 0
    for placement in placements:
        result += file.lines[done : placement.start]
        new = list(_replacement(file, placement))
        fault = f"{path}, hunk {placement.hunk.number} (patch line {placement.hunk.number_in_patch})"
        if [line.text for line in new] == [line.text for line in file.lines[placement.start : placement.end]]:
            raise PatchFault(f"{fault}: it changes nothing: the file has these lines already")
        reason = file.unwritable((line.text for line in placement.lines if line.kind == ADDED), placement.start, placement.end)
        if reason:
            raise PatchFault(f"{fault}: {reason}. Change only lines without it, or use a command that knows the file's encoding")
        result += new
        done = placement.end
    return result + list(file.lines[done:])


def _replacement(file: FileText, placement: Placement) -> Iterator[FileLine]:
    """Give a hunk's new lines: context as the file has it, added lines with the line end of what they replace or stand below."""
    at = placement.start
    freed: deque[str] = deque()
    # The mark of the file stays where it is; a second one must not follow it.
    after_mark = bool(file.mark) and at == 0
    above = file.lines[at - 1].ending if at else ""
    for line in placement.lines:
        if line.kind == ADDED:
            below = file.lines[at].ending if at < len(file.lines) else ""
            ending = (freed.popleft() if freed else "") or above or below or file.usual_ending
            yield FileLine(line.text.removeprefix("\ufeff") if after_mark else line.text, ending)
            after_mark = False
            continue
        original = file.lines[at]
        at += 1
        above = original.ending or above
        if line.kind == CONTEXT:
            freed.clear()
            after_mark = False
            yield original
        else:
            freed.append(original.ending)
