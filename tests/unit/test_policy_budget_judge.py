"""The pure decisions of a run: may it spend more, may a call run, and does an answer end it."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from contracts.agent import AgentSpec, ApprovalPolicy, Verdict
from contracts.blob import BlobRef, Text
from contracts.carried import KEPT_STEPS, CarriedRun, Counters
from contracts.model import CallModelResult, ToolCall
from contracts.prepare import PrepareRunResult
from contracts.run import ArtifactList, RunStatus, StepSummary
from contracts.usage import Budget, BudgetExtension, CallUsage, Usage, exceeded, extend
from workflows.judge import Judged, judge, kept, result_of, summarise
from workflows.policy import decide

REF = BlobRef(digest="a" * 64, size=1)
LIMITS = ("steps", "tokens", "cost_usd", "wall_seconds")


def budgets() -> st.SearchStrategy[Budget]:
    """Any budget."""
    whole, real = st.none() | st.integers(1, 10**6), st.none() | st.floats(0.01, 1e6)
    return st.builds(Budget, steps=whole, tokens=whole, cost_usd=real, wall_seconds=real)


def extensions() -> st.SearchStrategy[BudgetExtension]:
    """Any extension."""
    whole, real = st.none() | st.integers(1, 10**6), st.none() | st.floats(0.01, 1e6)
    return st.builds(BudgetExtension, steps=whole, tokens=whole, cost_usd=real, wall_seconds=real)


def answer(finish: str = "final", text: str | None = "done", **more: Any) -> CallModelResult:
    """An answer of the model."""
    given: dict[str, Any] = {
        "head": REF,
        "items_total": 1,
        "response_id": "r",
        "finish": finish,
        "text": Text(inline=text) if text is not None else None,
        "usage": CallUsage(input_tokens=3, output_tokens=4),
        "seconds": 1.5,
        "model": "m",
        **more,
    }
    return CallModelResult.model_validate(given)


def call(name: str = "shell", *, unknown: bool = False) -> ToolCall:
    """A call of a tool."""
    return ToolCall(
        call_id="c", name=name, arguments=Text(inline="{}"), arguments_digest="d", summary=name, fault=None, unknown_tool=unknown
    )


def judged(*answers: CallModelResult) -> Judged:
    """What the last of several answers in a row means."""
    result = Judged(Counters())
    for one in answers:
        result = judge(one, result.counters, more_to_say=False)
    return result


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("value", [0, "0", -1, math.nan])
def test_a_limit_of_nothing_is_refused(limit: str, value: float | str) -> None:
    """Zero, also as text, is never taken for unlimited (opensearch-project/ml-commons#4820)."""
    with pytest.raises(ValidationError, match=limit):
        Budget.model_validate({limit: value})


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 1e9), st.floats(0, 1e9))
def test_a_budget_without_limits_forbids_nothing(calls: int, tokens: int, cost: float, wall: float) -> None:
    """Null alone means unlimited."""
    usage = Usage(model_calls=calls, input_tokens=tokens, cost_usd=cost, wall_seconds=wall)
    assert exceeded(Budget(steps=None), usage) is None


@pytest.mark.parametrize(
    ("budget", "spent", "told"),
    [
        (Budget(steps=2), Usage(model_calls=2), "budget.steps: 2 used of 2"),
        (Budget(tokens=10), Usage(input_tokens=6, output_tokens=4), "budget.tokens: 10 used of 10"),
        (Budget(cost_usd=0.5), Usage(cost_usd=0.75), "budget.cost_usd: 0.75 used of 0.5"),
        (Budget(wall_seconds=60), Usage(wall_seconds=60.5), "budget.wall_seconds: 60.5 used of 60"),
        (Budget(), Usage(model_calls=100), "budget.steps: 100 used of 100"),
    ],
)
def test_the_limit_that_is_used_up_is_named(budget: Budget, spent: Usage, told: str) -> None:
    """What is spent equals the limit: nothing more may be."""
    assert exceeded(budget, spent) == told


@pytest.mark.parametrize(
    "spent", [Usage(model_calls=1), Usage(input_tokens=5, output_tokens=4), Usage(cost_usd=0.49), Usage(wall_seconds=59.9)]
)
def test_below_every_limit_a_run_may_go_on(spent: Usage) -> None:
    """The last call may be paid with what is left."""
    assert exceeded(Budget(steps=2, tokens=10, cost_usd=0.5, wall_seconds=60), spent) is None


@given(budgets(), extensions())
def test_an_extension_adds_exactly_and_never_limits(budget: Budget, more: BudgetExtension) -> None:
    """Each limit grows by what was given; unlimited stays unlimited."""
    after = extend(budget, more)
    for limit in LIMITS:
        old, added, new = getattr(budget, limit), getattr(more, limit), getattr(after, limit)
        assert new == (None if old is None else old + (added or 0))


