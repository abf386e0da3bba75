"""Providers by name, built when first used, so that an SDK nobody asks for is never imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

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
}
"""Where each provider's class is: `module:Class`."""

_ERROR_TYPES: Mapping[type[SandboxError], str] = {
    SandboxGone: ErrorType.SANDBOX_GONE,
    SandboxQuota: ErrorType.SANDBOX_STOP,
    SandboxAuth: ErrorType.SANDBOX_STOP,
    BadSandboxSpec: ErrorType.BAD_INPUT,
}


def provider_class(name: str) -> Callable[..., SandboxProvider]:
    """Import a provider's class. Raises BadSandboxSpec naming the known providers."""
    if name not in PROVIDERS:
        raise BadSandboxSpec(f"sandbox.provider: none is named {name!r}; there are: {', '.join(PROVIDERS)}")
    module, _, attribute = PROVIDERS[name].partition(":")
    found: Callable[..., SandboxProvider] = getattr(importlib.import_module(module), attribute)
    return found


class ProviderRegistry:
    """The providers that this worker offers."""

    def __init__(self, factories: Mapping[str, Callable[[], SandboxProvider]]) -> None:
        self._factories = dict(factories)
        self._built: dict[str, SandboxProvider] = {}

    def get(self, name: str) -> SandboxProvider:
        """Return a provider. Raises BadSandboxSpec naming those that this worker has."""
        if name not in self._factories:
            known = ", ".join(sorted(self._factories)) or "none"
            raise BadSandboxSpec(f"sandbox.provider: this worker has no provider {name!r}; choose one that it has: {known}")
        if name not in self._built:
            self._built[name] = self._factories[name]()
        return self._built[name]

    async def attach(self, ref: SandboxRef) -> Sandbox:
        """Reach the sandbox that `ref` means. Raises SandboxGone."""
        return await self.get(ref.provider).attach(ref)


def translate(error: SandboxError) -> ApplicationError:
    """Turn a sandbox failure into what Temporal acts on: only `SandboxUnavailable` is retried."""
    kind = next((name for cls, name in _ERROR_TYPES.items() if isinstance(error, cls)), None)
    return ApplicationError(str(error), type=kind or ErrorType.SANDBOX_UNAVAILABLE, non_retryable=kind is not None)
