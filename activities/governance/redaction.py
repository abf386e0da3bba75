"""Taking secrets out of text that comes from where they were sent, in every spelling in which they come back by accident.

Each character of a secret may be spelt in its own way, since programs differ in what they escape: `/` is `/`, `\\/`, `\\u002f`,
`%2F` or `&#47;`, and JSON in JSON has more backslashes. Repetitions are bounded or give nothing back, so the time is linear in
the length of the text.
"""

from __future__ import annotations

import base64
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from html.entities import codepoint2name
from itertools import groupby
from typing import Final

HIDDEN = "***"
_LEAST = 4
"""Characters of a secret that is looked for: a shorter one would be found everywhere."""
_LEAST_PART = 8
_MOST_PER_CHARACTER: Final = 48
"""More characters than one of a secret takes up in any spelling."""

_MOST_BACKSLASHES: Final = 15
"""Before one character: one for JSON or a program's own form, three in JSON again, then seven, and fifteen."""
_ESCAPE: Final = rf"\\{{0,{_MOST_BACKSLASHES}}}+"
_PERCENT: Final = "%(?:25){0,3}"
"""The percent sign of an encoded byte, which may be encoded itself."""
_AMPERSAND: Final = "&(?:amp;){0,3}"
_CONTROLS: Final = {"\n": "n", "\r": "r", "\t": "t", "\b": "b", "\f": "f"}

_BETWEEN: Final = re.compile(
    rf"(?=[%\\&\r\n])(?:(?P<plus>{_PERCENT}2b|\\{{1,15}}+u002b|&#43;)|(?P<slash>{_PERCENT}2f|\\{{1,15}}+(?:u002f|/)|&#47;)"
    rf"|(?:[\r\n]+[ \t]*|\\{{1,15}}+[rn]|{_PERCENT}0[ad]|&#1[03];)+)",
    re.IGNORECASE,
)
"""What programs make of the two signs of base64, and what they break it and hexadecimal into lines with."""
_ONE_ALPHABET: Final = str.maketrans("-_", "+/")


