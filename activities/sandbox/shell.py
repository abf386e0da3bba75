"""Carrying out one call of the shell tool: a command to its end, a session's beginning, or a word to a session."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from activities.sandbox.output import render, too_long
from activities.sandbox.port import Command, FileFault, InteractiveSandbox, Sandbox, SessionFault, SessionOutput
from activities.tools.shell import StartCommand, UseSession
from contracts.agent import ShellTool
from contracts.model import ToolCallInput
from contracts.sandbox import JobResult, JobState

_KEPT = 8 << 20
"""Bytes of each stream that are kept for the model to read in a file when they are too many for its context."""
MAX_COMMAND = 100_000
"""Bytes of a command. A system takes 128 KiB as one argument, and a provider's quotes may come on top."""


@dataclass(frozen=True)
class Shown:
    """What the model is told of a call, and whether the call counts as failed."""

    text: str
    failed: bool


class ShellCall:
    """One call of the shell tool in one sandbox. Done again, it finds what an interrupted attempt did and gives the same.

    `sessions` is the same sandbox where it can have sessions, else None.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        sessions: InteractiveSandbox | None,
        given: ToolCallInput,
        tool: ShellTool,
        asked: StartCommand | UseSession,
    ) -> None:
        self._sandbox = sandbox
        self._sessions = sessions
        self._given = given
        self._tool = tool
        self._asked = asked
        self._session = session_id(given) if isinstance(asked, StartCommand) else asked.session

    @property
    def job_id(self) -> str:
        """The job that this call starts or talks to."""
        if isinstance(self._asked, StartCommand) and self._asked.wait is None:
            return self._given.job_id
        return f"{self._given.run_id}/session/{self._session}"

    async def carry_out(self) -> Shown:
        """Do what was asked. Raises SandboxError."""
        if isinstance(self._asked, StartCommand):
            length = len(self._asked.command.encode("utf-8", "surrogatepass"))
            if length > MAX_COMMAND:
                return _refused(
                    f"the command has {length} bytes, and at most {MAX_COMMAND} fit; nothing was run. "
                    "Write a file with apply_patch and run that"
                )
            if self._asked.wait is None:
                result = await self._sandbox.exec(self._command(self._asked))
                return await self._shown(result, self._asked.timeout)
            return await self._start(self._asked)
        return await self._use(self._asked)

    def _command(self, asked: StartCommand) -> Command:
        return Command(
            job_id=self.job_id,
            argv=("bash", "-c", asked.command),
            timeout=asked.timeout,
            output_limit=_KEPT,
            terminal=asked.terminal,
        )

    async def _start(self, asked: StartCommand) -> Shown:
        sandbox = self._sessions
        if sandbox is None:
            return _refused(
                "this sandbox has no sessions; nothing was run. Give command alone, with timeout_seconds if it is long"
            )
        await sandbox.start(self._command(asked))
        return await self._read(sandbox, asked.wait or 0, asked.until_end)

    async def _use(self, asked: UseSession) -> Shown:
        sandbox = self._sessions
        if sandbox is None:
            return _refused("this sandbox has no sessions. Give command alone, with timeout_seconds if it is long")
        trouble = None
        try:
            if asked.size is not None:
                await sandbox.resize(self.job_id, *asked.size)
            if asked.input is not None:
                await sandbox.send(self.job_id, self._given.job_id, asked.input.encode())
        except SessionFault as fault:
            trouble = (
                f"session {asked.session}: nothing was typed: {fault}" if asked.input else f"session {asked.session}: {fault}"
            )
        if asked.kill:
            await sandbox.kill_job(self.job_id)
        try:
            # What was not typed has no answer to wait for.
            shown = await self._read(sandbox, 0 if trouble or asked.kill else asked.wait, asked.until_end)
        except SessionFault as fault:
            return _refused(f"session {asked.session}: {fault}; its id is in the output of the call that started it")
        return shown if trouble is None else Shown(f"{trouble}\n{shown.text}", failed=True)

    async def _read(self, sandbox: InteractiveSandbox, wait: float, until_end: bool) -> Shown:
        read = await sandbox.poll(self.job_id, self._given.job_id, wait, until_end=until_end, limit=_KEPT)
        result = _as_lines(read)
        if result.state is not JobState.RUNNING:
            return await self._shown(result, round(result.duration_seconds, 1))
        return await self._shown(result, 0, f"still running after {result.duration_seconds:.1f} s as session {self._session}")

    async def _shown(self, result: JobResult, timeout: float, status: str | None = None) -> Shown:
        spilled = None
        if too_long(result, self._tool.output_bytes):
            spilled = f"/tmp/output/step-{self._given.step}-{self._given.job_id.rpartition('/')[2]}.txt"  # noqa: S108 - the sandbox's own
            # A full disk in the sandbox loses the whole text, never the command's result.
            try:
                await self._sandbox.write(spilled, result.stdout + result.stderr)
            except FileFault:
                spilled = None
        text = render(result, timeout, self._tool.output_bytes, spilled, status)
        is_well = result.state is JobState.RUNNING or (result.state is JobState.EXITED and result.exit_code == 0)
        wanted = isinstance(self._asked, UseSession) and self._asked.kill and result.state is JobState.KILLED
        return Shown(text, failed=not (is_well or wanted))


def session_id(given: ToolCallInput) -> str:
    """Return the id of the session that a call starts: short, the same at every attempt, and no other call's in the run.

    Steps and calls are counted anew when a workflow is reset; the digest tells the sessions before and after apart.
    """
    number = given.job_id.rpartition("/")[2]
    return f"{given.step}-{number}-{hashlib.sha256(given.job_id.encode()).hexdigest()[:4]}"


def _as_lines(read: SessionOutput) -> JobResult:
    """Return what was read with the line ends that the command wrote: a terminal puts a carriage return before each."""
    if not read.terminal:
        return read.result
    stdout = read.result.stdout.replace(b"\r\n", b"\n")
    gone = len(read.result.stdout) - len(stdout)
    return read.result.model_copy(update={"stdout": stdout, "stdout_bytes": read.result.stdout_bytes - gone})


def _refused(text: str) -> Shown:
    return Shown(f"shell: {text}", failed=True)
