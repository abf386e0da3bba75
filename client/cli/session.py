"""What most commands need: the settings, the store and a connection, made the way the workers make them."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from client.cli.faults import ExitCode

if TYPE_CHECKING:
    from rich.console import Console
    from temporalio.client import Client

    from activities.store.blobs import BlobStore
    from client.sdk import CaissonClient, RunHandle
    from contracts.run import RunResult
    from workers.settings import Settings

RunId = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
Chain = Annotated[
    str | None,
    typer.Option(metavar="ID", help="Temporal's first run id, where the run's id was used more than once; else the latest."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON to standard output, for programs.")]
WebUi = Annotated[
    str | None,
    typer.Option("--ui", metavar="URL", help="Where the Web UI is; for a local server it is guessed."),
]


@dataclass(frozen=True)
class Session:
    """An open connection with what belongs to it."""

    settings: Settings
    blobs: BlobStore
    client: Client
    caisson: CaissonClient

    def handle(self, run_id: str) -> RunHandle:
        """Return the handle of a run."""
        return self.caisson.handle(run_id)

    def page(self, run_id: str, web_ui: str | None = None) -> str | None:
        """Return the address of a run's page in the Web UI, if it is known where that is."""
        from client.show import run_page, web_ui_of

        base = web_ui or web_ui_of(self.client.service_client.config.target_host)
        return None if base is None else run_page(base, self.client.namespace, run_id)


async def connected() -> Session:
    """Read the settings and connect. Raises BadInput naming the setting or the address, and what to do."""
    from client.sdk import CaissonClient
    from workers.connect import connect, open_blobs
    from workers.settings import load_settings

    settings = load_settings()
    blobs = open_blobs(settings)
    client = await connect(settings, blobs)
    return Session(settings, blobs, client, CaissonClient(client, settings.task_queue))


def ended(work: Coroutine[None, None, int]) -> None:
    """Run a command's work to its end and exit with its code; Ctrl-C or SIGTERM ends it without a traceback."""
    import asyncio

    try:
        code = asyncio.run(work)
    except (KeyboardInterrupt, asyncio.CancelledError):
        code = ExitCode.INTERRUPTED
    raise typer.Exit(code)


def terminal(*, stderr: bool = False) -> Console:
    """Return the console that people read. Nothing written to it is taken as markup: models and commands wrote some of it."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, highlight=False, emoji=False)


def exit_code(result: RunResult) -> ExitCode:
    """Return the exit code that tells a script how a run ended."""
    from contracts.run import RunStatus

    return {
        RunStatus.COMPLETED: ExitCode.COMPLETED,
        RunStatus.BUDGET_EXCEEDED: ExitCode.BUDGET_EXCEEDED,
        RunStatus.CANCELLED: ExitCode.CANCELLED,
        RunStatus.REFUSED: ExitCode.FAILED,
        RunStatus.FAILED: ExitCode.FAILED,
    }[result.status]


def user_name() -> str:
    """Return the name of the user of this terminal, or nothing where the system has none."""
    import os
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return ""
