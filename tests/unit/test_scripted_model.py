"""The scripted model, driven by the real OpenAI SDK over a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import TypeAdapter

from workers.scripted_model import ScenarioError, ScriptedModelServer, load_scenarios, parse_scenarios

TASK: Any = {"role": "user", "content": "count the files"}

LOOP = """
scenarios:
  - name: loop
    turns:
      - reasoning: I look first.
        calls: [{name: shell, arguments: {command: "ls ${HOME}; echo ${turn}"}}]
      - expect: 'files: \\d+'
        text: "There are ${output:files: (\\\\d{1,3})} files."
        usage: {input_tokens: 70, output_tokens: 9, cached_tokens: 50}
"""

ANSWER = "scenarios: [{name: answer, turns: [{text: 'A whole answer, long enough for a few deltas.'}]}]"


@asynccontextmanager
async def serving(scenario: str) -> AsyncIterator[tuple[ScriptedModelServer, AsyncOpenAI]]:
    async with (
        ScriptedModelServer(parse_scenarios(scenario, "test.yaml")) as server,
        AsyncOpenAI(api_key="k", base_url=server.base_url, max_retries=0, timeout=20) as client,
    ):
        yield server, client


async def stream_of(client: AsyncOpenAI, items: Any, **options: Any) -> list[Any]:
    stream = await client.responses.create(model="m-1", input=items, stream=True, **options)
    return [event async for event in stream]


def outputs_after(response: Response, *texts: str) -> list[Any]:
    items: list[Any] = [TASK, *(item.model_dump(exclude_none=True) for item in response.output)]
    calls = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
    for call, text in zip(calls, texts, strict=True):
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
    return items


async def test_a_stream_has_the_events_of_the_real_api_in_order() -> None:
    """Every event satisfies the SDK's types strictly, is numbered, and the last carries the whole response."""
    async with serving(LOOP) as (_, client):
        raw = await client.responses.with_raw_response.create(
            model="m-1", input=[TASK], stream=True, include=["reasoning.encrypted_content"], reasoning={"summary": "auto"}
        )
        body = await raw.http_response.aread()
    assert raw.headers["x-caisson-model"] == "scripted, not a language model"
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    kinds: list[str] = []
    for number, event in enumerate(events):
        parsed = adapter.validate_python(event, strict=True)
        assert parsed.type == event["type"]
        assert event["sequence_number"] == number
        if not kinds or kinds[-1] != event["type"]:
            kinds.append(event["type"])
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "function_call"]
    assert final["output"][0]["encrypted_content"].startswith("scripted:")
    assert final["usage"]["total_tokens"] > 0
    assert (
        "".join(event["delta"] for event in events if event["type"].endswith("arguments.delta"))
        == (final["output"][1]["arguments"])
    )


async def test_the_text_events_are_those_of_the_real_api() -> None:
    """A text goes through content_part.added, deltas, done and content_part.done."""
    async with serving(ANSWER) as (_, client):
        events = await stream_of(client, "hello")
    kinds = [event.type for event in events]
    assert kinds[2:4] == ["response.output_item.added", "response.content_part.added"]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == "A whole answer, long enough for a few deltas."


async def test_a_tool_loop_ends_with_what_the_tool_really_returned() -> None:
    """The turn follows from the input, the call id from the turn, and the answer from the tool's output."""
    async with serving(LOOP) as (server, client):
        first = await client.responses.create(model="m-1", input=[TASK], prompt_cache_key="c1", metadata={"run": "r"})
        call = first.output[-1]
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.name, call.call_id) == ("shell", "call_1_1")
        assert json.loads(call.arguments) == {"command": "ls ${HOME}; echo 1"}
        second = await client.responses.create(
            model="m-1", input=outputs_after(first, "exit 0\nfiles: 42"), prompt_cache_key="c1"
        )
        journal = server.journal()
    assert second.output_text == "There are 42 files."
    assert second.usage is not None
    assert (second.usage.input_tokens, second.usage.input_tokens_details.cached_tokens) == (70, 50)
    assert [(entry.conversation, entry.turn, entry.attempt, entry.outcome) for entry in journal] == [
        ("c1", 1, 1, "answered"),
        ("c1", 2, 1, "answered"),
    ]
    assert journal[0].metadata == {"run": "r"}
    assert journal[0].response_id == first.id != second.id


async def test_a_restarted_server_gives_the_same_answer() -> None:
    """The turn number is in the request, so another server process continues the conversation."""
    async with serving(LOOP) as (_, client):
        first = await client.responses.create(model="m-1", input=[TASK])
        again = await client.responses.create(model="m-1", input=[TASK])
    assert again.id != first.id
    async with serving(LOOP) as (_, client):
        second = await client.responses.create(model="m-1", input=outputs_after(first, "files: 7"))
    assert second.output_text == "There are 7 files."


