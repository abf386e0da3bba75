"""The emulator as one HTTP server: the control API, and the proxy in front of every sandbox's envd."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from tests.emulators.e2b import control, faults, files, process
from tests.emulators.e2b.connect import RpcError, answer_stream, answer_unary
from tests.emulators.e2b.control import Account, Box, Template, api_error

API_KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
"""The one key it takes; it is nobody's."""
SERVER = "e2b-emulator (of the Caisson tests; not E2B)"


class Emulator:
    """The server, while the block runs. Its sandboxes lie below `directory`."""

    def __init__(self, directory: Path, *, port: int = 0) -> None:
        templates = [Template("base"), Template("large", cpus=8, memory_mb=8192)]
        self.account = Account(directory, API_KEY, {template.name: template for template in templates})
        self.faults = faults.Faults()
        self._port = port
        self._runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=1)

    @property
    def url(self) -> str:
        """Where it is: the API's URL, and the sandboxes'."""
        return f"http://127.0.0.1:{self._port}"

    async def listen(self) -> None:
        """Take connections (again)."""
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        assert self._runner.addresses is not None
        self._port = self._runner.addresses[0][1]

    async def deafen(self) -> None:
        """Take no connections, and end those that are there."""
        for site in list(self._runner.sites):
            await site.stop()
        assert self._runner.server is not None
        for connection in list(self._runner.server.connections):
            connection.force_close()
            if connection.transport is not None:
                connection.transport.abort()

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await self.listen()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for box in list(self.account.boxes.values()):
            await self.account.end(box)
        await self._runner.cleanup()
        # The SDK leaves tasks whose exception nobody asks for; they are told of now, and not in the middle of another test.
        gc.collect()

    def _application(self) -> web.Application:
        application = web.Application(
            client_max_size=256 << 20, middlewares=[faults.middleware(self.faults), _key_checked(self.account.api_key)]
        )
        application.on_response_prepare.append(_label)
        application.add_routes(faults.routes(self.faults))
        application.add_routes(control.routes(self.account))
        at_envd = [
            web.get("/health", self._health),
            web.get("/files", self._envd(files.download)),
            web.post("/files", self._envd(files.upload)),
            web.post("/process.Process/StreamInput", self._envd(_stream_input)),
        ]
        for service, methods in (("process.Process", process.UNARY), ("filesystem.Filesystem", files.UNARY)):
            at_envd += [web.post(f"/{service}/{name}", self._envd(_unary(method))) for name, method in methods.items()]
        at_envd += [
            web.post(f"/process.Process/{name}", self._envd(_stream(method))) for name, method in process.STREAMING.items()
        ]
        application.add_routes(at_envd)
        application.router.add_route("*", "/{rest:.*}", _not_there)
        return application

    def _envd(self, handler: Callable[[Box, web.Request], Awaitable[web.StreamResponse]]) -> Callable[..., Any]:
        """Return a handler that finds the sandbox first, as E2B's proxy does, and checks the token, as envd does."""

        async def find(request: web.Request) -> web.StreamResponse:
            box = self._find(request)
            if isinstance(box, web.Response):
                return box
            if request.headers.get("X-Access-Token") != box.token:
                return api_error(401, "unauthorized access, please provide a valid access token or method signing if supported")
            with _connected(box, request):
                return await handler(box, request)

        return find

    async def _health(self, request: web.Request) -> web.Response:
        box = self._find(request)
        return box if isinstance(box, web.Response) else web.Response(status=204)

    def _find(self, request: web.Request) -> Box | web.Response:
        name = request.headers.get("E2b-Sandbox-Id", "")
        box = self.account.boxes.get(name)
        if box is None or box.paused:
            return web.json_response({"sandboxId": name, "message": "The sandbox was not found", "code": 502}, status=502)
        return box


@contextmanager
def _connected(box: Box, request: web.Request) -> Iterator[None]:
    box.connections.append(request)
    try:
        yield
    finally:
        box.connections.remove(request)


def _unary(method: Any) -> Callable[[Box, web.Request], Awaitable[web.StreamResponse]]:
    async def answer(box: Box, request: web.Request) -> web.StreamResponse:
        return await answer_unary(box, request, method)

    return answer


def _stream(method: Any) -> Callable[[Box, web.Request], Awaitable[web.StreamResponse]]:
    async def answer(box: Box, request: web.Request) -> web.StreamResponse:
        return await answer_stream(box, request, method)

    return answer


async def _stream_input(box: Box, request: web.Request) -> web.StreamResponse:
    from tests.emulators.e2b.connect import enveloped

    try:
        body = enveloped(await process.stream_input(box, request)) + enveloped({}, 2)
    except RpcError as error:
        body = enveloped({"error": error.shown()}, 2)
    return web.Response(body=body, content_type="application/connect+json")


async def _label(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER


async def _not_there(request: web.Request) -> web.Response:
    return api_error(501, f"the emulator has no {request.method} {request.path}")


def _key_checked(key: str) -> Callable[..., Any]:
    @web.middleware
    async def check(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        given = request.headers.get("X-API-KEY")
        if "/sandboxes" in request.path and not request.path.startswith("/_emulator/") and given != key:
            return api_error(401, f"Invalid API key, please visit https://e2b.dev/docs/api-key to get your API key: {given}")
        return await handler(request)

    return check
