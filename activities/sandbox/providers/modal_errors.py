"""What the errors of Modal's SDK mean for a sandbox."""

from __future__ import annotations

import re
from collections.abc import Mapping

from activities.sandbox.port import BadSandboxSpec, SandboxAuth, SandboxError, SandboxGone, SandboxQuota, SandboxUnavailable

Kind = type[SandboxError]
_ERRORS: Mapping[str, Kind] = {
    **dict.fromkeys(("NotFoundError", "SandboxTerminatedError", "SandboxTimeoutError"), SandboxGone),  # but see `ModalProvider`
    **dict.fromkeys(("AuthError", "PermissionDeniedError"), SandboxAuth),
    "ResourceExhaustedError": SandboxQuota,
    "ConflictError": SandboxUnavailable,  # a child of InvalidError: not now, though it was asked rightly
    **dict.fromkeys(("InvalidError", "UnimplementedError", "ImageBuildError", "VersionError"), BadSandboxSpec),
}
"""By the names of the SDK's classes, nearest first; it makes one of each gRPC status (`modal.exception`). Anything else, such as
ServiceError, InternalError, ConnectionError or a deadline, may be better later."""
_TRY_AGAIN = re.compile(r"terminated due to external shut-down|timed out. Please try again")  # an ImageBuildError that passes


def meaning_of(error: Exception, text: str) -> Kind:
    """Return what an error of the SDK means, as far as it can be told without asking Modal. `text` is its own."""
    names = [cls.__name__ for cls in type(error).__mro__]
    # With this detail, Modal says when to come back, and so that only the rate of requests is too high.
    details = [type(detail).__name__ for detail in getattr(error, "_grpc_details", None) or ()]
    if "RPCRetryPolicy" in details or ("ImageBuildError" in names and _TRY_AGAIN.search(text)):
        return SandboxUnavailable
    return next((_ERRORS[name] for name in names if name in _ERRORS), SandboxUnavailable)
