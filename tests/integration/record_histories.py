"""`python -m tests.integration.record_histories [CASE ...]`: record the histories that the replay test replays.

Run it when a workflow changes in a way that old histories need not follow (with a patch or a new worker version they must), and
say so in the commit. Names of recorded histories say what happened in them.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from temporalio.client import WorkflowFailureError

from tests.integration.away_support import allow, serving_both, waiting
from tests.integration.helpers import kill, sandboxes_of
from tests.integration.stack import QUEUE, Handle, Stack, make_stack

HISTORIES = Path(__file__).parent / "histories"


async def completed(stack: Stack) -> Handle:
    """A run with commands and a patch that completes."""
    return await _closed(await stack.start("files", run_id="completed"))


async def approved_and_denied(stack: Stack) -> Handle:
    """A run whose first command is approved and whose patch is denied."""
    approvals = {"tools": {"shell": "prompt", "apply_patch": "prompt"}}
    handle = await stack.start("replay", {"approvals": approvals}, run_id="approved-and-denied")
    for is_allowed in (True, False):
        status = await stack.until(handle, state="awaiting_approval")
        pending = status["pending_approvals"][0]
        decision = {
            "approval_id": pending["approval_id"],
            "arguments_digest": pending["arguments_digest"],
            "allow": is_allowed,
            "by": "ann",
        }
        await handle.execute_update("decide_approval", decision)
    return await _closed(handle)


async def talked_to(stack: Stack) -> Handle:
    """A run that is paused, given a message and more budget, resumed and stopped."""
    handle = await stack.start("replay-long", budget={"steps": 50}, run_id="talked-to")
    await stack.until(handle, state="running")
    await handle.execute_update("pause", {"by": "ann"})
    await stack.until(handle, state="paused")
    await handle.execute_update("send_message", {"text": "be quick"})
    await handle.execute_update("extend_budget", {"steps": 5})
    await handle.execute_update("resume", {})
    await asyncio.sleep(1)
    await handle.execute_update("stop", {"by": "ann", "reason": "seen enough"})
    return await _closed(handle)


async def out_of_budget(stack: Stack) -> Handle:
    """A run that its budget ends."""
    return await _closed(await stack.start("replay-long", budget={"steps": 3}, run_id="out-of-budget"))


async def cancelled(stack: Stack) -> Handle:
    """A run that is cancelled during a command."""
    handle = await stack.start("endless-command", run_id="cancelled")
    await stack.until(handle, step=1)
    await asyncio.sleep(1)
    await handle.cancel()
    return await _closed(handle)


async def failed(stack: Stack) -> Handle:
    """A run that the endpoint refuses."""
    return await _closed(await stack.start("bad-request-after-a-command", run_id="failed"))


async def bad_input(stack: Stack) -> Handle:
    """A run that never starts."""
    return await _closed(await stack.start_raw({"task": ""}, "bad-input"))


async def batch(stack: Stack) -> Handle:
    """A batch of three runs, two at a time, one of which fails."""
    items = [{"name": "a"}, {"name": "b"}, {"name": "c", "task": "Play [bad-request-after-a-command]."}]
    request = {"task": "Play [hello].", "items": items, "concurrency": 2}
    return await _closed(await stack.dev.client.start_workflow("AgentBatch", request, id="batch", task_queue=QUEUE))


async def recovered(stack: Stack) -> Handle:
    """A run whose sandbox is killed in the middle of its second command."""
    handle = await stack.start("told-of-a-loss", run_id="recovered")
    while not any((sandbox / "workspace/begun").exists() for sandbox in sandboxes_of(stack, handle.id)):
        await asyncio.sleep(0.05)
    kill(sandboxes_of(stack, handle.id)[0])
    return await _closed(handle)


async def put_away(stack: Stack) -> Handle:
    """A run whose sandbox is put away while it is paused."""
    handle = await stack.start("before-and-after", {"sandbox": {"idle_seconds": 1}}, run_id="put-away")
    await handle.execute_update("pause", {"by": "ann"})
    await stack.until(handle, state="paused", sandbox=None)
    await handle.execute_update("resume", {})
    return await _closed(handle)


async def forked(stack: Stack) -> Handle:
    """A run that goes on from a checkpoint of another."""
    await _closed(await stack.start("before-and-after", run_id="origin"))
    return await _closed(await stack.start("on-from-there", run_id="forked", from_checkpoint={"run_id": "origin", "step": 1}))


async def with_subagents(stack: Stack) -> Handle:
    """A run with two subagents whose outputs land in its workspace."""
    reader = {"name": "reader", "description": "Reads.", "workspace": "inputs"}
    return await _closed(await stack.start("fan-out", {"name": "lead", "subagents": [reader]}, run_id="with-subagents"))


async def paused_at_its_provider(stack: Stack) -> Handle:
    """A run whose sandbox is paused by its provider, and goes on."""
    return await _back_from(stack, "e2b", "paused-at-its-provider")


async def kept_as_an_image(stack: Stack) -> Handle:
    """A run whose sandbox is ended, and the next made of an image of it."""
    return await _back_from(stack, "modal", "kept-as-an-image")


async def _back_from(stack: Stack, provider: str, run_id: str) -> Handle:
    await stack.dev.running["sandbox-worker"].stop()
    with tempfile.TemporaryDirectory() as directory:
        async with serving_both(stack, Path(directory)) as away:
            is_away = away.one_is_paused if provider == "e2b" else away.one_is_kept
            handle = await waiting(away, provider, is_away, run_id)
            for step in (2, 3):
                await allow(stack, handle, step)
            return await _closed(handle)


CASES: tuple[Callable[[Stack], Awaitable[Handle]], ...] = (
    completed,
    approved_and_denied,
    talked_to,
    out_of_budget,
    cancelled,
    failed,
    bad_input,
    batch,
    recovered,
    put_away,
    forked,
    with_subagents,
    paused_at_its_provider,
    kept_as_an_image,
)
"""In their order, as the last ones take the place of the stack's own sandbox worker."""


async def _closed(handle: Handle) -> Handle:
    try:
        await handle.result()
    except WorkflowFailureError:
        return handle
    return handle


async def main(names: Sequence[str]) -> None:
    """Record the cases of these names, or every case."""
    HISTORIES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        stack = make_stack(Path(directory))
        async with stack.dev:
            for case in (case for case in CASES if case.__name__ in names or not names):
                handle = await case(stack)
                history = await handle.fetch_history()
                # No time in the archive, so that recording the same history again changes no byte.
                packed = gzip.compress(history.to_json().encode(), mtime=0)
                (HISTORIES / f"{handle.id}.json.gz").write_bytes(packed)
                print(f"{handle.id}: {len(history.events)} events, {len(packed)} bytes")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
