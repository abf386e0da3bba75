"""The workflows that Caisson is compared with. They run in Temporal's workflow sandbox, so this imports temporalio alone."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import workflow

QUEUE = "bare"
MODEL_QUEUE = f"{QUEUE}-model"
HOST_QUEUE = f"{QUEUE}-sandbox.host"

_TIMEOUT = timedelta(seconds=60)
_HOST_TIMEOUT = timedelta(seconds=30)


@workflow.defn
class TwoHops:
    """Two activities that do nothing, one after the other, on the queues of two other processes: the least a step can be."""

    @workflow.run
    async def run(self, count: int) -> int:
        """Do `count` pairs of hops."""
        for n in range(count):
            await workflow.execute_activity("hop_model", n, task_queue=MODEL_QUEUE, start_to_close_timeout=_TIMEOUT)
            await workflow.execute_activity(
                "hop_host",
                n,
                task_queue=HOST_QUEUE,
                start_to_close_timeout=_TIMEOUT,
                schedule_to_start_timeout=_HOST_TIMEOUT,
            )
        return count


@workflow.defn
class FanOut:
    """As many child workflows at one time, each of which does `pairs` pairs of hops: the least that subagents can be."""

    @workflow.run
    async def run(self, children: int, pairs: int) -> int:
        """Start all, and wait for all."""
        run_id = workflow.info().workflow_id
        hops = [workflow.execute_child_workflow("TwoHops", pairs, id=f"{run_id}/{n}") for n in range(children)]
        await asyncio.gather(*hops)
        return children


@workflow.defn
class WholeConversation:
    """An agent loop that passes everything said so far to each model call, as the integrations of agent frameworks do."""

    @workflow.run
    async def run(self, count: int, output_bytes: int) -> int:
        """Do `count` steps, each with a tool output of `output_bytes`."""
        conversation: list[dict[str, str]] = [{"role": "user", "content": "Do the work."}]
        for n in range(count):
            call: dict[str, str] = await workflow.execute_activity(
                "answer", conversation, task_queue=MODEL_QUEUE, start_to_close_timeout=_TIMEOUT
            )
            output: str = await workflow.execute_activity(
                "produce",
                args=[n, output_bytes],
                task_queue=HOST_QUEUE,
                start_to_close_timeout=_TIMEOUT,
                schedule_to_start_timeout=_HOST_TIMEOUT,
            )
            conversation += [call, {"type": "function_call_output", "call_id": call["call_id"], "output": output}]
        return count
