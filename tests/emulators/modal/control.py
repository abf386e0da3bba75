"""The emulator's control plane: those calls of Modal's `ModalClient` that the SDK needs for sandboxes."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import shutil
import string
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.empty_pb2 import Empty
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from modal_proto import api_pb2 as pb

from tests.emulators.modal.backing import Backing, Process
from tests.emulators.modal.faults import Call
from tests.emulators.modal.worker import make_jwt

BUILDER_VERSION = "2025.06"
_ALPHABET = string.ascii_letters + string.digits
_LONGEST = 24 * 3600
_TAG = re.compile(r"[A-Za-z0-9._-]{1,63}")


def new_id(kind: str, length: int = 22) -> str:
    """Return an id of Modal's form. Those of sandboxes of the second backend are longer than those of the first."""
    return f"{kind}-{''.join(secrets.choice(_ALPHABET) for _ in range(length))}"


@dataclass
class Box:
    """One sandbox as the control plane knows it."""

    id: str
    task_id: str
    app_id: str
    asked: pb.SandboxCreateV2Request
    backing: Backing
    created: float
    tags: dict[str, str]
    result: pb.GenericResult | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    processes: dict[str, Process] = field(default_factory=dict)
    watcher: asyncio.Task[None] | None = None


@dataclass
class Account:
    """A workspace: its token, apps, images and sandboxes."""

    directory: Path
    token: tuple[str, str]
    worker_url: str = ""
    page: int = 100
    """How many sandboxes are listed at once."""
    token_seconds: float = 600
    """How long a token for a worker says that it is good."""
    apps: dict[str, str] = field(default_factory=dict)
    images: dict[str, pb.Image] = field(default_factory=dict)
    kept: dict[str, Path] = field(default_factory=dict)
    """The files of the images that were made of sandboxes."""
    snapshots: dict[str, str] = field(default_factory=dict)
    """The images by the ids that the SDK gives what it asks for, so that asking again makes no second one."""
    boxes: dict[str, Box] = field(default_factory=dict)
    auth_tokens: set[str] = field(default_factory=set)
    router_tokens: set[str] = field(default_factory=set)

    async def end(self, box: Box, status: pb.GenericResult.GenericStatus.ValueType, code: int = 0) -> None:
        """End a sandbox; its record stays."""
        if box.result is not None:
            return
        box.result = pb.GenericResult(status=status, exitcode=code)
        box.ended.set()
        for process in list(box.processes.values()):
            await process.forget()
        await box.backing.end()

    async def keep(self, box: Box, snapshot_id: str) -> str:
        """Make an image of a sandbox's files."""
        if snapshot_id in self.snapshots:
            return self.snapshots[snapshot_id]
        image_id = self.snapshots[snapshot_id] = new_id("im")
        files = self.directory / image_id
        await box.backing.copy(files)
        self.images[image_id], self.kept[image_id] = pb.Image(), files
        return image_id

    def running(self) -> list[Box]:
        """Return the living sandboxes, the newest first."""
        return sorted((box for box in self.boxes.values() if box.result is None), key=lambda box: -box.created)


