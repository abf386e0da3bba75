"""Reading a bash command into the words of its simple commands, or not at all.

A rule may allow a command only when what bash will run is certain. This reader therefore takes the small part of bash's grammar
in which every word stands for itself: words with quotes and backslashes, put together with newlines and `; & && || | |&`.
Whatever makes bash compute, substitute, redirect or branch makes the command unreadable, and so does whatever a person would not
see. Two harmless kinds of redirection are taken: among the standard streams (`2>&1`), and to or from `/dev/null`.

Source of the rules: the Bash reference manual, chapters 3.1 (quoting, comments) to 3.6 (redirections). The sandbox runs commands
with `bash -c`: no aliases and no history there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final


class Unreadable(Exception):
    """A command whose meaning is not certain. The message says which part of it, in words that follow `it has`."""


@dataclass(frozen=True)
class Word:
    """One word as the program gets it. With `glob`, bash may put the names of files in its place."""

    text: str
    glob: bool = False


SimpleCommand = tuple[Word, ...]
"""A program and its arguments; never empty."""

MAX_COMMANDS: Final = 50
"""Simple commands of one text. More is nothing that a person has looked at, and each is tried on every rule."""

_HIDDEN: Final = re.compile(
    # Fixed ranges and not the categories of `unicodedata`, which change with Python's version: a replay must read the same.
    "[\x00-\x08\x0b-\x1f\x7f-\xa0\xad\u034f\u0600-\u0605\u061c\u06dd\u070f\u115f\u1160\u1680\u17b4\u17b5\u180b-\u180f"
    "\u2000-\u200f\u2028-\u202f\u205f-\u206f\u2800\u3000\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Control and format characters, unusual spaces, and what is not shown: all but newline and tab."""

_BLANK: Final = re.compile(r"(?:[ \t]|\\\n)+")
_OPERATOR: Final = re.compile(r"&&|\|\||\|&|[;\n|]|&(?!>)")
_HARMLESS_REDIRECTION: Final = re.compile(
    r"(?:[012]?>&[12]|(?:[012]?>>?|&>>?|0?<)[ \t]*/dev/null)(?=[ \t\n;&|<>]|\Z)",
)
_WORD_ENDS: Final = " \t\n;&|<>"
_SUBSTITUTIONS: Final = {"$": "an expansion ($)", "`": "a command substitution (`)"}
_REFUSED: Final = {**_SUBSTITUTIONS, "(": "a parenthesis", ")": "a parenthesis", "{": "a brace", "}": "a brace"}
_KEYWORDS: Final = re.compile("if|then|else|elif|fi|for|while|until|do|done|case|esac|select|in|function|time|coproc|\\[\\[|]]|!")


def read_commands(text: str) -> tuple[SimpleCommand, ...]:
    """Return the simple commands that bash runs for `text`, in order. Raises Unreadable when that is not certain."""
    return tuple(command for pipeline in read_pipelines(text) for command in pipeline)


