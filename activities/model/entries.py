"""Turning what the harness has to say into transcript entries, and writing them down where no model call follows."""

from __future__ import annotations

import time
from collections.abc import Sequence

from temporalio import activity

from activities.heartbeat import beating
from activities.model.transcript import Entry, Origin, TranscriptStore
from activities.store.blobs import BlobStore
from activities.store.checkpoints import CheckpointStore, RunEnd
from contracts.activity_names import RECORD_END
from contracts.model import NewItem, NoteItem, ToolOutputItem, UserItem
from contracts.prepare import RecordEndInput, RecordEndResult


async def entries_of(items: Sequence[NewItem], step: int, blobs: BlobStore) -> tuple[Entry, ...]:
    """Return the entries of new items. `step` is the step they are said before; a tool output belongs to the one that asked."""
    return tuple([await _entry(item, step, blobs) for item in items])


async def _entry(item: NewItem, step: int, blobs: BlobStore) -> Entry:
    match item:
        case ToolOutputItem():
            output = await blobs.get_text(item.output)
            return Entry(step - 1, "tool", {"type": "function_call_output", "call_id": item.call_id, "output": output})
        case UserItem():
            return await _message(step, "user", "user", item, blobs)
        case NoteItem():
            return await _message(step, "note", item.role, item, blobs)


async def _message(step: int, origin: Origin, role: str, item: UserItem | NoteItem, blobs: BlobStore) -> Entry:
    content = [{"type": "input_text", "text": await blobs.get_text(item.text)}]
    return Entry(step, origin, {"type": "message", "role": role, "content": content})


class RecordActivities:
    """Writes down how runs end."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._checkpoints = CheckpointStore(blobs)

    @activity.defn(name=RECORD_END.name)
    async def record_end(self, given: RecordEndInput) -> RecordEndResult:
        """Append the last items to the transcript, then write the checkpoint and the end. Repeating it gives the same."""
        async with beating():
            last = given.checkpoint
            if last.items:
                entries = await entries_of(last.items, last.step + 1, self._blobs)
                head = await TranscriptStore(self._blobs).append(last.transcript, entries, None)
                last = last.model_copy(update={"transcript": head, "items": ()})
            await self._checkpoints.put(given.run_id, given.chain, last)
            end = RunEnd(
                status=given.status,
                ended_at=time.time(),
                steps=last.step,
                artifacts=given.artifacts,
                output=given.output,
                egress_log=given.egress_log,
                inputs=given.inputs,
            )
            await self._checkpoints.end(given.run_id, given.chain, end)
            return RecordEndResult(checkpoint=last)
