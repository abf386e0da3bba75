"""Sandboxes as containers of a Docker-compatible engine, Podman too, through the `docker` SDK (extra `docker`).

A sandbox is one container, and what runs in it are execs of its ordinary user. No process of it is ever root, it
can write to nothing but its workspace and its memory, and it has no capability and no network. `docker_make` says how it is made,
`docker_engine` what the engine's errors mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from activities.sandbox.machine import Ran
from activities.sandbox.port import (
    BadSandboxSpec,
    Capabilities,
    FileFault,
    SandboxGone,
    SandboxUnavailable,
    refuse_what_it_cannot,
)
from activities.sandbox.portable import PortableSandbox, attach, prepare
from activities.sandbox.providers.docker_engine import (
    CREATED,
    EXPIRES,
    OWN,
    OWN_LABELS,
    Container,
    Engine,
    check_running,
    load_sdk,
    volume_of,
)
from activities.sandbox.providers.docker_exec import Exec, batch_of
from activities.sandbox.providers.docker_make import USER, Maker
from contracts.sandbox import SandboxRef, SandboxSpec

DEFAULT_IMAGE = "python:3.13-slim"
MAKING_SECONDS = 30.0
"""How old a sandbox that is not ready must be before its maker counts as dead."""
LEFT_SECONDS = 600.0
"""How old something that belongs to no living sandbox must be before `clear` removes it."""
KEPT = ("memory_mb", "processes", "cpus", "open_files", "file_mb", "lifetime_seconds")
"""The limits that an engine keeps wherever the workspace is."""
_MB = 1 << 20

# Reads as many bytes as there are and needs no end of its input: one half of a TLS connection cannot be closed.
_PUT = """part="$1.$3"
true >"$part" || exit 3
head -c "$2" >"$part" && [ "$(wc -c <"$part")" -eq "$2" ] || { rm -f "$part"; exit 4; }
[ ! -d "$1" ] && mv -f "$part" "$1" || { rm -f "$part"; exit 5; }"""
_PUT_FAULTS = {3: "its directory is missing or closed to the user", 4: "there is no room for it", 5: "it is a directory"}
_KILLED = 128 + 9
"""How a command ends that the kernel killed: alone, or with all that is in a container that ends."""
_SETTLING_SECONDS = 20.0
_GET = '[ -f "$1" ] || { echo "no such file" >&2; exit 1; }; exec cat "$1"'

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Resident:
    """One sandbox of an engine, for a sweep. `alive` is False for a container that has ended."""

    ref: SandboxRef
    labels: Mapping[str, str]
    created_at: float
    alive: bool


class DockerMachine:
    """One container. See Machine."""

    def __init__(self, engine: Engine, container: Container, provider: str) -> None:
        self._engine = engine
        self._id = container.id
        self._started = container.state.get("StartedAt")
        self._ref = container.ref(provider)

    @property
    def ref(self) -> SandboxRef:
        """The serialisable handle."""
        return self._ref

    async def run(self, script: str, *, timeout: float) -> Ran:
        """See Machine."""
        return await self._exec(["sh", "-c", script], None, timeout)

    async def put(self, path: str, data: bytes) -> None:
        """See Machine.

        By an exec and not by the engine's archive call: Docker's does not see the tmpfs of a container ("rootfs is marked
        read-only"), and it has the engine follow, as root, paths that sandboxed code made (CVE-2018-15664).
        """
        ran = await self._exec(["sh", "-c", _PUT, "put", path, str(len(data)), secrets.token_hex(4)], data, 60 + len(data) / _MB)
        if ran.exit_code != 0:
            # Not its own words: when it does not read on, Podman puts a fault of its own in their place.
            raise FileFault(f"{path}: cannot be written: {_PUT_FAULTS.get(ran.exit_code, f'exit code {ran.exit_code}')}")

    async def get(self, path: str) -> AsyncIterator[bytes]:
        """See Machine."""
        running = Exec(lambda: self._engine.api, self._id, USER, ["sh", "-c", _GET, "get", path], None)
        said = b""
        frames = running.frames(time.monotonic() + 600)
        try:
            while batch := await self._guarded(running, batch_of, frames):
                said = (said + b"".join(data for stream, data in batch if stream == 2))[-500:]
                if content := b"".join(data for stream, data in batch if stream == 1):
                    yield content
            ended = await self._guarded(running, running.exit_code)
        finally:
            running.stopped = True
            await self._engine.call(running.close)
        await self._check()
        if ended == _KILLED:
            await self._settle()
        if ended != 0:
            raise FileFault(f"{path}: {said.decode(errors='replace').strip() or 'cannot be read'}")

    async def extend(self, seconds: float) -> None:
        """Do nothing but see that the sandbox lives: how long its main process sleeps was fixed when it was made."""
        await self._check()

    async def _exec(self, argv: Sequence[str], stdin: bytes | None, timeout: float) -> Ran:
        running = Exec(lambda: self._engine.api, self._id, USER, argv, stdin)
        ran = await self._guarded(running, running.collect, time.monotonic() + timeout)
        await self._check()
        if ran.exit_code == _KILLED:
            await self._settle()
        return ran

    async def _settle(self) -> None:
        """See whether it was the end of the container that killed a command, which the engine may be the last to know."""
        until = time.monotonic() + _SETTLING_SECONDS
        while True:
            running = Exec(lambda: self._engine.api, self._id, USER, ["true"], None)
            try:
                alive = (await self._guarded(running, running.collect, until)).exit_code == 0
            except BadSandboxSpec:  # an engine's way to say that nothing can be started in it any more
                alive = False
            await self._check()
            if alive:
                return
            if time.monotonic() > until:
                raise SandboxUnavailable(f"sandbox {self._ref.id}: nothing can be started in it now")
            await asyncio.sleep(0.2)

    async def _guarded(self, running: Exec, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return await self._engine.call(function, *args, **kwargs)
        except SandboxGone as error:
            await self._check()
            # The container lives, so this was about its exec alone, which an engine that was restarted does not know any more.
            raise SandboxUnavailable(f"sandbox {self._ref.id}: the engine lost a command: {error}") from error
        except asyncio.CancelledError:
            running.stopped = True
            raise

    async def _check(self) -> None:
        """See that the container is the one that was attached to, and runs. Raises SandboxGone or SandboxUnavailable."""
        found = await self._engine.call(self._engine.find, self._id)
        if found is None:
            raise SandboxGone(f"sandbox {self._ref.id} has been removed")
        check_running(found)
        if found.state.get("StartedAt") != self._started:
            raise SandboxGone(f"sandbox {self._ref.id} was started again, so all that ran in it is lost")


@dataclass
class DockerProvider:
    """Makes, finds and ends the sandboxes of one engine.

    `engine` is the URL of its socket; `certificates` a directory with ca.pem, cert.pem and key.pem for tcp://. `image` is what
    sandboxes are made of whose spec names none; only with `pull` is an image fetched that the engine does not have.
    `workspace` says where the workspace is: on a volume of the engine, which has no limit but its disk, or in memory, which keeps
    `workspace_mb` and `workspace_files`, and counts as the sandbox's memory. `processes_of_user` sets RLIMIT_NPROC, for a Podman
    that may not raise its own, such as one in a container. `timeout` is in seconds, of one call to the engine.
    """

    engine: str = "unix:///var/run/docker.sock"
    image: str = DEFAULT_IMAGE
    pull: bool = False
    workspace: Literal["volume", "memory"] = "volume"
    certificates: Path | None = None
    processes_of_user: int | None = None
    timeout: float = 60.0
    name: str = field(default="docker", init=False)
    capabilities: Capabilities = field(init=False)

    def __post_init__(self) -> None:
        if not self.engine.startswith(("unix:///", "tcp://")):
            raise BadSandboxSpec(f"sandbox.provider: docker: DOCKER_HOST={self.engine}: give unix:///PATH or tcp://HOST:PORT")
        self._engine = Engine(self.engine, self.certificates, self.timeout)
        self._maker = Maker(self._engine, self.image, self.pull, self.workspace == "memory", self.processes_of_user)
        in_memory = ("workspace_mb", "workspace_files") if self.workspace == "memory" else ()
        self.capabilities = Capabilities(
            host_bound=self.engine.startswith("unix://"),
            native_jobs=False,
            interactive=True,
            limits=frozenset((*KEPT, *in_memory)),
            images=True,
        )

    async def create(
        self, spec: SandboxSpec, key: str, *, environment: Mapping[str, str], labels: Mapping[str, str], queue: str
    ) -> SandboxRef:
        """Make a sandbox with an empty workspace, or return the living one of `key`."""
        refuse_what_it_cannot(self.name, self.capabilities, spec)
        name = f"{OWN}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        while True:
            found = await self._engine.call(self._engine.find, name)
            if found is None:
                made = await self._engine.call(self._maker.make, spec, name, labels, queue)
                if made is None:  # another attempt for the same key was quicker
                    continue
                try:
                    await prepare(DockerMachine(self._engine, made, self.name), environment)
                except Exception:
                    await self._engine.call(self._engine.remove, made.id, volume_of(name, made.nonce))
                    raise
                return made.ref(self.name)
            if found.running:
                machine = DockerMachine(self._engine, found, self.name)
                try:
                    return (await attach(machine)).ref
                except SandboxGone:  # it is being made, or was started again, or its maker died
                    if found.age < MAKING_SECONDS:
                        await asyncio.sleep(0.5)
                        continue
            elif found.state.get("Status") == "created" and found.age < MAKING_SECONDS:
                await asyncio.sleep(0.5)
                continue
            await self._engine.call(self._engine.remove, found.id, volume_of(name, found.nonce))

    async def attach(self, ref: SandboxRef) -> PortableSandbox:
        """Reach a living sandbox and check its nonce. Raises SandboxGone."""
        found = await self._engine.call(self._engine.find, ref.id)
        if found is None or found.nonce != ref.nonce:
            raise SandboxGone(f"sandbox {ref.id} is not there any more")
        check_running(found)
        return await attach(DockerMachine(self._engine, found, self.name))

    async def kill(self, ref: SandboxRef) -> None:
        """End a sandbox and remove all of it. Ending one that is gone is no error."""
        found = await self._engine.call(self._engine.find, ref.id)
        # By its id: the name may be another sandbox's meanwhile. The workspace may be left though the container is gone.
        container = found.id if found is not None and found.nonce == ref.nonce else None
        await self._engine.call(self._engine.remove, container, volume_of(ref.id, ref.nonce))

    async def list(self, labels: Mapping[str, str]) -> list[SandboxRef]:
        """List living sandboxes that carry all `labels`."""
        return [one.ref for one in await self.inventory() if one.alive and labels.items() <= one.labels.items()]

    async def inventory(self) -> Sequence[Resident]:
        """Return the engine's sandboxes, the dead ones too, the oldest first. Changes nothing."""
        found = await self._engine.call(lambda: self._engine.api.containers(all=True, filters={"label": [OWN, EXPIRES]}))
        residents = []
        for one in found:
            state = {"Running": one["State"] in ("running", "paused")}
            container = Container(one["Id"], one["Names"][0].lstrip("/"), one["Labels"], state)
            labels = {name: value for name, value in one["Labels"].items() if name not in OWN_LABELS}
            created_at = float(one["Labels"][CREATED])
            residents.append(Resident(container.ref(self.name), labels, created_at, container.running))
        return sorted(residents, key=lambda one: one.created_at)

    async def clear(self) -> None:
        """Remove what sandboxes that have ended, and makers that were killed, have left."""
        for one in await self.inventory():
            if not one.alive and time.time() - one.created_at > LEFT_SECONDS:
                await self.kill(one.ref)
        await self._engine.call(self._clear)

    async def egress_log(self, ref: SandboxRef) -> bytes:
        """Return nothing: there is no network."""
        return b""

    def _clear(self) -> None:
        api, now = self._engine.api, time.time()
        for one in api.containers(all=True, filters={"label": [OWN]}):
            created = one["Labels"].get(CREATED)
            if EXPIRES not in one["Labels"] and created is not None and now - float(created) > LEFT_SECONDS:
                self._engine.remove(one["Id"], None)
        for one in api.volumes(filters={"label": [OWN], "dangling": ["true"]})["Volumes"] or []:
            created = (one.get("Labels") or {}).get(CREATED)
            if created is not None and now - float(created) > LEFT_SECONDS:
                with contextlib.suppress(load_sdk().errors.APIError):  # in use: Podman 4.3 lists those too
                    self._engine.remove(None, one["Name"])
