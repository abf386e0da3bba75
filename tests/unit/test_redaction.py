"""Secrets are taken out of text in every spelling in which programs write them."""

from __future__ import annotations

import base64
import html
import json
import re
import time
from collections.abc import Iterator
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from activities.governance.redaction import HIDDEN, Redactor

ODD = "tok/en+sl=ash&<x>\"q'9Zé\\b"
LONG = "".join(chr(48 + number % 70) for number in range(150))
KEY = "-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQ\n-----END KEY-----"


def spellings(secret: str) -> Iterator[str]:
    """What programs make of a text."""
    raw = secret.encode()
    plain = json.dumps(secret, ensure_ascii=False)
    in_base64 = base64.b64encode(raw).decode()
    wrapped = base64.encodebytes(b"some" + raw).decode()
    yield from (secret, json.dumps(secret), plain, json.dumps(json.dumps(secret)), json.dumps(json.dumps(plain)))
    yield from (plain.replace("/", "\\/"), json.dumps(json.dumps(secret).replace("/", "\\/")))
    yield re.sub("[&<>='+]", lambda found: f"\\u{ord(found[0]):04x}", plain)
    yield re.sub("[&<>='+]", lambda found: f"\\u{ord(found[0]):04X}", plain)
    yield from (html.escape(secret), html.escape(secret, quote=False), html.escape(html.escape(secret)))
    yield from (html.escape(secret).replace("&#x27;", "&#39;"), html.escape(secret).replace("&#x27;", "&apos;"))
    yield secret.encode("ascii", "xmlcharrefreplace").decode()
    yield from (quote(secret), quote(secret, safe=""), quote(quote(secret, safe=""), safe=""), quote(secret).lower())
    yield from ("".join(f"%{byte:02X}" for byte in raw), repr(secret), repr(raw), secret.replace("\n", "\r\n"))
    yield from (raw.hex(), raw.hex().upper(), "\n".join(re.findall(".{1,60}", raw.hex())))
    yield from (in_base64, quote(in_base64, safe=""), json.dumps(in_base64).replace("/", "\\/"), wrapped, json.dumps(wrapped))
    yield from (wrapped.replace("\n", "\r\n"), wrapped.replace("\n", "\r\n "), quote(wrapped, safe=""), in_base64.rstrip("="))
    yield base64.urlsafe_b64encode(raw).decode()


@pytest.mark.parametrize("secret", [ODD, LONG, KEY, "ghp_ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789ab", 'pässw"ord1', "p4ss&word<1>"])
@pytest.mark.parametrize("size", [0, 100_000])
def test_a_secret_is_found_as_programs_write_it(secret: str, size: int) -> None:
    """JSON with and without escapes, in itself too, HTML, URLs, reprs, hexadecimal, and base64 in lines."""
    hide = Redactor([secret])
    for spelling in spellings(secret):
        cleaned = hide("x " * (size // 2) + f"before {spelling} after")
        assert HIDDEN in cleaned, spelling
        assert cleaned.rstrip().endswith("after")
        assert len(spelling) <= hide.longest
        # In base64, a few characters at either end hold bits of what is beside the secret.
        assert not any(spelling[at : at + 8] in cleaned for at in range(4, len(spelling) - 12)), spelling


def test_what_stands_beside_a_secret_stays() -> None:
    """Also between two of them, and around one in base64 that is broken into lines."""
    hide = Redactor(["s3cret/s3cret", "other-0ther"])
    assert hide("a s3cret/s3cret,other-0ther b") == "a ***,*** b"
    assert hide("a%20s3cret%2Fs3cret%20b\n\nc\\nd") == "a%20***%20b\n\nc\\nd"
    whole = base64.b64encode(b"123" + b"s3cret/s3cret" * 2 + b"45").decode()
    cleaned = hide(f"one\n{whole[:9]}\n{whole[9:]}\ntwo\n")
    assert cleaned.startswith("one\nMTIz***") and cleaned.endswith("0NQ==\ntwo\n")


@settings(deadline=None)
@example("00\\\U00010000", "", "")
@example('00\\\\"\n\\', "\\", "\\")
@given(st.text(min_size=4, max_size=30), st.text(max_size=20), st.text(max_size=20))
def test_any_secret_is_found_as_it_is_and_in_json(secret: str, before: str, after: str) -> None:
    """Whatever it consists of, and whatever is beside it."""
    hide = Redactor([secret])
    for text in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quote(secret)):
        assert HIDDEN in hide(f"{before}{text}{after}")


@pytest.mark.parametrize("secret", [ODD, '\\\\\\\\"\\\\&&&amp;""""%25%25', "a" * 40, "Bearer ghp_ABCDEFGHIJKLMNOPQRSTUVWXYZ"])
@pytest.mark.parametrize("part", ["\\", "&amp;", "%25", "\n", "\\n", "\\u", " \r\n", "a", None])
def test_no_text_takes_long(secret: str, part: str | None) -> None:
    """The text is another's: none makes the search go back and forth."""
    hide = Redactor([secret])
    part = part or secret[:-1]
    begun = time.process_time()
    hide(part * (100_000 // len(part)))
    assert time.process_time() - begun < 2
