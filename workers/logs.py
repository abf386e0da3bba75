"""Structured logs: JSON for machines, columns for a terminal; every line of an activity says which run and step it is of."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from temporalio import activity
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
    Interceptor,
)

from workers.settings import Settings

_SHARED: list[structlog.typing.Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.stdlib.ExtraAdder(),
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
_SILENT = ("mcp", "client")
"""The MCP SDK's loggers: they quote what servers said, which is what runs work on."""
_NOISE = ("httpx", "httpx2", "httpcore", "httpcore2", "openai", "urllib3", "botocore", "asyncio")


def configure_logs(settings: Settings, role: str) -> None:
    """Send everything, Temporal's own lines too, through structlog to standard error."""
    console = settings.log_format == "console" or (settings.log_format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if console
        else structlog.processors.JSONRenderer()
    )
    last: list[structlog.typing.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if not console:
        # Never with the frames' local variables: they hold what runs work on.
        last.append(structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)))
    structlog.configure(
        processors=[*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_SHARED, processors=[*last, renderer]))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    for name in _NOISE:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in _SILENT:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    structlog.contextvars.bind_contextvars(role=role)


class LogInterceptor(Interceptor):
    """Logs each activity's start and end with its run, step and attempt. Never its arguments: they may hold company data."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        """Wrap an activity."""
        return _LoggedActivity(next)


class _LoggedActivity(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        info = activity.info()
        step = getattr(input.args[0], "step", None) if input.args else None
        bound = {"run": info.workflow_id, "activity": info.activity_type, "attempt": info.attempt}
        log = structlog.stdlib.get_logger("caisson.activity")
        with structlog.contextvars.bound_contextvars(**bound, **({"step": step} if step is not None else {})):
            log.debug("activity started")
            try:
                result = await super().execute_activity(input)
            except BaseException as error:
                log.warning("activity ended without a result", error=f"{type(error).__name__}: {error}"[:500])
                raise
            log.info("activity done")
            return result
