"""Short ways to use a real local sandbox in tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from activities.sandbox.port import Command
from activities.sandbox.providers.local import LocalProvider, LocalSandbox
from contracts.sandbox import WORKSPACE, JobResult, SandboxRef, SandboxSpec

ENVIRONMENT = {"PROJECT": "north wing"}
LABELS = {"run": "r-1", "kind": "test"}


async def make(provider: LocalProvider, key: str = "run-1", queue: str = "caisson-sandbox.here") -> SandboxRef:
    """Create a sandbox as the tests do."""
    return await provider.create(SandboxSpec(), key, environment=ENVIRONMENT, labels=LABELS, queue=queue)


def bash(
    job: str,
    script: str,
    *,
    timeout: float = 20.0,
    output_limit: int = 1 << 20,
    stdin: bytes | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str = WORKSPACE,
) -> Command:
    """Return a job that runs a bash script."""
    return Command(job, ["bash", "-c", script], cwd, env, stdin, timeout, output_limit)


class Local:
    """A local sandbox in which every script is a new job."""

    def __init__(self, provider: LocalProvider, sandbox: LocalSandbox, root: Path) -> None:
        self.provider = provider
        self.sandbox = sandbox
        self.directory = root / sandbox.ref.id
        self.workspace = self.directory / "workspace"
        self._jobs = 0

    async def sh(
        self,
        script: str,
        *,
        timeout: float = 20.0,
        output_limit: int = 1 << 20,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = WORKSPACE,
    ) -> JobResult:
        """Run a bash script."""
        self._jobs += 1
        job = f"run/{self._jobs}"
        return await self.sandbox.exec(
            bash(job, script, timeout=timeout, output_limit=output_limit, stdin=stdin, env=env, cwd=cwd)
        )

    async def run(self, *argv: str, env: Mapping[str, str] | None = None, cwd: str = WORKSPACE) -> JobResult:
        """Run a program without a shell."""
        self._jobs += 1
        return await self.sandbox.exec(Command(f"run/{self._jobs}", argv, cwd, env))

    async def text(self, script: str) -> str:
        """Run a bash script and return what it printed on either stream."""
        return (await self.sh(f"exec 2>&1\n{script}")).stdout.decode()

    async def alive(self, marker: str) -> bool:
        """Tell whether a process in the sandbox has `marker` as one of its arguments."""
        # Not with pgrep, which a minimal system lacks; the marker travels as a variable, so that the search does not find itself.
        search = (
            'for f in /proc/[0-9]*/cmdline; do tr "\\0" "\\n" < "$f" | grep -qxF -- "$MARKER" && exit 0; done 2>/dev/null; exit 1'
        )
        return (await self.sh(search, env={"MARKER": marker})).exit_code == 0

    def init_pid(self) -> int:
        """Return the pid of init as the host sees it."""
        record = self.provider._state.load(self.sandbox.ref.id)
        assert record is not None
        return record.pid