async def test_previous_response_id_continues_a_stored_response() -> None:
    """The items of the named response come before the new ones; an unknown name is refused."""
    async with serving(LOOP) as (_, client):
        first = await client.responses.create(model="m-1", input=[TASK])
        output: Any = {"type": "function_call_output", "call_id": "call_1_1", "output": "files: 5"}
        second = await client.responses.create(model="m-1", input=[output], previous_response_id=first.id)
        assert second.output_text == "There are 5 files."
        with pytest.raises(openai.BadRequestError, match="not found"):
            await client.responses.create(model="m-1", input=[output], previous_response_id="resp_none")


async def test_an_output_that_was_not_expected_is_refused() -> None:
    """A scripted fake is strict: the wrong tool output is an error of the harness, and the journal says so."""
    async with serving(LOOP) as (server, client):
        first = await client.responses.create(model="m-1", input=[TASK])
        with pytest.raises(openai.BadRequestError, match=r"scenario expectation failed: .*files: \\\\d\+"):
            await client.responses.create(model="m-1", input=outputs_after(first, "no such directory"))
        assert server.journal()[-1].outcome == "expectation_failed"


async def test_turns_after_the_last_and_unmatched_requests_are_refused() -> None:
    """A left-over request fails instead of getting a made-up answer."""
    scenario = LOOP.replace("turns:", "match: {model: '^m-', text: 'count'}\n    turns:")
    async with serving(scenario) as (server, client):
        history: Any = [TASK, {"role": "assistant", "content": "1"}, TASK, {"role": "assistant", "content": "2"}, TASK]
        with pytest.raises(openai.BadRequestError, match="has 2 turns; turn 3 was asked for"):
            await client.responses.create(model="m-1", input=history)
        with pytest.raises(openai.BadRequestError, match="no scenario matches"):
            await client.responses.create(model="other", input=[TASK])
        with pytest.raises(openai.BadRequestError, match="no scenario matches"):
            await client.responses.create(model="m-1", input="something else")
        in_instructions = await client.responses.create(model="m-1", input="x", instructions="You count files.")
        assert in_instructions.status == "completed"
        assert [entry.outcome for entry in server.journal()] == ["refused", "refused", "refused", "answered"]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([TASK, {"type": "function_call", "call_id": "c9", "name": "shell", "arguments": "{}"}], "No tool output found"),
        ([TASK, {"type": "function_call_output", "call_id": "c9", "output": ""}], "No tool call found"),
        ([TASK, {"type": "reasoning", "id": "rs_1", "summary": []}], "without its required following item"),
        ([{**TASK, "id": "msg_1"}, {**TASK, "id": "msg_1"}], "Duplicate item found with id msg_1"),
    ],
)
async def test_unpaired_items_are_refused_as_the_real_api_does(items: Any, message: str) -> None:
    """A call without output, an output without call and a lone reasoning item do not pass unnoticed."""
    async with serving(LOOP) as (_, client):
        with pytest.raises(openai.BadRequestError, match=message):
            await client.responses.create(model="m-1", input=items)


async def test_a_key_is_required() -> None:
    """Without a bearer key the answer is a 401 in the API's form."""
    async with serving(LOOP) as (server, _), httpx2.AsyncClient() as plain:
        answer = await plain.post(f"{server.base_url}/responses", json={"model": "m", "input": "x"})
    assert answer.status_code == 401
    assert "API key" in answer.json()["error"]["message"]


async def test_repeated_turns_and_many_conversations_at_once() -> None:
    """`repeat` makes long runs from one entry, and conversations do not disturb each other."""
    scenario = """
scenarios:
  - name: long
    turns:
      - repeat: {times: 2000, turn: {calls: [{name: shell, arguments: {command: "echo ${turn}"}}]}}
      - text: after ${turn} turns
"""

    def history(turns: int) -> list[Any]:
        items: list[Any] = [TASK]
        for turn in range(1, turns + 1):
            call = {"type": "function_call", "call_id": f"call_{turn}_1", "name": "shell", "arguments": "{}"}
            items += [call, {"type": "function_call_output", "call_id": f"call_{turn}_1", "output": str(turn)}]
        return items

    async with serving(scenario) as (server, client):
        # By extra_body, because the SDK's conversion of typed input takes seconds for thousands of items.
        last = await client.responses.create(model="m", extra_body={"input": history(2000)})
        assert last.output_text == "after 2001 turns"
        answers = await asyncio.gather(
            *(
                client.responses.create(model="m", input=history(number), prompt_cache_key=f"c{number}", store=False)
                for number in range(40)
            )
        )
        calls = [answer.output[0].to_dict() for answer in answers]
        assert [call["call_id"] for call in calls] == [f"call_{number + 1}_1" for number in range(40)]
        assert len(server.journal()) == 41


