"""How many commands of a sandbox worker run at one time.

A worker takes up whatever comes for its host at once, since a call that nobody takes up for long means that the host is lost.
What waits for its turn waits here, heartbeating.
"""

from __future__ import annotations

import asyncio

COMMANDS = 64


class Turns:
    """Turns of commands."""

    def __init__(self, commands: int = COMMANDS) -> None:
        self.commands = asyncio.Semaphore(commands)
