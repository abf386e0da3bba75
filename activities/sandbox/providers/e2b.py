"""Sandboxes at E2B: one virtual machine each, made of a template, through the async SDK `e2b` (2.63).

What E2B does not let one choose for a sandbox is refused, or said here, and never passed over:

- Processors and memory are the template's. A limit other than the default is refused unless it is what the template gives.
- E2B lets a sandbox run for 24 hours at most (one, in its free plan). A longer `lifetime_seconds` is cut, and the run moves to a
  new sandbox before `expires_at`.
- The network is closed in both directions, or open. E2B's own list of allowed hosts takes the name that a program says it wants
  (TLS SNI, HTTP Host) on two ports, leaves DNS to 8.8.8.8 open, and keeps no record, so it is not what `network.allow` promises
  (https://e2b.dev/docs/network/internet-access).
- The template's ordinary user may become root, as in E2B's own templates. The machine is the wall, not the user.
- The idempotency key of the SDK is not used: what it answers for a sandbox that has ended meanwhile is not documented.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from activities.sandbox.machine import Ran, cancellation_heard
from activities.sandbox.port import (
    BadSandboxSpec,
    Capabilities,
    FileFault,
    SandboxError,
    SandboxGone,
    SandboxUnavailable,
    refuse_what_it_cannot,
)
from activities.sandbox.portable import PortableSandbox, attach, prepare
from activities.sandbox.providers.e2b_errors import longest_hours, meaning_of
from contracts.sandbox import WORKSPACE, SandboxLimits, SandboxRef, SandboxSpec

if TYPE_CHECKING:
    from e2b import AsyncSandbox, SandboxInfo

_KEY, _NONCE, _QUEUE, _LIFETIME = "caisson_key", "caisson_nonce", "caisson_queue", "caisson_lifetime"
"""The metadata of a sandbox beside its labels."""

_LONGEST = 24 * 3600
_REQUEST_SECONDS = 60.0
_UPLOAD_SECONDS = 300.0
_PAUSE_SECONDS = 180.0
_OPEN_SECONDS = 30.0
"""The longest wait for a process to be started, of the time that a script has."""
_SCRIPT_OUTPUT = 1 << 20

_RUN = f"""
script=$CAISSON_SCRIPT mark=$CAISSON_MARK; unset CAISSON_SCRIPT CAISSON_MARK
dir=$(mktemp -d /dev/shm/caisson.XXXXXXXX 2>/dev/null || mktemp -d) || exit 125
cd {WORKSPACE} 2>/dev/null || cd /
sh -c "$script" </dev/null >"$dir/1" 2>"$dir/2"; code=$?
printf '\\n%s %s ' "$mark" "$code"
head -c {_SCRIPT_OUTPUT} "$dir/1" | base64 | tr -d '\\n'; printf ' '
head -c {_SCRIPT_OUTPUT} "$dir/2" | base64 | tr -d '\\n'; printf ' %s\\n' "$mark"
rm -rf "$dir"
"""
"""Run as `bash -l -c`. The script is an environment variable, as quoting could make it longer than one argument may be (128 KiB).
Its output goes through files, so that what it leaves in the background holds nothing up, and comes back between marks, since the
SDK passes on text only, after what the login shell may have to say."""


class E2BMachine:
    """One living sandbox at E2B, as `PortableSandbox` needs it."""

    def __init__(self, provider: E2BProvider, sandbox: AsyncSandbox, ref: SandboxRef) -> None:
        self._provider = provider
        self._sandbox = sandbox
        self._ref = ref

    @property
    def ref(self) -> SandboxRef:
        """The serialisable handle."""
        return self._ref

    async def run(self, script: str, *, timeout: float) -> Ran:
        """See Machine."""
        return await self._run(script, self._provider.user, timeout)

    async def put(self, path: str, data: bytes) -> None:
        """See Machine."""
        from e2b import InvalidArgumentException, NotEnoughSpaceException

        async with self._provider.asking(f"write {path}", self.ref.id):
            try:
                await self._sandbox.files.write(
                    path, data, user=self._provider.user, use_octet_stream=True, request_timeout=_UPLOAD_SECONDS
                )
            except (InvalidArgumentException, NotEnoughSpaceException) as error:
                raise FileFault(f"{path}: {error}") from None

    async def get(self, path: str) -> AsyncIterator[bytes]:
        """See Machine. A stream that is cut raises SandboxUnavailable."""
        from e2b import FileNotFoundException, InvalidArgumentException

        async with self._provider.asking(f"read {path}", self.ref.id):
            try:
                stream = await self._sandbox.files.read(path, format="stream", user=self._provider.user)
            except (FileNotFoundException, InvalidArgumentException, UnicodeError) as error:  # a URL's path is text
                raise FileFault(f"{path!r}: {error}") from None
            async with stream:
                async for part in stream:
                    yield part

    async def extend(self, seconds: float) -> None:
        """See Machine. An end that cannot be moved, as the plan's or the spec's longest life is over then, is left as it is."""
        async with self._provider.asking("extend", self.ref.id):
            info = await self._sandbox.get_info()
            now = time.time()
            lifetime = float(info.metadata.get(_LIFETIME, _LONGEST))
            end = min(now + seconds, info.started_at.timestamp() + lifetime)
            # A shorter time would be set as well, so it is looked at first.
            if end > info.end_at.timestamp() + 1:
                await self._sandbox.set_timeout(math.ceil(end - now))

    async def make_workspace(self) -> None:
        """Make the workspace, which the ordinary user cannot in a directory of root's. Done again it changes nothing."""
        user = self._provider.user
        script = f"mkdir -p {WORKSPACE} && {{ chown {user}: {WORKSPACE} || ! id {user} >/dev/null 2>&1; }}"
        done = await self._run(script, "root", _REQUEST_SECONDS)
        if done.exit_code != 0:
            raise BadSandboxSpec(
                f"sandbox.image: a sandbox of it cannot have {WORKSPACE}: {done.stderr.decode('utf-8', 'replace').strip()}"
            )

    async def _run(self, script: str, user: str, timeout: float) -> Ran:
        from e2b import CommandExitException

        mark, begun = secrets.token_hex(16), time.monotonic()
        async with self._provider.asking("run a script", self.ref.id):
            # Without its own timeout the SDK would end every stream after 60 seconds.
            handle = await self._sandbox.commands.run(
                _RUN,
                background=True,
                envs={"CAISSON_SCRIPT": script, "CAISSON_MARK": mark},
                user=user,
                cwd="/",
                timeout=timeout,
                request_timeout=min(timeout, _OPEN_SECONDS),
            )
            try:
                ended = await handle.wait()
            except CommandExitException as error:
                ended = error
            finally:
                await handle.disconnect()
        told = re.search(rf"\n{mark} (\d+) (\S*) (\S*) {mark}\n", ended.stdout)
        if told is None:
            # -1 is any signal: one of E2B's at the timeout, which it does not always say; before, one of the sandbox's own.
            if ended.exit_code == -1 and time.monotonic() < begun + timeout - 1:
                return Ran(128 + 9, b"", ended.stderr.encode())
            how = f"{ended.error or f'exit code {ended.exit_code}'}: {ended.stderr[-300:]}"
            raise SandboxUnavailable(f"e2b: sandbox {self.ref.id}: a script did not come to its end: {how}")
        return Ran(int(told[1]), base64.b64decode(told[2]), base64.b64decode(told[3]))


