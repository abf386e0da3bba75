"""`python -m tests.integration.record_histories`: record the histories that the replay test replays.

Run it when a workflow changes in a way that old histories need not follow (with a patch or a new worker version they must), and
say so in the commit. Names of recorded histories say what happened in them.
"""

from __future__ import annotations

import asyncio
import gzip
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from temporalio.client import WorkflowFailureError

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
    for allow in (True, False):
        status = await stack.until(handle, state="awaiting_approval")
        pending = status["pending_approvals"][0]
        decision = {
            "approval_id": pending["approval_id"],
            "arguments_digest": pending["arguments_digest"],
            "allow": allow,
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
)


async def _closed(handle: Handle) -> Handle:
    try:
        await handle.result()
    except WorkflowFailureError:
        return handle
    return handle


async def main() -> None:
    """Record every case."""
    HISTORIES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        stack = make_stack(Path(directory))
        async with stack.dev:
            for case in CASES:
                handle = await case(stack)
                history = await handle.fetch_history()
                # No time in the archive, so that recording the same history again changes no byte.
                packed = gzip.compress(history.to_json().encode(), mtime=0)
                (HISTORIES / f"{handle.id}.json.gz").write_bytes(packed)
                print(f"{handle.id}: {len(history.events)} events, {len(packed)} bytes")


if __name__ == "__main__":
    asyncio.run(main())
