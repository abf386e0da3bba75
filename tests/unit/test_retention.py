"""Which runs a policy keeps, and what may be written in it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from activities.store.retention import DAY_SECONDS, Known, decide
from contracts.base import explain
from contracts.retention import RetentionPolicy

NOW = 1_000 * DAY_SECONDS


def policy(*rules: dict[str, Any]) -> RetentionPolicy:
    """A policy of these rules."""
    return RetentionPolicy.model_validate({"rules": rules})


def run(place: str, days_ago: float | None = 0, steps: int = 3, **labels: str) -> Known:
    """A run that ended so many days ago, or goes on."""
    return Known(place, labels, None if days_ago is None else NOW - days_ago * DAY_SECONDS, range(1, steps + 1))


def kept(rules: RetentionPolicy, *runs: Known) -> set[str]:
    """The places of the runs that are kept."""
    return {place for place, verdict in decide(rules, runs, NOW).items() if verdict.is_kept}


def test_a_run_that_no_rule_fits_is_kept_forever() -> None:
    """Forgetting is asked for, never a default."""
    assert kept(policy({"label": {"team": "a"}, "keep": {"days": 1}}), run("x", 999), run("y", 999, team="b")) == {"x", "y"}
    assert kept(policy(), run("x", 999)) == {"x"}


def test_days_count_from_the_end() -> None:
    """To the second."""
    rules = policy({"keep": {"days": 30}})
    assert kept(rules, run("old", 30), run("young", 29.9999), run("open", None)) == {"young", "open"}


def test_the_last_ones_are_those_that_ended_last_among_those_the_rule_fits() -> None:
    """Each rule counts its own; runs that go on do not count; of runs that ended together the same ones go each time."""
    rules = policy({"label": {"team": "a"}, "keep": {"last": 2}}, {"keep": {"last": 1}})
    of_a = [run(f"a{days}", days, team="a") for days in (1, 2, 3)]
    others = [run("o1", 1), run("o2", 2), run("open", None)]
    assert kept(rules, *of_a, *others) == {"a1", "a2", "o1", "open"}
    same = [run("p", 1), run("q", 1)]
    assert kept(rules, *same) == kept(rules, *reversed(same)) == {"p"}


def test_the_first_rule_that_fits_decides() -> None:
    """All labels of a rule must be there."""
    rules = policy({"label": {"team": "a", "kind": "eval"}, "keep": "forever"}, {"label": {"team": "a"}, "keep": {"days": 1}})
    assert kept(rules, run("both", 9, team="a", kind="eval"), run("one", 9, team="a"), run("none", 9)) == {"both", "none"}


def test_the_last_checkpoints_of_an_ended_run_stay() -> None:
    """As many as the rule says, always the last one, and all of a run that goes on or that another rule fits."""
    rules = policy({"label": {"a": "1"}, "keep": "forever", "checkpoints": 2})
    verdicts = decide(
        rules, [run("ended", 5, 4, a="1"), run("short", 5, 1, a="1"), run("open", None, 4, a="1"), run("o", 5, 4)], NOW
    )
    assert {place: set(verdict.dropped_steps) for place, verdict in verdicts.items()} == {
        "ended": {1, 2},
        "short": set(),
        "open": set(),
        "o": set(),
    }


RULES = st.lists(
    st.fixed_dictionaries(
        {
            "keep": st.just("forever")
            | st.integers(1, 9).map(lambda n: {"days": n})
            | st.integers(1, 3).map(lambda n: {"last": n})
        },
        optional={
            "label": st.dictionaries(st.sampled_from("ab"), st.sampled_from("12"), min_size=1),
            "checkpoints": st.integers(1, 3),
        },
    ),
    max_size=3,
)
RUNS = st.lists(
    st.tuples(st.none() | st.floats(0, 12), st.integers(0, 4), st.dictionaries(st.sampled_from("ab"), st.sampled_from("12"))),
    max_size=9,
)


@given(RULES, RUNS)
def test_deciding_again_after_forgetting_forgets_no_more(rules: list[dict[str, Any]], drawn: list[Any]) -> None:
    """What a sweep leaves is what its policy keeps; and every run has a verdict, open ones a good one."""
    wanted = policy(*rules)
    runs = {f"r{n}": run(f"r{n}", days, steps, **labels) for n, (days, steps, labels) in enumerate(drawn)}
    first = decide(wanted, runs.values(), NOW)
    assert first.keys() == runs.keys()
    assert all(first[place].is_whole for place, known in runs.items() if known.ended_at is None)
    left = []
    for place, verdict in first.items():
        steps = [step for step in runs[place].steps if step not in verdict.dropped_steps]
        assert not runs[place].steps or not verdict.is_kept or runs[place].steps[-1] in steps
        if verdict.is_kept:
            left.append(Known(place, runs[place].labels, runs[place].ended_at, steps))
    assert all(verdict.is_whole for verdict in decide(wanted, left, NOW).values())


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ({}, "rules.0.keep: required, but missing"),
        ({"keep": "for ever"}, "rules.0.keep: Input should be 'forever' (found 'for ever')"),
        ({"keep": {}}, "rules.0.keep: give one of the two: {days: N} or {last: N}"),
        ({"keep": {"days": 1, "last": 1}}, "rules.0.keep: give one of the two: {days: N} or {last: N}"),
        ({"keep": {"days": 0}}, "rules.0.keep.days: Input should be greater than or equal to 1 (found 0)"),
        ({"keep": {"weeks": 1}}, "rules.0.keep.weeks: unknown field; remove it or correct its name"),
        ({"keep": "forever", "checkpoints": 0}, "rules.0.checkpoints: Input should be greater than or equal to 1 (found 0)"),
        ({"keep": "forever", "label": {}}, "rules.0.label: "),
        ({"keep": "forever", "labels": {"a": "b"}}, "rules.0.labels: unknown field; remove it or correct its name"),
    ],
)
def test_a_policy_that_cannot_be_used_is_told_by_field(rule: dict[str, Any], complaint: str) -> None:
    """A misspelt rule must not mean something else."""
    with pytest.raises(ValidationError) as refused:
        policy(rule)
    assert complaint in explain(refused.value, "the policy")
