"""Sandboxes at Modal: one gVisor container each, made of an image, through the SDK `modal` (1.6).

What Modal does not let one choose for a sandbox is refused, or said here, and never passed over:

- A sandbox lives for 24 hours at most, and its end is fixed when it is made, so a longer `lifetime_seconds` is refused, `extend`
  does nothing, and the run moves to a new sandbox before `expires_at` (https://modal.com/docs/guide/sandbox).
- Memory and processors have hard limits. Those of processes, open files and disk are Modal's own: another value is refused.
- The network is closed, or open. Modal's list of allowed domains (beta) goes by the name that a program says it wants (TLS SNI),
  on port 443, and keeps no record: not what `network.allow` promises (https://modal.com/docs/guide/sandbox-networking).
- `sandbox.image` is one of a public registry, for linux/amd64, or the id (`im-...`) of one that Modal has; none: `debian_slim`.
  Modal builds it at its first use, which takes minutes and is billed. Its ENTRYPOINT must run the arguments that it is given.
- Commands run as root, as everything in Modal's containers does. The container is the wall, not the user.
- The SDK reads other settings (MODAL_LOGLEVEL) from the environment and ~/.modal.toml, but no token, server or app.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING

from activities.sandbox import portable
from activities.sandbox.machine import Ran, cancellation_heard
from activities.sandbox.port import (
    BadSandboxSpec,
    Capabilities,
    FileFault,
    SandboxAuth,
    SandboxError,
    SandboxGone,
    SandboxUnavailable,
    refuse_what_it_cannot,
)
from activities.sandbox.providers.modal_errors import Kind, meaning_of
from activities.sandbox.providers.modal_scripts import GET, PUT, RUN
from contracts.sandbox import SandboxRef, SandboxSpec

if TYPE_CHECKING:
    from modal import App, Client, Image, Sandbox
    from modal.container_process import ContainerProcess

_NONCE, _QUEUE, _EXPIRES = "caisson_nonce", "caisson_queue", "caisson_expires"
"""The tags of a sandbox beside its labels."""
_TAG = re.compile(r"(?!sha256-)[A-Za-z0-9._-]{1,63}")
"""What a tag and its value may be (`modal._utils.name_utils.check_tag_dict`)."""
_LONGEST = 24 * 3600
_CPU_REQUEST, _MEMORY_REQUEST = 0.125, 128
"""Modal's own defaults of what is set aside for a sandbox, and billed when it uses less; the limits are above."""

# The SDK tries for a minute to reach the service, and for five to reach a worker. These are the ends of that.
_OPEN_SECONDS, _REQUEST_SECONDS, _MAKE_SECONDS, _BUILD_SECONDS, _TRANSFER_SECONDS = 10.0, 20.0, 120.0, 900.0, 300.0
_CHECK_SECONDS = _LATE_SECONDS = 5.0
_IMAGE_SECONDS, _IMAGE_LIVES = 120, 7 * 24 * 3600
"""How long storing a sandbox's files may take, and how long Modal keeps them when nobody removes them."""
_IDLE = ("sh", "-c", "while :; do sleep 3600; done")
"""The first process of a sandbox. A shell, as it also takes away the dead children that others leave."""
_PIECE, _ARGUMENTS = 4 << 20, 48 << 10
"""The SDK refuses more than 64 KiB of arguments, so a longer script goes through standard input."""


def _tag(text: str) -> str:
    """Return a text as a tag can have it: itself, or its hash. The same text always gives the same tag."""
    return text if _TAG.fullmatch(text) else f"sha256-{hashlib.sha256(text.encode()).hexdigest()[:56]}"


