"""What some providers can do with a sandbox that is put away, and the rest cannot: pause it, or make an image of it.

Either only saves work. The run's last snapshot is in the store before it is done, so whatever fails here costs a restore, and is
logged, not raised.
"""

from __future__ import annotations

from typing import cast

import structlog
from temporalio import activity

from activities.sandbox.port import (
    ImagingProvider,
    PausingProvider,
    SandboxError,
    SandboxGone,
    SandboxProvider,
    SandboxUnavailable,
)
from contracts.sandbox import SandboxRef

_PATIENT_ATTEMPTS = 2
"""Attempts of the activity in which a provider that does not answer is waited for, before the sandbox is ended instead."""


async def pause(provider: SandboxProvider, ref: SandboxRef) -> bool:
    """Pause a sandbox, if its provider can. Raises SandboxUnavailable in the first attempts of an activity."""
    if not provider.capabilities.pause:
        return False
    try:
        await cast("PausingProvider", provider).pause(ref)
    except SandboxGone:
        return False
    except SandboxError as error:
        if isinstance(error, SandboxUnavailable) and activity.info().attempt <= _PATIENT_ATTEMPTS:
            raise
        _log("a sandbox could not be paused, and is ended", ref, error)
        return False
    return True


async def resume(provider: SandboxProvider, ref: SandboxRef) -> SandboxRef:
    """Let a paused sandbox go on and return its new handle. Raises SandboxError."""
    if not provider.capabilities.pause:
        raise SandboxGone(f"sandbox {ref.id}: provider {provider.name} cannot go on with a paused one any more")
    return await cast("PausingProvider", provider).resume(ref)


async def make_image(provider: SandboxProvider, ref: SandboxRef) -> str | None:
    """Return the name of an image of a sandbox's files, if its provider can make one."""
    if not provider.capabilities.native_snapshot:
        return None
    try:
        return await cast("ImagingProvider", provider).make_image(ref)
    except SandboxGone:
        return None
    except SandboxError as error:
        _log("no image of a sandbox could be made", ref, error)
        return None


async def remove_image(provider: SandboxProvider, image: str | None) -> None:
    """Remove an image that nobody needs any more."""
    if image is None or not provider.capabilities.native_snapshot:
        return
    try:
        await cast("ImagingProvider", provider).remove_image(image)
    except SandboxError as error:
        structlog.stdlib.get_logger("caisson.sandbox").warning(
            "an image could not be removed, and ends by itself", provider=provider.name, image=image, error=str(error)
        )


def _log(what: str, ref: SandboxRef, error: SandboxError) -> None:
    structlog.stdlib.get_logger("caisson.sandbox").warning(what, provider=ref.provider, sandbox=ref.id, error=str(error))
