"""Starting the whole stack and stopping it: the server first, then the workers; the workers drained first, then the server."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import time
from collections.abc import Callable, Mapping
from datetime import UTC
from pathlib import Path
from types import TracebackType
from typing import IO

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client

from activities.store.blobs import BlobStore
from contracts.activity_names import Queues
from contracts.base import BadInput
from workers.connect import data_converter, open_blobs
from workers.dev.composefile import Service, read_services
from workers.dev.options import DevOptions
from workers.dev.supervisor import Supervised
from workers.settings import Settings, load_settings

SCRIPTED = "scripted, not a language model"
_SERVER = "temporal"
_START_SECONDS = 60.0
_PORTS = {"port": 7233, "ui_port": 8233}


class DevStack:
    """The running stack, as an async context manager. `say` is told, in a line each, what a person should know."""

    def __init__(self, options: DevOptions, settings: Settings, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self._options = options
        self._settings = settings
        self._say = say
        self.scripted = settings.openai_api_key is None
        self.port = self._port("port", options.port)
        self.ui_port = self._port("ui_port", options.ui_port)
        self.address = f"127.0.0.1:{self.port}"
        self.ui_url = f"http://127.0.0.1:{self.ui_port}"
        self.logs = options.state_dir / "logs"
        self.services = self._read(environ)
        self.running: dict[str, Supervised] = {}
        self.blobs: BlobStore
        self.client: Client

    async def __aenter__(self) -> DevStack:
        self.logs.mkdir(parents=True, exist_ok=True)
        self._lock = _only_one(self._options.state_dir)
        self._started = time.time()
        # The one that the workers have, with what they are given for it.
        worker = self.services["workflow-worker"].environment
        self.blobs = open_blobs(
            load_settings({name: value for name, value in worker.items() if name.startswith("CAISSON_STORE")})
        )
        try:
            self._start(_SERVER)
            self.client = await self._server_up()
            for name in self.services:
                if name != _SERVER:
                    self._start(name)
            await self._workers_up()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stop()

    def check(self) -> None:
        """Raise ServiceFailed if a service has given up."""
        for supervised in self.running.values():
            supervised.raise_failure()

    def _read(self, environ: Mapping[str, str]) -> dict[str, Service]:
        model_port = _any_free()
        variables = {
            **environ,
            "DEV_IP": "127.0.0.1",
            "DEV_PORT": str(self.port),
            "DEV_UI_PORT": str(self.ui_port),
            "DEV_MODEL_PORT": str(model_port),
            "DEV_STATE": str(self._options.state_dir),
            "DEV_STORE": environ.get("CAISSON_STORE") or str(self._options.state_dir / "store"),
            "DEV_CACHE": environ.get("CAISSON_STORE_CACHE") or str(self._options.state_dir / "cache"),
            "TEMPORAL_ADDRESS": self.address,
        }
        if self._options.scenario is not None:
            if not self._options.scenario.is_file():
                raise BadInput(f"--scenario: {self._options.scenario} is not a file")
            variables["DEV_SCENARIO"] = str(self._options.scenario)
        if self.scripted:
            variables["OPENAI_API_KEY"] = "scripted"
            variables["OPENAI_BASE_URL"] = f"http://127.0.0.1:{model_port}/v1"
        services = read_services(self._options.file, variables)
        if _SERVER not in services:
            raise BadInput(f"{self._options.file}: has no service named {_SERVER}")
        profiles = {"scripted"} if self.scripted else set()
        return {name: service for name, service in services.items() if not service.profiles or service.profiles & profiles}

    def _port(self, name: str, chosen: int | None) -> int:
        usual = _PORTS[name]
        port = chosen or usual
        if _is_free(port):
            return port
        if chosen is None and self._options.run is not None:
            return _any_free()
        option = "--" + name.replace("_", "-")
        raise BadInput(f"{option}: port {port} is taken on this machine; stop what uses it, or choose another with {option}")

    def _start(self, name: str) -> None:
        supervised = Supervised(self.services[name], self.logs, self._restarted)
        self.running[name] = supervised
        supervised.start()

    def _restarted(self, name: str, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._say(f"{name} {how}; starting it again (log: {self.logs / name}.log)")

    async def _server_up(self) -> Client:
        deadline = asyncio.get_running_loop().time() + _START_SECONDS
        while True:
            self.check()
            try:
                return await Client.connect(self.address, data_converter=data_converter(self.blobs))
            except RuntimeError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise BadInput(
                        f"the Temporal server is not up after {_START_SECONDS:g} s: {error}; see {self.logs}"
                    ) from error
            await asyncio.sleep(0.1)

    async def _workers_up(self) -> None:
        queues = Queues(self._settings.task_queue)
        wanted = [
            (queues.workflow, TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW),
            (queues.model, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
            (queues.tools, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
            (queues.sandbox, TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY),
        ]
        deadline = asyncio.get_running_loop().time() + _START_SECONDS
        while wanted:
            self.check()
            queue, kind = wanted[0]
            if await _has_poller(self.client, queue, kind, self._started):
                wanted.pop(0)
            elif asyncio.get_running_loop().time() > deadline:
                raise BadInput(f"no worker polls {queue} after {_START_SECONDS:g} s; see the logs in {self.logs}")
            else:
                await asyncio.sleep(0.1)

    async def _stop(self) -> None:
        workers = [supervised for name, supervised in self.running.items() if name != _SERVER]
        await asyncio.gather(*(supervised.stop() for supervised in workers))
        if _SERVER in self.running:
            await self.running[_SERVER].stop()
        self._lock.close()


def _only_one(state_dir: Path) -> IO[bytes]:
    """Hold the state directory: two servers on one database would damage it."""
    lock = (state_dir / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise BadInput(
            f"--state-dir: another dev stack runs with {state_dir}; start your run in it (caisson run --input FILE.json), "
            "or give this one a directory of its own"
        ) from None
    return lock


async def _has_poller(client: Client, queue: str, kind: TaskQueueType.ValueType, since: float) -> bool:
    # A kept database still knows the pollers of the stack before.
    request = DescribeTaskQueueRequest(namespace=client.namespace, task_queue=TaskQueue(name=queue), task_queue_type=kind)
    pollers = (await client.workflow_service.describe_task_queue(request)).pollers
    return any(poller.last_access_time.ToDatetime(UTC).timestamp() >= since for poller in pollers)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _any_free() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
