"""What a spec asks for is given, or refused by name: limits, network, images, options."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from activities.sandbox.port import BadSandboxSpec
from contracts.sandbox import JobState, NetworkPolicy, SandboxLimits, SandboxSpec
from tests.conformance.box import Box, own, shared
from tests.conformance.subjects import NotShown, Subject

LIMITS = {
    "memory_mb": (256, "head -c 600000000 /dev/zero | tail -c 599999999 | wc -c", "599999999"),
    "file_mb": (1, "head -c 3000000 /dev/zero > f; wc -c < f", "3000000"),
    "open_files": (64, 'n=3; while [ $n -lt 300 ]; do eval "exec $n</dev/null" || exit; n=$((n+1)); done; echo yes', "yes"),
    "processes": (40, "n=0; while [ $n -lt 200 ]; do sleep 4 & n=$((n+1)); done; jobs -p | wc -l", "200"),
}
"""A low limit, a command that would break it, and what that would print if there were none."""


def spec_with(subject: Subject, **fields: object) -> SandboxSpec:
    """Return the subject's spec with other fields."""
    return subject.spec.model_copy(update=fields)


async def refused(subject: Subject, spec: SandboxSpec, words: str) -> None:
    """See that a spec is refused in words that name the field."""
    with pytest.raises(BadSandboxSpec, match=words) as caught:
        ref = await subject.create(spec)
        await subject.provider.kill(ref)
    assert str(caught.value).startswith("sandbox.")


async def _limit(subject: Subject, field: str) -> str | None:
    value, script, unlimited = LIMITS[field]
    spec = spec_with(subject, limits=SandboxLimits.model_validate({field: value}))
    if field not in subject.capabilities.limits:
        await refused(subject, spec, f"sandbox.limits.{field}: {value}")
        return f"limits.{field} is not kept, and refused"
    if subject.where == "emulator":
        raise NotShown("an emulator does not measure")
    async with own(subject, spec) as box:
        result = await box.sh(script, timeout=30)
        assert unlimited.encode() not in result.stdout.split(), result
        if field == "processes":
            await asyncio.sleep(5)  # until what it left has ended: while there is no room, nothing else can be started
        assert (await box.sh("echo after")).stdout == b"after\n"
    return None


async def check_the_limit_of_memory(subject: Subject) -> str | None:
    """Commands get no more memory than the spec says, or the spec is refused."""
    return await _limit(subject, "memory_mb")


async def check_the_limit_of_a_file(subject: Subject) -> str | None:
    """No file grows beyond what the spec says, or the spec is refused."""
    return await _limit(subject, "file_mb")


async def check_the_limit_of_open_files(subject: Subject) -> str | None:
    """No process opens more files than the spec says, or the spec is refused."""
    return await _limit(subject, "open_files")


async def check_the_limit_of_processes(subject: Subject) -> str | None:
    """There are no more processes than the spec says, or the spec is refused."""
    return await _limit(subject, "processes")


async def check_other_limits_are_kept_or_refused(subject: Subject) -> str | None:
    """Of the limits that take long to show: what the provider does not keep is refused by name."""
    values = {"cpus": 0.5, "workspace_mb": 100, "workspace_files": 5000, "lifetime_seconds": 3600}
    lacking = sorted(set(values) - subject.capabilities.limits)
    for field in lacking:
        limits = SandboxLimits.model_validate({field: values[field]})
        await refused(subject, spec_with(subject, limits=limits), f"sandbox.limits.{field}: {values[field]}")
    return f"not kept, and refused: {', '.join(lacking)}" if lacking else None


async def check_images_and_options(subject: Subject) -> str | None:
    """An option that the provider does not know is refused by name, and an image where it has none."""
    await refused(subject, spec_with(subject, options={"no_such_option": "x"}), "sandbox.options.no_such_option: x")
    if subject.capabilities.images:
        return None
    await refused(subject, spec_with(subject, image="some/image:1"), "sandbox.image: some/image:1")
    return "there are no images, and one is refused"


@contextmanager
def listener() -> Iterator[int]:
    """Listen on every address of this host, and give the port."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        yield server.getsockname()[1]


def _serve(server: socket.socket) -> None:
    while True:
        try:
            peer, _ = server.accept()
        except OSError:
            return
        peer.sendall(b"HTTP/1.0 200 OK\r\n\r\nreached\n")
        peer.close()


async def reached(box: Box, port: int) -> str:
    """Return what a sandbox reaches of this host, and of the internet, past every proxy."""
    addresses = {"127.0.0.1"}
    with contextlib.suppress(socket.gaierror):  # a host need not know its own name
        addresses |= {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    tries = [f"{address} {port}" for address in sorted(addresses)] + ["1.1.1.1 80"]
    client = "bash -c 'exec 3<>/dev/tcp/$0/$1 && printf \"GET / HTTP/1.0\\r\\n\\r\\n\" >&3 && head -c 100 <&3'"
    if box.subject.image != "python":
        client = "nc -w 2"
    lines = [f"printf 'GET / HTTP/1.0\\r\\n\\r\\n' | timeout 2 {client} {one} 2>/dev/null" for one in tries]
    return (await box.sh("\n".join(lines) + "\ntrue")).stdout.decode("utf-8", "replace")


async def check_without_a_policy_there_is_no_network(subject: Subject) -> str | None:
    """A spec that names no host gets a sandbox that reaches nothing, or is refused."""
    if "none" not in subject.capabilities.network:
        await refused(subject, spec_with(subject, network=NetworkPolicy(), options={}), "sandbox.network.allow")
        return "the network cannot be closed, and a spec that does not accept that is refused"
    if subject.where == "emulator":
        raise NotShown("an emulator has no network of its own")
    with listener() as port:
        assert await reached(await shared(subject), port) == ""
    return None


async def check_named_hosts_alone_are_reached(subject: Subject) -> str | None:
    """A spec that names hosts gets a sandbox that reaches nothing else, or is refused."""
    spec = spec_with(subject, network=NetworkPolicy(allow=("example.com",)), options={})
    if "allowlist" not in subject.capabilities.network:
        await refused(subject, spec, "sandbox.network.allow")
        return "hosts cannot be named, and a spec that does is refused"
    if subject.where == "emulator":
        raise NotShown("an emulator has no network of its own")
    with listener() as port:
        async with own(subject, spec) as box:
            assert await reached(box, port) == ""
    return None


async def check_an_open_network_is_asked_for(subject: Subject) -> str | None:
    """Only who asks for an open network gets one, and only where there is one."""
    if "open" in subject.capabilities.network:
        async with own(
            subject, spec_with(subject, network=NetworkPolicy(), options={**subject.spec.options, "network": "open"})
        ) as box:
            assert (await box.sh("true")).state is JobState.EXITED
        return None
    await refused(subject, spec_with(subject, options={"network": "open"}), "sandbox.options.network: open")
    return "there is no open network, and asking for it is refused"
