"""A file's content as lines that can be edited and written back, with every byte of the others kept. Pure."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from activities.tools.patch_parse import Hunk, PatchFault, shown

MAX_FILE_LINES: Final = 2_000_000
"""Lines of one file. Each of them becomes an object."""

_ENCODINGS: Final = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


@dataclass(frozen=True, slots=True)
class FileLine:
    """A line of a file and how it ends: LF, CR LF, CR, or "" for a last line without a line end."""

    text: str
    ending: str


@dataclass(frozen=True)
class FileText:
    """A file's content as lines. `mark` is its byte order mark; an undecodable byte is a surrogate (PEP 383).

    `damaged` says that there are such bytes, `foreign` that the file is in another encoding than UTF-8: they are at least as
    many as the other characters outside of ASCII.
    """

    mark: bytes
    encoding: str
    lines: tuple[FileLine, ...]
    damaged: bool
    foreign: bool

    @classmethod
    def read(cls, path: str, data: bytes, hunks: Sequence[Hunk]) -> FileText:
        """Return the content of the file `path`, which `hunks` are to change. Raises PatchFault for one that they cannot."""
        mark, encoding, text = _decoded(data)
        if not mark and _is_like_utf_16(data) and not any("\0" in line.text for hunk in hunks for line in hunk.lines):
            raise PatchFault(
                f"{path} has NUL bytes as UTF-16 has, but no byte order mark, and '+' lines would be written as UTF-8: use a "
                "command that knows the file's encoding"
            )
        # A file without any LF may end its lines with CR, as old Macs did; not when the patch itself has a CR within a line.
        by_cr = "\n" not in text and not any("\r" in line.text for hunk in hunks for line in hunk.lines)
        separator = "\r" if by_cr else "\n"
        count = text.count(separator)
        if count > MAX_FILE_LINES:
            raise PatchFault(f"{path} has {count} lines, more than {MAX_FILE_LINES}: change it with a command instead")
        *ended, rest = text.split(separator)
        if by_cr:
            lines = [FileLine(line, "\r") for line in ended]
        else:
            lines = [FileLine(line[:-1], "\r\n") if line.endswith("\r") else FileLine(line, "\n") for line in ended]
        if rest:
            lines.append(FileLine(rest, ""))
        undecodable, others = _outside_of_ascii(text)
        return cls(mark, encoding, tuple(lines), undecodable > 0, undecodable > 0 and undecodable >= others)

    @property
    def usual_ending(self) -> str:
        """The most frequent line end, LF where there is none."""
        endings = Counter(line.ending for line in self.lines if line.ending)
        return endings.most_common(1)[0][0] if endings else "\n"

    def unwritable(self, added: Iterable[str], start: int, end: int) -> str:
        """Say what of the '+' lines that replace lines `start` to `end` would bring a second encoding into the file, or ""."""
        if not self.damaged:
            return ""
        there = set[str]().union(*(line.text for line in self.lines[start:end]))
        for character in (character for line in added for character in line if not character.isascii()):
            if character == "\ufffd":
                return "the file is not UTF-8, and U+FFFD in a '+' line stands for a byte of it that cannot be shown"
            if self.foreign and character not in there:
                return f"the file is not UTF-8, and {shown(character)} in a '+' line would be written as UTF-8"
        return ""

    def encode(self, path: str, lines: Sequence[FileLine]) -> bytes:
        """Return the bytes of a file with these lines that ends like this one: with a line end, or without."""
        usual = self.usual_ending
        inner = [line.text + (line.ending or usual) for line in lines[:-1]]
        terminated = not self.lines or self.lines[-1].ending
        last = [line.text + ((line.ending or usual) if terminated else "") for line in lines[-1:]]
        return self.mark + encoded(path, "".join(inner + last), self.encoding)


def _decoded(data: bytes) -> tuple[bytes, str, str]:
    for mark, encoding in _ENCODINGS:
        if data.startswith(mark):
            try:
                return mark, encoding, data[len(mark) :].decode(encoding)
            except UnicodeDecodeError:
                break
    return b"", "utf-8", data.decode("utf-8", "surrogateescape")


def _is_like_utf_16(data: bytes) -> bool:
    """Tell whether a quarter of the bytes are NUL, or one stands beside every LF."""
    ends = data.count(b"\n")
    beside = (data.count(b"\n\0"), data.count(b"\0\n"))
    return b"\0" in data and (data.count(0) * 4 >= len(data) or (ends > 0 and ends in beside))


def _outside_of_ascii(text: str) -> tuple[int, int]:
    """Count the undecodable bytes and the other characters outside of ASCII."""
    if text.isascii():
        return 0, 0
    decodable = len(text.encode("utf-8", "ignore").decode())
    return len(text) - decodable, decodable - len(text.encode("ascii", "ignore"))


def encoded(path: str, text: str, encoding: str) -> bytes:
    """Return text in an encoding, undecodable bytes as they were. Raises PatchFault for what has no place in it."""
    try:
        return text.encode(encoding, "surrogateescape")
    except UnicodeEncodeError as error:
        character = shown(text[error.start])
        raise PatchFault(
            f"{path}: the character {character} of a '+' line cannot be written as {encoding}: leave it out"
        ) from None