@pytest.mark.parametrize(
    ("limit", "value"),
    [("steps", 10**12 + 1), ("tokens", 10**400), ("cost_usd", 1e10), ("wall_seconds", 1e15), ("steps", True), ("cost_usd", True)],
)
def test_a_limit_that_no_clock_or_share_could_be_computed_of_is_refused(limit: str, value: float) -> None:
    """In a budget, and in what is added to one; and `true` is not the number 1."""
    for kind in (Budget, BudgetExtension):
        with pytest.raises(ValidationError, match=limit):
            kind.model_validate({limit: value})


def test_extensions_end_at_the_largest_limit() -> None:
    """However often a run is extended, its limits stay numbers that it can work with."""
    most = Budget(steps=10**12, tokens=10**12, cost_usd=1e9, wall_seconds=1e9)
    assert extend(most, BudgetExtension(steps=5, tokens=10**12, cost_usd=1e9, wall_seconds=0.5)) == most


@given(budgets(), extensions(), extensions())
def test_the_order_of_extensions_does_not_matter(budget: Budget, one: BudgetExtension, other: BudgetExtension) -> None:
    """Two people who extend at the same time get the same budget, whoever came first."""
    here, there = extend(extend(budget, one), other), extend(extend(budget, other), one)
    for limit in LIMITS:
        assert getattr(here, limit) == (None if getattr(there, limit) is None else pytest.approx(getattr(there, limit)))


@given(st.lists(st.builds(CallUsage, input_tokens=st.integers(0, 10**6), output_tokens=st.integers(0, 10**6)), max_size=20))
def test_usage_is_the_sum_of_its_calls(calls: list[CallUsage]) -> None:
    """Nothing is lost or counted twice, and a call whose price is unknown makes the cost unknown."""
    usage = Usage()
    for one in calls:
        usage = usage.plus_call(one)
    assert usage.model_calls == len(calls)
    assert usage.tokens == sum(one.input_tokens + one.output_tokens for one in calls)
    assert (usage.cost_usd is None) == bool(calls)


def test_known_prices_add_up() -> None:
    """The cost is known as long as every call's is."""
    usage = Usage().plus_call(CallUsage(cost_usd=0.25)).plus_call(CallUsage(cost_usd=0.5))
    assert (usage.cost_usd, usage.plus_call(CallUsage()).cost_usd) == (0.75, None)


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [
        (ApprovalPolicy(), Verdict.ALLOW),
        (ApprovalPolicy(default=Verdict.PROMPT), Verdict.PROMPT),
        (ApprovalPolicy(default=Verdict.FORBID, tools={"shell": Verdict.ALLOW}), Verdict.ALLOW),
        (ApprovalPolicy(tools={"shell": Verdict.FORBID}), Verdict.FORBID),
        (ApprovalPolicy(tools={"apply_patch": Verdict.FORBID}), Verdict.ALLOW),
    ],
)
def test_a_tools_own_verdict_wins_over_the_default(policy: ApprovalPolicy, verdict: Verdict) -> None:
    """Policy looks at the tool's name, then at the default."""
    assert decide(policy, call()).verdict is verdict


def test_a_text_ends_the_run_as_completed() -> None:
    """An answer without a call is the result."""
    assert judged(answer()).end is RunStatus.COMPLETED


def test_a_text_does_not_end_a_run_that_was_told_more_meanwhile() -> None:
    """What a person said after the question was asked is answered first."""
    assert judge(answer(), Counters(), more_to_say=True).end is None


def test_calls_do_not_end_the_run() -> None:
    """They are carried out."""
    assert judged(answer("tools", calls=(call(),))).end is None


def test_a_refusal_ends_the_run_with_the_models_words() -> None:
    """The reason is cut, so that it stays readable."""
    result = judged(answer("refused", "No. " * 500))
    assert result.end is RunStatus.REFUSED
    assert (result.reason or "").startswith("the model declined: No. ")
    assert len(result.reason or "") < 600


@pytest.mark.parametrize(
    ("one", "remedy"),
    [(answer(text=None), "check the agent's model and instructions"), (answer("incomplete", "part"), "raise max_output_tokens")],
)
def test_empty_and_cut_answers_are_nudged_three_times(one: CallModelResult, remedy: str) -> None:
    """The fourth in a row ends the run, saying what may help: more room is of no use to an answer that says nothing."""
    for times in range(1, 4):
        result = judged(*[one] * times)
        assert (result.end, len(result.notes)) == (None, 1)
    result = judged(*[one] * 4)
    assert (result.end, (result.reason or "").endswith(f"(4 times in a row); {remedy}")) == (RunStatus.FAILED, True)


