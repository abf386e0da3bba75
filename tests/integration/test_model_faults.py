"""What a run makes of a model endpoint that is busy, breaks off, or says what cannot be used: over HTTP, with the real SDK."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from datetime import datetime
from typing import Any

import pytest

from tests.integration.helpers import last_request, outputs_of, sandboxes_of, scheduled
from tests.integration.stack import Handle, Stack

BACKGROUND = {"model_settings": {"store": True, "background": True}}
CUT = ("cut-call", "cut-before-the-end", "cut-mid-event", "error-event", "failed-response", "disconnect")
STOPPED = {
    "status-400": ("400", "Unsupported parameter temperature", "check the agent's model and model_settings"),
    "status-401": ("401", "set a valid OPENAI_API_KEY for the model worker"),
    "status-403": ("403", "the key may not do this"),
    "status-404": ("404", "correct `model` in the agent"),
    "insufficient-quota": ("429", "add credit, or use another key"),
}


def outcomes(stack: Stack, handle: Handle) -> list[str]:
    """What became of each request of a run, in order."""
    return [entry["outcome"] for entry in stack.journal(handle)]


@pytest.fixture(scope="module")
async def slow(stack: Stack) -> dict[str, Handle]:
    """Runs that mostly wait, started together."""
    return {name: await stack.start(name) for name in ("wait-as-told", "busy-for-ever", *CUT)}


async def answers(stack: Stack, handle: Handle) -> dict[str, str]:
    """The output of each call of a run, by call id, as the model was given it; no call has two."""
    found = outputs_of(await last_request(stack, handle))
    assert len(dict(found)) == len(found)
    return dict(found)


async def test_the_wait_that_the_server_asks_for_wins_over_backoff(stack: Stack, slow: dict[str, Handle]) -> None:
    """Seconds, a date and milliseconds are each honoured, and there is one result (earendil-works/pi#4377, openai/codex#231)."""
    handle = slow["wait-as-told"]
    assert (await stack.finish(handle))["output"] == "done"
    journal = stack.journal(handle)
    assert outcomes(stack, handle) == ["http", "http", "http", "answered"]
    at = [datetime.fromisoformat(entry["at"]) for entry in journal]
    gaps = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(at)]
    # Without the header the waits would be 1, 2 and 4 seconds. A date has whole seconds, so up to one of them is lost.
    assert gaps[0] >= 2
    assert gaps[1] >= 3
    assert 0.25 <= gaps[2] < 4
    assert len({entry["idempotency_key"] for entry in journal}) == 1


async def test_attempts_are_bounded_and_then_the_run_says_why_it_gave_up(stack: Stack, slow: dict[str, Handle]) -> None:
    """A model that is busy for ever is asked ten times."""
    handle = slow["busy-for-ever"]
    error = await stack.failure(handle)
    assert (error.type, "answered 429" in error.message) == ("RunFailed", True), error
    assert outcomes(stack, handle) == ["http"] * 10


async def test_malformed_arguments_are_told_to_the_model_and_nothing_runs(stack: Stack) -> None:
    """Each bad call gets one output with the reason, and the run goes on (openai/openai-agents-js#887)."""
    handle = await stack.start("malformed-arguments")
    assert (await stack.finish(handle))["output"] == "nothing was run"
    outputs = await answers(stack, handle)
    reasons = [outputs[f"call_1_{n}"] for n in range(1, 13)]
    assert all(text.startswith("shell: bad arguments: ") for text in reasons), reasons
    told = (
        "not JSON",
        "this is an array",
        "this is a string",
        "this is a string",
        "'command' is a required property",
        "NaN",
        "'command' twice",
        "surrogate pair",
        "surrogate pair",
        "this is null",
        "'command' is a required property",
        "too large a number",
    )
    assert [text for text, part in zip(reasons, told, strict=True) if part not in text] == []
    assert (await scheduled(handle)).count("run_shell") == 1


async def test_an_unknown_tool_is_told_to_the_model_with_the_names_there_are(stack: Stack) -> None:
    """The run goes on after a call to a tool that does not exist (openai/openai-agents-python#325, #2204)."""
    handle = await stack.start("unknown-tool")
    result = await stack.finish(handle)
    assert (result["status"], result["output"]) == ("completed", "I see")
    assert list(await answers(stack, handle)) == ["call_1_1"]


