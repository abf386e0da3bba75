"""Which paths a patch may name. Pure."""

from __future__ import annotations

import unicodedata
from typing import Final

from contracts.manifest import check_workspace_path
from contracts.sandbox import WORKSPACE

MAX_PATH_BYTES: Final = 3072
"""Bytes of one path, so that it fits below any workspace root in the 4096 that Linux takes."""

MAX_PATH_PARTS: Final = 128
"""Directories of one path, its file included. Each of them is looked at, and made where it is missing."""

_QUOTES: Final = "\"'`"


def workspace_path(given: str) -> str:
    """Return the path that a patch names, relative to the workspace and in its normal form.

    Raises ValueError saying what is wrong with it and what to write instead: nothing that was meant as quoting, as a home
    directory or not at all becomes part of a file's name.
    """
    inside = f"{WORKSPACE}/"
    relative = given.removeprefix(inside).lstrip("/") if given.startswith(inside) else given
    if given.endswith(("/", "/.")):
        raise ValueError("the path of a file does not end with '/'")
    if len(relative.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"a path has at most {MAX_PATH_BYTES} bytes")
    path = check_workspace_path(relative)
    parts = path.split("/")
    if len(parts) > MAX_PATH_PARTS:
        raise ValueError(f"it has {len(parts)} parts, and a path has at most {MAX_PATH_PARTS}")
    if len(given) > 2 and given[0] in _QUOTES and given[-1] == given[0]:
        raise ValueError(f"the quotes would be part of the name: write {given[1:-1]!r} without them")
    if given.startswith("~/"):
        raise ValueError(f"'~' is no home directory here: write {given[2:]!r}, or './~' for a directory of that name")
    seen = "/".join(map(_seen, parts))
    if seen != path:
        raise ValueError(f"it has characters that cannot be seen: write {seen!r}")
    return path


def _seen(part: str) -> str:
    """Return a part of a path without control characters, and without invisible ones at its ends."""
    printed = "".join(character for character in part if unicodedata.category(character) != "Cc")
    first, last = 0, len(printed)
    while first < last and unicodedata.category(printed[first]) == "Cf":
        first += 1
    while first < last and unicodedata.category(printed[last - 1]) == "Cf":
        last -= 1
    return printed[first:last]
