"""Two hosts, each a network namespace with a sandbox worker of its own, and one Temporal server that both reach.

Needs root and `ip` (Debian and Ubuntu: apt-get install iproute2).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import EventType, TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

from contracts.activity_names import Queues
from tests.integration.helpers import events, failed_tasks
from tests.integration.stack import QUEUE, Handle, Stack, make_stack
from tests.integration.test_durability import artifact, started, until
from tests.stores.servers import S3_CREDENTIAL, S3Server, seaweedfs
from workers.settings import load_settings

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="`ip` is missing: apt-get install iproute2"),
]
NOTICED_WITHIN = 35.0


def ip(*words: str) -> str:
    """Run `ip`."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@dataclass
class Host:
    """A network namespace whose only neighbour is this machine, and the sandbox worker in it."""

    name: str
    number: int
    state: Path
    worker: asyncio.subprocess.Process | None = None

    @property
    def gateway(self) -> str:
        """This machine's address on the wire between the two."""
        return f"10.213.{self.number}.1"

    @property
    def sandboxes(self) -> Path:
        """Where its sandboxes live."""
        return self.state / self.name

    def queue(self) -> str:
        """The task queue of its sandboxes."""
        settings = load_settings({"CAISSON_SANDBOX_DIR": str(self.sandboxes), "CAISSON_HOST": self.name})
        return Queues(QUEUE).sandbox_host(settings.sandbox_host)

    def build(self) -> None:
        """Make the namespace and the wire."""
        ip("netns", "add", self.name)
        ip("link", "add", f"{self.name}0", "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("addr", "add", f"{self.gateway}/24", "dev", f"{self.name}0")
        ip("link", "set", f"{self.name}0", "up")
        ip("-n", self.name, "addr", "add", f"10.213.{self.number}.2/24", "dev", "eth0")
        ip("-n", self.name, "link", "set", "eth0", "up")

    async def start(self, port: int, store: S3Server | None = None, bucket: str = "") -> None:
        """Start its worker, and see to it that the server is reached over the wire alone, and the store in a bucket too."""
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.getcwd(),
            "TEMPORAL_ADDRESS": f"{self.gateway}:{port}",
            "CAISSON_STORE": str(self.state / "store"),
            "CAISSON_SANDBOX_DIR": str(self.sandboxes),
            "CAISSON_HOST": self.name,
        }
        if store is not None:
            environ |= {**store_of(bucket), "CAISSON_STORE_ENDPOINT": f"http://{self.gateway}:{store.port}"}
            environ["CAISSON_STORE_CACHE"] = str(self.state / f"{self.name}-cache")
        command = ("ip", "netns", "exec", self.name, sys.executable, "-m", "workers", "--role", "sandbox")
        with (self.state / f"{self.name}.log").open("ab") as log:
            self.worker = await asyncio.create_subprocess_exec(*command, env=environ, stdout=log, stderr=log)

    def living(self) -> list[Path]:
        """The directories of its sandboxes."""
        return [path.parent for path in self.sandboxes.glob("local-*/state.json")]

    async def die(self) -> None:
        """End everything on it, and take it off the net. Its connections are closed, as those of a host that is shut down are."""
        if self.worker is not None and self.worker.returncode is None:
            self.worker.kill()
            await self.worker.wait()
        for sandbox in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads((sandbox / "state.json").read_text())["pid"], signal.SIGKILL)
        for words in (("link", "delete", f"{self.name}0"), ("netns", "delete", self.name)):
            with contextlib.suppress(subprocess.CalledProcessError):  # it is gone already
                ip(*words)


async def forward(address: str, port: int) -> asyncio.Server:
    """Let the server, which listens on the loopback only, be reached at an address of this machine."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    return await asyncio.start_server(serve, address, port)


def store_of(bucket: str) -> dict[str, str]:
    """The settings of a store in a bucket."""
    return {
        "CAISSON_STORE": f"s3://{bucket}/blobs",
        "CAISSON_STORE_ACCESS_KEY_ID": S3_CREDENTIAL.access_key_id,
        "CAISSON_STORE_SECRET_KEY": S3_CREDENTIAL.secret_key,
    }


@contextlib.asynccontextmanager
async def two_hosts(stack: Stack, store: S3Server | None = None, bucket: str = "") -> AsyncIterator[tuple[Host, Host]]:
    """Two hosts with a worker each; the stack's own sandbox worker has left."""
    await stack.dev.running["sandbox-worker"].stop()
    tag = uuid.uuid4().hex[:6]
    pair = (Host(f"w{tag}", 1, stack.state), Host(f"e{tag}", 2, stack.state))
    servers: list[asyncio.Server] = []
    try:
        for host in pair:
            host.build()
            servers.append(await forward(host.gateway, stack.dev.port))
            if store is not None:
                servers.append(await forward(host.gateway, store.port))
            await host.start(stack.dev.port, store, bucket)
        for host in pair:
            await polled(stack, host)
        yield pair
    finally:
        for host in pair:
            await host.die()
        for server in servers:
            server.close()


@pytest.fixture
async def hosts(own_stack: Stack) -> AsyncIterator[tuple[Host, Host]]:
    """Two hosts with a worker each; the stack's own sandbox worker has left."""
    async with two_hosts(own_stack) as pair:
        yield pair