@pytest.mark.parametrize(
    ("bad", "bound"),
    [(answer(schema_fault="no"), 1), (answer(text=None), 3), (answer("tools", calls=(call("shel", unknown=True),)), 2)],
    ids=["schema", "empty", "unknown tools"],
)
def test_a_good_answer_starts_every_count_anew(bad: CallModelResult, bound: int) -> None:
    """People may go on with a run after an answer; what went wrong before it is past."""
    counters = Counters()
    for one in (*[bad] * bound, answer(), *[bad] * bound):
        result = judge(one, counters, more_to_say=True)
        assert result.end is None
        counters = result.counters


def test_an_answer_that_does_not_fit_its_schema_is_not_empty() -> None:
    """Only what is the same in a row counts."""
    empty, misfit = answer(text=None), answer(schema_fault="no")
    assert judged(empty, empty, empty, misfit, empty).end is None


def test_work_in_between_starts_the_count_of_empty_answers_anew() -> None:
    """Only answers in a row count."""
    empty, work = answer(text=None), answer("tools", calls=(call(),))
    assert judged(empty, empty, empty, work, empty, empty, empty).end is None


def test_three_answers_with_only_unknown_tools_end_the_run() -> None:
    """The third in a row; one known tool among them is enough to go on."""
    lost = answer("tools", calls=(call("shel", unknown=True), call("cat", unknown=True)))
    mixed = answer("tools", calls=(call("shel", unknown=True), call()))
    assert judged(lost, lost).end is None
    assert judged(lost, lost, mixed, lost, lost).end is None
    result = judged(lost, lost, lost)
    assert (result.end, "(last: 'shel')" in (result.reason or "")) == (RunStatus.FAILED, True)


def test_one_answer_is_corrected_and_the_second_wrong_one_ends_the_run() -> None:
    """The note for the model holds the fault; so does the reason."""
    wrong = answer(schema_fault="rows: not an integer")
    first, second = judged(wrong), judged(wrong, wrong)
    assert first.end is None
    assert "rows: not an integer" in (first.notes[0].text.inline or "")
    assert (second.end, "rows: not an integer" in (second.reason or "")) == (RunStatus.FAILED, True)


def test_only_the_last_steps_are_kept_for_the_query() -> None:
    """State stays of constant size, however long the run."""
    steps: tuple[StepSummary, ...] = ()
    for n in range(1, KEPT_STEPS * 2 + 1):
        steps = kept(steps, StepSummary(step=n, model_seconds=0, tokens=0))
    assert [step.step for step in steps] == list(range(KEPT_STEPS + 1, KEPT_STEPS * 2 + 1))


def test_a_steps_summary_is_bounded() -> None:
    """Twenty actions and three hundred characters of text."""
    summary = summarise(answer(text="x" * 1000), 3, [f"action {n}" for n in range(50)])
    assert (summary.step, summary.tokens, len(summary.actions), len(summary.text)) == (3, 7, 20, 300)


def run(*, schema: bool = False, text: str = "on the way") -> CarriedRun:
    """A run after two steps."""
    from activities.agents import plan_of

    spec = AgentSpec(output_schema={"type": "object"} if schema else None)
    prepared = PrepareRunResult(
        agent=REF,
        agent_digest="d" * 64,
        agent_name="default",
        model="m",
        plan=plan_of(spec),
        task=Text(inline="t"),
        price_known=True,
    )
    return CarriedRun(
        prepared=prepared,
        budget=Budget(),
        head=REF,
        items=(),
        step=2,
        usage=Usage(model_calls=2),
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        text=text,
    )


def test_a_completed_run_has_the_answer_as_its_output() -> None:
    """With its checkpoint and the head of its transcript."""
    result = result_of(RunStatus.COMPLETED, None, run(), answer(text="42 rows"), ArtifactList())
    assert (result.output, result.steps, result.checkpoint and result.checkpoint.step) == ("42 rows", 2, 2)
    assert result.provenance_head == REF


def test_a_schema_makes_the_output_an_object_and_no_schema_leaves_json_as_text() -> None:
    """Only who asked for an object gets one."""
    outputs = [
        result_of(RunStatus.COMPLETED, None, run(schema=schema), answer(text='{"a": 1}'), ArtifactList()).output
        for schema in (True, False)
    ]
    assert outputs == [{"a": 1}, '{"a": 1}']


def test_a_run_that_was_ended_has_the_last_text_as_its_output() -> None:
    """What the model said on the way is better than nothing."""
    assert result_of(RunStatus.BUDGET_EXCEEDED, "why", run(), None, ArtifactList()).output == "on the way"


def test_a_run_that_never_began_has_a_result_too() -> None:
    """Nothing was used."""
    result = result_of(RunStatus.CANCELLED, "cancelled", None, None, ArtifactList())
    assert (result.steps, result.checkpoint, result.usage) == (0, None, Usage())
