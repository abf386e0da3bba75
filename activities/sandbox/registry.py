"""Providers by name, built when first used, so that an SDK nobody asks for is never imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from temporalio.exceptions import ApplicationError

from activities.sandbox.port import (
    BadSandboxSpec,
    Sandbox,
    SandboxAuth,
    SandboxError,
    SandboxGone,
    SandboxProvider,
    SandboxQuota,
)
from contracts.activity_names import ErrorType
from contracts.sandbox import SandboxRef

PROVIDERS: Mapping[str, str] = {
    "local": "activities.sandbox.providers.local:LocalProvider",
    "docker": "activities.sandbox.providers.docker:DockerProvider",
    "e2b": "activities.sandbox.providers.e2b:E2BProvider",
    "modal": "activities.sandbox.providers.modal:ModalProvider",
}
"""Where each built-in provider's class is: `module:Class`."""
GROUP = "caisson.sandbox_providers"
"""The entry points by which an installed package offers providers: name = module:Class. The class is called without arguments."""

_ERROR_TYPES: Mapping[type[SandboxError], str] = {
    SandboxGone: ErrorType.SANDBOX_GONE,
    SandboxQuota: ErrorType.SANDBOX_STOP,
    SandboxAuth: ErrorType.SANDBOX_STOP,
    BadSandboxSpec: ErrorType.BAD_INPUT,
}


def provider_class(name: str) -> Callable[..., SandboxProvider]:
    """Import a provider's class, built in or of an entry point. Raises BadSandboxSpec, naming what is missing."""
    own = [entry for entry in entry_points(group=GROUP) if entry.name == name]
    if own and name in PROVIDERS:
        raise BadSandboxSpec(
            f"sandbox.provider: {name!r} is built in, and {_origin(own[0])} offers another one of that name, which nothing may "
            f"replace; rename it in the package's entry points ({GROUP}), or uninstall the package"
        )
    if len(own) > 1:
        raise BadSandboxSpec(f"sandbox.provider: {name!r} is offered by {' and '.join(map(_origin, own))}; uninstall all but one")
    if not own and name not in PROVIDERS:
        there = sorted({*PROVIDERS, *(entry.name for entry in entry_points(group=GROUP))})
        raise BadSandboxSpec(f"sandbox.provider: none is named {name!r}; there are: {', '.join(there)}")
    target = own[0].value if own else PROVIDERS[name]
    module, _, attribute = target.partition(":")
    try:
        found: Callable[..., SandboxProvider] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise _missing(name, error, own) from error
    except AttributeError as error:
        raise BadSandboxSpec(f"sandbox.provider: {name}: there is no {attribute} in {module}") from error
    return found


def _missing(name: str, error: ModuleNotFoundError, own: Sequence[EntryPoint] = ()) -> BadSandboxSpec:
    remedy = f"reinstall {_origin(own[0])}" if own else f"install it: pip install 'caisson[{name}]'"
    return BadSandboxSpec(f"sandbox.provider: {name} needs the package {error.name}, which is missing; {remedy}")


def _origin(entry: EntryPoint) -> str:
    return f"the package {entry.dist.name}" if entry.dist is not None else f"an installed package ({entry.value})"


class ProviderRegistry:
    """The providers that this worker offers: those it was set up with, and those of installed packages."""

    def __init__(self, factories: Mapping[str, Callable[[], SandboxProvider]]) -> None:
        self._factories = dict(factories)
        self._built: dict[str, SandboxProvider] = {}

    def get(self, name: str) -> SandboxProvider:
        """Return a provider. Raises BadSandboxSpec naming those that this worker has."""
        if name not in self._built:
            own = {entry.name for entry in entry_points(group=GROUP)}
            if name not in self._factories and name not in own:
                known = ", ".join(sorted({*self._factories, *own})) or "none"
                raise BadSandboxSpec(f"sandbox.provider: this worker has no provider {name!r}; choose one that it has: {known}")
            try:
                self._built[name] = self._factories[name]() if name in self._factories else provider_class(name)()
            except ModuleNotFoundError as error:  # of an SDK that its provider imports when it is made
                raise _missing(name, error) from error
        return self._built[name]

    async def attach(self, ref: SandboxRef) -> Sandbox:
        """Reach the sandbox that `ref` means. Raises SandboxGone."""
        return await self.get(ref.provider).attach(ref)


def translate(error: SandboxError) -> ApplicationError:
    """Turn a sandbox failure into what Temporal acts on: only `SandboxUnavailable` is retried."""
    kind = next((name for cls, name in _ERROR_TYPES.items() if isinstance(error, cls)), None)
    return ApplicationError(str(error), type=kind or ErrorType.SANDBOX_UNAVAILABLE, non_retryable=kind is not None)
