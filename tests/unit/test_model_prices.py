"""The table of prices: from a file, or the one that comes with the product."""

from __future__ import annotations

from pathlib import Path

import pytest

from activities.model.prices import load_prices
from contracts.base import BadInput
from contracts.usage import CallUsage


def test_the_built_in_table_prices_a_call() -> None:
    """Cached tokens cost less than fresh ones."""
    prices = load_prices(None)
    fresh = prices.cost("gpt-5.4", CallUsage(input_tokens=1000))
    cached = prices.cost("gpt-5.4", CallUsage(input_tokens=1000, cached_input_tokens=1000))
    assert fresh is not None
    assert cached is not None
    assert 0 < cached < fresh


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "the whole input"),
        (b"prices: {m: {input: 1, output: 0}}", "prices.m.cached_input: required, but missing"),
        (b"prices: {m: {input: .nan, cached_input: 0, output: 0}}", "prices.m.input"),
        (b"prices: {m: [}", "is not YAML"),
        (b"prices: 2026-13-45", "is not YAML"),
        (b"prices: {caf\xe9: {}}", "is not UTF-8 (byte 12): save it as UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path: Path, content: bytes, told: str) -> None:
    """A worker does not start without its prices, and says what is wrong with them."""
    path = tmp_path / "prices.yaml"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"price file .*prices\.yaml") as caught:
        load_prices(path)
    assert told in str(caught.value)
