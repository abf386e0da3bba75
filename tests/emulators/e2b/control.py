"""The emulator's control API: https://e2b.dev/docs/api-reference, of sandboxes only."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_plus

from aiohttp import web

from tests.emulators.e2b.backing import Backing

ENVD_VERSION = "0.6.7"
_ALPHABET = string.ascii_lowercase + string.digits


def api_error(status: int, message: str) -> web.Response:
    """Return an error as both APIs of E2B have it."""
    return web.json_response({"code": status, "message": message}, status=status)


@dataclass(frozen=True)
class Template:
    """What sandboxes can be made of."""

    name: str
    cpus: int = 2
    memory_mb: int = 512


@dataclass
class Box:
    """One sandbox as the control plane knows it."""

    id: str
    template: Template
    backing: Backing
    body: dict[str, Any]
    started: datetime
    ends: datetime
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    paused: bool = False
    connections: list[web.Request] = field(default_factory=list)

    @property
    def metadata(self) -> dict[str, str]:
        """What its maker said of it."""
        return dict(self.body.get("metadata") or {})

    def shown(self) -> dict[str, Any]:
        """Return the answer to making or reaching it."""
        return {
            "templateID": f"tpl-{self.template.name}",
            "alias": self.template.name,
            "sandboxID": self.id,
            "clientID": "emulator",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.token,
            "domain": None,
        }

    def described(self) -> dict[str, Any]:
        """Return what a list has of it."""
        return {
            **{name: value for name, value in self.shown().items() if name != "envdAccessToken"},
            "startedAt": self.started.isoformat(),
            "endAt": self.ends.isoformat(),
            "cpuCount": self.template.cpus,
            "memoryMB": self.template.memory_mb,
            "diskSizeMB": 10240,
            "state": "paused" if self.paused else "running",
            "metadata": self.metadata,
        }


@dataclass
class Account:
    """The one account: its sandboxes and its plan."""

    directory: Path
    api_key: str
    templates: dict[str, Template]
    max_hours: int = 24
    max_sandboxes: int = 100
    page: int = 100
    boxes: dict[str, Box] = field(default_factory=dict)
    answered: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def make(self, template: Template, body: dict[str, Any]) -> Box:
        """Start a sandbox."""
        name = "i" + "".join(secrets.choice(_ALPHABET) for _ in range(20))
        backing = Backing(self.directory / name)
        await backing.start()
        now = datetime.now(UTC)
        box = Box(name, template, backing, body, now, now + timedelta(seconds=body.get("timeout", 300)))
        self.boxes[name] = box
        backing.go(self._expire(box))
        return box

    async def end(self, box: Box) -> None:
        """End a sandbox and every connection to it."""
        if self.boxes.pop(box.id, None) is not None:
            for request in list(box.connections):
                if request.transport is not None:
                    request.transport.abort()
            await box.backing.end()

    async def _expire(self, box: Box) -> None:
        while self.boxes.get(box.id) is box:
            if not box.paused and datetime.now(UTC) >= box.ends:
                if box.body.get("autoPause"):
                    await self.pause(box)
                else:
                    # Not waited for: the sandbox waits for this very task.
                    self._ending = asyncio.create_task(self.end(box))
                    return
            await asyncio.sleep(0.02)

    async def pause(self, box: Box) -> None:
        """Stop a sandbox."""
        box.paused = True
        await box.backing.freeze(True)

    async def keep(self, box: Box, seconds: int, *, shorter: bool) -> None:
        """Let a sandbox live so many seconds from now, but no longer than the plan has it; a paused one goes on."""
        now = datetime.now(UTC)
        was_paused = box.paused
        if was_paused:
            box.started = box.ends = now
        end = min(now + timedelta(seconds=seconds), box.started + timedelta(hours=self.max_hours))
        if shorter or end > box.ends:
            box.ends = end
        if was_paused:
            await box.backing.freeze(False)
            box.paused = False


def _filters(text: str) -> dict[str, str]:
    """Read a metadata filter, whose names and values are quoted twice."""
    return {
        unquote(unquote_plus(name)): unquote(unquote_plus(value))
        for name, value in (part.split("=", 1) for part in text.split("&"))
    }


def routes(account: Account) -> web.RouteTableDef:
    """Return the control API."""
    table = web.RouteTableDef()

    def known(handler: Callable[[web.Request, Box], Any]) -> Callable[[web.Request], Any]:
        async def find(request: web.Request) -> web.StreamResponse:
            box = account.boxes.get(request.match_info["id"])
            if box is None:
                return api_error(404, f"Sandbox \"{request.match_info['id']}\" doesn't exist or you don't have access to it")
            answer: web.StreamResponse = await handler(request, box)
            return answer

        return find

    @table.post("/sandboxes")  # as older SDKs ask, such as 2.31
    @table.post("/v2/sandboxes")
    async def create(request: web.Request) -> web.Response:
        body = await request.json()
        template = account.templates.get(body["templateID"])
        if template is None:
            return api_error(404, f"template '{body['templateID']}' not found")
        if body.get("timeout", 300) > account.max_hours * 3600:
            return api_error(400, f"Timeout cannot be greater than {account.max_hours} hours")
        key = request.headers.get("Idempotency-Key")
        if key in account.answered:
            return web.json_response(account.answered[key], status=201)
        if len(account.boxes) >= account.max_sandboxes:
            return api_error(
                429,
                f"you have reached the maximum number of concurrent E2B sandboxes ({account.max_sandboxes}). If you need more, "
                "please contact us at 'https://e2b.dev/docs/getting-help'",
            )
        shown = (await account.make(template, body)).shown()
        if key is not None:
            account.answered[key] = shown
        return web.json_response(shown, status=201)

    @table.get("/v2/sandboxes")
    async def show(request: web.Request) -> web.Response:
        query = request.query
        wanted = _filters(query["metadata"]) if query.get("metadata") else {}
        states = query.get("state", "running,paused").split(",")
        found = [box for box in account.boxes.values() if wanted.items() <= box.metadata.items()]
        found = [box for box in found if ("paused" if box.paused else "running") in states]
        found.sort(key=lambda box: (box.started, box.id), reverse=query.get("order") != "asc")
        with contextlib.suppress(ValueError):
            after = base64.urlsafe_b64decode(query.get("nextToken", "")).decode()
            found = found[[box.id for box in found].index(after) + 1 :]
        limit = min(int(query.get("limit", 100)), account.page)
        more = {"x-next-token": base64.urlsafe_b64encode(found[limit - 1].id.encode()).decode()} if len(found) > limit else {}
        return web.json_response([box.described() for box in found[:limit]], headers=more)

    async def detail(request: web.Request, box: Box) -> web.Response:
        more = {"envdAccessToken": box.token, "allowInternetAccess": box.body.get("allow_internet_access")}
        return web.json_response({**box.described(), **more})

    async def kill(request: web.Request, box: Box) -> web.Response:
        await account.end(box)
        return web.Response(status=204)

    async def timeout(request: web.Request, box: Box) -> web.Response:
        if box.paused:
            return api_error(409, f"Sandbox {box.id} is paused")
        await account.keep(box, (await request.json())["timeout"], shorter=True)
        return web.Response(status=204)

    async def connect(request: web.Request, box: Box) -> web.Response:
        seconds = (await request.json()).get("timeout", 300)
        if seconds > account.max_hours * 3600:
            return api_error(400, f"Timeout cannot be greater than {account.max_hours} hours")
        status = 201 if box.paused else 200
        await account.keep(box, seconds, shorter=False)
        return web.json_response(box.shown(), status=status)

    async def pause(request: web.Request, box: Box) -> web.Response:
        if box.paused:
            return api_error(409, f"Sandbox {box.id} is already paused")
        await account.pause(box)
        return web.Response(status=204)

    async def expire(request: web.Request, box: Box) -> web.Response:
        box.ends = datetime.now(UTC)
        while box.id in account.boxes and not box.paused:
            await asyncio.sleep(0.01)
        return web.Response(status=204)

    table.get("/sandboxes/{id}")(known(detail))
    table.delete("/sandboxes/{id}")(known(kill))
    table.post("/sandboxes/{id}/timeout")(known(timeout))
    table.post("/sandboxes/{id}/pause")(known(pause))
    for path in ("/v2/sandboxes/{id}/connect", "/sandboxes/{id}/connect", "/sandboxes/{id}/resume"):
        table.post(path)(known(connect))
    table.post("/_emulator/sandboxes/{id}/kill")(known(kill))
    table.post("/_emulator/sandboxes/{id}/expire")(known(expire))
    return table