async def test_three_answers_in_a_row_with_only_unknown_tools_end_the_run(stack: Stack) -> None:
    """Misses are bounded, and the failure names the tool."""
    handle = await stack.start("unknown-tools-for-ever")
    error = await stack.failure(handle)
    assert "3 answers in a row (last: 'shel'); check the agent's instructions and tools" in error.message
    assert error.details[0]["status"] == "failed"
    assert stack.answered(handle) == [1, 2, 3]


async def test_a_known_tool_in_between_starts_the_count_of_misses_anew(stack: Stack) -> None:
    """Only misses in a row count."""
    assert (await stack.finish(await stack.start("unknown-tools-now-and-then")))["output"] == "done"


async def test_an_answer_that_breaks_off_is_asked_for_again_and_no_tool_runs_twice(stack: Stack, slow: dict[str, Handle]) -> None:
    """However it breaks off, the step is repeated and its command runs once (openclaw/openclaw#109133)."""
    handles = [slow[name] for name in CUT]
    results = await asyncio.gather(*map(stack.finish, handles))
    assert [result["output"] for result in results] == ["it ran once"] * len(CUT)
    kinds = [outcomes(stack, handle) for handle in handles]
    assert kinds == [
        [kind, "answered", "answered"] for kind in ("cut", "cut", "cut_mid_event", "error_event", "failed", "disconnect")
    ]


async def test_the_beginning_of_a_text_is_never_the_result(stack: Stack) -> None:
    """A text that was cut after some words is asked for again as a whole (openclaw/openclaw#108958)."""
    handle = await stack.start("cut-text")
    result = await stack.finish(handle)
    assert result["output"] == "The answer is not what the first words say."
    assert result["usage"]["model_calls"] == 1
    assert outcomes(stack, handle) == ["cut", "answered"]


async def test_errors_that_pass_are_retried(stack: Stack) -> None:
    """500, 503 with an HTML body, and 529 (temporalio/sdk-python#1177)."""
    handles = [await stack.start(name) for name in ("status-500", "status-503", "status-529")]
    results = await asyncio.gather(*map(stack.finish, handles))
    assert [result["output"] for result in results] == ["done"] * 3
    assert [outcomes(stack, handle) for handle in handles] == [["http", "answered"]] * 3


@pytest.mark.parametrize("scenario", STOPPED)
async def test_errors_that_no_retry_can_mend_end_the_run_at_once(stack: Stack, scenario: str) -> None:
    """One request is made, and the failure says what a person must do (temporalio/sdk-python#1177)."""
    handle = await stack.start(scenario)
    error = await stack.failure(handle, 15)
    assert error.type == "RunFailed"
    assert [part for part in STOPPED[scenario] if part not in error.message] == [], error.message
    assert outcomes(stack, handle) == ["http"]
    assert sandboxes_of(stack, handle.id) == []


async def test_a_run_that_must_give_up_keeps_what_it_made(stack: Stack) -> None:
    """The failure carries the result so far, with its artifacts and checkpoint."""
    error = await stack.failure(await stack.start("bad-key-in-mid-run"))
    result = error.details[0]
    assert (result["status"], result["steps"], result["checkpoint"]["step"]) == ("failed", 1, 1)
    assert [artifact["path"] for artifact in result["artifacts"]["first"]] == ["outputs/kept.txt"]


async def test_the_second_of_two_calls_with_one_id_is_not_run(stack: Stack) -> None:
    """Each of the two gets an output of its own, so that the next request is valid."""
    handle = await stack.start("same-id-twice")
    assert (await stack.finish(handle))["output"] == "I see"
    outputs = await answers(stack, handle)
    assert list(outputs) == ["same", "same~2"]
    assert "first" in outputs["same"]
    assert "second" not in outputs["same~2"]
    assert (await scheduled(handle)).count("run_shell") == 1


async def test_an_id_that_an_earlier_answer_used_is_renamed_and_run(stack: Stack) -> None:
    """Some servers count anew in each answer; every output still finds its call."""
    handle = await stack.start("same-id-again")
    assert (await stack.finish(handle))["output"] == "done"
    outputs = await answers(stack, handle)
    assert list(outputs) == ["again", "again~2", "again~3"]
    assert ["first" in outputs["again"], "second" in outputs["again~2"], "third" in outputs["again~3"]] == [True] * 3