async def polled(stack: Stack, host: Host) -> None:
    """Wait until the worker of a host polls for work."""
    client = stack.dev.client
    request = DescribeTaskQueueRequest(
        namespace=client.namespace,
        task_queue=TaskQueue(name=host.queue()),
        task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
    )
    async with asyncio.timeout(20):
        while not (await client.workflow_service.describe_task_queue(request)).pollers:
            assert host.worker is not None and host.worker.returncode is None, (host.state / f"{host.name}.log").read_text()
            await asyncio.sleep(0.1)


async def seconds_until_noticed(handle: Handle) -> float:
    """Wait until a call for the lost host has timed out, and return how long it had been waiting then."""
    async with asyncio.timeout(60):
        while True:
            happened = await events(handle)
            times = {event.event_id: event.event_time.ToNanoseconds() / 1e9 for event in happened}
            for event in happened:
                if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_TIMED_OUT:
                    scheduled = event.activity_task_timed_out_event_attributes.scheduled_event_id
                    return times[event.event_id] - times[scheduled]
            await asyncio.sleep(0.5)


async def test_a_run_goes_on_at_another_host(own_stack: Stack, hosts: tuple[Host, Host]) -> None:
    """A host dies with worker and sandbox and stays away: the run notices in bounded time and goes on at the other one.

    Its files are as they were, and no model call is asked again.
    """
    handle = await own_stack.start("host-lost")
    await until(lambda: any((s / "workspace/begun").exists() for host in hosts for s in host.living()), "the first command")
    (lost,) = (host for host in hosts if host.living())
    (other,) = (host for host in hosts if host is not lost)
    await started(own_stack, handle, "call_model")
    await lost.die()

    meanwhile = await own_stack.start("files")
    assert (await own_stack.finish(meanwhile))["status"] == "completed"

    result = await own_stack.finish(handle, 60)
    assert await seconds_until_noticed(handle) < NOTICED_WITHIN
    noticed = [event for event in await events(handle) if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_TIMED_OUT]
    assert len(noticed) == 1, "nothing more is asked of a host that is lost"
    assert (result["status"], result["output"], result["recoveries"]) == ("completed", "went on", 1)
    assert await artifact(own_stack, result, "outputs/log") == b"first\nsecond\n"
    assert own_stack.answered(handle) == [1, 2, 3], "nothing was asked again"
    assert other.living() == []


async def test_a_host_that_dies_in_the_middle_of_a_command_costs_only_that_command(tmp_path: Path) -> None:
    """The command in flight is carried out again at the other host, from the files before it.

    All that the hosts share is a bucket.
    """
    (tmp_path / "seaweedfs").mkdir()
    (tmp_path / "stack").mkdir()
    with seaweedfs(tmp_path / "seaweedfs") as server:
        bucket = server.make()
        stack = make_stack(tmp_path / "stack", {**store_of(bucket), "CAISSON_STORE_ENDPOINT": server.endpoint})
        async with stack.dev, two_hosts(stack, server, bucket) as pair:
            handle = await stack.start("host-lost-in-a-command")
            await until(lambda: any((s / "workspace/running").exists() for host in pair for s in host.living()), "the command")
            (lost,) = (host for host in pair if host.living())
            await lost.die()
            result = await stack.finish(handle, 90)
            assert (result["status"], result["recoveries"]) == ("completed", 1)
            assert await artifact(stack, result, "outputs/log") == b"first\nsecond\n"
            assert stack.answered(handle) == [1, 2, 3]
            assert not (tmp_path / "stack/store").exists(), "nothing was kept but in the bucket"


@pytest.mark.soak
@pytest.mark.timeout(2400)
async def test_a_host_killed_at_every_step_costs_no_model_call(own_stack: Stack, hosts: tuple[Host, Host]) -> None:
    """Twenty model calls, nineteen hosts killed in commands: the same artifacts as without, and every call once."""
    handle = await own_stack.start("twenty-steps")
    killed: list[int] = []

    async def kill_once_a_step() -> None:
        while True:
            await asyncio.sleep(0.02)
            for host in hosts:
                for sandbox in host.living():
                    with contextlib.suppress(OSError):
                        step = (sandbox / "workspace/outputs/log").read_text().count("\n")
                        if step and step not in killed:
                            killed.append(step)
                            await host.die()
                            for left in host.sandboxes.glob("local-*"):  # it comes back as a new machine does
                                shutil.rmtree(left, ignore_errors=True)
                            host.build()
                            await host.start(own_stack.dev.port)
                            await polled(own_stack, host)

    killer = asyncio.create_task(kill_once_a_step())
    try:
        result = await own_stack.finish(handle, 2000)
    finally:
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
    assert killed == list(range(1, 20))
    assert result["status"] == "completed"
    assert await artifact(own_stack, result, "outputs/log") == "".join(f"{n}\n" for n in range(1, 20)).encode()
    assert own_stack.answered(handle) == list(range(1, 21))
    assert (result["usage"]["model_calls"], result["recoveries"]) == (20, 19)
    assert await failed_tasks(handle) == []
