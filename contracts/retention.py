"""How long runs are kept: a policy, which a person writes as a YAML file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from contracts.base import Contract


class KeepSome(Contract):
    """Exactly one of a time and a number."""

    days: int | None = Field(default=None, ge=1, description="so many days after the run's end")
    last: int | None = Field(default=None, ge=1, description="so many runs of those that the rule fits: the ones that ended last")

    @model_validator(mode="after")
    def _exactly_one(self) -> KeepSome:
        if (self.days is None) == (self.last is None):
            raise ValueError("give one of the two: {days: N} or {last: N}")
        return self


def _word_or_bound(value: Any) -> str:
    return "(bound)" if isinstance(value, (dict, KeepSome)) else "(word)"


Keep = Annotated[
    Annotated[Literal["forever"], Tag("(word)")] | Annotated[KeepSome, Tag("(bound)")], Discriminator(_word_or_bound)
]


class RetentionRule(Contract):
    """How long the runs that it fits are kept, and how many of their checkpoints."""

    label: dict[str, str] | None = Field(
        default=None, min_length=1, description="labels that a run must have, all of them; null fits any run"
    )
    keep: Keep
    checkpoints: int | None = Field(
        default=None, ge=1, description="of a run that has ended only so many checkpoints, the last ones; null keeps all"
    )

    def fits(self, labels: dict[str, str]) -> bool:
        """Whether a run of these labels is for this rule."""
        return all(labels.get(name) == value for name, value in (self.label or {}).items())


class RetentionPolicy(Contract):
    """Rules in order: the first that fits a run decides. A run that none fits is kept forever."""

    rules: tuple[RetentionRule, ...]
