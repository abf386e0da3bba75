"""Taking secrets out of text that comes from where they were sent, in every spelling in which they come back by accident."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

HIDDEN = "***"
_LEAST = 4
"""Characters of a secret that is looked for: a shorter one would be found everywhere."""
_LEAST_PART = 8
_SHORT_TEXT = 64 * 1024
"""Characters of a text in which also what is percent-encoded in part is looked for, which takes its time."""


def spelt_any_way(secrets: Iterable[str]) -> re.Pattern[str] | None:
    """Return what finds secrets of which any characters are percent-encoded, in any case; None without any secret."""
    forms = [
        "".join("(?:" + re.escape(char) + "|" + "".join(f"%{byte:02x}" for byte in char.encode()) + ")" for char in secret)
        for secret in sorted(set(secrets), key=len, reverse=True)
    ]
    # Case is only free where it is meant, in %2D and %2d; a secret in other case is none, and is taken out just the same.
    return re.compile("|".join(forms), re.IGNORECASE) if forms else None


class Redactor:
    """Takes secrets out of text: as they are, percent-encoded, in JSON, in hexadecimal, and in base64 at any offset."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        given = {secret for secret in secrets if len(secret) >= _LEAST}
        # `Bearer abc` comes back as `abc`.
        whole = given | {part for secret in given for part in secret.split() if len(part) >= _LEAST_PART}
        self._forms = sorted({form for secret in whole for form in _forms_of(secret)}, key=len, reverse=True)
        self._pattern = spelt_any_way(whole)

    @property
    def longest(self) -> int:
        """The most characters that a secret takes up in any form."""
        return 3 * max(map(len, self._forms), default=0)

    def __call__(self, text: str) -> str:
        """Return the text without secrets. It must be whole: what is cut within a secret is not found."""
        for form in self._forms:
            text = text.replace(form, HIDDEN)
        if self._pattern is not None and len(text) <= _SHORT_TEXT:
            text = self._pattern.sub(HIDDEN, text)
        return text


def _forms_of(secret: str) -> Iterable[str]:
    raw = secret.encode()
    yield from (secret, json.dumps(secret)[1:-1])
    for encoded in (quote(secret), quote(secret, safe=""), quote_plus(secret)):
        yield from (encoded, re.sub("%..", lambda found: found[0].lower(), encoded))
    yield from (raw.hex(), raw.hex().upper())
    for before in range(3):
        # The characters at either end also hold bits of what is beside the secret.
        encoded = base64.b64encode(b"\0" * before + raw).decode().rstrip("=")[4 if before else 0 : -4]
        if len(encoded) >= _LEAST_PART:
            yield from (encoded, encoded.translate(str.maketrans("+/", "-_")))
