"""Tools that are Temporal activities of somebody else: whatever their worker does, the model is told and the run goes on."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import pytest
from temporalio import activity
from temporalio.api.common.v1 import Payload
from temporalio.client import Client
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from tests.integration.helpers import activity_tool, failed_tasks, last_request, outputs_of
from tests.integration.stack import Handle, Stack
from workflows.tool_calls import MAX_ACTIVITY_OUTPUT, MAX_FAILURE, MAX_PARALLEL

_NOW = timedelta(0)


class Lookup:
    """Another team's worker, with one activity that does what the test says. It knows nothing of Caisson's data converter."""

    def __init__(self, stack: Stack, client: Client) -> None:
        self._stack = stack
        self._client = client
        self.queue = f"lookup-{uuid.uuid4().hex[:8]}"
        self.given: list[Any] = []
        self.answer: Callable[[], Any] = lambda: None
        self.at_once = self.most_at_once = 0

    @activity.defn(name="lookup")
    async def lookup(self, given: Any) -> Any:
        """The activity."""
        self.given.append(given)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            answer = self.answer()
            return await answer if asyncio.iscoroutine(answer) else answer
        finally:
            self.at_once -= 1

    async def ask(self, scenario: str = "one-lookup", tools: tuple[str, ...] = (), **tool: Any) -> tuple[Handle, dict[str, str]]:
        """Play a scenario with this tool; return the run, which completed, and the outputs that the model was given."""
        agent = {"tools": [*tools, activity_tool(self.queue, "lookup", **tool)]}
        async with Worker(self._client, task_queue=self.queue, activities=[self.lookup], graceful_shutdown_timeout=_NOW):
            handle = await self._stack.start(scenario, agent)
            result = await self._stack.finish(handle)
        assert (result["status"], result["output"]) == ("completed", "done")
        assert await failed_tasks(handle) == []
        return handle, dict(outputs_of(await last_request(self._stack, handle)))


@pytest.fixture
async def lookup(stack: Stack) -> AsyncIterator[Lookup]:
    """Another team's worker on a task queue of its own."""
    yield Lookup(stack, await Client.connect(stack.dev.address))


async def test_an_activity_tool_gets_the_arguments_and_its_result_goes_to_the_model(lookup: Lookup) -> None:
    """The arguments arrive as the object that the model wrote; a result that is no string arrives as JSON."""
    lookup.answer = lambda: {"claim": 7, "state": "geprüft"}
    _, outputs = await lookup.ask()
    assert lookup.given == [{"claim": 7, "note": "für Zoë"}]
    assert outputs == {"call_1_1": '{"claim": 7, "state": "geprüft"}'}


async def test_a_text_result_is_given_as_it_is(lookup: Lookup) -> None:
    """A string is not quoted once more."""
    lookup.answer = lambda: 'said "yes"\nand left'
    assert (await lookup.ask())[1] == {"call_1_1": 'said "yes"\nand left'}


async def test_no_arguments_at_all_are_an_empty_object(lookup: Lookup) -> None:
    """A tool that requires nothing may be called with nothing."""
    _, outputs = await lookup.ask("empty-arguments")
    assert (lookup.given, outputs) == ([{}], {"call_1_1": "null"})


async def test_arguments_that_do_not_fit_the_schema_never_reach_the_activity(lookup: Lookup) -> None:
    """The model is told the place and the fault."""
    await lookup.ask("misfit-arguments", parameters={"type": "object", "properties": {"claim": {"type": "integer"}}})
    assert lookup.given == []


async def test_arguments_too_long_for_history_are_told_to_the_model(lookup: Lookup) -> None:
    """What would make history grow is not given on, and nothing runs."""
    _, outputs = await lookup.ask("long-arguments", ("shell",))
    assert "pass less" in outputs["call_2_1"]
    assert lookup.given == []


async def test_a_failure_is_tried_as_often_as_the_agent_allows_and_then_told(lookup: Lookup) -> None:
    """The model reads the type and the message of the last failure."""

    def fail() -> None:
        raise ApplicationError("the registry is closed on Sundays", type="Closed")

    lookup.answer = fail
    _, outputs = await lookup.ask(max_attempts=2)
    assert len(lookup.given) == 2
    assert outputs == {"call_1_1": "lookup: failed: Closed: the registry is closed on Sundays"}


async def test_a_failure_that_says_so_is_not_retried(lookup: Lookup) -> None:
    """Non-retryable means once."""

    def fail() -> None:
        raise ApplicationError("no such claim", type="NotFound", non_retryable=True)

    lookup.answer = fail
    await lookup.ask(max_attempts=5)
    assert len(lookup.given) == 1


async def test_a_long_failure_is_cut(lookup: Lookup) -> None:
    """A stack trace of another system does not fill history or the model's context."""

    def fail() -> None:
        raise ApplicationError("x" * 100_000, non_retryable=True)

    lookup.answer = fail
    _, outputs = await lookup.ask()
    assert len(outputs["call_1_1"]) == MAX_FAILURE


