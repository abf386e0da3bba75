"""Read the text of an `apply_patch` call into typed operations. Pure: nothing is looked at and nothing is changed here.

The format is OpenAI's V4A patch, as its `apply_patch` tool describes it:

    *** Begin Patch
    *** Add File: path            every line of the new file, each after a `+`; none for an empty file
    *** Delete File: path
    *** Update File: path
    *** Move to: path             optional, directly after Update File; without hunks it is a plain rename
    @@ a line of the file         optional, may be stacked: the hunk stands after this line
     context
    -removed
    +added
    *** End of File               optional: the hunk's lines are the last of the file
    *** End Patch

What surrounds a patch without changing its meaning is accepted: a here-document or a Markdown fence, asterisks after a marker,
a byte order mark, CRLF line ends, and blank lines between the parts. Anything else that is not in the format is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from activities.tools.patch_paths import workspace_path
from contracts.sandbox import WORKSPACE

CONTEXT, REMOVED, ADDED, HEADER = " ", "-", "+", "@"

MAX_PATCH_LINES: Final = 1_000_000
"""Lines of one patch. The search gives each distinct line of a patch one of the 1,114,111 characters there are."""

_SHOWN_CHARS: Final = 160
_HERE_DOCUMENT: Final = re.compile(r"(?:apply_?patch\s*)?<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_RANGE_HEADER: Final = re.compile(r"-\d+(?:,\d+)? \+\d+(?:,\d+)?(?:\s*@@|$)")
_FILE_MARKERS: Final = ("add file", "update file", "delete file")
_MARKER: Final = re.compile(
    rf"\*\*\*\s*(?:(?P<bare>begin patch|end patch|end of file)|(?P<named>{'|'.join(_FILE_MARKERS)}|move to)\s*:)", re.I
)


class PatchFault(Exception):
    """A patch cannot be used, and nothing of it was applied.

    The message is for the model: it names the file, the hunk, the line of the patch, the first line that did not match, and
    what to do next.
    """


@dataclass(frozen=True)
class PatchLine:
    """One line of a hunk: `kind` is CONTEXT, REMOVED, ADDED or HEADER, `number` its line in the patch text, from 1."""

    kind: str
    text: str
    number: int


@dataclass(frozen=True)
class Hunk:
    """One change of a file: its number in the file's part of the patch (from 1), and the lines that say where and what.

    `number_in_patch` is the line of the patch where it begins. `at_end` says that its old lines are the last of the file. The
    last `padding` lines are blank context lines that may instead be spacing between the parts of the patch. `spaced` says that
    lines without a prefix, which are spacing and no lines of the hunk, followed.
    """

    number: int
    number_in_patch: int
    headers: tuple[PatchLine, ...]
    lines: tuple[PatchLine, ...]
    at_end: bool = False
    padding: int = 0
    spaced: bool = False


@dataclass(frozen=True)
class AddFile:
    """Make a file that does not exist yet. `path` is relative to the workspace and in its normal form, here as below."""

    path: str
    content: str


@dataclass(frozen=True)
class DeleteFile:
    """Remove a regular file."""

    path: str


@dataclass(frozen=True)
class UpdateFile:
    """Change a regular file by `hunks`, in the order of the file, and rename it to `move_to` if that is another path."""

    path: str
    hunks: tuple[Hunk, ...]
    move_to: str | None = None


PatchOperation = AddFile | UpdateFile | DeleteFile


def parse_patch(text: str) -> tuple[PatchOperation, ...]:
    """Return the operations of a patch, in its order. Raises PatchFault for text that is not a whole V4A patch."""
    return tuple(_PARSERS[section.kind](section) for section in _sections(_between_markers(text)))


def shown(line: str) -> str:
    """Return a line quoted for a message: white space and undecodable bytes visible, a long line cut."""
    return repr(line) if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]!r}... ({len(line)} characters)"


@dataclass(frozen=True)
class _Line:
    """A line of the patch text without its end. `cr` says that it ended with CR LF."""

    number: int
    text: str
    cr: bool

    @property
    def blank(self) -> bool:
        return not self.text.strip()

    def fault(self, message: str) -> PatchFault:
        return PatchFault(f"patch line {self.number}: {message}")


@dataclass
class _Section:
    """A file marker and the lines below it."""

    kind: str
    path: str
    marker: _Line
    lines: list[_Line] = field(default_factory=list)

    def fault(self, line: _Line, message: str) -> PatchFault:
        return PatchFault(f"{self.path}, patch line {line.number}: {message}")


@dataclass
class _Draft:
    """A hunk being read. `opened` says that an `@@` line began it, `spacing` how many of its last lines have no prefix."""

    begins: _Line
    opened: bool
    headers: list[PatchLine] = field(default_factory=list)
    lines: list[PatchLine] = field(default_factory=list)
    spacing: int = 0
    at_end: bool = False

    def only_spacing(self) -> bool:
        return not self.opened and not self.at_end and _blank_context(self.lines) == len(self.lines)


def _numbered(text: str) -> list[_Line]:
    # Only LF ends a line of a patch: form feeds, U+2028 and lone CRs are characters of the lines they stand in.
    lines = text.removeprefix("\ufeff").split("\n")
    if len(lines) > MAX_PATCH_LINES:
        raise PatchFault(f"the patch has {len(lines)} lines, more than {MAX_PATCH_LINES}: send it as several patches")
    return [_Line(number, line.removesuffix("\r"), line.endswith("\r")) for number, line in enumerate(lines, 1)]


def _marker(line: _Line) -> tuple[str, str] | None:
    """Return a marker's name in lower case and its argument without decoration, or None when the line is no marker."""
    found = _MARKER.match(line.text)
    if found is None:
        return None
    argument = line.text[found.end() :].strip()
    if argument.endswith("***"):
        argument = argument.rstrip("*").rstrip()
    if found["bare"]:
        return None if argument else (found["bare"].lower(), "")
    return found["named"].lower(), argument


