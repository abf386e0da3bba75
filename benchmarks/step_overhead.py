"""Harness time per step, beside two bare Temporal activity hops on the same server.

A step is taken from the server's own clock in the histories: from the scheduling of one `call_model` to that of the next, so the
model call, the command, both workflow tasks, the search attributes and the store's writes are all in it. Two things that are not
the harness's are taken off, and both are measured without the harness, so that whatever the harness adds to them stays in:

- the endpoint's service time: the run's own requests, sent again over a plain socket connection to the same endpoint. What the
  OpenAI SDK costs in the model worker is not taken off.
- the command's own time: `bash -c true` started on the host. What the sandbox costs is not taken off.

Rounds of product and baseline alternate. Times are medians over all steps of all rounds; the ratio is the median of the rounds'.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import time
from itertools import chain
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from benchmarks.histories import run_cost
from benchmarks.registry import Say
from benchmarks.report import Metric
from benchmarks.stack import BenchStack, bench_stack, shell_steps
from contracts.activity_names import CALL_MODEL

ROUNDS = 8
STEPS = 20
SCENARIO = "step_overhead"
COMMAND = ["bash", "-c", "true"]
BASELINE = "two_bare_hops"
TARGET = 2.0


async def measure(say: Say) -> dict[str, Metric]:
    """Measure, in about a minute."""
    steps: list[list[float]] = []
    hops: list[list[float]] = []
    served: list[float] = []
    commands: list[float] = []
    async with bench_stack([shell_steps(SCENARIO, STEPS, "true")]) as stack:
        say("warming up")
        await _product_round(stack)
        await _bare_round(stack)
        for n in range(ROUNDS):
            run_id, took = await _product_round(stack)
            steps.append(took)
            hops.append(await _bare_round(stack))
            served += await asyncio.to_thread(_service_times, stack.model_url(), run_id)
            commands += await asyncio.to_thread(_command_times)
            say(f"round {n + 1} of {ROUNDS}: {median(took):.1f} ms a step, {median(hops[-1]):.1f} ms two hops")
    model, command = median(served), median(commands)
    say(f"taken off each step: {model:.2f} ms that the endpoint takes, {command:.2f} ms that the command takes")
    whole, two_hops = median(chain(*steps)), median(chain(*hops))
    # Round by round, so that a load that comes and goes falls on both sides alike.
    ratio = median((median(took) - model - command) / median(bare) for took, bare in zip(steps, hops, strict=True))
    return {
        "ratio": Metric(value=ratio, unit="ratio", target=TARGET, baseline=BASELINE, baseline_value=1.0),
        "step_ms": Metric(
            value=whole - model - command, unit="ms", target=TARGET * two_hops, baseline=BASELINE, baseline_value=two_hops
        ),
        "whole_step_ms": Metric(
            value=whole, unit="ms", target=TARGET * two_hops + model + command, baseline=BASELINE, baseline_value=two_hops
        ),
    }


async def _product_round(stack: BenchStack) -> tuple[str, list[float]]:
    handle = await stack.run(SCENARIO, STEPS)
    cost = await run_cost(stack.dev.client, handle, CALL_MODEL.name)
    return handle.id, [step.milliseconds for step in cost.steps]


async def _bare_round(stack: BenchStack) -> list[float]:
    # One more, because the last has no successor; a run's last answer stands there for the product.
    handle = await stack.run_bare("TwoHops", STEPS + 1)
    return [step.milliseconds for step in (await run_cost(stack.bare, handle, "hop_model")).steps]


def _service_times(base_url: str, run_id: str) -> list[float]:
    """Send each request of a run once more, on one connection, and return how long each answer took in milliseconds."""
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    connection.request("GET", f"/scripted/last?conversation={run_id[:64]}")
    last: dict[str, Any] = json.loads(connection.getresponse().read())
    # Each earlier request was the beginning of the last one: the task, then two items (a call, its output) for each step.
    headers = {"Authorization": "Bearer scripted", "Content-Type": "application/json"}
    took = []
    for items in range(1, len(last["input"]), 2):
        body = json.dumps({**last, "input": last["input"][:items]})
        started = time.perf_counter()
        connection.request("POST", f"{address.path}/responses", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        took.append((time.perf_counter() - started) * 1000)
        if answer.status != 200 or b"response.completed" not in text:
            raise RuntimeError(f"the endpoint answered {answer.status} to a request it had answered before: {text[:300]!r}")
    connection.close()
    return took


def _command_times() -> list[float]:
    took = []
    for _ in range(STEPS):
        started = time.perf_counter()
        os.waitpid(os.posix_spawnp(COMMAND[0], COMMAND, os.environ), 0)
        took.append((time.perf_counter() - started) * 1000)
    return took
