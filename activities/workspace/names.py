"""Names of files, and other words of strangers, as text.

Any bytes are a name: what is not UTF-8 comes as lone surrogates, which JSON cannot take.
"""

from __future__ import annotations


def is_utf8(text: str) -> bool:
    """Whether text has no byte in it that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(text: str) -> str:
    """Return text that JSON and people can take: bytes that are not UTF-8 as `\\xe9`."""
    if is_utf8(text):
        return text
    return "".join(
        letter.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        if "\udc80" <= letter <= "\udcff"
        else letter.encode("utf-8", "backslashreplace").decode()
        for letter in text
    )


def printable(text: str, most: int) -> str:
    """Return text as one line of at most `most` characters, with nothing in it that a terminal or a reader could be misled by."""
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(text.split()))
    return text if len(text) <= most else text[: most - 1] + "…"
