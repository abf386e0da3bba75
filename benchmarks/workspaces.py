"""Workspaces for the snapshot benchmarks, what else can keep them, and what it costs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from activities.sandbox.providers.local import LocalProvider, LocalSandbox
from activities.sandbox.registry import ProviderRegistry
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.workspace.keeper import WorkspaceKeeper
from benchmarks.sandbox_start import PEERS, peers_python
from contracts.base import BadInput
from contracts.sandbox import SandboxSpec
from workers.process import calm_collector

TAR, GIT, LOCAL_SNAPSHOT = "gnu_tar", "git", "openai_agents"
SMALL, LARGE = (1_000, 10_000), (10_000, 20_000)
"""Files, and bytes of each: 10 MB and 200 MB."""
_FOLDERS = 100
T = TypeVar("T")


class Bench:
    """A worker's keeper with a store of its own, and local sandboxes on the same file system."""

    def __init__(self, root: Path) -> None:
        calm_collector()  # as every worker does
        self.root = root
        self.provider = LocalProvider(root / "sandboxes")
        self._made = 0
        self.keeper = self.worker("store")

    def worker(self, store: str) -> WorkspaceKeeper:
        """A worker that remembers nothing, with a store of this name."""
        return WorkspaceKeeper(ProviderRegistry({"local": lambda: self.provider}), BlobStore(LocalStore(self.root / store)))

    async def sandbox(self) -> LocalSandbox:
        """A new sandbox."""
        self._made += 1
        ref = await self.provider.create(SandboxSpec(), str(self._made), environment={}, labels={}, queue="q")
        return await self.provider.attach(ref)

    async def close(self) -> None:
        """End the sandboxes."""
        for ref in await self.provider.list({}):
            await self.provider.kill(ref)

    def stored(self, store: str = "store") -> int:
        """Bytes in a store."""
        return size_of(self.root / store)


@contextmanager
def room() -> Iterator[Path]:
    """A temporary directory that goes again, with read-only parts and all."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        yield Path(root)


def make_tree(root: Path, files: int, size: int) -> None:
    """Fill a directory: half of the files cannot be compressed, half are like source text. The same each time."""
    dice = random.Random(files)
    words = [dice.randbytes(dice.randrange(1, 5)).hex() for _ in range(3000)]
    for number in range(files):
        folder = root / f"folder-{number % _FOLDERS}"
        folder.mkdir(exist_ok=True)
        text = " ".join(dice.choices(words, k=size // 6)).encode()[:size]
        (folder / f"file-{number}").write_bytes(dice.randbytes(size) if number % 2 else text)


def change(root: Path, count: int, seed: int) -> int:
    """Write `count` files anew and return how many bytes that is."""
    dice = random.Random(seed)
    paths = dice.sample(sorted(path for path in root.rglob("file-*")), count)
    for path in paths:
        path.write_bytes(dice.randbytes(path.stat().st_size))
    return sum(path.stat().st_size for path in paths)


async def timed(work: Awaitable[T]) -> tuple[float, T]:
    """Wait for `work`; return the seconds it took, and its result. What was written before is on the disk first."""
    await asyncio.to_thread(os.sync)
    started = time.perf_counter()
    result = await work
    return time.perf_counter() - started, result


async def command(*argv: str | Path, cwd: Path | None = None) -> None:
    """Run a program. Raises BadInput when it fails."""
    process = await asyncio.create_subprocess_exec(*argv, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, said = await process.communicate()
    if process.returncode != 0:
        raise BadInput(f"{argv[0]} failed: {said.decode(errors='replace')[-500:]}")


async def commit(repository: Path, tree: Path) -> None:
    """Have git keep the tree: add all of it, and commit."""
    git = (
        "git",
        f"--git-dir={repository}",
        f"--work-tree={tree}",
        "-c",
        "user.name=b",
        "-c",
        "user.email=b@b",
        "-c",
        "gc.auto=0",
    )
    if not repository.exists():
        await command("git", "init", "-q", "--bare", repository)
    await command(*git, "add", "-A", cwd=tree)
    await command(*git, "commit", "-q", "--allow-empty", "-m", "snapshot", cwd=tree)


def size_of(root: Path) -> int:
    """Bytes of the files below a directory, or of a file."""
    return root.stat().st_size if root.is_file() else sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def forget_pages(root: Path) -> None:
    """Have the kernel drop what it remembers of the files below, so that they are read from the disk."""
    os.sync()
    for path in [root] if root.is_file() else root.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_memory(process: int | str = "self") -> float:
    """The most memory that a process has had resident, in MiB; this one's, unless told. Its start is set by `forget_peak`."""
    with Path(f"/proc/{process}/status").open() as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))


def forget_peak(process: int | str = "self") -> None:
    """Begin to count the most resident memory anew (proc(5), clear_refs)."""
    Path(f"/proc/{process}/clear_refs").write_text("5")


def peer(tree: Path) -> dict[str, float]:
    """Measure openai-agents' local snapshots of a copy of `tree`, in an environment of its own."""
    python = peers_python()
    script = Path(__file__).parent / "peers/local_snapshot.py"
    done = subprocess.run([python, script, tree], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BadInput(f"the peer cannot be measured: {done.stderr[-500:]}; remove {PEERS} to have it installed anew")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def remove(path: Path) -> None:
    """Remove a file or a tree."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
