"""The emulator as two gRPC servers: the control plane, and the one worker that all sandboxes are on."""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from grpclib.protocol import H2Protocol
from grpclib.server import Server
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_pb2 as pb
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from tests.emulators.modal.control import Account, Control
from tests.emulators.modal.faults import Faults, Service
from tests.emulators.modal.worker import Router

TOKEN_ID, TOKEN_SECRET = "ak-0123456789abcdefghijkl", "as-0123456789abcdefghijkl"
"""The one token it takes; it is nobody's."""


class _Server(Server):
    """A gRPC server that knows its connections."""

    def __init__(self, service: Service) -> None:
        super().__init__([service], status_details_codec=custom_detail_codec)
        self.connections: list[H2Protocol] = []

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        self.connections.append(protocol)
        return protocol


class _Listener:
    """One server on one port, which it keeps when it goes deaf for a while."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server: _Server | None = None
        self.port = 0

    async def listen(self) -> None:
        """Take connections (again)."""
        self._server = _Server(self._service)
        # Without a protocol that it names, asyncio leaves its connections slow (Nagle's algorithm, 40 ms for an answer).
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", self.port))
        self.port = listening.getsockname()[1]
        await self._server.start(sock=listening)

    async def deafen(self) -> None:
        """Take no connections, and end those that are there, in the middle of what they carry."""
        if self._server is not None:
            server, self._server = self._server, None
            server.close()
            for protocol in server.connections:
                # One that has closed already has no transport any more.
                transport = getattr(protocol.connection, "_transport", None)
                if transport is not None:
                    transport.abort()
            await server.wait_closed()


class Emulator:
    """The servers, while the block runs. Its sandboxes lie below `directory`."""

    def __init__(self, directory: Path) -> None:
        self.account = Account(directory, (TOKEN_ID, TOKEN_SECRET))
        self.faults = Faults()
        control, router = Control(self.account), Router(self.account)
        self.control = _Listener(Service(ModalClientBase, control.calls(), control.check, self.faults))
        self.worker = _Listener(Service(TaskCommandRouterBase, router.calls(), router.check, self.faults))

    @property
    def url(self) -> str:
        """Where the control plane is."""
        return f"http://127.0.0.1:{self.control.port}"

    @property
    def calls(self) -> list[str]:
        """The names of all calls so far."""
        return self.faults.calls

    async def listen(self) -> None:
        """Take connections (again)."""
        await self.control.listen()
        await self.worker.listen()
        self.account.worker_url = f"http://127.0.0.1:{self.worker.port}"

    async def deafen(self) -> None:
        """Take no connections, and end those that are there."""
        await self.control.deafen()
        await self.worker.deafen()

    async def kill(self, sandbox_id: str) -> None:
        """End a sandbox from outside, as Modal itself may."""
        await self.account.end(self.account.boxes[sandbox_id], pb.GenericResult.GENERIC_STATUS_TERMINATED)

    async def expire(self, sandbox_id: str) -> None:
        """Let a sandbox's time be over."""
        await self.account.end(self.account.boxes[sandbox_id], pb.GenericResult.GENERIC_STATUS_TIMEOUT)

    def expire_tokens(self) -> None:
        """Let all short-lived tokens for workers be over."""
        self.account.router_tokens.clear()

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for box in self.account.boxes.values():
            if box.watcher is not None:
                box.watcher.cancel()
            await self.account.end(box, pb.GenericResult.GENERIC_STATUS_TERMINATED)
        await self.deafen()
