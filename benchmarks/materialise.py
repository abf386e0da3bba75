"""Bringing a manifest's entries into a fresh sandbox: local files beside `cp -a`, a bucket's objects beside `aws s3 sync`.

What is measured is the two activities as the workers run them, without a server between them: `fetch_manifest`, which reads the
entries into the store as a snapshot, and `restore_workspace`, which brings it into the sandbox, checks every byte, and takes the
run's first snapshot. Both are in one process here, so its memory is that of a tools worker and a sandbox worker together.

10,000 local files of 200 MB; and 2,000 objects of 4 KB with one of 200 MB on a real SeaweedFS on the same machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from temporalio.testing import ActivityEnvironment

from activities.governance.secrets import Secrets
from activities.sandbox.registry import ProviderRegistry
from activities.workspace.activity import WorkspaceActivities
from activities.workspace.fetch import ManifestActivities
from benchmarks.registry import Say
from benchmarks.report import Metric
from benchmarks.sandbox_start import PEER, PEERS, peers_python
from benchmarks.workspaces import LARGE, Bench, command, forget_peak, make_tree, peak_memory, remove, room, timed
from contracts.agent import AgentSpec
from contracts.base import BadInput
from contracts.prepare import (
    FetchManifestInput,
    FetchManifestResult,
    ResolvedAgent,
    RestoreWorkspaceInput,
    RestoreWorkspaceResult,
)

ROUNDS = 5
_WAIT4 = """import os, sys
_, status, usage = os.wait4(os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ), 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))"""
OBJECTS, OBJECT_BYTES, LARGE_OBJECT = 2_000, 4_096, 200 << 20
AWS_CLI = "awscli==1.46.3"
CP, LOCAL_DIR, AWS_SYNC, BOTO3 = "cp_a", "openai_agents", "aws_s3_sync", "boto3_threads"
MAX_RATIO, MAX_MEMORY = 1.5, 256


@dataclass(frozen=True)
class Took:
    """Seconds of the two activities."""

    fetch: float
    restore: float

    @property
    def seconds(self) -> float:
        """Of both."""
        return self.fetch + self.restore


async def measure(say: Say) -> dict[str, Metric]:
    """Measure, in about three minutes; the first time a little longer, for the peers' environment."""
    # The bucket first: what a process has once had resident, it mostly keeps.
    bucket = await _bucket(say)
    return await _local(say) | bucket


async def _local(say: Say) -> dict[str, Metric]:
    files, size = LARGE
    say(f"{files} local files, {files * size / 1e6:.0f} MB")
    with room() as root:
        (root / "tree").mkdir()
        make_tree(root / "tree", files, size)
        peer = await asyncio.to_thread(_local_dir, root)
        entries = {"inputs": {"type": "local", "path": "tree"}}
        await _materialise(root, entries, files)  # what is only done once in a process
        forget_peak()
        ours, copies = [], []
        for _ in range(ROUNDS):
            seconds, _ = await timed(command("cp", "-a", root / "tree", root / "copied"))
            await asyncio.to_thread(remove, root / "copied")
            copies.append(seconds)
            ours.append(await _materialise(root, entries, files))
        memory = peak_memory()
    _tell(say, ours)
    ratio = median(took.seconds / copy for took, copy in zip(ours, copies, strict=True))
    took = median(one.seconds for one in ours)
    return {
        "local": Metric(value=ratio, unit="ratio", target=MAX_RATIO, baseline=CP, baseline_value=1),
        "local_ms": _ms(took, MAX_RATIO * median(copies), CP, median(copies)),
        "local_beside_peer_ms": _ms(took, peer["seconds"], LOCAL_DIR, peer["seconds"]),
        "local_memory": Metric(
            value=memory, unit="MiB", target=MAX_MEMORY, baseline=LOCAL_DIR, baseline_value=peer["memory_mib"]
        ),
    }


async def _bucket(say: Say) -> dict[str, Metric]:
    say(f"{OBJECTS} objects of {OBJECT_BYTES} bytes and one of {LARGE_OBJECT / 1e6:.0f} MB")
    aws = await asyncio.to_thread(_aws)
    with room() as root:
        async with _serving(root) as place:
            entry = {"type": "s3", "bucket": place["bucket"], "prefix": place["prefix"], "endpoint": place["endpoint"]}
            entries = {"inputs": {**entry, "secret": "bucket"}}
            credential = {name: place[name] for name in ("access_key_id", "secret_access_key", "endpoint")}
            (root / "secrets").mkdir()
            (root / "secrets/bucket").write_text(json.dumps(credential))
            (root / "secrets/bucket").chmod(0o600)
            await _materialise(root, entries, OBJECTS + 1)
            forget_peak()
            ours, syncs, downloads, memories = [], [], [], []
            for _ in range(ROUNDS):
                seconds, memory = await asyncio.to_thread(_sync, aws, place, root / "synced")
                syncs.append(seconds)
                memories.append(memory)
                downloads.append(await asyncio.to_thread(_download, place, root / "downloaded"))
                ours.append(await _materialise(root, entries, OBJECTS + 1))
            memory = peak_memory()
    _tell(say, ours)
    took = median(one.seconds for one in ours)
    return {
        "s3": _ratio(ours, syncs, AWS_SYNC),
        "s3_ms": _ms(took, MAX_RATIO * median(syncs), AWS_SYNC, median(syncs)),
        "s3_beside_boto3": _ratio(ours, downloads, BOTO3),
        "s3_beside_boto3_ms": _ms(took, MAX_RATIO * median(downloads), BOTO3, median(downloads)),
        "s3_memory": Metric(value=memory, unit="MiB", target=MAX_MEMORY, baseline=AWS_SYNC, baseline_value=max(memories)),
    }