async def test_a_tool_that_does_not_answer_in_time_is_told_to_the_model(lookup: Lookup) -> None:
    """The run waits no longer than the tool may take."""
    never = asyncio.Event()
    lookup.answer = lambda: never.wait()
    _, outputs = await lookup.ask(timeout_seconds=0.5, max_attempts=1)
    assert outputs["call_1_1"].startswith("lookup: failed: Timeout: ")


async def test_a_task_queue_without_a_worker_is_told_to_the_model(stack: Stack) -> None:
    """A misspelt queue neither hangs the run nor is taken for a lost sandbox."""
    handle = await stack.start("one-lookup", {"tools": [activity_tool("no-such-queue", "lookup", queue_seconds=1)]})
    assert (await stack.finish(handle))["output"] == "done"
    (output,) = dict(outputs_of(await last_request(stack, handle))).values()
    assert "no worker of task queue 'no-such-queue' has taken it for 1 s; it was not run" in output
    assert "sandbox" not in output


async def test_an_activity_that_its_worker_does_not_know_is_told_to_the_model(lookup: Lookup) -> None:
    """A misspelt activity name is a failure of the tool."""
    _, outputs = await lookup.ask(activity="look_up", max_attempts=1)
    assert "look_up" in outputs["call_1_1"]
    assert lookup.given == []


async def test_a_result_over_the_servers_limit_is_told_once(lookup: Lookup) -> None:
    """Three MiB from a plain worker fail the tool, not the run, and are not retried for ever (pydantic/pydantic-ai#7157)."""
    lookup.answer = lambda: "x" * (3 << 20)
    _, outputs = await lookup.ask(max_attempts=2)
    assert len(lookup.given) <= 2
    assert outputs["call_1_1"].startswith("lookup: failed: ")


async def test_a_large_result_through_caissons_own_converter_is_bounded(stack: Stack) -> None:
    """Three MiB leave history by external storage, and the model gets beginning and end (pydantic/pydantic-ai#7110)."""
    own = Lookup(stack, stack.dev.client)
    own.answer = lambda: "begin" + "x" * (3 << 20) + "end"
    handle, outputs = await own.ask(max_attempts=1)
    text = outputs["call_1_1"]
    assert (len(own.given), text[:5], text[-3:]) == (1, "begin", "end")
    assert MAX_ACTIVITY_OUTPUT < len(text) < MAX_ACTIVITY_OUTPUT + 100
    assert "characters left out" in text
    assert await stack.history_bytes(handle) < 100_000


async def test_twenty_large_results_of_one_step_meet_no_limit(stack: Stack, lookup: Lookup) -> None:
    """4 MB of results in one step stay below every limit, a few at a time, each with its own output."""
    numbers = iter(range(20))
    lookup.answer = lambda: f"{next(numbers)}:" + "x" * 200_000
    _, outputs = await lookup.ask("twenty-lookups")
    assert sorted(int(text.partition(":")[0]) for text in outputs.values()) == list(range(20))
    assert {len(text) // 1000 for text in outputs.values()} == {MAX_ACTIVITY_OUTPUT // 1000}
    assert lookup.most_at_once <= MAX_PARALLEL


async def test_tools_beside_the_sandbox_leave_the_order_of_commands_alone(lookup: Lookup) -> None:
    """Outputs come in the order of the calls, and each command sees what the one before it did."""
    lookup.answer = lambda: "found"
    _, outputs = await lookup.ask("lookup-beside-shell", ("shell",))
    assert list(outputs) == ["call_1_1", "call_1_2", "call_1_3"]
    assert outputs["call_1_2"] == "found"


def raw(data: bytes, encoding: bytes) -> RawValue:
    """A result as another SDK may write it."""
    return RawValue(Payload(metadata={"encoding": encoding}, data=data))


@pytest.mark.parametrize(
    ("result", "told"),
    [
        pytest.param(raw("für Zoë".encode(), b"binary/plain"), "für Zoë", id="bytes that are text"),
        pytest.param(raw(b"\xff\xfe\x00", b"binary/plain"), "cannot be read", id="bytes that are none"),
        pytest.param(raw(b'"half \\ud83d"', b"json/plain"), "half \ufffd", id="half a surrogate pair"),
        pytest.param(raw(b"{cut", b"json/plain"), "cannot be read", id="broken JSON"),
        pytest.param(raw(b"secret", b"binary/encrypted"), "cannot be read", id="an encoding that only they know"),
        pytest.param(raw(b'{"a": 1}', b"json/protobuf"), '{"a": 1}', id="a protobuf message as JSON"),
    ],
)
async def test_a_result_in_any_form_is_shown_or_told(lookup: Lookup, result: RawValue, told: str) -> None:
    """What a worker in another language returns never fails the workflow task."""
    lookup.answer = lambda: result
    _, outputs = await lookup.ask()
    assert told in outputs["call_1_1"]