async def _as_long_as_it_may(ask: Callable[[int], Awaitable[AsyncSandbox]], lifetime: int) -> AsyncSandbox:
    """Ask for so many seconds of life, or for as many as the plan allows."""
    from e2b import SandboxException

    try:
        return await ask(lifetime)
    except SandboxException as error:
        hours = longest_hours(error)
        if hours is None:
            raise
        return await ask(hours * 3600)


class E2BProvider:
    """Makes, finds and ends the sandboxes of one E2B account.

    They are made of `template` when the spec names no image; `user` is its ordinary user. `domain`, `api_url` and `sandbox_url`
    say where E2B is, when it is not the public one.
    """

    name = "e2b"
    capabilities = Capabilities(
        host_bound=False,
        native_jobs=False,
        interactive=True,
        network=frozenset({"none", "open"}),
        limits=frozenset({"lifetime_seconds", "memory_mb", "cpus"}),
        lifetime=_LONGEST,
        pause=True,
        images=True,
    )

    def __init__(
        self,
        api_key: str,
        *,
        template: str = "base",
        user: str = "user",
        domain: str | None = None,
        api_url: str | None = None,
        sandbox_url: str | None = None,
    ) -> None:
        self._key = api_key
        self._template = template
        self.user = user
        where = {"domain": domain, "api_url": api_url, "sandbox_url": sandbox_url}
        # In debug mode, which an environment variable can set, the SDK neither makes nor ends sandboxes.
        self._options: dict[str, Any] = {
            "api_key": api_key,
            "debug": False,
            "retries": 0,
            "request_timeout": _REQUEST_SECONDS,
            **{name: value for name, value in where.items() if value},
        }

    async def create(
        self, spec: SandboxSpec, key: str, *, environment: Mapping[str, str], labels: Mapping[str, str], queue: str
    ) -> SandboxRef:
        """See SandboxProvider."""
        refuse_what_it_cannot(self.name, self.capabilities, spec)
        marks = {**labels, _KEY: hashlib.sha256(key.encode()).hexdigest()}
        made = None
        found = await self._find(marks)
        if not found:
            made = await self._make(spec, {**marks, _NONCE: secrets.token_hex(16), _QUEUE: queue})
            # Somebody else with this key may have found none either, such as an attempt whose answer was lost: the oldest counts.
            found = await self._find(marks)
        if not found:
            raise SandboxUnavailable("e2b: a sandbox was made, but is not listed yet; the next attempt will find it")
        first, *others = sorted(found, key=lambda info: (info.started_at, info.sandbox_id))
        for other in others:
            await self._end(other.sandbox_id)
        ref = self._ref(first)
        try:
            self._check(spec, first)
            if made is None or made.sandbox_id != ref.id:
                made = await self._connect(ref)
            machine = E2BMachine(self, made, ref)
            await machine.make_workspace()
            await prepare(machine, environment)
        except BadSandboxSpec:
            await self._end(ref.id)
            raise
        return ref

    async def attach(self, ref: SandboxRef) -> PortableSandbox:
        """See SandboxProvider. A sandbox that is paused goes on."""
        return await attach(E2BMachine(self, await self._connect(ref), ref))

    async def kill(self, ref: SandboxRef) -> None:
        """See SandboxProvider."""
        try:
            info = await self._info(ref.id)
        except SandboxGone:
            return
        if info.metadata.get(_NONCE) == ref.nonce:
            await self._end(ref.id)

    async def list(self, labels: Mapping[str, str]) -> list[SandboxRef]:
        """See SandboxProvider."""
        return [self._ref(info) for info in await self._find(labels)]

    async def egress_log(self, ref: SandboxRef) -> bytes:
        """See SandboxProvider. E2B keeps no record."""
        return b""

    async def pause(self, ref: SandboxRef) -> None:
        """See PausingProvider."""
        from e2b import AsyncSandbox

        async with self.asking("pause", ref.id):
            # Its memory is written to a disk meanwhile, some seconds for each GB.
            await AsyncSandbox.pause(ref.id, **{**self._options, "request_timeout": _PAUSE_SECONDS})

    async def resume(self, ref: SandboxRef) -> SandboxRef:
        """See PausingProvider. E2B counts the time that a sandbox may run from here."""
        from e2b import AsyncSandbox

        info = await self._info(ref.id)
        if info.metadata.get(_NONCE) != ref.nonce:
            raise SandboxGone(f"e2b: sandbox {ref.id} is another one by now")

        async def connect(timeout: int) -> AsyncSandbox:
            return await AsyncSandbox.connect(ref.id, timeout=timeout, **self._options)

        async with self.asking("resume", ref.id):
            await _as_long_as_it_may(connect, int(info.metadata.get(_LIFETIME, _LONGEST)))
        return self._ref(await self._info(ref.id))

    @contextlib.asynccontextmanager
    async def asking(self, what: str, sandbox_id: str = "", template: str = "") -> AsyncIterator[None]:
        """Translate what the SDK raises in the block, once. `template` is that of a sandbox which is being made."""
        try:
            with cancellation_heard():
                yield
        except (SandboxError, FileFault):
            raise
        except Exception as error:  # noqa: BLE001 - the SDK has no common base class, and lets those of three HTTP stacks through
            # Not `from error`, whose text may hold the key.
            raise await self._fault(error, f"{what} {sandbox_id}".rstrip(), sandbox_id, template) from None

    async def _fault(self, error: Exception, what: str, sandbox_id: str, template: str) -> SandboxError:
        names = [cls.__name__ for cls in type(error).__mro__]
        text = str(error).replace(self._key, "[key]")[:600]
        kind = meaning_of(error, text, is_making=bool(template))
        if kind is BadSandboxSpec and template:
            what = f"sandbox.image {template}: {what}"
        if kind is SandboxGone and "SandboxNotRunningException" in names and not await self._has_ended(sandbox_id):
            # Its proxy says the same of a sandbox that has only just been made, or is paused.
            kind = SandboxUnavailable
        return kind(f"e2b: {what}: {names[0]}: {text}")

    async def _has_ended(self, sandbox_id: str) -> bool:
        try:
            await self._info(sandbox_id)
        except SandboxError as error:
            return isinstance(error, SandboxGone)
        return False

    async def _info(self, sandbox_id: str) -> SandboxInfo:
        from e2b import AsyncSandbox

        async with self.asking("look at", sandbox_id):
            return await AsyncSandbox.get_info(sandbox_id, **self._options)

    async def _find(self, marks: Mapping[str, str]) -> Sequence[SandboxInfo]:
        """Return the sandboxes of this provider that have all `marks` in their metadata."""
        from e2b import AsyncSandbox, SandboxQuery

        found: dict[str, SandboxInfo] = {}
        async with self.asking("list sandboxes"):
            pages = AsyncSandbox.list(query=SandboxQuery(metadata=dict(marks)), limit=100, **self._options)
            while pages.has_next:
                # Looked at once more, since some of them may be ended for what this says.
                for info in await pages.next_items():
                    if _NONCE in info.metadata and marks.items() <= info.metadata.items():
                        found[info.sandbox_id] = info
        return list(found.values())

    async def _make(self, spec: SandboxSpec, metadata: Mapping[str, str]) -> AsyncSandbox:
        from e2b import AsyncSandbox

        template = spec.image or self._template
        lifetime = min(spec.limits.lifetime_seconds, _LONGEST)

        async def make(timeout: int) -> AsyncSandbox:
            return await AsyncSandbox.create(
                template,
                timeout=timeout,
                metadata={**metadata, _LIFETIME: str(lifetime)},
                allow_internet_access="network" in spec.options,
                # Else whoever knows its name reaches every port of a sandbox from the internet.
                network={"allow_public_traffic": False},
                lifecycle={"on_timeout": "kill"},
                **self._options,
            )

        async with self.asking("make a sandbox", template=template):
            return await _as_long_as_it_may(make, lifetime)

    async def _connect(self, ref: SandboxRef) -> AsyncSandbox:
        from e2b import AsyncSandbox

        # Connecting moves the end of a sandbox to this many seconds from now if that is later, and else leaves it.
        left = _REQUEST_SECONDS if ref.expires_at is None else ref.expires_at - time.time()
        async with self.asking("connect to", ref.id):
            return await AsyncSandbox.connect(ref.id, timeout=max(1, int(left)), **self._options)

    async def _end(self, sandbox_id: str) -> None:
        from e2b import AsyncSandbox

        with contextlib.suppress(SandboxGone):
            async with self.asking("end", sandbox_id):
                await AsyncSandbox.kill(sandbox_id, **self._options)

    def _check(self, spec: SandboxSpec, info: SandboxInfo) -> None:
        given: dict[str, float] = {"memory_mb": info.memory_mb, "cpus": info.cpu_count}
        for field, has in given.items():
            asked = getattr(spec.limits, field)
            if asked not in (has, SandboxLimits.model_fields[field].default):
                raise BadSandboxSpec(
                    f"sandbox.limits.{field}: {asked:g}: the template {info.name or info.template_id} gives {has:g}, and E2B "
                    f"cannot change that; ask for {has:g}, leave the field out, or name another template in sandbox.image"
                )

    def _ref(self, info: SandboxInfo) -> SandboxRef:
        return SandboxRef(
            provider=self.name,
            id=info.sandbox_id,
            nonce=info.metadata[_NONCE],
            queue=info.metadata.get(_QUEUE, ""),
            expires_at=info.end_at.timestamp(),
        )