def _is_marker(line: _Line, name: str) -> bool:
    return _marker(line) == (name, "")


def _without_wrapping(lines: list[_Line]) -> list[_Line]:
    """Take away blank lines, Markdown fences and a here-document around the patch."""
    first, last = 0, len(lines)
    while True:
        while first < last and lines[first].blank:
            first += 1
        while first < last and lines[last - 1].blank:
            last -= 1
        if first == last:
            raise PatchFault("the patch is empty: send *** Begin Patch, the operations, and *** End Patch")
        opening = lines[first].text.strip()
        here = _HERE_DOCUMENT.fullmatch(opening)
        if here is None and not opening.startswith("```"):
            return lines[first:last]
        first += 1
        if first < last and lines[last - 1].text.strip() == (here[2] if here else "```"):
            last -= 1


def _between_markers(text: str) -> list[_Line]:
    lines = _without_wrapping(_numbered(text))
    if not _is_marker(lines[0], "begin patch"):
        raise lines[0].fault(f"a patch starts with *** Begin Patch, not with {shown(lines[0].text)}: send the patch alone")
    end = next((index for index, line in enumerate(lines) if _is_marker(line, "end patch")), None)
    if end is None:
        raise lines[-1].fault("the patch has no *** End Patch, so it may be cut off: send the whole patch")
    for line in lines[end + 1 :]:
        if not line.blank:
            raise line.fault(f"{shown(line.text)} stands after *** End Patch: send one patch, with nothing after it")
    return lines[1:end]


def _sections(lines: Iterable[_Line]) -> list[_Section]:
    sections: list[_Section] = []
    for line in lines:
        name, argument = _known_marker(line) if line.text.startswith("***") else ("", "")
        if name == "begin patch":
            raise line.fault("a second *** Begin Patch: put all operations between one *** Begin Patch and *** End Patch")
        if name in _FILE_MARKERS:
            sections.append(_Section(name, _workspace_path(argument, line), line))
        elif sections:
            sections[-1].lines.append(line)
        elif not line.blank:
            raise line.fault(
                f"{shown(line.text)} stands before the first file: start with *** Add File: path, *** Update File: path "
                "or *** Delete File: path"
            )
    if not sections:
        raise PatchFault("the patch names no file: give at least one Add File, Update File or Delete File between its markers")
    return sections


def _known_marker(line: _Line) -> tuple[str, str]:
    marker = _marker(line)
    if marker is None:
        raise line.fault(
            f"{shown(line.text)} is no marker of this format. Markers are Begin Patch, Add File: path, Update File: path, "
            "Delete File: path, Move to: path, End of File and End Patch; a line of a file needs ' ', '-' or '+' before it"
        )
    return marker


def _workspace_path(given: str, line: _Line) -> str:
    try:
        return workspace_path(given)
    except UnicodeEncodeError:
        raise line.fault(f"the path {shown(given)} is not valid Unicode: use the name as `ls` shows it") from None
    except ValueError as error:
        raise line.fault(f"the path {shown(given)} cannot be used: {error}. Give a file's path relative to {WORKSPACE}") from None


