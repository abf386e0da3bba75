"""Short ways to use a sandbox of a subject in checks."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import cast

from activities.sandbox.port import Command, InteractiveSandbox, Sandbox, SandboxProvider
from contracts.sandbox import WORKSPACE, JobResult, JobState, SandboxRef, SandboxSpec
from tests.conformance.subjects import Subject

_NUMBERS = itertools.count()


class Box:
    """One living sandbox. Every script is a new job, and runs in a directory that only this box has."""

    def __init__(self, subject: Subject, provider: SandboxProvider, ref: SandboxRef, sandbox: Sandbox) -> None:
        self.subject = subject
        self.provider = provider
        self.ref = ref
        self.sandbox = sandbox
        self.name = f"check-{next(_NUMBERS)}"
        self._jobs = itertools.count()

    @property
    def sessions(self) -> InteractiveSandbox:
        """The sandbox, for sessions."""
        return cast("InteractiveSandbox", self.sandbox)

    def job(self) -> str:
        """Return a job id that is not used yet."""
        return f"{self.name}/{next(self._jobs)}"

    def at(self, path: str) -> str:
        """Return a workspace path in this box's directory."""
        return f"{self.name}/{path}" if path else self.name

    def command(
        self,
        script: str,
        *,
        job: str | None = None,
        timeout: float = 20.0,
        output_limit: int = 1 << 20,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Command:
        """Return a job that runs a script in the shell that the tool asks for, which is bash."""
        cwd = f"{WORKSPACE}/{self.name}" if cwd is None else cwd
        return Command(job or self.job(), ("bash", "-c", script), cwd, env, stdin, timeout, output_limit)

    async def sh(
        self,
        script: str,
        *,
        job: str | None = None,
        timeout: float = 20.0,
        output_limit: int = 1 << 20,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> JobResult:
        """Run a script."""
        return await self.sandbox.exec(
            self.command(script, job=job, timeout=timeout, output_limit=output_limit, stdin=stdin, env=env, cwd=cwd)
        )

    async def run(self, *argv: str) -> JobResult:
        """Run a program without a shell."""
        return await self.sandbox.exec(Command(self.job(), argv, f"{WORKSPACE}/{self.name}"))

    async def text(self, script: str) -> str:
        """Run a script that must end well, and return what it printed."""
        result = await self.sh(script)
        assert (result.state, result.exit_code) == (JobState.EXITED, 0), result
        return result.stdout.decode()

    async def content(self, path: str) -> bytes:
        """Return a whole file."""
        return b"".join([part async for part in self.sandbox.read(path)])

    async def alive(self, marker: str) -> bool:
        """Tell whether a process in the sandbox has `marker` as one of its arguments."""
        # The marker travels as a variable, so that the search does not find itself.
        search = (
            'for f in /proc/[0-9]*/cmdline; do tr "\\0" "\\n" < "$f" | grep -qxF -- "$MARKER" && exit 0; done 2>/dev/null; exit 1'
        )
        return (await self.sh(search, env={"MARKER": marker})).exit_code == 0

    async def enter(self) -> Box:
        """Make the box's directory."""
        await self.sandbox.write(f"{self.name}/.keep", b"")
        return self


async def shared(subject: Subject) -> Box:
    """Return a box in the one sandbox of a subject that many checks use. None of them ends it, or what others left in it."""
    if not subject.shared:
        subject.shared.append(await subject.create(key="shared"))
    ref = subject.shared[0]
    return await Box(subject, subject.provider, ref, await subject.provider.attach(ref)).enter()


@asynccontextmanager
async def own(subject: Subject, spec: SandboxSpec | None = None, key: str | None = None) -> AsyncIterator[Box]:
    """Make a sandbox for one check, and end it."""
    ref = await subject.create(spec, key)
    try:
        yield await Box(subject, subject.provider, ref, await subject.provider.attach(ref)).enter()
    finally:
        await subject.provider.kill(ref)


async def elsewhere(box: Box) -> Box:
    """Return the same box as another worker reaches it."""
    provider = await box.subject.other()
    other = Box(box.subject, provider, box.ref, await provider.attach(box.ref))
    other.name = box.name
    other._jobs = box._jobs
    return other


def labels_of(refs: Sequence[SandboxRef]) -> set[str]:
    """Return the ids of sandboxes."""
    return {ref.id for ref in refs}
