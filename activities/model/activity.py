"""The `call_model` activity: one model call, appended to the transcript, the same however often it is retried."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from openai import AsyncOpenAI
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.agents import AgentReader
from activities.governance.redaction import Redactor
from activities.heartbeat import Beat, beating
from activities.model.calls import BadJson, JudgedCall, judge_calls, read_json, schema_faults, store_calls, unique_call_ids
from activities.model.client import Answer, ask_in_background, ask_streaming
from activities.model.entries import entries_of
from activities.model.errors import ReplyFault, translate
from activities.model.prices import PriceTable
from activities.model.reply import Reply, read_reply, sent_back
from activities.model.request import build_request
from activities.model.transcript import Entry, TranscriptStore
from activities.store.blobs import BlobStore
from activities.store.checkpoints import CheckpointStore
from activities.tools.definitions import definitions
from contracts.activity_names import CALL_MODEL
from contracts.model import CallModelInput, CallModelResult
from contracts.prepare import ResolvedAgent
from contracts.run import Checkpoint

_ANSWER_INLINE = 32 * 1024
"""Bytes of an answer's text carried inline: a result is read by people and services without the store where that is possible."""


class ModelActivities:
    """Holds the model key (inside the SDK's client) and nothing that runs model-written code."""

    def __init__(self, client: AsyncOpenAI, blobs: BlobStore, prices: PriceTable) -> None:
        self._client = client
        self._blobs = blobs
        self._prices = prices
        self._agents = AgentReader(blobs)
        self._transcripts = TranscriptStore(blobs)
        self._checkpoints = CheckpointStore(blobs)
        # Some endpoints repeat the key that they refuse.
        self._hide = Redactor([client.api_key, client.base_url.password])

    @activity.defn(name=CALL_MODEL.name)
    async def call_model(self, call: CallModelInput) -> CallModelResult:
        """Ask the model, append its answer, and return what it wants.

        The result is recorded under the call's key before it is returned: a retry after that returns the record and asks nothing.
        Raises ApplicationError `ModelUnavailable` (retried) or `ModelStopped`.
        """
        async with beating() as beat:
            # Before the model is asked: with a store that takes nothing, no call is paid again and again.
            recorded, _ = await asyncio.gather(
                self._blobs.get_record(f"model-call/{call.key}"),
                self._checkpoints.put(call.run_id, call.chain, _checkpoint_before(call)),
            )
            if recorded is None:
                result = await self._call(call, beat)
                recorded = await self._blobs.put_record(f"model-call/{call.key}", result.model_dump(mode="json"))
            return CallModelResult.model_validate(recorded)

    async def _call(self, call: CallModelInput, beat: Beat) -> CallModelResult:
        agent = await self._agents.get(call.agent)
        entries = await self._transcripts.load(call.head)
        new = await entries_of(call.items, call.step, self._blobs)
        request = build_request(agent, (*entries, *new), call.run_id, call.step)
        started = time.monotonic()
        answer = await self._ask(agent, request, call.key, beat)
        seconds = time.monotonic() - started
        reply, calls, schema_fault = await self._read(agent, answer, _call_ids(entries))
        usage = reply.usage.model_copy(update={"cost_usd": self._prices.cost(agent.model, reply.usage)})
        head = await self._transcripts.append(
            call.head,
            (*new, *(Entry(call.step, "model", sent_back(item)) for item in reply.output)),
            {
                "step": call.step,
                "response_id": reply.id,
                "model": reply.model,
                "finish": reply.finish,
                "usage": usage.model_dump(mode="json"),
                "label": answer.label,
            },
        )
        return CallModelResult(
            head=head,
            items_total=len(entries) + len(new) + len(reply.output),
            response_id=reply.id,
            finish=reply.finish,
            incomplete_reason=reply.incomplete_reason,
            text=await self._blobs.put_text(reply.text, _ANSWER_INLINE) if reply.text else None,
            calls=await store_calls(calls, self._blobs),
            usage=usage,
            seconds=round(seconds, 3),
            schema_fault=schema_fault,
            model=reply.model,
            model_label=answer.label,
        )

    async def _ask(self, agent: ResolvedAgent, request: dict[str, Any], key: str, beat: Beat) -> Answer:
        settings = agent.spec.model_settings
        try:
            if settings.background:
                return await ask_in_background(self._client, request, key, settings.timeout_seconds, beat, self._blobs)
            return await ask_streaming(self._client, request, key, settings.timeout_seconds, beat)
        except ApplicationError:
            raise
        except Exception as error:  # noqa: BLE001 - translate() decides what each means
            # The message holds the causes; a chain of stack traces would only bury it.
            raise translate(error, hide=self._hide) from None

    async def _read(self, agent: ResolvedAgent, answer: Answer, taken: set[str]) -> tuple[Reply, list[JudgedCall], str | None]:
        try:
            # A long answer takes its time, and other runs' calls and heartbeats go on meanwhile.
            return await asyncio.to_thread(_read, agent, answer, taken)
        except Exception as error:  # noqa: BLE001 - whatever a model wrote: it is asked again, a bounded number of times
            fault = ReplyFault(f"the answer cannot be read: {type(error).__name__}: {error}")
            raise translate(fault, hide=self._hide) from None


def _read(agent: ResolvedAgent, answer: Answer, taken: set[str]) -> tuple[Reply, list[JudgedCall], str | None]:
    """Return an answer, its calls, and how it does not satisfy the output schema. `taken` are the call ids used so far."""
    reply = read_reply(answer.response, agent.model)
    output, repeated = unique_call_ids(reply.output, taken)
    calls = judge_calls(output, definitions(agent), repeated)
    return replace(reply, output=tuple(output)), calls, _schema_fault(agent, reply)


def _checkpoint_before(call: CallModelInput) -> Checkpoint:
    return Checkpoint(step=call.step - 1, transcript=call.head, items=call.items, usage=call.usage, snapshot=call.snapshot)


def _call_ids(entries: Sequence[Entry]) -> set[str]:
    return {str(e.item["call_id"]) for e in entries if e.origin == "model" and "call_id" in e.item}


def _schema_fault(agent: ResolvedAgent, reply: Reply) -> str | None:
    """Say why a final answer does not satisfy the agent's output schema, or None when it does or there is none."""
    schema = agent.spec.output_schema
    if schema is None or reply.finish != "final":
        return None
    try:
        value = read_json(reply.text)
    except BadJson as error:
        return f"the answer: {error}"
    faults = schema_faults(value, schema)
    if not faults:
        return None
    return "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
