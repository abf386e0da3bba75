"""The portable sandbox where the conformance suite does not look: how many calls it takes, and what its helper is written in."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import subprocess
from pathlib import Path

import pytest

from activities.sandbox import portable_helper
from activities.sandbox.port import Command, FileChange, SandboxGone, SandboxUnavailable
from activities.sandbox.providers.local import LocalProvider
from contracts.sandbox import SandboxSpec
from tests.conformance.local_machine import LocalMachine, PortableProvider

HELPER = Path(portable_helper.__file__).parent


@pytest.mark.parametrize("path", sorted(HELPER.glob("*.py")), ids=lambda path: path.name)
def test_the_helper_is_python_3_6(path: Path) -> None:
    """What runs in somebody's image parses there, and imports nothing but the standard library and itself."""
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 6))):
        if isinstance(node, ast.ImportFrom):
            assert node.module != "__future__"
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & {"dataclasses", "pathlib", "subprocess", "asyncio", "shutil"}


@pytest.mark.parametrize("path", sorted(HELPER.glob("*.sh")), ids=lambda path: path.name)
def test_the_helper_is_posix_shell(path: Path) -> None:
    """The shell of the system reads it without complaint."""
    assert subprocess.run(["sh", "-n", path], capture_output=True, text=True, check=False).stderr == ""


async def test_a_call_of_the_port_is_few_calls_of_the_sdk(provider: LocalProvider) -> None:
    """One for a command, its input being one more; one to three for files, however many."""
    portable = PortableProvider(provider)
    ref = await portable.create(SandboxSpec(), "k", environment={}, labels={}, queue="q")
    sandbox = await portable.attach(ref)
    machine = sandbox.machine
    assert isinstance(machine, LocalMachine)
    many = [FileChange(f"d/{n}", b"x" * 1000) for n in range(300)]
    calls = {
        "a command": (sandbox.exec(Command("a", ("echo", "x"))), ["run"]),
        "a command with input": (sandbox.exec(Command("b", ("cat",), stdin=b"x")), ["put", "run"]),
        "a long output": (sandbox.exec(Command("c", ("seq", "100000"))), ["run", "get"]),
        "a write": (sandbox.write("f", b"x" * 100_000), ["put", "run"]),
        "many changes": (sandbox.change(many), ["put", "run"]),
        "many looks": (sandbox.look([change.path for change in many], 2000), ["run", "get"]),
        "a walk": (sandbox.walk(""), ["run"]),
        "a kill": (sandbox.kill_job("a"), ["run"]),
        "progress": (sandbox.progress("a"), ["run"]),
    }
    for name, (call, expected) in calls.items():
        machine.calls.clear()
        await call
        assert machine.calls == expected, name


async def test_a_sandbox_that_lost_its_records_is_gone(provider: LocalProvider) -> None:
    """Without the records of its jobs nobody can tell what was run, so it must be replaced from the last snapshot."""
    portable = PortableProvider(provider)
    ref = await portable.create(SandboxSpec(), "k", environment={}, labels={}, queue="q")
    sandbox = await portable.attach(ref)
    await sandbox.exec(Command("a", ("sh", "-c", "(sleep 0.3; rm -rf /tmp/.caisson) >/dev/null 2>&1 &")))
    async with asyncio.timeout(20):
        with pytest.raises(SandboxGone):
            while True:
                with contextlib.suppress(SandboxUnavailable):  # while they are being removed
                    await sandbox.look(["f"], 1)
    with pytest.raises(SandboxGone):
        await portable.attach(ref)
