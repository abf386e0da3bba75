"""Making a local sandbox and running commands in it, beside plain bubblewrap and beside a peer that isolates nothing.

Plain bubblewrap is `bwrap --unshare-all ... true`: a fresh sandbox for one command, with no limits, no filter and nothing that
outlives it. The peer is openai-agents' `UnixLocal` session: a directory on the host, with all that the host has.
All are measured in turns in the same run.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from statistics import median

from activities.sandbox.port import Command
from activities.sandbox.providers.local import LocalProvider
from benchmarks.registry import Say
from benchmarks.report import Metric
from contracts.base import BadInput
from contracts.sandbox import SandboxRef, SandboxSpec

SANDBOXES, COMMANDS, MANY_COMMANDS, AT_ONCE = 20, 10, 1000, 50
PEERS = Path(".venv-peers")
PEER = "openai-agents==0.24.0"
PLAIN = "plain_bwrap"
UNIX_LOCAL = "unix_local"
_BARE = ("bwrap", "--unshare-all", "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib")
_BARE_TRUE = (*_BARE, "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "true")


async def measure(say: Say) -> dict[str, Metric]:
    """Measure, in about a minute; the first time a little longer, for the peer's environment."""
    say("the peer")
    peer = await asyncio.to_thread(_peer)
    with tempfile.TemporaryDirectory() as root:
        provider = LocalProvider(Path(root))
        await provider.kill(await _create(provider, "warm-up"))
        say(f"{SANDBOXES} sandboxes, {COMMANDS} commands in each")
        made, ran, plain = await _one_after_the_other(provider)
        say(f"{MANY_COMMANDS} commands in one sandbox")
        grown = await _many_commands(provider)
        say(f"{AT_ONCE} sandboxes at once")
        together = await _at_once(provider)
        bare_together = await _bare_at_once()
    create, true, bare = (median(times) * 1e3 for times in (made, ran, plain))
    return {
        "create_ms": Metric(value=create, unit="ms", target=60, baseline=PLAIN, baseline_value=bare),
        "true_ms": Metric(value=true, unit="ms", target=15, baseline=PLAIN, baseline_value=bare),
        "create_beside_peer_ms": Metric(
            value=create, unit="ms", target=60, baseline=UNIX_LOCAL, baseline_value=peer["create_ms"]
        ),
        "true_beside_peer_ms": Metric(value=true, unit="ms", target=15, baseline=UNIX_LOCAL, baseline_value=peer["true_ms"]),
        "memory_growth": Metric(value=grown, unit="MiB", target=4, baseline="none", baseline_value=0),
        "at_once_ms": Metric(
            value=together * 1e3 / AT_ONCE,
            unit="ms",
            target=60,
            baseline=PLAIN,
            baseline_value=bare_together * 1e3 / AT_ONCE,
        ),
    }


async def _create(provider: LocalProvider, key: str) -> SandboxRef:
    return await provider.create(SandboxSpec(), key, environment={}, labels={"caisson_run": "benchmark"}, queue="q")


async def _one_after_the_other(provider: LocalProvider) -> tuple[list[float], list[float], list[float]]:
    made: list[float] = []
    ran: list[float] = []
    plain: list[float] = []
    for number in range(SANDBOXES):
        started = time.perf_counter()
        ref = await _create(provider, str(number))
        made.append(time.perf_counter() - started)
        sandbox = await provider.attach(ref)
        for n in range(COMMANDS):
            started = time.perf_counter()
            result = await sandbox.exec(Command(job_id=str(n), argv=("true",)))
            ran.append(time.perf_counter() - started)
            if result.exit_code != 0:
                raise BadInput(f"`true` ended as {result}")
            plain.append(await _bare())
        await provider.kill(ref)
    return made, ran, plain


async def _bare() -> float:
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*_BARE_TRUE)
    if await process.wait() != 0:
        raise BadInput("plain bubblewrap cannot make a sandbox here")
    return time.perf_counter() - started


async def _many_commands(provider: LocalProvider) -> float:
    """Return by how many MiB this process and the sandbox's init grew over many commands, after a warm-up."""
    ref = await _create(provider, "many")
    sandbox = await provider.attach(ref)
    for n in range(100):
        await sandbox.exec(Command(job_id=f"warm-{n}", argv=("true",)))
    before = _resident()
    for n in range(MANY_COMMANDS):
        await sandbox.exec(Command(job_id=str(n), argv=("true",)))
    grown = _resident() - before
    await provider.kill(ref)
    return max(grown, 0) / (1 << 20)


def _resident() -> int:
    """Resident bytes of this process and of every process below it, sandboxes' too."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            ours = int(status.parent.name) == os.getpid() or b"local_init" in (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if ours and "VmRSS" in fields:
            total += int(fields["VmRSS"].split()[0]) * 1024
    return total


async def _at_once(provider: LocalProvider) -> float:
    started = time.perf_counter()

    async def one(number: int) -> SandboxRef:
        ref = await _create(provider, f"at-once-{number}")
        await (await provider.attach(ref)).exec(Command(job_id="only", argv=("true",)))
        return ref

    refs = await asyncio.gather(*map(one, range(AT_ONCE)))
    seconds = time.perf_counter() - started
    await asyncio.gather(*map(provider.kill, refs))
    return seconds


async def _bare_at_once() -> float:
    started = time.perf_counter()
    await asyncio.gather(*(_bare() for _ in range(AT_ONCE)))
    return time.perf_counter() - started


def peers_python() -> Path:
    """Return the Python of the peers' own environment, which is made when it is not there."""
    python = PEERS / "bin/python"
    if not python.exists():
        venv.create(PEERS, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER], check=True)
    return python


def _peer() -> dict[str, float]:
    """Measure the peer."""
    python = peers_python()
    script = Path(__file__).parent / "peers/unix_local.py"
    done = subprocess.run([python, script, str(SANDBOXES), str(COMMANDS)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BadInput(f"the peer cannot be measured: {done.stderr[-500:]}; remove {PEERS} to have it installed anew")
    sys.stdout.flush()
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures
