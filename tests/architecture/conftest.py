"""What all tests of the architecture have around them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_garbage_is_collected() -> Iterator[None]:
    """Keep the collector away while sources are parsed.

    It may find a task of an earlier test whose exception nobody asked for; telling of that formats a traceback, which parses a
    line, and CPython 3.11 fails with `AST constructor recursion depth mismatch` when one parse begins within another.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()