class Redactor:
    """Takes secrets out of text: as they are, escaped, percent-encoded, in JSON, HTML or hexadecimal, in base64 at any offset."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        given = {secret for secret in secrets if len(secret) >= _LEAST}
        # `Bearer abc` comes back as `abc`.
        whole = given | {part for secret in given for part in secret.split() if len(part) >= _LEAST_PART}
        ordered = sorted(whole, key=lambda one: (-len(one), one))
        self._longest = max(map(len, whole), default=0)
        # Case is only free where it is meant, in %2D and %2d; a secret in other case is none, and is taken out just the same.
        forms = [_at(secret[0], _spelt(secret)) for secret in ordered]
        self._pattern = re.compile(_at("".join(secret[0] for secret in ordered), "|".join(forms)), re.I) if ordered else None
        self._recoded = [form for secret in ordered for form in _recoded(secret)]

    @property
    def longest(self) -> int:
        """The most characters that a secret takes up in any form."""
        return _MOST_PER_CHARACTER * self._longest

    def __call__(self, text: str) -> str:
        """Return the text without secrets. It must be whole: what is cut within a secret is not found."""
        if self._pattern is None:
            return text
        return _without(self._recoded, self._pattern.sub(HIDDEN, text))


def _at(begins: str, pattern: str) -> str:
    """Return a pattern that looks at one character first, which is quick: as it is, or what another spelling begins with."""
    return rf"(?=[{re.escape(''.join(sorted(set(begins))))}\\%&+\r])(?:{pattern})"


def _spelt(secret: str) -> str:
    """Return a pattern for a secret whose characters are each written as they are, escaped or encoded."""
    pattern = ""
    after_backslashes = False
    for char, run in groupby(secret):
        count = len(list(run))
        if char == "\\":
            # Every escaping doubles each. Those of the next character come right after them, and are taken with them.
            most = (_MOST_BACKSLASHES + 1) * count + _MOST_BACKSLASHES
            pattern += rf"(?:\\{{{count},{most}}}+|(?:{'|'.join(_encoded(char, _ESCAPE))}){{{count}}}{_ESCAPE})"
        else:
            pattern += _character(char, "" if after_backslashes else _ESCAPE) + _character(char, _ESCAPE) * (count - 1)
        after_backslashes = char == "\\"
    return pattern


def _character(char: str, escape: str) -> str:
    if char.isascii() and char.isalnum():
        # Escaped by nobody, and a secret consists of little else.
        return f"(?:{char}|{_PERCENT}{ord(char):02x})"
    ways = [escape + re.escape(char), *_encoded(char, escape)]
    if char in _CONTROLS:
        ways += [escape + _CONTROLS[char], *([r"\r\n", rf"{escape}r\\{{1,{_MOST_BACKSLASHES}}}n"] if char == "\n" else [])]
    if char == " ":
        ways.append(r"\+")
    return f"(?:{'|'.join(ways)})"


def _encoded(char: str, escape: str) -> Iterator[str]:
    """Yield what finds a character by its number: percent-encoded, in JSON, in a program's own form, or in HTML.

    `escape` finds the backslashes before it, also those before the first part of a character that is written in parts.
    """
    number, raw, units = ord(char), char.encode(), char.encode("utf-16-be")
    yield "".join(f"{_PERCENT}{byte:02x}" for byte in raw)
    yield escape + _ESCAPE.join(f"u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
    yield escape + _ESCAPE.join(f"x{byte:02x}" for byte in raw)
    if 128 <= number < 256:
        yield f"{escape}x{number:02x}"
    yield rf"{_AMPERSAND}#(?:0{{0,4}}{number}|x0{{0,4}}{number:x});"
    name = "apos" if char == "'" else codepoint2name.get(number)
    if name:
        yield f"{_AMPERSAND}{name};"


def _recoded(secret: str) -> Iterator[str]:
    """Yield a secret in hexadecimal, and what of it is the same in all base64 that holds it, for each of the three offsets."""
    raw = secret.encode()
    yield from (raw.hex(), raw.hex().upper())
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + raw).decode()
        # The characters at either end also hold bits of what is beside the secret.
        within = encoded[(8 * before + 5) // 6 : 8 * (before + len(raw)) // 6]
        if len(within) >= _LEAST_PART:
            yield within


def _without(forms: Iterable[str], text: str) -> str:
    """Return a text without these forms, in either alphabet of base64, also broken into lines and with signs encoded."""
    flat = _BETWEEN.sub(_sign, text).translate(_ONE_ALPHABET)
    spans = sorted(span for form in forms for span in _places(flat, form))
    if not spans:
        return text
    # Where each piece of what was looked at begins there, and where in the text.
    begins: list[int] = []
    origins: list[int] = []
    size = at = 0
    for found in (*_BETWEEN.finditer(text), None):
        end = len(text) if found is None else found.start()
        for length, origin in ((end - at, at), (0 if found is None else len(_sign(found)), end)):
            begins.append(size)
            origins.append(origin)
            size += length
        at = end if found is None else found.end()
    kept: list[str] = []
    at = 0
    for begin, end in spans:
        first, last = bisect_right(begins, begin) - 1, bisect_right(begins, end - 1) - 1
        start = max(at, origins[first] + begin - begins[first])
        stop = max(start, origins[last] + end - begins[last])
        kept.append(text[at:start] + ("" if start == at and kept else HIDDEN))
        at = stop
    return "".join(kept) + text[at:]


def _sign(found: re.Match[str]) -> str:
    return "+" if found["plus"] else "/" if found["slash"] else ""


def _places(text: str, form: str) -> Iterator[tuple[int, int]]:
    at = text.find(form)
    while at >= 0:
        yield at, at + len(form)
        at = text.find(form, at + len(form))
