"""What the conformance suite knows of the sandboxes it checks, and where it finds them.

A subject is one provider in one flavour. `tests/conformance/subject_<name>.py` has, for each, an async generator function
`subject(tmp_path)`, `subject_<flavour>(tmp_path)` and so on, which yields one `Subject` and ends in the end all that was made. It
raises `NotHere` before the yield where its engine is missing.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from activities.sandbox.port import Capabilities, InteractiveSandbox, SandboxProvider
from contracts.sandbox import SandboxRef, SandboxSpec

ENVIRONMENT = {"PROJECT": "north wing", "QUOTED": 'it\'s "so" $HOME\n'}
"""What every sandbox of the suite is made with."""


class NotHere(Exception):
    """The engine of a subject is not on this machine; the text says what is missing."""


class NotShown(Exception):
    """A check cannot be made with this subject, as its emulator or engine lacks what it takes; the text says what.

    Never for what a provider cannot do: that must be refused, and the refusal is what is checked then.
    """


@dataclass(frozen=True)
class Subject:
    """One provider in one flavour, ready to make sandboxes."""

    name: str
    """As in the matrix, such as `docker` or `docker-busybox`."""
    provider: SandboxProvider
    where: str
    """`emulator`, `real engine` or `live`."""
    kill_machine: Callable[[SandboxRef], Awaitable[None]]
    """Ends a sandbox from outside, as a crash or another user would, not through the provider."""
    spec: SandboxSpec = field(default_factory=SandboxSpec)
    image: str = "python"
    """The flavour of its image: `python` (bash, coreutils, Python 3.6 or newer) or `busybox` (BusyBox alone)."""
    again: Callable[[], SandboxProvider] | None = None
    """Makes the provider as another worker has it, that knows nothing of this one."""
    unreachable: Callable[[bool], Awaitable[None]] | None = None
    """Makes the provider's service unreachable (True) and reachable again (False); None where a test cannot."""
    asked_for: bool = False
    """It costs money: it runs only when it is named, with CONFIRM=yes."""
    shared: list[SandboxRef] = field(default_factory=list)
    """The sandbox that checks use which leave it as they found it; see `box`."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def capabilities(self) -> Capabilities:
        """What the provider says it can do."""
        return self.provider.capabilities

    def key(self) -> str:
        """Return a key that no sandbox has yet."""
        return f"conformance-{next(self._numbers)}"

    async def create(
        self, spec: SandboxSpec | None = None, key: str | None = None, labels: dict[str, str] | None = None
    ) -> SandboxRef:
        """Make a sandbox as a run does."""
        return await self.provider.create(
            self.spec if spec is None else spec,
            key or self.key(),
            environment=ENVIRONMENT,
            labels=labels or {"suite": "conformance"},
            queue="caisson-sandbox",
        )

    async def other(self) -> SandboxProvider:
        """Return the provider as another worker has it."""
        return self.provider if self.again is None else self.again()


Sandbox = InteractiveSandbox
"""What the checks work with. One that is not interactive is refused before it is asked to be."""

Making = Callable[[Path], AbstractAsyncContextManager[Subject]]


def subjects() -> dict[str, Making]:
    """Find all subjects: name -> how to make it. The name is that of the file and of the flavour: `local`, `portable-busybox`."""
    found: dict[str, Making] = {}
    for path in sorted(Path(__file__).parent.glob("subject_*.py")):
        module = importlib.import_module(f"{__package__}.{path.stem}")
        base = path.stem.removeprefix("subject_")
        for attribute in vars(module):
            if attribute == "subject" or attribute.startswith("subject_"):
                name = "-".join([base, *attribute.split("_")[1:]])
                found[name] = _manager(getattr(module, attribute))
    return found


def _manager(function: Callable[[Path], AsyncIterator[Subject]] | Making) -> Making:
    if hasattr(function, "__wrapped__"):
        return function  # type: ignore[return-value]  # it is a context manager already
    return asynccontextmanager(function)  # type: ignore[arg-type]