def read_pipelines(text: str) -> tuple[tuple[SimpleCommand, ...], ...]:
    """Return the same commands, together with those whose output they get."""
    hidden = _HIDDEN.search(text)
    if hidden is not None:
        raise Unreadable(f"a character that is not shown (U+{ord(hidden[0]):04X})")
    return _Reader(text).pipelines()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def pipelines(self) -> tuple[tuple[SimpleCommand, ...], ...]:
        pipelines: list[tuple[SimpleCommand, ...]] = []
        commands: list[SimpleCommand] = []
        number = 0
        words: list[Word] = []
        redirected = False
        awaited = False
        while True:
            self._take(_BLANK)
            operator = "\n" if self._at == len(self._text) else self._take(_OPERATOR)
            if operator is None:
                if self._take(_HARMLESS_REDIRECTION) is not None:
                    redirected = True
                else:
                    words.append(self._word(first=not words))
                continue
            if words:
                commands.append(tuple(words))
                number += 1
                if number > MAX_COMMANDS:
                    raise Unreadable(f"more than {MAX_COMMANDS} commands")
                awaited = operator in ("&&", "||", "|", "|&")
                if operator not in ("|", "|&"):
                    pipelines.append(tuple(commands))
                    commands = []
            elif operator != "\n" or redirected:
                raise Unreadable(f"no command before {operator!r}")
            words, redirected = [], False
            if self._at == len(self._text):
                break
        if awaited or not number:
            raise Unreadable("no command at its end" if number else "no command in it")
        return tuple(pipelines)

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        found = pattern.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found[0]

    def _word(self, *, first: bool) -> Word:
        text, begins = "", self._at
        glob = quoted = False
        while self._at < len(self._text) and (char := self._text[self._at]) not in _WORD_ENDS:
            self._at += 1
            if char == "'":
                text += self._until_quote()
                quoted = True
            elif char == '"':
                text += self._double_quoted()
                quoted = True
            elif char == "\\":
                text += self._escaped()
                quoted = True
            else:
                self._check(char, text, quoted)
                glob = glob or char in "*?["
                text += char
        raw = self._text[begins : self._at]
        following = self._text[self._at : self._at + 1]
        if not raw or (following in ("<", ">") and text.isdigit()):
            raise Unreadable("a redirection to or from something else than /dev/null")
        if raw in ("[", "]"):
            glob = False
        if first:
            _check_program(text, raw.replace("\\\n", ""), glob=glob)
        return Word(text, glob)

    def _check(self, char: str, text: str, quoted: bool) -> None:
        """Refuse an unquoted character that does not stand for itself."""
        if char in _REFUSED:
            raise Unreadable(_REFUSED[char])
        begins = not text and not quoted
        if char == "#" and begins:
            raise Unreadable("a comment")
        if char == "~" and (not text or text[-1] in "=:"):
            raise Unreadable("a home directory (~)")
        if char == "!" and self._text[self._at : self._at + 1] not in ("", "=", *_WORD_ENDS):
            raise Unreadable("a reference to the history (!)")

    def _until_quote(self) -> str:
        begins, end = self._at, self._text.find("'", self._at)
        if end < 0:
            raise Unreadable("a quote that is not closed")
        self._at = end + 1
        return self._text[begins:end]

    def _double_quoted(self) -> str:
        text = ""
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 1
            if char == '"':
                return text
            if char in _SUBSTITUTIONS:
                raise Unreadable(_SUBSTITUTIONS[char])
            # Between double quotes a backslash is itself unless one of these follows.
            escapes = char == "\\" and self._text[self._at : self._at + 1] in ('"', "\\", "$", "`", "\n")
            text += self._escaped() if escapes else char
        raise Unreadable("a quote that is not closed")

    def _escaped(self) -> str:
        if self._at == len(self._text):
            raise Unreadable("a backslash at its end")
        char = self._text[self._at]
        self._at += 1
        return "" if char == "\n" else char


def _check_program(text: str, raw: str, *, glob: bool) -> None:
    if not text:
        raise Unreadable("a program without a name")
    if _KEYWORDS.fullmatch(raw):
        raise Unreadable(f"the keyword {raw}")
    if "=" in text:
        raise Unreadable("an assignment")
    if glob:
        raise Unreadable("a glob in place of a program")


_UNQUOTED: Final = re.compile(r"\\\n|[\\'\"]")
_EXPANSION: Final = re.compile(r"\$(?:\{[^}]*\}|\w+|[@*#?!$-])")


_VERSION: Final = re.compile(r"[-_.]?\d[\d.]*[a-z]?$")


def without_version(name: str) -> str:
    """Return a program's name without the version at its end: `python` of `python3.11`."""
    return _VERSION.sub("", name) or name


def same_program(one: str, other: str) -> bool:
    """Return whether two names may be one program: they are equal but for a version that one says less exactly."""
    first, second = without_version(one), without_version(other)
    begins = one[len(first) :], other[len(second) :]
    return first == second and (begins[0].startswith(begins[1]) or begins[1].startswith(begins[0]))


def mentions(text: str, program: str) -> bool:
    """Return whether a text may run `program`: its name is a word of it, with or without quotes, expansions and a version.

    The name may also follow the letter of an option without a space, as in `su -crm`.
    """
    bare = without_version(program)
    named = re.compile(rf"(?:(?<![\w.-])|(?<![\w.-])-[A-Za-z0-9]+?){_versions_of(program)}(?![\w.-])")
    return any(bare in view and named.search(view) for view in _views(text))


def mentions_after_e(text: str, program: str) -> bool:
    """Return whether a script of sed may run `program`, whose name may follow the `e` of sed without a space."""
    return any(re.search(rf"e{_versions_of(program)}(?![\w.-])", view) for view in _views(text))


def _versions_of(program: str) -> str:
    bare = without_version(program)
    any_version = rf"{re.escape(program)}(?:[-_.]?\d[\d.]*)?"
    return any_version if bare == program else f"(?:{any_version}|{re.escape(bare)})"


@lru_cache(maxsize=16)
def _views(text: str) -> tuple[str, ...]:
    unquoted = _UNQUOTED.sub("", text)
    expanded = [_EXPANSION.sub(to, text) for to in ("", " ")]
    return (
        text,
        unquoted,
        *(_EXPANSION.sub(to, unquoted) for to in ("", " ")),
        # Also in the other order: in r$z'm' the quote ends the expansion's name.
        *(_UNQUOTED.sub("", one) for one in expanded),
    )
