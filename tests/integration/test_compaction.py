"""A conversation that is longer than a model's context is compacted by the endpoint, and the run goes on."""

from __future__ import annotations

import json
from typing import Any

from activities.model.transcript import TranscriptStore
from contracts.blob import BlobRef
from tests.integration.helpers import last_request
from tests.integration.stack import Stack
from tests.integration.test_durability import artifact


async def test_a_long_conversation_is_compacted_and_the_run_goes_on(stack: Stack) -> None:
    """Requests stay small, each command runs once, and the transcript in the store keeps everything."""
    agent: dict[str, Any] = {"model_settings": {"compact_tokens": 5000}}
    handle = await stack.start("long-conversation", agent)
    result = await stack.finish(handle, 60)
    assert (result["status"], result["output"], result["steps"]) == ("completed", "done", 13), result["reason"]
    assert await artifact(stack, result, "outputs/log") == b"".join(b"%d\n" % n for n in range(1, 13))
    assert stack.answered(handle) == list(range(1, 14))
    sent = await last_request(stack, handle)
    assert sent[0]["type"] == "compaction"
    assert len(json.dumps(sent)) < 40_000
    head = BlobRef.model_validate(result["checkpoint"]["transcript"])
    whole = [entry.item for entry in await TranscriptStore(stack.dev.blobs).load(head)]
    assert len([item for item in whole if item["type"] == "function_call_output"]) == 12
    assert len([item for item in whole if item["type"] == "compaction"]) >= 3


async def test_nothing_is_compacted_that_nobody_asked_to_be(stack: Stack) -> None:
    """The setting is off by itself: an endpoint may not know it."""
    handle = await stack.start("long-conversation")
    result = await stack.finish(handle, 60)
    assert result["status"] == "completed"
    sent = await last_request(stack, handle)
    assert len([item for item in sent if item["type"] == "function_call_output"]) == 12


async def test_another_run_goes_on_from_a_compacted_one(stack: Stack) -> None:
    """A fork sends what the endpoint compacted, and what came after."""
    agent: dict[str, Any] = {"model_settings": {"compact_tokens": 5000}}
    first = await stack.start("long-conversation", agent)
    await stack.finish(first, 60)
    handle = await stack.start("goes-on-compacted", from_checkpoint={"run_id": first.id, "step": 8})
    result = await stack.finish(handle, 60)
    assert (result["status"], result["output"]) == ("completed", "went on"), result["reason"]
    assert (await last_request(stack, handle))[0]["type"] == "compaction"