async def test_malformed_arguments_and_given_call_ids_are_sent_as_written() -> None:
    """A string of arguments is not repaired, and a scripted call id may even repeat."""
    scenario = """
scenarios:
  - name: odd
    turns: [{calls: [{name: shel, arguments: '{"cmd": "ls', call_id: c1}, {name: shell, call_id: c1}]}]
"""
    async with serving(scenario) as (_, client):
        calls = [item.to_dict() for item in (await client.responses.create(model="m", input="x")).output]
    assert [(call["name"], call["arguments"], call["call_id"]) for call in calls] == [
        ("shel", '{"cmd": "ls', "c1"),
        ("shell", "{}", "c1"),
    ]


async def test_a_message_can_be_expected() -> None:
    """A turn may demand what a person or the harness said since the previous one."""
    scenario = "scenarios: [{name: m, turns: [{text: a}, {text: b, expect_message: 'schema'}]}]"
    async with serving(scenario) as (_, client):
        history: Any = [TASK, {"role": "assistant", "content": "a"}]
        fixed = await client.responses.create(
            model="m", input=[*history, {"role": "user", "content": "does not satisfy the schema"}]
        )
        assert fixed.output_text == "b"
        with pytest.raises(openai.BadRequestError, match="expects 'schema' in the messages"):
            await client.responses.create(model="m", input=[*history, {"role": "user", "content": "go on"}])


async def test_tests_can_look_inside() -> None:
    """The journal, the health and the last raw request of a conversation are served."""
    async with serving(LOOP) as (server, client), httpx2.AsyncClient() as plain:
        await client.responses.create(model="m", input=[TASK], prompt_cache_key="look")
        health = (await plain.get(f"{server.root_url}/scripted/health")).json()
        assert health == {"status": "ok", "model": "scripted, not a language model", "scenarios": ["loop"]}
        journal = (await plain.get(f"{server.root_url}/scripted/journal")).json()
        assert [entry["outcome"] for entry in journal] == ["answered"]
        last = await plain.get(f"{server.root_url}/scripted/last", params={"conversation": "look"})
        assert last.json()["input"] == [TASK]
        assert (await plain.get(f"{server.root_url}/scripted/last")).status_code == 404


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("scenarios: [{name: a, turns: [{txt: x}]}]", "scenarios.0.turns.0"),
        ("scenarios: [{name: a, match: {text: '('}, turns: [{text: x}]}]", "scenarios.0.match.text"),
        ("scenarios: [{name: a, turns: [{text: '${output:(}'}]}]", "scenarios.0.turns.0"),
        ("scenarios: [{name: a, turns: [{text: '${output:x'}]}]", "no closing brace"),
        ("scenarios: [{name: a, turns: [{}]}]", "needs `text` or `calls`"),
        ("scenarios: []", "scenarios"),
        ("[1", "not YAML"),
        ("3", "expected a mapping"),
    ],
)
def test_a_mistake_in_a_scenario_names_the_file_and_the_field(text: str, field: str, tmp_path: Path) -> None:
    """A person who mistypes a field is told where."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ScenarioError) as refused:
        load_scenarios(path)
    assert str(path) in str(refused.value)
    assert field in str(refused.value)


def test_a_missing_scenario_file_is_named(tmp_path: Path) -> None:
    """A file that is not there is a ScenarioError, not a traceback."""
    with pytest.raises(ScenarioError, match="cannot be read"):
        load_scenarios(tmp_path / "none.yaml")


async def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    """One line says where it is and what it is not; SIGTERM ends it cleanly; the journal is on disk."""
    scenario, journal = tmp_path / "s.yaml", tmp_path / "journal.jsonl"
    scenario.write_text(LOOP)
    command = [sys.executable, "-m", "workers.scripted_model", "--scenario", str(scenario), "--journal", str(journal)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        assert line.startswith("scripted model (not a language model) on http://127.0.0.1:")
        assert line.rstrip().endswith("/v1")
        async with AsyncOpenAI(api_key="k", base_url=line.split()[-1], max_retries=0) as client:
            await client.responses.create(model="m", input=[TASK])
            os.kill(process.pid, signal.SIGTERM)
            _, errors = await asyncio.to_thread(process.communicate, timeout=20)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, "")
    assert [json.loads(entry)["outcome"] for entry in journal.read_text().splitlines()] == ["answered"]