async def test_an_answer_cut_at_the_output_limit_is_continued_and_its_calls_never_run(stack: Stack) -> None:
    """A call in an incomplete answer may be only the beginning of what was meant."""
    handle = await stack.start("incomplete")
    assert (await stack.finish(handle))["output"] == "done"
    assert (await scheduled(handle)).count("run_shell") == 1


async def test_answers_that_are_always_cut_end_the_run(stack: Stack) -> None:
    """Three nudges are given; then the failure says which setting to raise."""
    handle = await stack.start("incomplete-for-ever")
    error = await stack.failure(handle)
    assert "4 times in a row); raise max_output_tokens" in error.message
    assert stack.answered(handle) == [1, 2, 3, 4]


async def test_a_refusal_ends_the_run_as_refused(stack: Stack) -> None:
    """What the model said is the reason and the output."""
    result = await stack.finish(await stack.start("refusal"))
    assert (result["status"], result["output"]) == ("refused", "I cannot help with that.")
    assert result["reason"] == "the model declined: I cannot help with that."


async def test_an_answer_stopped_by_a_content_filter_is_a_refusal(stack: Stack) -> None:
    """It is not asked for again."""
    handle = await stack.start("filtered")
    assert (await stack.finish(handle))["status"] == "refused"
    assert stack.answered(handle) == [1]


async def test_an_empty_answer_is_asked_for_again(stack: Stack) -> None:
    """Neither text nor a call is no answer."""
    assert (await stack.finish(await stack.start("empty-answer")))["output"] == "here it is"


async def test_reasoning_travels_with_the_calls_it_led_to(stack: Stack) -> None:
    """No request holds a reasoning item alone or a call without an output (openai/openai-agents-python#1660, #1611)."""
    handle = await stack.start("reasoning")
    assert (await stack.finish(handle))["output"] == "done"
    kinds = [item["type"] for item in await last_request(stack, handle)]
    call, output = "function_call", "function_call_output"
    assert kinds == [
        "message",
        "reasoning",
        call,
        call,
        output,
        output,
        "reasoning",
        "message",
        call,
        output,
        "reasoning",
        "message",
        "message",
    ]
    encrypted = [item["encrypted_content"] for item in await last_request(stack, handle) if item["type"] == "reasoning"]
    assert all(encrypted)


async def test_half_a_surrogate_pair_in_an_answer_ends_no_run(stack: Stack) -> None:
    """What no UTF-8 can hold is replaced, in the transcript that is sent back as in the result; no call is paid for twice."""
    handle = await stack.start("half-a-character")
    assert (await stack.finish(handle))["output"] == "done \ufffd and more"
    assert outcomes(stack, handle) == ["answered", "cut", "answered"]


@pytest.mark.parametrize("run_id", ["Läufe/ラン", "two\nlines", "x" * 900])
async def test_a_run_may_have_any_name(stack: Stack, run_id: str) -> None:
    """People choose workflow ids freely; a header made from one must not stop the call."""
    result = await stack.finish(await stack.start("no-fault", run_id=f"{uuid.uuid4().hex} {run_id}"[:900]), 20)
    assert result["output"] == "it ran once"


async def test_a_background_response_is_asked_for_once_and_picked_up(stack: Stack) -> None:
    """With store and background, each step is one create and one finished retrieve."""
    handle = await stack.start("background", BACKGROUND)
    assert (await stack.finish(handle))["output"] == "it ran once"
    seen = [(entry["request"], entry["outcome"]) for entry in stack.journal(handle)]
    assert seen == [("create", "accepted"), ("retrieve", "answered")] * 2


async def test_a_background_response_that_failed_is_asked_for_anew(stack: Stack) -> None:
    """A response that will never be an answer is not picked up for ever."""
    handle = await stack.start("background-failed", BACKGROUND)
    assert (await stack.finish(handle))["output"] == "it ran once"
    creates: list[dict[str, Any]] = [entry for entry in stack.journal(handle) if entry["request"] == "create"]
    assert [(entry["turn"], entry["attempt"]) for entry in creates] == [(1, 1), (1, 2), (2, 1)]
    assert len({entry["idempotency_key"] for entry in creates}) == 3