class Control:
    """The calls of the control plane."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def calls(self) -> dict[str, Call]:
        """Return them by name."""
        return {
            "AuthTokenGet": self.auth_token,
            "AppGetOrCreate": self.app,
            "EnvironmentGetOrCreate": self.environment,
            "ImageGetOrCreate": self.image,
            "ImageJoinStreaming": self.join_image,
            "ImageFromId": self.image_by_id,
            "ImageDelete": self.delete_image,
            "SandboxCreateV2": self.create,
            "SandboxGetFromName": self.by_name_v1,
            "SandboxGetFromNameV2": self.by_name,
            "SandboxGetTaskIdV2": self.task_id,
            "SandboxGetCommandRouterAccess": self.router_access,
            "SandboxWaitV2": self.wait,
            "SandboxTerminateV2": self.terminate,
            "SandboxTagsGetV2": self.get_tags,
            "SandboxListV2": self.list,
        }

    def check(self, name: str, stream: Any) -> None:
        """Refuse a call without the token, and one about sandboxes without the short-lived token that one gets for it."""
        given = stream.metadata.get("x-modal-token-id"), stream.metadata.get("x-modal-token-secret")
        if given != self._account.token:
            raise GRPCError(Status.UNAUTHENTICATED, f"Token validation failed: {given[0]} {given[1]}")
        is_of_second_backend = name.startswith("Sandbox") and name != "SandboxGetFromName"
        if is_of_second_backend and stream.metadata.get("x-modal-auth-token") not in self._account.auth_tokens:
            raise GRPCError(Status.UNAUTHENTICATED, "missing auth token")

    def _box(self, asked: Any) -> Box:
        box = self._account.boxes.get(asked.sandbox_id)
        if box is None:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {asked.sandbox_id} not found")
        return box

    async def auth_token(self, stream: Any) -> None:
        """Give a short-lived token."""
        await stream.recv_message()
        token = make_jwt(1200)
        self._account.auth_tokens.add(token)
        await stream.send_message(pb.AuthTokenGetResponse(token=token))

    async def app(self, stream: Any) -> None:
        """Find an app by name, or make it."""
        asked: pb.AppGetOrCreateRequest = await stream.recv_message()
        if asked.app_name not in self._account.apps:
            if asked.object_creation_type != pb.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise GRPCError(Status.NOT_FOUND, f"App {asked.app_name} not found")
            self._account.apps[asked.app_name] = new_id("ap")
        await stream.send_message(pb.AppGetOrCreateResponse(app_id=self._account.apps[asked.app_name]))

    async def environment(self, stream: Any) -> None:
        """Tell of the environment."""
        await stream.recv_message()
        settings = pb.EnvironmentSettings(image_builder_version=BUILDER_VERSION)
        metadata = pb.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(pb.EnvironmentGetOrCreateResponse(environment_id=new_id("en"), metadata=metadata))

    async def image(self, stream: Any) -> None:
        """Find an image by what it is made of, or begin to build it."""
        asked: pb.ImageGetOrCreateRequest = await stream.recv_message()
        image_id = f"im-{hashlib.sha256(asked.image.SerializeToString(deterministic=True)).hexdigest()[:22]}"
        answer = pb.ImageGetOrCreateResponse(image_id=image_id)
        if image_id in self._account.images:
            answer.result.status = pb.GenericResult.GENERIC_STATUS_SUCCESS
        self._account.images.setdefault(image_id, asked.image)
        await stream.send_message(answer)

    async def join_image(self, stream: Any) -> None:
        """Tell how building an image ends: badly if its base is of the registry that is never there."""
        asked: pb.ImageJoinStreamingRequest = await stream.recv_message()
        result = pb.GenericResult(status=pb.GenericResult.GENERIC_STATUS_SUCCESS)
        if any("registry.invalid/" in line for line in self._account.images[asked.image_id].dockerfile_commands):
            del self._account.images[asked.image_id]
            result = pb.GenericResult(status=pb.GenericResult.GENERIC_STATUS_FAILURE, exception="manifest unknown")
        await stream.send_message(pb.ImageJoinStreamingResponse(result=result, entry_id="1", eof=True))

    async def image_by_id(self, stream: Any) -> None:
        """Find an image by its id."""
        asked: pb.ImageFromIdRequest = await stream.recv_message()
        if asked.image_id not in self._account.images:
            raise GRPCError(Status.NOT_FOUND, f"Image {asked.image_id} not found")
        await stream.send_message(pb.ImageFromIdResponse(image_id=asked.image_id))

    async def delete_image(self, stream: Any) -> None:
        """Delete an image. No sandbox can be made of it any more."""
        asked: pb.ImageDeleteRequest = await stream.recv_message()
        if self._account.images.pop(asked.image_id, None) is None:
            raise GRPCError(Status.NOT_FOUND, f"Image {asked.image_id} not found")
        files = self._account.kept.pop(asked.image_id, None)
        if files is not None:
            await asyncio.to_thread(shutil.rmtree, files)
        await stream.send_message(Empty())

    async def create(self, stream: Any) -> None:
        """Make a sandbox. A name is that of one living sandbox in its app."""
        asked: pb.SandboxCreateV2Request = await stream.recv_message()
        wanted = asked.definition
        if wanted.image_id not in self._account.images:
            raise GRPCError(Status.NOT_FOUND, f"Image {wanted.image_id} not found")
        if not 0 < wanted.timeout_secs <= _LONGEST:
            raise GRPCError(Status.INVALID_ARGUMENT, "timeout must be between 1 and 86400 seconds")
        tags = {tag.tag_name: tag.tag_value for tag in asked.tags}
        for text in [*tags, *tags.values()]:
            if not _TAG.fullmatch(text):
                raise GRPCError(Status.INVALID_ARGUMENT, f"Invalid tag: {text!r}")
        for other in self._account.running():
            if wanted.name and other.app_id == asked.app_id and other.asked.definition.name == wanted.name:
                raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox with name {wanted.name!r} already exists")
        box_id = new_id("sb", 26)
        backing = Backing(self._account.directory / box_id)
        box = Box(box_id, new_id("ta", 25) + "V", asked.app_id, asked, backing, time.time(), tags)
        self._account.boxes[box_id] = box
        files = self._account.kept.get(wanted.image_id)
        await backing.start(list(wanted.entrypoint_args) or ["sleep", "172800"], files)
        box.watcher = asyncio.create_task(self._watch(box))
        await stream.send_message(
            pb.SandboxCreateV2Response(
                sandbox_id=box_id,
                task_id=box.task_id,
                metadata=pb.SandboxHandleMetadata(app_id=box.app_id),
                command_router_access=self._access(),
            )
        )

    async def _watch(self, box: Box) -> None:
        """End a sandbox when its time is over, or its first process has ended."""
        status = pb.GenericResult.GENERIC_STATUS_TIMEOUT
        code = 0
        try:
            async with asyncio.timeout(box.asked.definition.timeout_secs):
                code = await box.backing.wait()
                status = pb.GenericResult.GENERIC_STATUS_SUCCESS if code == 0 else pb.GenericResult.GENERIC_STATUS_FAILURE
        except TimeoutError:
            pass
        await self._account.end(box, status, code)

    def _access(self) -> pb.CommandRouterAccess:
        token = make_jwt(self._account.token_seconds)
        self._account.router_tokens.add(token)
        return pb.CommandRouterAccess(url=self._account.worker_url, jwt=token)

    async def by_name_v1(self, stream: Any) -> None:
        """Find a sandbox of the first backend: there is none."""
        asked: pb.SandboxGetFromNameRequest = await stream.recv_message()
        raise GRPCError(Status.NOT_FOUND, f"Sandbox {asked.sandbox_name} not found")

    async def by_name(self, stream: Any) -> None:
        """Find a living sandbox by its name."""
        asked: pb.SandboxGetFromNameRequest = await stream.recv_message()
        app_id = self._account.apps.get(asked.app_name)
        for box in self._account.running():
            if box.app_id == app_id and box.asked.definition.name == asked.sandbox_name:
                metadata = pb.SandboxHandleMetadata(app_id=box.app_id)
                await stream.send_message(pb.SandboxGetFromNameResponse(sandbox_id=box.id, metadata=metadata))
                return
        raise GRPCError(Status.NOT_FOUND, f"Sandbox {asked.sandbox_name} not found")

    async def task_id(self, stream: Any) -> None:
        """Tell a sandbox's task, or how it has ended."""
        box = self._box(await stream.recv_message())
        if box.result is None:
            answer = pb.SandboxGetTaskIdResponse(task_id=box.task_id)
        else:
            answer = pb.SandboxGetTaskIdResponse(task_result=box.result)
        await stream.send_message(answer)

    async def router_access(self, stream: Any) -> None:
        """Tell where a sandbox's worker is, with a token for it."""
        box = self._box(await stream.recv_message())
        if box.result is not None:
            raise GRPCError(Status.FAILED_PRECONDITION, f"Sandbox {box.id} has already completed")
        access = self._access()
        await stream.send_message(pb.SandboxGetCommandRouterAccessResponse(url=access.url, jwt=access.jwt))

    async def wait(self, stream: Any) -> None:
        """Wait for a sandbox's end for as long as was asked, and tell of it."""
        asked: pb.SandboxWaitRequest = await stream.recv_message()
        box = self._box(asked)
        if box.result is None and asked.timeout > 0:
            await asyncio.wait([asyncio.ensure_future(box.ended.wait())], timeout=asked.timeout)
        await stream.send_message(
            pb.SandboxWaitResponse(result=box.result, metadata=pb.SandboxHandleMetadata(app_id=box.app_id, result=box.result))
        )

    async def terminate(self, stream: Any) -> None:
        """End a sandbox."""
        box = self._box(await stream.recv_message())
        before = box.result
        await self._account.end(box, pb.GenericResult.GENERIC_STATUS_TERMINATED)
        await stream.send_message(pb.SandboxTerminateResponse(existing_result=before))

    async def get_tags(self, stream: Any) -> None:
        """Tell a sandbox's tags."""
        box = self._box(await stream.recv_message())
        tags = [pb.SandboxTag(tag_name=name, tag_value=value) for name, value in box.tags.items()]
        await stream.send_message(pb.SandboxTagsGetResponse(tags=tags))

    async def list(self, stream: Any) -> None:
        """List one page of the sandboxes with some tags, the newest first."""
        asked: pb.SandboxListRequest = await stream.recv_message()
        wanted = {tag.tag_name: tag.tag_value for tag in asked.tags}
        before = asked.before_timestamp or float("inf")
        found = [
            pb.SandboxInfo(id=box.id, created_at=box.created, app_id=box.app_id, task_info=pb.TaskInfo(id=box.task_id))
            for box in self._account.running()
            if asked.app_id in ("", box.app_id) and wanted.items() <= box.tags.items() and box.created < before
        ]
        await stream.send_message(pb.SandboxListResponse(sandboxes=found[: self._account.page]))
