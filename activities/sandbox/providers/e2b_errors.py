"""What the errors of E2B's SDK mean for a sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping

from activities.sandbox.port import BadSandboxSpec, SandboxAuth, SandboxError, SandboxGone, SandboxQuota, SandboxUnavailable

_ERRORS: Mapping[str, type[SandboxError]] = {
    "SandboxNotFoundException": SandboxGone,
    "SandboxNotRunningException": SandboxGone,  # if the control plane says so too, see `_fault`
    "GuestUnresponsiveException": SandboxGone,  # what it was paused with cannot be gone on with
    "AuthenticationException": SandboxAuth,
    "TemplateException": BadSandboxSpec,
    "RateLimitException": SandboxUnavailable,
    "ServiceBusyException": SandboxUnavailable,
    "TimeoutException": SandboxUnavailable,  # also the parent of SandboxUnreachableException
}
"""By the names of the SDK's classes, nearest first; what is not here goes by its HTTP status."""
_STATUS: Mapping[int, type[SandboxError]] = {401: SandboxAuth, 402: SandboxQuota, 403: SandboxAuth, 410: SandboxGone}
"""410: the API's answer for a sandbox that was killed, which the SDK has no class for. Anything else may be better later."""
_OF_THE_SPEC = frozenset({400, 404, 422})
"""What the API answers when a sandbox is made in a way that it cannot be: 404 for an unknown template."""
_QUOTA = re.compile(r"concurrent|maximum number|quota", re.IGNORECASE)
"""Beside the rate of requests, 429 stands for the number of sandboxes that an account may have."""
_FORBIDDEN = re.compile(r"(403|Code\.PERMISSION_DENIED):")
"""How errors of the data plane begin, which carry no status."""
_TOO_LONG = re.compile(r"cannot be greater than (\d+) hours?")


def meaning_of(error: Exception, text: str, *, is_making: bool) -> type[SandboxError]:
    """Return what an error of the SDK means. `text` is its own; `is_making` says that a sandbox was being made."""
    names = [cls.__name__ for cls in type(error).__mro__]
    status = getattr(error, "status_code", None)
    kind = next((_ERRORS[name] for name in names if name in _ERRORS), None) or _STATUS.get(status or 0, SandboxUnavailable)
    if (status == 429 or "RateLimitException" in names) and _QUOTA.search(text):
        kind = SandboxQuota
    elif _FORBIDDEN.match(text):
        kind = SandboxAuth
    if is_making and (status in _OF_THE_SPEC or (status == 403 and "template" in text) or "InvalidArgumentException" in names):
        kind = BadSandboxSpec
    return kind


def longest_hours(error: Exception) -> int | None:
    """Return the most hours of life that E2B's plan allows, when the error says that more were asked for."""
    found = _TOO_LONG.search(str(error))
    return None if found is None else int(found[1])
