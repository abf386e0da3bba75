"""The whole sandbox port on top of what any provider's SDK can do with one machine: run a script, put a file, get a file.

What needs to be near the processes and files happens inside the sandbox, in the helper of `portable_helper/`: in Python where
the image has one from 3.6 on, else in POSIX shell with the tools of BusyBox or GNU. A call of the port is one or two of the SDK.

The helper, its jobs and their output belong to the sandbox's ordinary user, as the commands of the agent do. A command that
tampers with them spoils its own results, and reaches nothing that it could not reach anyway. One that removes all of STATE ends
its sandbox: what was run is not known any more, so a new one is made from the last snapshot.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from activities.sandbox.machine import STATE, Machine
from activities.sandbox.port import (
    SCRATCH,
    BadSandboxSpec,
    Command,
    FileChange,
    FileFault,
    FileView,
    JobProgress,
    SandboxGone,
    SandboxUnavailable,
    SessionFault,
    SessionOutput,
)
from activities.sandbox.portable_call import Answer, Caller, HelperSilent, install, say_hello
from activities.sandbox.portable_files import check_changes, check_name, check_write, normal, views_of_look, views_of_walk
from activities.sandbox.portable_result import NO_TERMINAL, cannot_start, job_result, session_output, sound_command
from activities.sandbox.portable_setup import settings, setup_script
from contracts.sandbox import WORKSPACE, JobResult, JobState, SandboxRef

WAIT = 20.0
"""Seconds that one call of the SDK waits inside the sandbox."""
END_GRACE = 60.0
"""Seconds after a command's own timeout until its sandbox counts as stuck: the supervisor in it should have ended it long ago."""
MAX_INPUT = 64 << 10
FORGET = f"rm -rf {STATE} {SCRATCH}*"
"""Removes what the harness has in a sandbox: jobs, which run no more, helper and nonce."""
_FORGET_SECONDS = 60.0


async def prepare(machine: Machine, environment: Mapping[str, str], *, inherited: bool = False) -> None:
    """Make a new machine ready, once, in a provider's `create`: its workspace, nonce (that of `machine.ref`) and environment.

    Done again on a machine that is ready it changes nothing. `inherited` says that its image may have been made of another
    sandbox, and that the provider knows `machine.ref` for the one that it has just made. Raises BadSandboxSpec when the image
    cannot have a workspace, or `environment` cannot be set.
    """
    variables = settings(environment)
    hello = await say_hello(machine)
    if hello.nonce == machine.ref.nonce and hello.has_helper:
        return
    script = setup_script(variables, machine.ref.nonce)
    if hello.nonce not in ("", machine.ref.nonce):
        if not inherited:
            raise SandboxGone(f"sandbox {machine.ref.id} belongs to somebody else by now")
        await machine.run(FORGET, timeout=_FORGET_SECONDS)
        hello = await say_hello(machine)
    try:
        await install(machine, hello.image, script)
    except SandboxUnavailable as error:
        if "no-workspace" in str(error):
            raise BadSandboxSpec(
                f"sandbox.image: the user of the image can make no {WORKSPACE}; give an image that has it, writable for its user"
            ) from error
        raise


async def attach(machine: Machine) -> PortableSandbox:
    """Reach a machine that was prepared, in a provider's `attach`: one call of the SDK.

    Raises SandboxGone when it does not hold the nonce of `machine.ref`, as it is then another one.
    """
    sandbox = PortableSandbox(machine)
    await sandbox.caller()
    return sandbox


