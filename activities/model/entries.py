"""Turning what the harness has to say into transcript entries, and writing them down where no model call follows."""

from __future__ import annotations

from collections.abc import Sequence

from temporalio import activity

from activities.heartbeat import beating
from activities.model.transcript import Entry, Origin, TranscriptStore
from activities.store.blobs import BlobStore
from contracts.activity_names import EXTEND_TRANSCRIPT
from contracts.model import ExtendTranscriptInput, ExtendTranscriptResult, NewItem, NoteItem, ToolOutputItem, UserItem


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
            return await _message(step, "note", "developer", item, blobs)


async def _message(step: int, origin: Origin, role: str, item: UserItem | NoteItem, blobs: BlobStore) -> Entry:
    content = [{"type": "input_text", "text": await blobs.get_text(item.text)}]
    return Entry(step, origin, {"type": "message", "role": role, "content": content})


class TranscriptActivities:
    """Writes a transcript without asking a model."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    @activity.defn(name=EXTEND_TRANSCRIPT.name)
    async def extend_transcript(self, given: ExtendTranscriptInput) -> ExtendTranscriptResult:
        """Append items, so that a run that ends after its tool calls keeps what they gave. Repeating it gives the same head."""
        async with beating():
            entries = await entries_of(given.items, given.step + 1, self._blobs)
            head = await TranscriptStore(self._blobs).append(given.head, entries, None)
            return ExtendTranscriptResult(head=head)
