"""The emulator's worker: Modal's `TaskCommandRouter`, which the SDK speaks to directly to run commands in a sandbox."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from typing import TYPE_CHECKING, Any

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from modal_proto import task_command_router_pb2 as pb

from tests.emulators.modal.backing import Process
from tests.emulators.modal.faults import Call

if TYPE_CHECKING:
    from tests.emulators.modal.control import Account, Box

_MOST_ARGUMENTS = 128 << 10


def make_jwt(seconds: float) -> str:
    """Return a token of Modal's form that says when it ends. It is signed by nobody."""

    def part(value: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    return f"{part({'alg': 'none'})}.{part({'exp': time.time() + seconds, 'id': secrets.token_hex(8)})}.emulator"


class Router:
    """The calls of the task command router."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._tasks: set[asyncio.Task[None]] = set()

    def calls(self) -> dict[str, Call]:
        """Return them by name."""
        return {
            "TaskExecStart": self.start,
            "TaskExecStdioRead": self.read,
            "TaskExecStdinWrite": self.write,
            "TaskExecWait": self.wait,
            "TaskExecPoll": self.poll,
            "TaskSnapshotFilesystem": self.snapshot,
        }

    def check(self, name: str, stream: Any) -> None:
        """Refuse a call without a token that was given for a sandbox."""
        token = str(stream.metadata.get("authorization", "")).removeprefix("Bearer ")
        if token not in self._account.router_tokens:
            raise GRPCError(Status.UNAUTHENTICATED, "invalid or expired token")

    def _box(self, task_id: str) -> Box:
        for box in self._account.boxes.values():
            if box.task_id == task_id and box.result is None:
                return box
        raise GRPCError(Status.NOT_FOUND, f"task {task_id} not found")

    def _process(self, asked: Any) -> Process:
        process = self._box(asked.task_id).processes.get(asked.exec_id)
        if process is None:
            raise GRPCError(Status.NOT_FOUND, f"exec {asked.exec_id} not found")
        return process

    async def start(self, stream: Any) -> None:
        """Start a command. One that was started before, by its id, is not started again."""
        asked: pb.TaskExecStartRequest = await stream.recv_message()
        box = self._box(asked.task_id)
        if asked.exec_id not in box.processes:
            if sum(len(word.encode()) for word in asked.command_args) > _MOST_ARGUMENTS:
                raise GRPCError(Status.INVALID_ARGUMENT, "argument list too long")
            env = {name: value for source in asked.secret_sources for name, value in source.env.contents.items()}
            process = box.processes[asked.exec_id] = await box.backing.spawn(
                list(asked.command_args),
                cwd=asked.workdir or "/",
                env={"MODAL_TASK_ID": box.task_id, "MODAL_SANDBOX_ID": box.id, **env},
                stdout=asked.stdout_config == pb.TASK_EXEC_STDOUT_CONFIG_PIPE,
                stderr=asked.stderr_config == pb.TASK_EXEC_STDERR_CONFIG_PIPE,
            )
            if asked.HasField("timeout_secs"):
                task = asyncio.create_task(_end_at(process, asked.timeout_secs))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        await stream.send_message(pb.TaskExecStartResponse())

    async def read(self, stream: Any) -> None:
        """Stream what a command says, from an offset on."""
        asked: pb.TaskExecStdioReadRequest = await stream.recv_message()
        process, offset = self._process(asked), asked.offset
        is_stdout = asked.file_descriptor == pb.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        output = process.stdout if is_stdout else process.stderr
        while data := await self._while_it_lives(asked.task_id, output.after(offset)):
            offset += len(data)
            await stream.send_message(pb.TaskExecStdioReadResponse(data=data))

    async def write(self, stream: Any) -> None:
        """Write to a command's input."""
        asked: pb.TaskExecStdinWriteRequest = await stream.recv_message()
        try:
            await self._while_it_lives(asked.task_id, self._process(asked).write(asked.offset, asked.data, asked.eof))
        except BrokenPipeError:
            raise GRPCError(Status.FAILED_PRECONDITION, "stdin is closed") from None
        await stream.send_message(pb.TaskExecStdinWriteResponse())

    async def wait(self, stream: Any) -> None:
        """Answer with a command's end, once it has come."""
        asked: pb.TaskExecWaitRequest = await stream.recv_message()
        code = await self._while_it_lives(asked.task_id, self._process(asked).inner.wait())
        await stream.send_message(pb.TaskExecWaitResponse(code=code) if code >= 0 else pb.TaskExecWaitResponse(signal=-code))

    async def poll(self, stream: Any) -> None:
        """Answer with a command's end, or with nothing while it runs."""
        asked: pb.TaskExecPollRequest = await stream.recv_message()
        code = self._process(asked).inner.returncode
        if code is None:
            answer = pb.TaskExecPollResponse()
        else:
            answer = pb.TaskExecPollResponse(code=code) if code >= 0 else pb.TaskExecPollResponse(signal=-code)
        await stream.send_message(answer)

    async def snapshot(self, stream: Any) -> None:
        """Make an image of a sandbox's files."""
        asked: pb.TaskSnapshotFilesystemRequest = await stream.recv_message()
        image_id = await self._account.keep(self._box(asked.task_id), asked.snapshot_id)
        await stream.send_message(pb.TaskSnapshotFilesystemResponse(image_id=image_id))

    async def _while_it_lives(self, task_id: str, work: Any) -> Any:
        """Wait for something, or for the end of the sandbox: NOT_FOUND then."""
        tasks = [doing := asyncio.ensure_future(work)]
        try:
            tasks.append(ended := asyncio.ensure_future(self._box(task_id).ended.wait()))
            await asyncio.wait((ended, doing), return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise GRPCError(Status.NOT_FOUND, f"task {task_id} was shut down")
            return doing.result()
        finally:
            for task in tasks:
                task.cancel()


async def _end_at(process: Process, seconds: float) -> None:
    await asyncio.sleep(seconds)
    process.end()