class PortableSandbox:
    """One living sandbox, an InteractiveSandbox. It holds nothing open beside its machine.

    A provider whose SDK can do better overrides single methods. Without Python in the image there are no terminals.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._caller: Caller | None = None

    @property
    def ref(self) -> SandboxRef:
        """The serialisable handle."""
        return self.machine.ref

    async def caller(self) -> Caller:
        """Return the way to the helper. The first time it checks the nonce, and renews a helper of another version."""
        if self._caller is None:
            hello = await say_hello(self.machine)
            if hello.nonce != self.ref.nonce:
                raise SandboxGone(f"sandbox {self.ref.id} is gone: what answers under its name is another one, or was emptied")
            if not hello.has_helper:
                await install(self.machine, hello.image)
            self._caller = Caller(self.machine, hello.image)
        return self._caller

    async def exec(self, command: Command) -> JobResult:
        """See Sandbox."""
        end = time.monotonic() + command.timeout + END_GRACE
        try:
            answer = await self._begin(command, WAIT, command.output_limit)
        except HelperSilent:  # a command like `kill -9 -1` ends this call of the helper as well; the job is found again
            answer = await self._begin(command, WAIT, command.output_limit)
        while answer.words["state"] == JobState.RUNNING:
            if time.monotonic() > end:
                raise SandboxUnavailable(f"job {command.job_id} goes on long after its timeout of {command.timeout} s")
            job, limit = _digest(command.job_id), command.output_limit
            given = {"job": job, "wait": WAIT, "limit": limit}
            answer = await (await self.caller()).call("await", given, [job, _centiseconds(WAIT), limit], WAIT)
        return job_result(answer)

    async def start(self, command: Command) -> None:
        """See InteractiveSandbox."""
        await self._begin(command, 0.0, 0)

    async def poll(self, job_id: str, read_id: str, wait: float, *, until_end: bool, limit: int) -> SessionOutput:
        """See InteractiveSandbox."""
        caller = await self.caller()
        job, read = _digest(job_id), _digest(read_id)
        until = time.monotonic() + wait
        while True:
            left = max(until - time.monotonic(), 0.0)
            turn = min(left, WAIT)
            given = {"job": job, "read": read, "wait": turn, "until_end": until_end, "last": left <= WAIT, "limit": limit}
            words: list[str | int] = [job, read, _centiseconds(turn), int(until_end), int(left <= WAIT), limit]
            answer = await caller.call("poll", given, words, turn)
            if not answer.words.get("waiting"):
                return session_output(answer)

    async def send(self, job_id: str, input_id: str, data: bytes) -> None:
        """See InteractiveSandbox."""
        if len(data) > MAX_INPUT:
            raise SessionFault(f"{len(data)} bytes of input are more than the {MAX_INPUT} that are typed at once")
        caller = await self.caller()
        path = await caller.put(data) if caller.image.python is not None else ""
        job = _digest(job_id)
        await caller.call("tell", {"job": job, "input": _digest(input_id), "data": path}, [job])

    async def resize(self, job_id: str, rows: int, columns: int) -> None:
        """See InteractiveSandbox."""
        job = _digest(job_id)
        await (await self.caller()).call("tell", {"job": job, "rows": rows, "columns": columns}, [job])

    async def progress(self, job_id: str) -> JobProgress | None:
        """See Sandbox."""
        job = _digest(job_id)
        answer = await (await self.caller()).call("progress", {"job": job}, [job])
        if not answer.words["running"]:
            return None
        stdout, stderr = answer.parts(answer.words["lengths"])
        return JobProgress(
            stdout_tail=stdout or b"",
            stderr_tail=stderr or b"",
            stdout_bytes=answer.words["totals"][0],
            stderr_bytes=answer.words["totals"][1],
            running_seconds=answer.words["seconds"],
        )

    async def kill_job(self, job_id: str) -> None:
        """See Sandbox."""
        job = _digest(job_id)
        end = time.monotonic() + END_GRACE
        while True:
            answer = await (await self.caller()).call("kill", {"job": job, "wait": WAIT}, [job, _centiseconds(WAIT)], WAIT)
            if not answer.words["running"]:
                return
            if time.monotonic() > end:
                raise SandboxUnavailable(f"job {job_id} cannot be ended")

    async def read(self, path: str) -> AsyncIterator[bytes]:
        """See Sandbox. A file of more than 40 KB comes through the SDK, as a stream; its path was checked just before.

        That is left out for files of the harness, which saves a call for each. Sandboxed code can put something else there, but
        nothing that it could not have put into the file as well.
        """
        if "\0" in path:
            raise FileFault(f"{path!r}: a path cannot hold a NUL byte")
        check_name(path)
        if path.startswith(SCRATCH):
            async for part in self.machine.get(path):
                yield part
            return
        answer = await (await self.caller()).call("read", {"path": path}, [path])
        if "at" not in answer.words:
            yield answer.body
            return
        where = answer.words["at"] if isinstance(answer.words["at"], str) else answer.body.decode("utf-8", "surrogateescape")
        async for part in self.machine.get(where):
            yield part

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See Sandbox."""
        check_write(path)
        await self._change([FileChange(path, data, mode)], anywhere=True)

    async def look(self, paths: Sequence[str], max_bytes: int) -> dict[str, FileView]:
        """See Sandbox."""
        names = [normal(path) for path in paths]
        if not paths:
            return {}
        answer = await (await self.caller()).call("look", {"paths": names, "max_bytes": max_bytes}, [max_bytes, *names])
        return views_of_look(paths, answer)

    async def change(self, changes: Sequence[FileChange]) -> None:
        """See Sandbox."""
        check_changes(changes)
        await self._change(changes, anywhere=False)

    async def walk(self, path: str) -> list[tuple[str, FileView]]:
        """See Sandbox."""
        top = normal(path)
        answer = await (await self.caller()).call("walk", {"path": top}, [top])
        return views_of_walk(top, answer)

    async def extend(self, seconds: float) -> None:
        """See Sandbox."""
        await self.machine.extend(seconds)

    async def _begin(self, command: Command, wait: float, limit: int) -> Answer:
        try:
            return await self._started(command, wait, limit)
        except FileFault as fault:  # what belongs to it finds no place in the sandbox
            told = replace(command, argv=cannot_start(str(fault)), cwd="/", env=None, stdin=None, terminal=False)
            return await self._started(told, wait, limit)

    async def _started(self, command: Command, wait: float, limit: int) -> Answer:
        caller = await self.caller()
        command, note = sound_command(command, has_bash=caller.image.has_bash)
        has_terminal = command.terminal and caller.image.python is not None
        if command.terminal and not has_terminal:
            command = replace(command, argv=NO_TERMINAL)
        stdin = None if command.stdin is None else await caller.put(command.stdin)
        job = _digest(command.job_id)
        environment = dict(command.env or {})
        given = {
            "job": job,
            "argv": list(command.argv),
            "cwd": command.cwd,
            "env": environment,
            "stdin": stdin,
            "timeout": command.timeout,
            "limit": limit,
            "wait": wait,
            "terminal": has_terminal,
            "note": note,
        }
        words: list[str | int] = [
            job,
            stdin or "-",
            _centiseconds(command.timeout),
            limit,
            _centiseconds(wait),
            command.cwd,
            note or "-",
            len(environment),
            *(f"{name}={value}" for name, value in environment.items()),
            *command.argv,
        ]
        return await caller.call("exec", given, words, wait)

    async def _change(self, changes: Sequence[FileChange], *, anywhere: bool) -> None:
        if not changes:
            return
        caller = await self.caller()
        content = b"".join(change.data or b"" for change in changes)
        data = await caller.put(content) if content else None
        items = [(change.path, None if change.data is None else len(change.data), change.mode) for change in changes]
        words: list[str | int] = [int(anywhere), data or "-"]
        for path, length, mode in items:
            words += [path, "-" if length is None else length, f"{mode & 0o777:o}"]
        await caller.call("change", {"changes": items, "data": data, "anywhere": anywhere}, words)


def _digest(name: str) -> str:
    """Return the name that a job, a read or an input has inside the sandbox: ids may hold anything."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _centiseconds(seconds: float) -> int:
    return int(min(seconds, 1e9) * 100)


__all__ = ["STATE", "PortableSandbox", "attach", "prepare"]