def _add(section: _Section) -> AddFile:
    lines = section.lines
    while lines and lines[-1].blank:
        lines.pop()
    for line in lines:
        if not line.text.startswith(ADDED):
            raise section.fault(
                line, f"{shown(line.text)} has no '+' before it: every line of an added file, blank ones too, starts with '+'"
            )
    # CR LF on content lines alone is a file meant to have it; on the marker too, it is only how the patch was sent.
    ending = "\r\n" if lines and not section.marker.cr and all(line.cr for line in lines) else "\n"
    return AddFile(section.path, "".join(line.text[1:] + ending for line in lines))


def _delete(section: _Section) -> DeleteFile:
    for line in section.lines:
        if not line.blank:
            raise section.fault(line, f"{shown(line.text)} stands below *** Delete File, which takes no lines: remove it")
    return DeleteFile(section.path)


def _update(section: _Section) -> UpdateFile:
    hunks: list[Hunk] = []
    draft: _Draft | None = None
    move_to: str | None = None

    def close() -> None:
        if draft is not None and not draft.only_spacing():
            hunks.append(_hunk(section, draft, len(hunks) + 1))

    for line in section.lines:
        if line.text.startswith("***"):
            name, argument = _known_marker(line)
            if name == "move to":
                if hunks or move_to is not None or (draft is not None and not draft.only_spacing()):
                    raise section.fault(line, "*** Move to stands once, directly after *** Update File, before the hunks")
                move_to = _workspace_path(argument, line)
                draft = None
            elif draft is None or draft.at_end:
                raise section.fault(line, "*** End of File stands below the lines of a hunk: give the lines first")
            else:
                draft.at_end = True
        elif line.text.startswith("@@"):
            if draft is None or draft.lines or draft.at_end:
                close()
                draft = _Draft(line, opened=True)
            header = _header(line.text[2:])
            if header:
                draft.headers.append(PatchLine(HEADER, header, line.number))
        elif draft is not None and draft.at_end:
            if not line.blank:
                raise section.fault(line, f"{shown(line.text)} stands after *** End of File: start another hunk with @@")
        else:
            draft = draft or _Draft(line, opened=False)
            _take(section, draft, line)
    close()
    if not hunks and move_to in (None, section.path):
        raise section.fault(section.marker, "*** Update File changes nothing: give at least one hunk, or *** Move to: new path")
    return UpdateFile(section.path, tuple(hunks), move_to)


def _header(text: str) -> str:
    """Return the line that an `@@` line names, or "" when it names none, as a unified diff's line ranges do."""
    stripped = text.strip()
    if not stripped or _RANGE_HEADER.match(stripped):
        return ""
    closed = text.rstrip().removesuffix("@@")
    if closed != text.rstrip() and closed != closed.rstrip():
        text = closed.rstrip()
    return text.removeprefix(" ")


def _take(section: _Section, draft: _Draft, line: _Line) -> None:
    kind, text = line.text[:1], line.text[1:]
    if line.blank and kind != CONTEXT:
        draft.spacing += 1
        draft.lines.append(PatchLine(CONTEXT, line.text, line.number))
        return
    if kind not in (CONTEXT, REMOVED, ADDED):
        raise section.fault(
            line,
            f"{shown(line.text)} has no prefix: every line of a hunk starts with ' ' (kept), '-' (removed) or '+' (added)",
        )
    draft.spacing = 0
    draft.lines.append(PatchLine(kind, text, line.number))


def _blank_context(lines: Sequence[PatchLine]) -> int:
    """Return how many of the last lines are blank context."""
    count = 0
    while count < len(lines) and lines[-1 - count].kind == CONTEXT and not lines[-1 - count].text.strip():
        count += 1
    return count


def _hunk(section: _Section, draft: _Draft, number: int) -> Hunk:
    lines = draft.lines
    if draft.spacing and not draft.at_end:
        # As context, spacing would choose between equal places, and take added lines away from their header.
        lines = lines[: -draft.spacing]
    # Blank lines with a prefix may be spacing too; and a file that ends with a line end is often thought to have one more line.
    padding = _blank_context(lines)
    old = [line.text for line in lines if line.kind != ADDED]
    new = [line.text for line in lines if line.kind != REMOVED]
    if old == new:
        raise section.fault(
            draft.begins, f"hunk {number} changes nothing: give the lines to remove with '-' and those to add with '+'"
        )
    spaced = len(lines) < len(draft.lines)
    return Hunk(number, draft.begins.number, tuple(draft.headers), tuple(lines), draft.at_end, padding, spaced)


_PARSERS: Final[dict[str, Callable[[_Section], PatchOperation]]] = {
    "add file": _add,
    "update file": _update,
    "delete file": _delete,
}