class ModalMachine:
    """One living sandbox at Modal, as `PortableSandbox` needs it."""

    def __init__(self, provider: ModalProvider, sandbox: Sandbox, ref: SandboxRef) -> None:
        self._provider, self._sandbox, self.ref = provider, sandbox, ref

    async def run(self, script: str, *, timeout: float) -> Ran:
        """See Machine."""
        text = script.encode()
        is_short = len(text) <= _ARGUMENTS
        async with self._provider.asking("run a script", self._sandbox):
            # Modal would end it a little earlier than it says, so that its time could not be told from a kill.
            process = await self._start(RUN, *((script,) if is_short else ()), timeout=timeout + _LATE_SECONDS)
            async with asyncio.timeout(timeout):
                if not is_short:
                    await _send(process, text)
                told = await process.stdout.read.aio()
                head, _, output = told.partition(b"\n")
                said = re.fullmatch(rb"(\d+) (\d+) (\d+)", head)
                if said is not None and len(output) == int(said[2]) + int(said[3]):
                    return Ran(int(said[1]), output[: int(said[2])], output[int(said[2]) :])
                code = await process.wait.aio()
            if code in (125, 126, 127):
                raise BadSandboxSpec(f"sandbox.image: it lacks sh, mktemp, wc or head: a script ended with code {code}")
            if code < 128:
                raise EOFError(f"a script broke off: exit code {code}")
            return Ran(code, b"", b"")  # something in the sandbox killed the shell

    async def put(self, path: str, data: bytes) -> None:
        """See Machine."""
        from modal.exception import ConflictError

        async with self._provider.asking(f"write {path}", self._sandbox), asyncio.timeout(_TRANSFER_SECONDS):
            process = await self._start(PUT, path, str(len(data)), timeout=_TRANSFER_SECONDS)
            # Modal's word for a process that has ended before its input has: why, it says itself.
            with contextlib.suppress(ConflictError):
                await _send(process, data)
            told = await process.stdout.read.aio()
            if told != b"done\n":
                said = told.decode("utf-8", "replace").strip()[-300:]
                raise FileFault(f"{path}: {said}") if said else EOFError("the file's writer did not come to its end")

    async def get(self, path: str) -> AsyncIterator[bytes]:
        """See Machine. A stream that is cut, and cannot be taken up again, raises SandboxUnavailable."""
        async with self._provider.asking(f"read {path}", self._sandbox):
            process = await self._start(GET, path, timeout=_TRANSFER_SECONDS)
            stream = aiter(process.stdout)
            head, left = b"", -1
            while left != 0:
                async with asyncio.timeout(_REQUEST_SECONDS):
                    part = await anext(stream, b"")
                if not part:
                    raise EOFError("its stream was cut")
                if left < 0:
                    head, found, part = (head + part).partition(b"\n")
                    if found and not head.isdigit():
                        raise FileFault(f"{path}: {head.decode('utf-8', 'replace')}")
                    left = int(head) if found else -1
                if part:
                    left -= len(part)
                    yield part

    async def extend(self, seconds: float) -> None:
        """See Machine. Modal cannot, as `expires_at` is final: this tells only whether it lives."""
        await self._provider.find(self.ref.id)

    async def _start(self, script: str, *arguments: str, timeout: float) -> ContainerProcess[bytes]:
        from modal.stream_type import StreamType

        words = ("sh", "-c", script, "caisson", *arguments)
        async with asyncio.timeout(min(timeout, _REQUEST_SECONDS)):
            return await self._sandbox.exec.aio(*words, stderr=StreamType.DEVNULL, text=False, timeout=math.ceil(timeout))


async def _send(process: ContainerProcess[bytes], data: bytes) -> None:
    """Give a process its whole input, in pieces, as the SDK takes 16 MiB at once."""
    for at in range(0, len(data) + 1, _PIECE):
        process.stdin.write(data[at : at + _PIECE])
        if at + _PIECE > len(data):
            process.stdin.write_eof()
        await process.stdin.drain.aio()


