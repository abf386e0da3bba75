"""What a model call costs, from a table of prices."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError

from contracts.base import BadInput, Contract, explain
from contracts.usage import CallUsage

_Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ModelPrice(Contract):
    """US dollars for a million tokens of each kind."""

    input: _Price
    cached_input: _Price
    output: _Price


class PriceTable(Contract):
    """Prices by model name; a name that ends in `*` stands for all that begin so, the longest one winning."""

    prices: dict[str, ModelPrice]

    def of(self, model: str) -> ModelPrice | None:
        """Return a model's price, or None when it is unknown."""
        if model in self.prices:
            return self.prices[model]
        matching = [name for name in self.prices if name.endswith("*") and model.startswith(name[:-1])]
        return self.prices[max(matching, key=len)] if matching else None

    def cost(self, model: str, usage: CallUsage) -> float | None:
        """Return what a call cost in US dollars, or None when the model's price is unknown."""
        price = self.of(model)
        if price is None:
            return None
        fresh = usage.input_tokens - usage.cached_input_tokens
        spent = fresh * price.input + usage.cached_input_tokens * price.cached_input + usage.output_tokens * price.output
        return spent / 1_000_000


def load_prices(path: Path | None) -> PriceTable:
    """Read a price file, or the table that comes with the product. Raises BadInput naming file and field."""
    name = str(path) if path else "the built-in price table"
    try:
        place = path if path else resources.files("activities.model").joinpath("prices.yaml")
        text = place.read_text(encoding="utf-8")
        return PriceTable.model_validate(yaml.safe_load(text))
    except OSError as error:
        raise BadInput(f"price file {name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"price file {name} is not UTF-8 (byte {error.start}): save it as UTF-8") from error
    except ValidationError as error:
        raise BadInput(explain(error, f"price file {name}")) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise BadInput(f"price file {name} is not YAML: {error}") from error
