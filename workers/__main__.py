"""`python -m workers --role ROLE`: one worker process, without the rest of the `caisson` command."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from contracts.base import BadInput
from workers.process import serve
from workers.settings import Role, load_settings


def main(arguments: list[str] | None = None) -> int:
    """Work until SIGTERM; return 0, or 2 when the environment or the server does not fit."""
    parser = argparse.ArgumentParser(prog="python -m workers", description="Run one Caisson worker process.")
    parser.add_argument("--role", action="append", required=True, choices=[role.value for role in Role])
    given = parser.parse_args(arguments)
    try:
        asyncio.run(serve(frozenset(Role(role) for role in given.role), load_settings()))
    except BadInput as error:
        print(f"caisson worker: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # The SDK's native threads may abort an interpreter that is being taken down, which would look like a crash.
    os._exit(code)
