"""A container engine: its client and threads, what it says of a container, and what its errors mean.

Source: docs.docker.com/reference/api/engine, and what Docker 20.10.24 and Podman 4.3.1 answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from activities.sandbox.port import (
    BadSandboxSpec,
    SandboxAuth,
    SandboxError,
    SandboxGone,
    SandboxQuota,
    SandboxUnavailable,
)
from contracts.sandbox import SandboxRef

OWN = "caisson"
"""The label of everything that is made here. What follows it says more."""
NONCE, QUEUE, CREATED, EXPIRES = f"{OWN}_nonce", f"{OWN}_queue", f"{OWN}_created", f"{OWN}_expires"
OWN_LABELS = (OWN, NONCE, QUEUE, CREATED, EXPIRES)
_THREADS = 64

_SAID: Sequence[tuple[str, type[SandboxError]]] = (
    ("is paused", SandboxUnavailable),
    ("no space left on device", SandboxQuota),
    ("quota exceeded", SandboxQuota),
    ("cannot allocate memory", SandboxQuota),
    ("no such image", BadSandboxSpec),
    ("executable file not found", BadSandboxSpec),
    ("init binary not found", BadSandboxSpec),
    ("container state improper", SandboxGone),
    ("no such container", SandboxGone),
    ("no such exec", SandboxGone),
    ("is not running", SandboxGone),
)
"""What an engine's words mean. They count more than its status, as Podman answers 500 for nearly everything."""
_STATUS: Mapping[int, type[SandboxError]] = {
    400: BadSandboxSpec,
    401: SandboxAuth,
    403: SandboxAuth,
    404: SandboxGone,
    409: SandboxGone,
    507: SandboxQuota,
}
"""What an engine's status means; any other one is an engine that may answer later."""
_HINTS = {
    SandboxAuth: "; the worker's user must be allowed to use the engine",
    SandboxQuota: "; make room where the engine has its data",
}


def load_sdk() -> Any:
    """Import the SDK when it is first used. Raises BadSandboxSpec that says what to install."""
    try:
        return importlib.import_module("docker")
    except ModuleNotFoundError as error:
        raise BadSandboxSpec("sandbox.provider: docker needs its SDK on the worker: pip install 'caisson[docker]'") from error


@contextlib.contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn the SDK's errors, and those of what it stands on, into those of the port."""
    docker = load_sdk()
    requests = importlib.import_module("requests.exceptions")
    urllib3 = importlib.import_module("urllib3.exceptions")
    foreign = (docker.errors.DockerException, requests.RequestException, urllib3.HTTPError, HTTPException, OSError)
    try:
        yield
    except foreign as error:
        kind, said = _meaning(error)
        raise kind(f"the engine at {url}: {said}{_HINTS.get(kind, '')}") from error


def _meaning(error: BaseException) -> tuple[type[SandboxError], str]:
    status = getattr(error, "status_code", None)
    said = str(getattr(error, "explanation", None) or error) or type(error).__name__
    if status is not None:
        words = said.lower()
        kind = next((kind for word, kind in _SAID if word in words), None) or _STATUS.get(status, SandboxUnavailable)
        return kind, f"{status}: {said}"
    inner: BaseException | None = error
    while inner is not None:  # urllib3 and requests wrap what the socket said
        if isinstance(inner, PermissionError):
            return SandboxAuth, said
        inner = inner.__cause__ or inner.__context__
    return SandboxUnavailable, said


_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Container:
    """What the engine says of a container that is a sandbox."""

    id: str
    name: str
    labels: Mapping[str, str]
    state: Mapping[str, Any]

    @property
    def nonce(self) -> str:
        return self.labels.get(NONCE, "")

    @property
    def age(self) -> float:
        return time.time() - float(self.labels.get(CREATED, 0))

    @property
    def running(self) -> bool:
        return bool(self.state.get("Running") or self.state.get("Paused"))  # Podman calls one that is paused not running

    def ref(self, provider: str) -> SandboxRef:
        expires_at = float(self.labels[EXPIRES])
        return SandboxRef(provider=provider, id=self.name, nonce=self.nonce, queue=self.labels[QUEUE], expires_at=expires_at)