class ModalProvider:
    """Makes, finds and ends the sandboxes of one app of a Modal workspace.

    The app is made when it is not there. `environment` is Modal's environment that it is in, when that is not the workspace's
    default one; `url` says where Modal is, when it is not the public one.
    """

    name = "modal"
    capabilities = Capabilities(
        host_bound=False,
        native_jobs=False,
        interactive=True,
        network=frozenset({"none", "open"}),
        limits=frozenset({"lifetime_seconds", "memory_mb", "cpus"}),
        lifetime=_LONGEST,
        native_snapshot=True,
        images=True,
    )

    def __init__(
        self, token_id: str, token_secret: str, app_name: str = "caisson", *, environment: str | None = None, url: str = ""
    ) -> None:
        self._token = token_id, token_secret
        self._app_name, self._environment, self._url = app_name, environment, url
        self._opening = asyncio.Lock()
        self._client: Client | None = None
        self._app: App | None = None
        # With them the connection to a sandbox's worker is kept, which takes three calls to make.
        self._handles: dict[str, Sandbox] = {}

    async def create(
        self, spec: SandboxSpec, key: str, *, environment: Mapping[str, str], labels: Mapping[str, str], queue: str
    ) -> SandboxRef:
        """See SandboxProvider. A name is one living sandbox's in its app: that is what makes it the only one of its key."""
        refuse_what_it_cannot(self.name, self.capabilities, spec)
        if spec.limits.lifetime_seconds > _LONGEST:
            given = f"sandbox.limits.lifetime_seconds: {spec.limits.lifetime_seconds}"
            raise BadSandboxSpec(f"{given}: Modal ends a sandbox after {_LONGEST} seconds; ask for that or less, the run goes on")
        sandbox = await self._make(spec, f"caisson-{hashlib.sha256(key.encode()).hexdigest()[:40]}", labels, queue)
        ref = await self._ref(sandbox)
        try:
            await portable.prepare(ModalMachine(self, sandbox, ref), environment, inherited=True)
        except BadSandboxSpec:
            await self._end(sandbox)
            raise
        return ref

    async def attach(self, ref: SandboxRef) -> portable.PortableSandbox:
        """See SandboxProvider."""
        sandbox = self._handles.get(ref.id)
        if sandbox is None:
            if len(self._handles) >= 256:
                self._handles.clear()
            self._handles[ref.id] = sandbox = await self.find(ref.id)
        return await portable.attach(ModalMachine(self, sandbox, ref))

    async def kill(self, ref: SandboxRef) -> None:
        """See SandboxProvider."""
        with contextlib.suppress(SandboxGone):
            await self._end(await self._find_own(ref))

    async def list(self, labels: Mapping[str, str]) -> list[SandboxRef]:
        """See SandboxProvider."""
        import modal

        client, app = await self._open()
        refs = []
        async with self.asking("list sandboxes", missing=SandboxUnavailable), asyncio.timeout(_REQUEST_SECONDS):
            tags = {_tag(name): _tag(value) for name, value in labels.items()}
            found = [one async for one in modal.Sandbox.list.aio(app_id=app.app_id, tags=tags, client=client)]
        for sandbox in found:
            with contextlib.suppress(SandboxGone):
                refs.append(await self._ref(sandbox))
        return refs

    async def egress_log(self, ref: SandboxRef) -> bytes:
        """See SandboxProvider. Modal keeps no record."""
        return b""

    async def make_image(self, ref: SandboxRef) -> str:
        """See ImagingProvider."""
        sandbox = await self._find_own(ref)
        async with self.asking("make an image", sandbox), asyncio.timeout(_IMAGE_SECONDS + _LATE_SECONDS):
            return (await sandbox.snapshot_filesystem.aio(timeout=_IMAGE_SECONDS, ttl=_IMAGE_LIVES)).object_id

    async def remove_image(self, image: str) -> None:
        """See ImagingProvider."""
        from modal.experimental import image_delete

        client, _ = await self._open()
        with contextlib.suppress(SandboxGone):
            async with self.asking(f"remove {image}"), asyncio.timeout(_REQUEST_SECONDS):
                await image_delete.aio(image, client=client)

    async def close(self) -> None:
        """Close the connections. The next call opens them again."""
        if self._client is not None:
            await self._client.close.aio()
        self._client = self._app = None
        self._handles.clear()

    @contextlib.asynccontextmanager
    async def asking(self, what: str, of: Sandbox | None = None, missing: Kind = SandboxGone) -> AsyncIterator[None]:
        """Translate what the SDK raises, once. A sandbox's worker is asked, or the control plane: `missing` is its NOT_FOUND."""
        try:
            with cancellation_heard():
                yield
        except (SandboxError, FileFault):
            raise
        except Exception as error:  # noqa: BLE001 - beside its own classes, the SDK lets those of gRPC, HTTP/2 and sockets through
            # Not `from error`, whose text or frames may hold the secret.
            raise await self._fault(error, what, of, missing) from None

    async def _fault(self, error: Exception, what: str, sandbox: Sandbox | None, missing: Kind) -> SandboxError:
        text = (str(error) or "no answer in time").replace(self._token[1], "[secret]")[:600]
        kind = meaning_of(error, text)
        if sandbox is None:
            kind = missing if kind is SandboxGone else kind
            self._app = None  # it may have been stopped, and then another has its name
        else:
            # A worker that is gone does not answer, and one that lives may have lost a command. The control plane knows. What the
            # worker refuses is a short-lived token, and the next attempt gets a new one.
            if kind in (SandboxGone, SandboxAuth, SandboxUnavailable):
                kind = SandboxGone if await self._has_ended(sandbox) else SandboxUnavailable
            self._handles.pop(sandbox.object_id, None)
            what += f" in {sandbox.object_id}"
        return kind(f"modal: {what}: {type(error).__name__}: {text}")

    async def _has_ended(self, sandbox: Sandbox) -> bool:
        from modal.exception import NotFoundError

        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                return await sandbox.poll.aio() is not None
        except NotFoundError:
            return True
        except Exception:  # noqa: BLE001 - what it was asked for has failed already, and that is told
            return False

    async def _open(self) -> tuple[Client, App]:
        import modal
        from modal.config import DEFAULT_SERVER_URL
        from modal_proto import api_pb2

        async with self._opening, self.asking("open the app", missing=BadSandboxSpec), asyncio.timeout(_OPEN_SECONDS):
            if self._client is None:
                logging.getLogger("hpack").setLevel(logging.INFO)  # below, it logs every header, and so the secret
                # `Client.from_credentials` takes the server from the environment or ~/.modal.toml.
                client = modal.Client(self._url or DEFAULT_SERVER_URL, api_pb2.CLIENT_TYPE_CLIENT, self._token)
                self._client = await client.__aenter__()  # type: ignore[no-untyped-call]
            if self._app is None:
                self._app = await modal.App.lookup.aio(
                    self._app_name, client=self._client, environment_name=self._environment, create_if_missing=True
                )
            return self._client, self._app

    async def _image(self, wanted: str | None, client: Client, app: App) -> Image:
        from modal import Image

        image = Image.from_registry(wanted) if wanted else Image.debian_slim()
        if wanted and wanted.startswith("im-"):
            image = Image.from_id(wanted, client)
        async with (
            self.asking(f"sandbox.image {wanted or 'debian_slim'}", missing=BadSandboxSpec),
            asyncio.timeout(_BUILD_SECONDS),
        ):
            return await image.build.aio(app)

    async def _make(self, spec: SandboxSpec, name: str, labels: Mapping[str, str], queue: str) -> Sandbox:
        """Make the sandbox of a name, or return the one that has it already, such as that of an attempt whose answer was lost."""
        import modal

        client, app = await self._open()
        image = await self._image(spec.image, client, app)
        tags = {_tag(label): _tag(value) for label, value in labels.items()}
        tags |= {f"{_QUEUE}.{part}": text for part, text in enumerate(re.findall(r".{1,63}", queue))}
        limits = spec.limits
        async with self.asking("make a sandbox", missing=SandboxUnavailable), asyncio.timeout(_MAKE_SECONDS):
            try:
                return await modal.Sandbox.create.aio(
                    *_IDLE,
                    app=app,
                    name=name,
                    # Its time begins later than this, and so it ends no earlier.
                    tags={**tags, _NONCE: secrets.token_hex(16), _EXPIRES: f"{time.time() + limits.lifetime_seconds:.0f}"},
                    image=image,
                    timeout=limits.lifetime_seconds,
                    cpu=(min(_CPU_REQUEST, limits.cpus), limits.cpus),
                    memory=(min(_MEMORY_REQUEST, limits.memory_mb), limits.memory_mb),
                    block_network="network" not in spec.options,
                    client=client,
                )
            except modal.exception.AlreadyExistsError:
                # One that has just ended is not found: the next attempt makes a new one.
                return await modal.Sandbox.from_name.aio(self._app_name, name, environment_name=self._environment, client=client)

    async def find(self, sandbox_id: str) -> Sandbox:
        """Return a living sandbox. Raises SandboxGone."""
        import modal

        client, _ = await self._open()
        async with self.asking(f"find {sandbox_id}"), asyncio.timeout(_REQUEST_SECONDS):
            sandbox = await modal.Sandbox.from_id.aio(sandbox_id, client)
        if sandbox.returncode is not None:
            raise SandboxGone(f"modal: sandbox {sandbox_id} has ended")
        return sandbox

    async def _find_own(self, ref: SandboxRef) -> Sandbox:
        sandbox = await self.find(ref.id)
        if (await self._ref(sandbox)).nonce != ref.nonce:
            raise SandboxGone(f"modal: sandbox {ref.id} is another one by now")
        return sandbox

    async def _end(self, sandbox: Sandbox) -> None:
        self._handles.pop(sandbox.object_id, None)
        with contextlib.suppress(SandboxGone):
            async with self.asking(f"end {sandbox.object_id}"), asyncio.timeout(_REQUEST_SECONDS):
                # Until it has ended, its name is not free for the next one.
                await sandbox.terminate.aio(wait=True)

    async def _ref(self, sandbox: Sandbox) -> SandboxRef:
        """Return the handle of a sandbox by its tags. Raises SandboxGone if it has ended, or is not one of this provider."""
        async with self.asking(f"look at {sandbox.object_id}"), asyncio.timeout(_REQUEST_SECONDS):
            tags = await sandbox.get_tags.aio()
        if _NONCE not in tags or _EXPIRES not in tags:
            raise SandboxGone(f"modal: sandbox {sandbox.object_id} is not one of Caisson's")
        queue = "".join(tags.get(f"{_QUEUE}.{part}", "") for part in range(4))  # it may be longer than a tag
        ends = float(tags[_EXPIRES])
        return SandboxRef(provider=self.name, id=sandbox.object_id, nonce=tags[_NONCE], queue=queue, expires_at=ends)
