"""How the container of a sandbox is made: what it may do and use, and its workspace.

A container is given as little as an engine can be told to give. Its main process is `sleep`, for as long as the sandbox may live,
under a user of its own, so that no command can stop or signal it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from activities.sandbox.port import BadSandboxSpec, SandboxError, SandboxUnavailable
from activities.sandbox.providers.docker_engine import (
    CREATED,
    EXPIRES,
    NONCE,
    OWN,
    QUEUE,
    Container,
    Engine,
    load_sdk,
    translated,
    volume_of,
)
from activities.sandbox.providers.docker_exec import Exec
from contracts.sandbox import WORKSPACE, SandboxSpec

USER, KEEPER = "1000:1000", "65532:65532"
"""Who commands are, and who the main process is. Numbers, so that an image needs no entry for them."""
_MB = 1 << 20
_TMP = ("/tmp", "/var/tmp", "/run")  # noqa: S108 - the sandbox's own
_SPARE_PROCESSES = 4
"""The engine's init, the main process, and what the engine itself starts to begin an exec."""
_NEVER = ("not found", "unknown", "denied", "unauthorized", "invalid reference")
"""What a registry says of an image that trying again does not bring."""


def _tmpfs(spec: SandboxSpec) -> dict[str, str]:
    """Return how a volume in memory is asked for, with the limits of the workspace.

    In blocks, as Podman takes a `size` for a quota on disk; and as a volume, as it knows no owner of a plain tmpfs.
    """
    blocks = min(spec.limits.workspace_mb, spec.limits.memory_mb // 2) * _MB // 4096
    owner = "uid={},gid={}".format(*USER.split(":"))
    options = f"nr_blocks={blocks},nr_inodes={spec.limits.workspace_files + 1},mode=0755,{owner},nosuid,nodev"
    return {"type": "tmpfs", "device": "tmpfs", "o": options}


@dataclass(frozen=True)
class Maker:
    """Makes containers on one engine. See DockerProvider for what the fields mean. All methods block."""

    engine: Engine
    image: str
    pull: bool
    in_memory: bool
    processes_of_user: int | None

    def make(self, spec: SandboxSpec, name: str, labels: Mapping[str, str], queue: str) -> Container | None:
        """Make and start the container of a sandbox. Returns None when there is one of that name."""
        api, limits, image = self.engine.api, spec.limits, spec.image or self.image
        nonce, now = secrets.token_hex(16), time.time()
        own = {OWN: "1", CREATED: f"{now:.3f}"}
        marks = {**labels, **own, NONCE: nonce, QUEUE: queue, EXPIRES: f"{now + limits.lifetime_seconds:.3f}"}
        processors = min(limits.cpus, self.engine.processors())  # Docker refuses to give more than there are
        memory = limits.memory_mb * _MB
        volume = volume_of(name, nonce)
        # Together less than all memory: what is full of files cannot be freed by killing, so the kernel would kill everything.
        tmp, few = memory // (4 if self.in_memory else 2), memory // 16
        options = _tmpfs(spec) if self.in_memory else None
        try:
            api.create_volume(volume, labels=own, driver_opts=options)
            container = self._container(
                image,
                ["sleep", str(limits.lifetime_seconds)],
                volume,
                name=name,
                labels=marks,
                user=KEEPER,
                host={
                    # Podman mounts all of these anyway when the root is read-only, without a limit where none is given.
                    "tmpfs": {at: f"rw,exec,nosuid,nodev,size={size}" for at, size in zip(_TMP, (tmp, few, few), strict=True)},
                    "shm_size": few,
                    "init": True,
                    "pids_limit": limits.processes + _SPARE_PROCESSES,
                    "mem_limit": memory,
                    "memswap_limit": memory,
                    "nano_cpus": int(max(processors, 0.01) * 1e9),
                },
                ulimits={"nofile": limits.open_files, "fsize": limits.file_mb * _MB, "core": 0},
            )
            if container is not None:
                if not self.in_memory:
                    self._give(image, volume, own)
                with self._speaking_of(image):
                    api.start(container)
                    self._open_tmp(container)
                found = self.engine.find(container)
                if found is not None:
                    return found
            self.engine.remove(None, volume)
            return None
        except Exception:
            # The answer to a call may be what was lost, so look for what it made. What cannot be undone now, `clear` removes.
            with contextlib.suppress(SandboxError), translated(self.engine.url):
                left = self.engine.find(name)
                self.engine.remove(left.id if left is not None and left.nonce == nonce else None, volume)
            raise

    def _container(
        self,
        image: str,
        argv: Sequence[str],
        volume: str,
        *,
        labels: Mapping[str, str],
        user: str,
        host: Mapping[str, Any],
        ulimits: Mapping[str, int],
        name: str | None = None,
    ) -> str | None:
        """Make a container that can do as little as possible and return its id, or None when the name is taken."""
        docker, api = load_sdk(), self.engine.api
        if self.processes_of_user is not None:
            ulimits = {**ulimits, "nproc": self.processes_of_user}
        config = api.create_container_config(
            image,
            argv[1:],
            entrypoint=argv[:1],
            user=user,
            labels=dict(labels),
            working_dir=WORKSPACE,
            healthcheck={"test": ["NONE"]},
            host_config=api.create_host_config(
                network_mode="none",
                read_only=True,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges:true"],
                ipc_mode="private",
                mounts=[docker.types.Mount(WORKSPACE, volume, type="volume")],
                ulimits=[docker.types.Ulimit(name=limit, soft=most, hard=most) for limit, most in ulimits.items()],
                **host,
            ),
        )
        try:
            # Not `create_container`: it would put the proxies of the worker's ~/.docker/config.json into the sandbox.
            try:
                made = api.create_container_from_config(config, name)
            except docker.errors.ImageNotFound:
                self._fetch(image)
                made = api.create_container_from_config(config, name)
        except docker.errors.APIError as error:
            if "already in use" in str(error):  # Docker: 409, Podman: 500
                return None
            raise
        return str(made["Id"])

    def _give(self, image: str, volume: str, labels: Mapping[str, str]) -> None:
        """Make the fresh workspace the ordinary user's.

        No engine can be asked for that, and the sandbox has no capability to do it, so a container does that is gone before the
        sandbox starts. It has this one capability and runs the image's `chown`.
        """
        api = self.engine.api
        host = {"cap_add": ["CHOWN"], "pids_limit": 64, "mem_limit": 64 * _MB, "memswap_limit": 64 * _MB}
        argv = ["chown", USER, WORKSPACE]
        helper = self._container(image, argv, volume, labels=labels, user="0:0", host=host, ulimits={"nofile": 1024, "core": 0})
        try:
            with self._speaking_of(image):
                api.start(helper)
            code = api.wait(helper, timeout=self.engine.timeout)["StatusCode"]
            if code != 0:
                raise BadSandboxSpec(f"sandbox.image: {image}: chown in it ended with exit code {code}")
        finally:
            self.engine.remove(helper, None)

    def _open_tmp(self, container: str) -> None:
        """Let everybody write to /tmp: whatever mode is asked for, runc 1.1 gives it that of the image's own /tmp.

        Before anything of the sandbox runs, by a root that owns it and has no capability either.
        """
        argv = ["chmod", "1777", *_TMP[:2]]
        ran = Exec(lambda: self.engine.api, container, "0:0", argv, None).collect(time.monotonic() + self.engine.timeout)
        if ran.exit_code != 0:
            raise BadSandboxSpec(f"chmod ended with exit code {ran.exit_code}: {ran.stderr[-200:].decode(errors='replace')}")

    def _fetch(self, image: str) -> None:
        if not self.pull:
            raise BadSandboxSpec(
                f"sandbox.image: {image}: the engine at {self.engine.url} does not have it, and is not told to fetch images; "
                f"fetch it there with: docker pull {image}, or set CAISSON_DOCKER_PULL=true"
            )
        repository, tag = load_sdk().utils.parse_repository_tag(image)
        said = ""
        try:
            with translated(self.engine.url):
                for line in self.engine.api.pull(repository, tag=tag or "latest", stream=True, decode=True):
                    said = str(line.get("error") or said)
        except SandboxError as error:
            said = str(error)
        if said:
            kind = BadSandboxSpec if any(word in said.lower() for word in _NEVER) else SandboxUnavailable
            raise kind(f"sandbox.image: {image}: cannot be fetched: {said}")

    @contextlib.contextmanager
    def _speaking_of(self, image: str) -> Iterator[None]:
        try:
            with translated(self.engine.url):
                yield
        except BadSandboxSpec as error:
            raise BadSandboxSpec(f"sandbox.image: {image}: it needs sh, sleep, chmod and chown: {error}") from error
