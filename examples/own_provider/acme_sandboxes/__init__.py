"""A whole provider for Caisson: what your service must do with one machine, and how machines are made, found and ended.
The "service" here is bubblewrap on this machine, so that the example runs. Put your SDK's calls where it says SDK."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from activities.sandbox.machine import Ran
from activities.sandbox.port import Capabilities, FileFault, SandboxGone, SandboxUnavailable, refuse_what_it_cannot
from activities.sandbox.portable import PortableSandbox, attach, prepare
from contracts.sandbox import SandboxRef, SandboxSpec

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
BWRAP = (
    "bwrap --unshare-all --unshare-user --info-fd 9 --ro-bind /usr /usr --ro-bind /etc /etc --symlink usr/bin /bin "
    "--symlink usr/lib /lib --symlink usr/lib64 /lib64 --proc /proc --dev /dev --bind '{workspace}' /workspace "
    "--bind '{tmp}' /tmp --as-pid-1 -- sh -c 'while :; do sleep 9999 & wait; done'"
)


class AcmeMachine:
    """One machine (see `activities.sandbox.machine.Machine`)."""

    def __init__(self, ref: SandboxRef, folder: Path) -> None:
        self.ref = ref
        self._folder = folder

    def pid(self) -> int:
        """Return the machine's first process. Raises SandboxGone: the one error that must be told from all others."""
        try:
            meta = json.loads((self._folder / "meta.json").read_text())
            if meta["nonce"] != self.ref.nonce or _started(meta["pid"]) != meta["started"]:
                raise ValueError(self.ref.id)
        except (OSError, ValueError, IndexError) as error:
            raise SandboxGone(f"sandbox {self.ref.id} has ended") from error
        return int(meta["pid"])

    async def run(self, script: str, *, timeout: float) -> Ran:
        """Run a script. SDK: the call that executes a command; its own retries off."""
        process = await self._enter(["sh", "-c", f"cd /workspace\n{script}"])
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), timeout)
        except TimeoutError:
            process.kill()
            raise SandboxUnavailable(f"sandbox {self.ref.id}: no answer within {timeout} s") from None
        self.pid()  # a script that ended because its machine did has no result
        return Ran(process.returncode or 0, stdout, stderr)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file. SDK: the upload of a file."""
        process = await self._enter(["sh", "-c", f"cat >{shlex.quote(path)}"])
        _, stderr = await process.communicate(data)
        self.pid()
        if process.returncode:
            raise SandboxUnavailable(f"sandbox {self.ref.id}: {path}: {stderr.decode('utf-8', 'replace')}")

    async def get(self, path: str) -> AsyncIterator[bytes]:
        """Stream a file. SDK: the download of a file, in parts where it can be."""
        process = await self._enter(["cat", path])
        data, stderr = await process.communicate()
        self.pid()
        if process.returncode:
            raise FileFault(f"{path}: {stderr.decode('utf-8', 'replace').rpartition(': ')[2].strip()}")
        yield data

    async def extend(self, seconds: float) -> None:
        """Keep it alive. SDK: the call that moves the end of its life, if it has one."""
        self.pid()

    async def _enter(self, argv: list[str]) -> asyncio.subprocess.Process:
        enter = ["nsenter", "-t", str(self.pid()), "-U", "-m", "-p", "-n", "-i", "--preserve-credentials"]
        enter += ["--", *argv]
        return await asyncio.create_subprocess_exec(*enter, stdin=-1, stdout=-1, stderr=-1, env=ENVIRONMENT)  # -1: pipes


class AcmeProvider:
    """Makes, finds and ends machines (see `activities.sandbox.port.SandboxProvider`)."""

    name = "acme"
    capabilities = Capabilities(host_bound=True, native_jobs=False, interactive=True)  # what a spec asks for beyond is refused

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path.home() / ".acme-sandboxes"
        self._making = asyncio.Lock()  # a service has something better, that holds between workers too

    async def create(
        self, spec: SandboxSpec, key: str, *, environment: Mapping[str, str], labels: Mapping[str, str], queue: str
    ) -> SandboxRef:
        """Make one machine for `key`, or find it. SDK: create, with the key as the service's idempotency key or unique name."""
        refuse_what_it_cannot(self.name, self.capabilities, spec)
        folder = self._root / hashlib.sha256(key.encode()).hexdigest()[:24]
        async with self._making:
            refs = [ref for ref in await self.list({}) if ref.id == folder.name]
            ref = refs[0] if refs else await asyncio.to_thread(self._make, folder, labels, queue)
            await prepare(AcmeMachine(ref, folder), environment)  # the workspace, the nonce and the environment
        return ref

    async def attach(self, ref: SandboxRef) -> PortableSandbox:
        """Reach a machine. SDK: get or connect; `attach` compares the nonce."""
        return await attach(AcmeMachine(ref, self._root / ref.id))

    async def kill(self, ref: SandboxRef) -> None:
        """End exactly the machine that `ref` means. SDK: delete; that it is gone already is no error."""
        with contextlib.suppress(SandboxGone):
            os.kill(AcmeMachine(ref, self._root / ref.id).pid(), signal.SIGKILL)
            await asyncio.to_thread(shutil.rmtree, self._root / ref.id, ignore_errors=True)

    async def list(self, labels: Mapping[str, str]) -> list[SandboxRef]:
        """List living machines by their labels. SDK: list, with a filter by metadata or tags."""
        found = []
        for path in sorted(self._root.glob("*/meta.json")):
            meta = json.loads(path.read_text())
            ref = SandboxRef(provider=self.name, id=path.parent.name, nonce=meta["nonce"], queue=meta["queue"])
            with contextlib.suppress(SandboxGone):
                AcmeMachine(ref, path.parent).pid()
                found += [ref] if labels.items() <= meta["labels"].items() else []
        return found

    async def egress_log(self, ref: SandboxRef) -> bytes:
        """Return the record of its connections; there is no network."""
        return b""

    def _make(self, folder: Path, labels: Mapping[str, str], queue: str) -> SandboxRef:
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("workspace", "tmp"):
            (folder / name).mkdir(parents=True)
        command = shlex.split(BWRAP.format(workspace=folder / "workspace", tmp=folder / "tmp"))
        shell = f"{shlex.join(command)} 9>{shlex.quote(str(folder / 'info'))} </dev/null >/dev/null 2>&1 & sleep 0.2"
        subprocess.run(["sh", "-c", shell], check=True, start_new_session=True, env=ENVIRONMENT)
        pid = json.loads((folder / "info").read_text())["child-pid"]
        meta = {"nonce": secrets.token_hex(16), "queue": queue, "labels": dict(labels), "pid": pid, "started": _started(pid)}
        (folder / "meta.json").write_text(json.dumps(meta))
        return SandboxRef(provider=self.name, id=folder.name, nonce=str(meta["nonce"]), queue=queue)


def _started(pid: int) -> str:
    """When a process was started: a pid alone may be another one's by now."""
    state, *fields = Path("/proc", str(pid), "stat").read_text().rpartition(") ")[2].split()
    return "" if state in "ZX" else fields[18]  # one that is only not buried yet is dead
