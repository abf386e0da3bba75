"""`python -m workers.scripted_model --scenario FILE`: serve until told to stop."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from workers.scripted_model.scenario import ScenarioError, load_scenarios
from workers.scripted_model.server import ScriptedModelServer


def main(arguments: list[str] | None = None) -> int:
    """Serve the scenario file given; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.scripted_model", description="A scripted model, not a language model."
    )
    parser.add_argument("--scenario", type=Path, required=True, action="append", help="a scenario file (YAML); may be repeated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0, the default, takes any free port")
    parser.add_argument("--journal", type=Path, help="append one JSON line for each request to this file")
    given = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    try:
        with ScriptedModelServer(
            load_scenarios(*given.scenario), host=given.host, port=given.port, journal=given.journal
        ) as server:
            print(f"scripted model (not a language model) on {server.base_url}", flush=True)
            stop.wait()
    except ScenarioError as error:
        print(f"scripted model: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"scripted model: {error}", file=sys.stderr)
        return 1  # a port may be free again when it is started again
    return 0


if __name__ == "__main__":
    sys.exit(main())
