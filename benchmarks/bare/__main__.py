"""`python -m benchmarks.bare --address HOST:PORT --role ROLE`: one plain Temporal worker in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Any

from temporalio.client import Client
from temporalio.worker import Worker

from benchmarks.bare.activities import answer, hop_host, hop_model, produce
from benchmarks.bare.workflows import HOST_QUEUE, MODEL_QUEUE, QUEUE, FanOut, TwoHops, WholeConversation

Crew = tuple[str, Sequence[Callable[..., Any]], Sequence[type]]

ROLES: dict[str, Crew] = {
    "workflow": (QUEUE, [], [TwoHops, FanOut, WholeConversation]),
    "model": (MODEL_QUEUE, [hop_model, answer], []),
    "sandbox": (HOST_QUEUE, [hop_host, produce], []),
}


async def work(address: str, role: str) -> None:
    """Work until SIGTERM."""
    client = await Client.connect(address)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    queue, activities, workflows = ROLES[role]
    async with Worker(client, task_queue=queue, activities=activities, workflows=workflows):
        await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare")
    parser.add_argument("--address", required=True)
    parser.add_argument("--role", required=True, choices=list(ROLES))
    given = parser.parse_args()
    asyncio.run(work(given.address, given.role))