class Engine:
    """One engine: a client that is made when first used, and the threads that wait for it."""

    def __init__(self, url: str, certificates: Path | None, timeout: float) -> None:
        self.url = url
        self._certificates = certificates
        self.timeout = timeout
        self._lock = threading.Lock()
        self._api: Any = None
        self._info: dict[str, Any] | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="caisson-docker")

    async def call(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run what blocks in a thread; foreign errors come out translated."""

        def guarded() -> _T:
            with translated(self.url):
                self._knock()
                return function(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._threads, guarded)

    def _knock(self) -> None:
        """Raise OSError when nothing listens. The SDK would raise too, but leave its socket open each time."""
        if self.url.startswith("unix://"):
            with socket.socket(socket.AF_UNIX) as one:
                one.settimeout(self.timeout)
                one.connect(self.url.removeprefix("unix://"))

    @property
    def api(self) -> Any:
        """The SDK's client. Blocks its thread the first time."""
        with self._lock:
            if self._api is None:
                docker = load_sdk()
                tls: Any = False
                if self._certificates is not None:
                    at = self._certificates
                    pair = (str(at / "cert.pem"), str(at / "key.pem"))
                    tls = docker.TLSConfig(client_cert=pair, ca_cert=str(at / "ca.pem"), verify=True)
                self._api = docker.APIClient(base_url=self.url, timeout=self.timeout, tls=tls, max_pool_size=_THREADS)
            return self._api

    def processors(self) -> int:
        """Return how many processors the engine has, once it is sure to keep the limits. Raises BadSandboxSpec."""
        if self._info is None:
            info = self.api.info()
            lacking = [name for name in ("MemoryLimit", "PidsLimit", "CpuCfsQuota") if info.get(name) is False]
            if lacking or info.get("OSType", "linux") != "linux":
                found = ", ".join(f"{name}: false" for name in lacking) or f"OSType: {info['OSType']}"
                raise BadSandboxSpec(
                    f"sandbox.limits: the engine at {self.url} cannot keep them (docker info: {found}); it needs Linux control "
                    "groups, which a rootless engine gets by delegation: see docs.docker.com/engine/security/rootless"
                )
            self._info = info
        return int(self._info.get("NCPU") or 1)

    def find(self, name: str) -> Container | None:
        """Return the container of a sandbox, dead or alive."""
        docker = load_sdk()
        try:
            found = self.api.inspect_container(name)
        except docker.errors.NotFound:
            return None
        labels = found["Config"].get("Labels") or {}
        return Container(found["Id"], found["Name"].lstrip("/"), labels, found["State"]) if OWN in labels else None

    def remove(self, container: str | None, volume: str | None) -> None:
        """Remove a container, whatever it does, and a volume. What is gone already is no error."""
        docker = load_sdk()
        for _ in range(50 if container is not None else 0):
            try:
                self.api.remove_container(container, force=True, v=True)
            except docker.errors.NotFound:
                break
            except docker.errors.APIError as error:  # another caller removes it at this moment
                if error.status_code != 409 and "in progress" not in str(error):
                    raise
                time.sleep(0.2)
        if volume is not None:
            with contextlib.suppress(docker.errors.NotFound):
                self.api.remove_volume(volume)


def volume_of(name: str, nonce: str) -> str:
    """Return the name of the volume that one sandbox has its workspace on: never that of another one for the same key."""
    return f"{name}-{nonce}"


def check_running(found: Container) -> None:
    """Raise SandboxGone for a container that has ended, SandboxUnavailable for one that is held at the moment."""
    if not found.running:
        state = found.state
        code = state.get("ExitCode")  # 0: its main process has slept to the end
        why = "out of memory" if state.get("OOMKilled") else state.get("Error") or f"exit code {code}"
        why = "its lifetime is over" if code == 0 else why
        raise SandboxGone(f"sandbox {found.name} has ended ({state.get('Status')}: {why})")
    if found.state.get("Paused") or found.state.get("Restarting"):
        raise SandboxUnavailable(
            f"sandbox {found.name} is {found.state.get('Status')}; docker unpause {found.name} lets it go on"
        )