def _ratio(ours: list[Took], theirs: list[float], baseline: str) -> Metric:
    value = median(took.seconds / other for took, other in zip(ours, theirs, strict=True))
    return Metric(value=value, unit="ratio", target=MAX_RATIO, baseline=baseline, baseline_value=1)


def _ms(seconds: float, target: float, baseline: str, baseline_seconds: float) -> Metric:
    return Metric(value=seconds * 1e3, unit="ms", target=target * 1e3, baseline=baseline, baseline_value=baseline_seconds * 1e3)


def _tell(say: Say, ours: list[Took]) -> None:
    say(f"fetch_manifest {median(took.fetch for took in ours):.2f} s, restore {median(took.restore for took in ours):.2f} s")


async def _materialise(root: Path, entries: dict[str, Any], files: int) -> Took:
    """Bring entries into a new sandbox, with a store and workers that know nothing of them yet."""
    bench = Bench(root / "host")
    try:
        blobs = bench.keeper.store.blobs
        spec = AgentSpec.model_validate({"manifest": {"entries": entries}})
        agent = await blobs.put_json(ResolvedAgent(spec=spec, model="m", instructions="").model_dump(mode="json"))
        sandbox = await bench.sandbox()
        tools = ManifestActivities(blobs, [root], Secrets(root / "secrets"), root / "spool")
        workspace = WorkspaceActivities(ProviderRegistry({"local": lambda: bench.provider}), blobs, bench.keeper)
        given = FetchManifestInput(run_id="run", chain="chain", agent=agent)
        fetching = ActivityEnvironment().run(tools.fetch_manifest, given)
        fetched: FetchManifestResult
        fetch, fetched = await timed(fetching)
        asked = RestoreWorkspaceInput(run_id="run", sandbox=sandbox.ref, agent=agent, snapshot=fetched.snapshot, keep=True)
        # Without waiting for the disk in between: the two follow each other.
        started = time.perf_counter()
        restored: RestoreWorkspaceResult = await ActivityEnvironment().run(workspace.restore_workspace, asked)
        restore = time.perf_counter() - started
        if restored.snapshot.files != files:
            raise BadInput(f"{restored.snapshot.files} of {files} files came into the sandbox")
    finally:
        await bench.close()
        await asyncio.to_thread(remove, root / "host")
    return Took(fetch, restore)


def _local_dir(root: Path) -> dict[str, float]:
    """Measure openai-agents' LocalDir, once: it takes its time."""
    script = Path(__file__).parent / "peers/local_dir.py"
    done = subprocess.run([peers_python().absolute(), script, "tree", "1"], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BadInput(f"the peer cannot be measured: {done.stderr[-500:]}; remove {PEERS} to have {PEER} installed anew")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _aws() -> Path:
    python = peers_python()
    aws = python.parent / "aws"
    if not aws.exists():
        subprocess.run([python, "-m", "pip", "install", "--quiet", AWS_CLI], check=True)
    return aws.absolute()


@contextlib.asynccontextmanager
async def _serving(root: Path) -> AsyncIterator[dict[str, str]]:
    """Serve a bucket; its place and credential are what the server prints."""
    (root / "server").mkdir()
    numbers = map(str, (OBJECTS, OBJECT_BYTES, LARGE_OBJECT))
    argv = (sys.executable, "-m", "benchmarks.bucket", str(root / "server"), *numbers)
    server = await asyncio.create_subprocess_exec(*argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if server.stdin is None or server.stdout is None:
        raise BadInput("the bucket's server has no pipes")
    try:
        line = await server.stdout.readline()
        if not line:
            raise BadInput("the bucket's server did not start; pip install .[dev] brings it")
        place: dict[str, str] = json.loads(line)
        yield place
    finally:
        server.stdin.close()
        await server.wait()


def _sync(aws: Path, place: dict[str, str], target: Path) -> tuple[float, float]:
    """Run `aws s3 sync`, and return its seconds, its start included, and its most resident memory in MiB."""
    environment = {
        "PATH": os.defpath,
        "AWS_ACCESS_KEY_ID": place["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": place["secret_access_key"],
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    source = f"s3://{place['bucket']}/{place['prefix']}"
    argv = [str(aws), "s3", "sync", "--only-show-errors", "--endpoint-url", place["endpoint"], source, str(target)]
    os.sync()
    started = time.perf_counter()
    # By way of a small process: what the kernel counts for a new one begins with what its parent has.
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _WAIT4, *argv], env=environment, stdout=subprocess.PIPE, check=False)
    seconds = time.perf_counter() - started
    _check(target, done.returncode, "aws s3 sync")
    return seconds, int(done.stdout.split()[-1]) / 1024


def _download(place: dict[str, str], target: Path) -> float:
    script = Path(__file__).parent / "peers/boto3_download.py"
    os.sync()
    done = subprocess.run([sys.executable, script, json.dumps(place), target], stdout=subprocess.PIPE, text=True, check=False)
    _check(target, done.returncode, "the download with boto3")
    seconds: float = json.loads(done.stdout)["seconds"]
    return seconds


def _check(target: Path, code: int, what: str) -> None:
    count = sum(path.is_file() for path in target.rglob("*"))
    if code != 0 or count != OBJECTS + 1:
        raise BadInput(f"{what} ended with code {code} and {count} of {OBJECTS + 1} files")
    remove(target)
