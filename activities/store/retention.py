"""Which runs, and which checkpoints of them, a policy keeps. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from contracts.retention import KeepSome, RetentionPolicy

DAY_SECONDS = 86400.0


@dataclass(frozen=True)
class Known:
    """What a policy looks at. `place` names the run among all runs; `ended_at` is None while it goes on."""

    place: str
    labels: Mapping[str, str]
    ended_at: float | None
    steps: Sequence[int]
    """Of its checkpoints, in order."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of a run: whether it is kept, and the steps of the checkpoints that are dropped of one that is."""

    is_kept: bool
    why: str
    dropped_steps: frozenset[int] = field(default_factory=frozenset)

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the run is dropped."""
        return self.is_kept and not self.dropped_steps


def decide(policy: RetentionPolicy, runs: Iterable[Known], now: float) -> dict[str, Verdict]:
    """Return the verdict on each run, by its place.

    A run that goes on is kept whole and does not count among the last ones. Of runs that ended at the same time the order of
    their places decides, so that deciding again gives the same.
    """
    verdicts: dict[str, Verdict] = {}
    ranks: Counter[int] = Counter()
    for run in sorted(runs, key=lambda run: (-(run.ended_at or 0), run.place)):
        number = next((n for n, rule in enumerate(policy.rules) if rule.fits(dict(run.labels))), None)
        if run.ended_at is None:
            verdicts[run.place] = Verdict(True, "it goes on")
            continue
        if number is None:
            verdicts[run.place] = Verdict(True, "no rule fits it")
            continue
        rule, told = policy.rules[number], f"rule {number + 1}"
        ranks[number] += 1
        if isinstance(rule.keep, KeepSome):
            if rule.keep.days is not None and now - run.ended_at >= rule.keep.days * DAY_SECONDS:
                verdicts[run.place] = Verdict(False, f"{told}: it ended more than {rule.keep.days} days ago")
                continue
            if rule.keep.last is not None and ranks[number] > rule.keep.last:
                verdicts[run.place] = Verdict(False, f"{told}: {rule.keep.last} others ended later")
                continue
        dropped = frozenset(run.steps[: -rule.checkpoints] if rule.checkpoints is not None else ())
        verdicts[run.place] = Verdict(True, told, dropped)
    return verdicts
