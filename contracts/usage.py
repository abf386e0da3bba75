"""Budgets, usage, and the pure decision whether a run may spend more."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from contracts.base import NOT_BOOLEAN, Contract

MOST_COUNTED, MOST_MEASURED = 10**12, 10**9
"""The largest limits: of steps and tokens, and of seconds and dollars. A clock or a share of more could not be computed."""

PositiveInt = Annotated[int, Field(gt=0, le=MOST_COUNTED), NOT_BOOLEAN]
PositiveFloat = Annotated[float, Field(gt=0, le=MOST_MEASURED), NOT_BOOLEAN]


class Budget(Contract):
    """What a run may spend. `null` alone means no limit; zero is refused, since it would allow nothing."""

    steps: PositiveInt | None = Field(default=100, description="model calls")
    tokens: PositiveInt | None = Field(default=None, description="input and output tokens together")
    cost_usd: PositiveFloat | None = Field(default=None, description="US dollars; needs a known price for the model")
    wall_seconds: PositiveFloat | None = Field(default=None, description="seconds since the run started")


class BudgetExtension(Contract):
    """What a person adds to a run's limits. A limit that is `null` in the budget stays unlimited."""

    steps: PositiveInt | None = None
    tokens: PositiveInt | None = None
    cost_usd: PositiveFloat | None = None
    wall_seconds: PositiveFloat | None = None


class CallUsage(Contract):
    """What one model call used. `cost_usd` is null where the price of the model is unknown."""

    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cost_usd: float | None = None


class Usage(Contract):
    """What a run has used so far. `cost_usd` is null as soon as one call's price was unknown."""

    model_calls: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cost_usd: float | None = 0.0
    sandbox_seconds: float = 0.0
    wall_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """Input and output tokens together, the number that `Budget.tokens` limits."""
        return self.input_tokens + self.output_tokens

    def plus(self, other: Usage) -> Usage:
        """Return what two runs used together. The cost is null as soon as one of them is."""
        cost = None if self.cost_usd is None or other.cost_usd is None else self.cost_usd + other.cost_usd
        names = [name for name in type(self).model_fields if name != "cost_usd"]
        return Usage(cost_usd=cost, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def plus_call(self, call: CallUsage) -> Usage:
        """Return the usage after one more model call."""
        cost = None if self.cost_usd is None or call.cost_usd is None else self.cost_usd + call.cost_usd
        return self.model_copy(
            update={
                "model_calls": self.model_calls + 1,
                "input_tokens": self.input_tokens + call.input_tokens,
                "cached_input_tokens": self.cached_input_tokens + call.cached_input_tokens,
                "output_tokens": self.output_tokens + call.output_tokens,
                "reasoning_tokens": self.reasoning_tokens + call.reasoning_tokens,
                "cost_usd": cost,
            }
        )


def extend(budget: Budget, more: BudgetExtension) -> Budget:
    """Return `budget` with each given extension added, up to the largest limit there is; unlimited stays unlimited."""
    changes = {
        name: min(getattr(budget, name) + added, MOST_COUNTED if name in ("steps", "tokens") else MOST_MEASURED)
        for name, added in more.model_dump(exclude_none=True).items()
        if getattr(budget, name) is not None
    }
    return budget.model_copy(update=changes)


def exceeded(budget: Budget, usage: Usage) -> str | None:
    """Say which limit forbids another model call, or return None when all have room."""
    spent: tuple[tuple[str, float | None, float | None], ...] = (
        ("steps", budget.steps, usage.model_calls),
        ("tokens", budget.tokens, usage.tokens),
        ("cost_usd", budget.cost_usd, usage.cost_usd),
        ("wall_seconds", budget.wall_seconds, usage.wall_seconds),
    )
    for name, limit, used in spent:
        if limit is not None and used is not None and used >= limit:
            return f"budget.{name}: {used:g} used of {limit:g}"
    return None
