"""The provider for E2B against the emulator, with the faults that a test asks for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from activities.sandbox.providers.e2b import E2BMachine, E2BProvider
from contracts.sandbox import SandboxRef, SandboxSpec
from tests.emulators.e2b import Emulator
from tests.emulators.e2b.server import API_KEY

NOT_FOUND = {"sandboxId": "x", "message": "The sandbox was not found", "code": 502}
"""What the proxy in front of the sandboxes says of one that it does not know."""


class Service:
    """An emulator and providers for it."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.account = emulator.account
        self.provider = self.worker()

    def worker(self, api_key: str = API_KEY) -> E2BProvider:
        """Return another provider, as another worker has it."""
        return E2BProvider(api_key, api_url=self.emulator.url, sandbox_url=self.emulator.url)

    @property
    def options(self) -> dict[str, Any]:
        """What the SDK needs to be used directly, as somebody else of the same account would."""
        return {"api_key": API_KEY, "api_url": self.emulator.url, "sandbox_url": self.emulator.url, "retries": 0}

    async def create(
        self, key: str = "key", spec: SandboxSpec | None = None, labels: Mapping[str, str] | None = None
    ) -> SandboxRef:
        """Make a sandbox."""
        spec = spec or SandboxSpec(provider="e2b")
        return await self.provider.create(spec, key, environment={}, labels=labels or {}, queue="q")

    async def machine(self, ref: SandboxRef | None = None) -> E2BMachine:
        """Reach a sandbox, or a new one, below the portable layer."""
        machine = (await self.provider.attach(ref or await self.create())).machine
        assert isinstance(machine, E2BMachine)
        return machine

    async def fault(self, match: str, **what: Any) -> None:
        """Have the emulator make a fault, over HTTP."""
        async with httpx.AsyncClient() as client:
            (await client.post(f"{self.emulator.url}/_emulator/faults", json={"match": match, **what})).raise_for_status()

    async def outside(self, ref: SandboxRef, what: str) -> None:
        """`kill` or `expire` a sandbox from outside."""
        async with httpx.AsyncClient() as client:
            (await client.post(f"{self.emulator.url}/_emulator/sandboxes/{ref.id}/{what}")).raise_for_status()

    async def answer_header(self, name: str) -> str:
        """Return a header that every answer of the emulator has."""
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{self.emulator.url}/health")).headers[name]

    def asked(self, what: str) -> int:
        """How often the emulator was asked for something, "METHOD /path"."""
        return sum(line.startswith(what) for line in self.emulator.faults.requests)


def missing() -> str | None:
    """Return what the emulator lacks on this machine, if anything."""
    if os.geteuid() != 0:
        return "the emulator of E2B takes root, for sandboxes with two users"
    tools = [tool for tool in ("bwrap", "nsenter", "setpriv") if shutil.which(tool) is None]
    return f"missing: {', '.join(tools)}: apt-get install bubblewrap util-linux" if tools else None


def emulator_in(directory: Path) -> Emulator:
    """Return an emulator that is not started yet."""
    return Emulator(directory / "e2b")
