"""A response in the making: its events appear one by one, and connections follow them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from workers.scripted_model.conversation import CreateRequest, InputItem
from workers.scripted_model.replies import TERMINAL_EVENTS, JsonObject, Reply


class Generation:
    """One response. A background one goes on when the connection that asked for it is gone."""

    def __init__(self, request: CreateRequest, items: Sequence[InputItem], conversation: str, turn: int, attempt: int) -> None:
        self.request = request
        self.items = list(items)
        self.conversation = conversation
        self.turn = turn
        self.attempt = attempt
        self.response: JsonObject = {}
        self.output: list[InputItem] = []
        self.events: list[JsonObject] = []
        self.over = False
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def response_id(self) -> str:
        """Return the id of the response."""
        return str(self.response["id"])

    @property
    def background(self) -> bool:
        """Tell whether the response was asked for in the background."""
        return bool(self.request.background)

    def start(self, response: JsonObject, events: Sequence[JsonObject], reply: Reply) -> None:
        """Begin to make `events` appear, at the pace the reply gives."""
        self.response = response
        self._task = asyncio.create_task(self._appear(events, reply))

    async def cancel(self) -> None:
        """Stop where it is. A response that is over stays as it is."""
        if self._task is not None and not self.over:
            self._task.cancel()
            await asyncio.wait([self._task])
            self.response = {**self.response, "status": "cancelled"}
            await self._finish()

    async def follow(self, first: int = 0) -> AsyncIterator[JsonObject]:
        """Yield the events from number `first` on as they appear, until the response is over."""
        number = first
        while True:
            while number < len(self.events):
                yield self.events[number]
                number += 1
            if self.over:
                return
            async with self._changed:
                # The event may have come while the lock was being taken; without this look the wait would miss it.
                if number >= len(self.events) and not self.over:
                    await self._changed.wait()

    async def _appear(self, events: Sequence[JsonObject], reply: Reply) -> None:
        waited = False
        for event in events:
            kind = str(event["type"])
            if reply.delay_s and not waited and kind.startswith(("response.output_item", "response.failed", "error")):
                # The endpoint acknowledges a request at once; what takes time is the model.
                waited = True
                await asyncio.sleep(reply.delay_s)
            if reply.chunk_delay_s and kind.endswith(".delta"):
                await asyncio.sleep(reply.chunk_delay_s)
            response = event.get("response")
            if isinstance(response, dict):
                self.response = response
            if kind == "error":
                error = {"code": event["code"], "message": event["message"]}
                self.response = {**self.response, "status": "failed", "error": error}
            self.events.append(event)
            if kind in TERMINAL_EVENTS:
                output = self.response["output"]
                self.output = [InputItem.model_validate(item) for item in output] if isinstance(output, list) else []
            async with self._changed:
                self._changed.notify_all()
        await self._finish()

    async def _finish(self) -> None:
        self.over = True
        async with self._changed:
            self._changed.notify_all()
