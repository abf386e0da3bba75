"""What is sent after an endpoint has compacted a conversation: the compaction, and all that follows."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest

from activities.model.repair import repair
from activities.model.request import build_request, since_compaction
from activities.model.transcript import Entry, Item
from contracts.agent import AgentSpec, ModelSettings
from contracts.prepare import ResolvedAgent
from workers.scripted_model.scenario import parse_scenarios
from workers.scripted_model.server import ScriptedModelServer

SAID: Item = {"type": "message", "role": "user", "content": "hello"}
CALL: Item = {"type": "function_call", "call_id": "a", "name": "shell", "arguments": "{}"}
OUTPUT: Item = {"type": "function_call_output", "call_id": "a", "output": "x"}
ANSWER: Item = {"type": "message", "role": "assistant", "content": []}


def compaction(name: str = "c") -> Item:
    """A compaction."""
    return {"type": "compaction", "id": name, "encrypted_content": name}


@pytest.mark.parametrize(
    ("items", "kept"),
    [
        ([], 0),
        ([SAID, CALL, OUTPUT], 3),
        ([SAID, CALL, OUTPUT, compaction(), ANSWER, SAID], 3),
        ([SAID, compaction("1"), ANSWER, SAID, compaction("2"), CALL, OUTPUT], 3),
        ([compaction()], 1),
    ],
)
def test_what_stands_before_the_last_compaction_is_not_sent(items: list[Item], kept: int) -> None:
    """The last counts, and it comes first."""
    assert since_compaction(items) == items[len(items) - kept :]


def test_no_output_is_left_without_its_call() -> None:
    """Also where an endpoint puts a compaction between them."""
    assert repair(since_compaction([SAID, CALL, compaction(), OUTPUT, SAID])) == [compaction(), SAID]


@pytest.mark.parametrize(("tokens", "sent"), [(None, None), (50_000, [{"type": "compaction", "compact_threshold": 50_000}])])
def test_it_is_only_asked_for_where_the_agent_says_so(tokens: int | None, sent: Any) -> None:
    """With the agent's number of tokens."""
    agent = ResolvedAgent(spec=AgentSpec(model_settings=ModelSettings(compact_tokens=tokens)), model="m", instructions="")
    body = build_request(agent, [Entry(1, "user", SAID)], "r", 1)["extra_body"]
    assert body.get("context_management") == sent


async def test_the_scripted_model_takes_back_only_its_own() -> None:
    """Whole or from the compaction on, it is the same turn; a forged one is refused, as the endpoint does."""
    scenarios = parse_scenarios(
        "scenarios: [{name: s, match: {text: hello}, turns: [{text: one}, {text: two}, {text: three}]}]", "test"
    )
    async with ScriptedModelServer(scenarios) as server, httpx.AsyncClient(headers={"authorization": "Bearer k"}) as client:

        async def ask(items: list[Item]) -> httpx.Response:
            asked = {
                "model": "m",
                "input": items,
                "context_management": [{"type": "compaction", "compact_threshold": 1}],
            }
            return await client.post(f"{server.base_url}/responses", json=asked)

        first = (await ask([SAID])).json()["output"]
        assert [item["type"] for item in first] == ["compaction", "message"]
        for items in ([SAID, *first, SAID], [*first, SAID]):
            second = (await ask(items)).json()["output"]
            assert second[-1]["content"][0]["text"] == "two"
        third = (await ask([*second, SAID])).json()["output"]
        assert third[-1]["content"][0]["text"] == "three"
        for content in ("", "scripted:", "scripted:" + base64.b64encode(b"[]").decode(), "other"):
            refused = await ask([{**compaction(), "encrypted_content": content}, SAID])
            assert refused.status_code == 400 and "could not be verified" in refused.text
