"""A real sandbox with a network policy: what its programs reach, and who survives whom."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.governance.egress_process import proxy_command
from activities.sandbox.activity import SandboxActivities
from activities.sandbox.port import BadSandboxSpec, SandboxGone
from activities.sandbox.providers.local import LocalProvider
from activities.sandbox.providers.local_state import start_time
from activities.sandbox.registry import ProviderRegistry
from activities.store.blobs import BlobStore
from activities.store.local import LocalStore
from activities.workspace.keeper import WorkspaceKeeper
from contracts.activity_names import Queues
from contracts.sandbox import CloseSandboxInput, NetworkPolicy, SandboxSpec
from tests.sandbox.egress_support import LOOPBACK, Authority, Site, until
from tests.sandbox.local_support import Local

REPOSITORY = Path(__file__).parents[2]
ALLOW = ("allowed.example", "*.below.example")
SPEC = SandboxSpec(network=NetworkPolicy(allow=ALLOW))


@pytest.fixture
def command(secure: Site, plain: Site) -> Sequence[str]:
    """A proxy that knows the names of the tests, and may use the servers' ports."""
    names = {
        "allowed.example": "127.0.0.1",
        "metadata.below.example": "169.254.169.254",
        "rebinding.below.example": "127.0.0.1,169.254.169.254",
        "private.below.example": "10.0.0.1",
    }
    resolve = [word for name, address in names.items() for word in ("--resolve", f"{name}={address}")]
    ports = ("--tls-port", str(secure.port), "--http-port", str(plain.port))
    return proxy_command(LOOPBACK, [*ports, *resolve])


@pytest.fixture
async def provider(root: Path, command: Sequence[str]) -> AsyncIterator[LocalProvider]:
    """A provider with that proxy, whose sandboxes end with the test."""
    provider = LocalProvider(root, proxy=command)
    yield provider
    for ref in await provider.list({}):
        await provider.kill(ref)


@pytest.fixture
async def online(provider: LocalProvider, root: Path, authority: Authority) -> Local:
    """A sandbox with a network policy, that trusts the test's authority."""
    ref = await provider.create(SPEC, "run-1", environment={"CURL_CA_BUNDLE": "/workspace/ca.pem"}, labels={}, queue="q")
    local = Local(provider, await provider.attach(ref), root)
    await local.sandbox.write("ca.pem", authority.ca.read_bytes())
    return local


def proxy_of(local: Local) -> tuple[int, int]:
    """Return pid and start time of a sandbox's proxy."""
    known = json.loads((local.directory / "egress.json").read_text())
    return known["pid"], known["started"]


def proxy_lives(proxy: tuple[int, int]) -> bool:
    """Tell whether it runs."""
    return start_time(proxy[0]) == proxy[1]


def lines(local: Local, *verdicts: str) -> list[dict[str, Any]]:
    """The lines of the record with one of these verdicts."""
    found = [json.loads(line) for line in (local.directory / "egress.jsonl").read_text().splitlines()]
    return [line for line in found if line["verdict"] in verdicts]


async def test_programs_reach_an_allowed_host(online: Local, secure: Site, plain: Site) -> None:
    """curl and Python find the proxy by their environment; TLS is checked end to end; every connection is in the record."""
    python = f"""
import ssl, urllib.request
print(urllib.request.urlopen("http://allowed.example:{plain.port}/hello").read().decode(), end="")
context = ssl.create_default_context(cafile="ca.pem")
print(urllib.request.urlopen("https://allowed.example:{secure.port}/hello", context=context).read().decode(), end="")
"""
    await online.sandbox.write("ask.py", python.encode())
    text = await online.text(
        f"curl -sS https://allowed.example:{secure.port}/hello http://allowed.example:{plain.port}/hello; python3 ask.py"
    )
    assert text == "hello from outside\n" * 4
    await until(lambda: len(lines(online, "closed")) == 4)
    assert {(line["method"], line["port"]) for line in lines(online, "allowed")} == {
        ("CONNECT", secure.port),
        ("GET", plain.port),
    }


async def test_pip_installs_from_an_allowed_index(online: Local, secure: Site, tmp_path: Path) -> None:
    """A package is found, fetched and installed through the proxy."""
    if (await online.sh("python3 -m pip --version")).exit_code != 0:
        pytest.skip("this machine's Python has no pip")
    wheel = tmp_path / "tiny_part-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_part.py", "VALUE = 42\n")
        archive.writestr("tiny_part-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-part\nVersion: 1.0\n")
        archive.writestr("tiny_part-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_part-1.0.dist-info/RECORD", "")
    secure.files["/simple/tiny-part/"] = f'<a href="/files/{wheel.name}">{wheel.name}</a>'.encode()
    secure.files[f"/files/{wheel.name}"] = wheel.read_bytes()
    text = await online.text(
        f"python3 -m pip install --quiet --target parts --index-url https://allowed.example:{secure.port}/simple/"
        " --cert ca.pem tiny-part && PYTHONPATH=parts python3 -c 'import tiny_part; print(tiny_part.VALUE)'"
    )
    assert text.splitlines()[-1] == "42"


async def test_other_hosts_and_addresses_are_refused_in_words(online: Local, secure: Site, plain: Site) -> None:
    """Python shows the reason in its error; each refusal has its line."""
    hosts = ["evil.example", "127.0.0.2", "169.254.169.254", "metadata.below.example", "rebinding.below.example"]
    for host in [*hosts, "private.below.example"]:
        text = await online.text(f"curl -sS -m 10 http://{host}:{plain.port}/; curl -sSv -m 10 https://{host}:{secure.port}/")
        assert "403" in text
    assert "not in this sandbox's network policy (allow: allowed.example, *.below.example)" in await online.text(
        f"python3 -c 'import urllib.request as u; u.urlopen(\"https://evil.example:{secure.port}/\")' 2>&1 | tail -1"
    )
    assert len(lines(online, "refused")) == 13
    assert lines(online, "allowed") == []
    assert plain.asked == secure.asked == []


async def test_tls_for_another_host_is_refused(online: Local, secure: Site) -> None:
    """A program that names an allowed host to the proxy and another one in TLS reaches neither."""
    code = f"""
import socket, ssl
s = socket.create_connection(("127.0.0.1", 3128))
s.sendall(b"CONNECT allowed.example:{secure.port} HTTP/1.0\\r\\n\\r\\n")
print(s.recv(1000).split()[1].decode())
ssl.create_default_context(cafile="ca.pem").wrap_socket(s, server_hostname="other.example")
"""
    await online.sandbox.write("front.py", code.encode())
    text = await online.text("python3 front.py 2>&1")
    assert text.startswith("200\n")
    assert "SSLError" in text or "access denied" in text
    assert "its TLS is for other.example" in lines(online, "refused")[0]["reason"]
    assert secure.asked == []


async def test_there_is_no_other_way_out(online: Local, plain: Site) -> None:
    """No name is resolved inside, no address is reachable but the sandbox's own, and the host's loopback is another one."""
    code = f"""
import socket
def tried(act):
    try:
        act()
        return "reached"
    except OSError as error:
        return type(error).__name__
print(tried(lambda: socket.getaddrinfo("allowed.example", 80)))
for address in ("1.1.1.1", "10.0.0.1", "169.254.169.254"):
    print(tried(lambda: socket.create_connection((address, 80), 3)))
print(tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("1.1.1.1", 53))))
print(tried(lambda: socket.create_connection(("127.0.0.1", {plain.port}), 3)))
print(sorted(name for _, name in socket.if_nameindex()))
"""
    await online.sandbox.write("try.py", code.encode())
    assert (await online.text("python3 try.py")).splitlines() == [
        *("gaierror", "OSError", "OSError", "OSError", "OSError", "ConnectionRefusedError", "['lo']"),
    ]


async def test_without_a_policy_there_is_no_proxy_at_all(provider: LocalProvider, root: Path) -> None:
    """No listener, no process, no variable, no file."""
    ref = await provider.create(SandboxSpec(), "offline", environment={}, labels={}, queue="q")
    local = Local(provider, await provider.attach(ref), root)
    assert "refused" in await local.text("exec 3<>/dev/tcp/127.0.0.1/3128")
    assert (await local.text("env | grep -ci proxy")).strip() == "0"
    assert not list(local.directory.glob("egress*"))
    assert await provider.egress_log(ref) == b""


async def test_a_worker_without_a_proxy_refuses_a_policy(root: Path) -> None:
    """It never quietly gives less than was asked, nor more."""
    with pytest.raises(BadSandboxSpec, match=r"sandbox\.network"):
        await LocalProvider(root).create(SPEC, "k", environment={}, labels={}, queue="q")


async def test_the_proxy_holds_no_secret_and_no_right(online: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the worker's environment goes along; a root worker's proxy is neither root nor the sandbox's user."""
    monkeypatch.setenv("CANARY_KEY", "canary-4711")
    os.kill(proxy_of(online)[0], signal.SIGKILL)
    await asyncio.sleep(0.2)
    await online.provider.attach(online.sandbox.ref)
    process = Path(f"/proc/{proxy_of(online)[0]}")
    if os.geteuid() == 0:
        names = {part.partition(b"=")[0] for part in (process / "environ").read_bytes().split(b"\0") if part}
        assert names <= {b"PATH", b"LANG", b"PWD", b"SHLVL", b"_", b"OLDPWD"}
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        users = set(status["Uid"].split())
        init = dict(line.split(":", 1) for line in Path(f"/proc/{online.init_pid()}/status").read_text().splitlines())
        assert len(users) == 1
        assert not users & {"0", *init["Uid"].split()}
        assert (status["Groups"].strip(), status["CapEff"].strip("\t0"), status["NoNewPrivs"].strip()) == ("", "", "1")
    assert b"canary" not in (process / "cmdline").read_bytes()


async def test_the_proxy_outlives_its_worker(root: Path, command: Sequence[str], provider: LocalProvider, plain: Site) -> None:
    """A worker that is killed right after making the sandbox leaves a network that the next one finds working."""
    code = (
        "import asyncio, json, os, signal, sys; from pathlib import Path\n"
        "from activities.sandbox.providers.local import LocalProvider\n"
        "from contracts.sandbox import SandboxSpec\n"
        "async def main():\n"
        "    provider = LocalProvider(Path(sys.argv[1]), proxy=json.loads(sys.argv[2]))\n"
        "    spec = SandboxSpec.model_validate_json(sys.argv[3])\n"
        "    ref = await provider.create(spec, 'run-1', environment={}, labels={}, queue='q')\n"
        "    print(ref.model_dump_json(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    words = [sys.executable, "-c", code, str(root), json.dumps(list(command)), SPEC.model_dump_json()]
    done = await asyncio.to_thread(subprocess.run, words, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    (ref,) = await provider.list({})
    before = proxy_of(Local(provider, await provider.attach(ref), root))
    local = Local(provider, await provider.attach(ref), root)
    assert await local.text(f"curl -sS http://allowed.example:{plain.port}/hello") == "hello from outside\n"
    assert proxy_of(local) == before
    assert proxy_lives(before)


async def test_a_killed_proxy_is_started_anew(online: Local, plain: Site) -> None:
    """On attach, on the same socket: a program that was already waiting is served, and the record goes on."""
    before = proxy_of(online)
    assert await online.text(f"curl -sS http://allowed.example:{plain.port}/hello") == "hello from outside\n"
    os.kill(before[0], signal.SIGKILL)
    waiting = asyncio.create_task(online.text(f"curl -sS http://allowed.example:{plain.port}/hello"))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    again = Local(online.provider, await online.provider.attach(online.sandbox.ref), online.directory.parent)
    assert await waiting == "hello from outside\n"
    assert proxy_of(again) != before
    assert proxy_lives(proxy_of(again))
    assert len(lines(online, "allowed")) == 2


async def test_attaches_that_race_start_one_proxy(online: Local) -> None:
    """The lock on the record is held by the proxy itself."""
    os.kill(proxy_of(online)[0], signal.SIGKILL)
    await asyncio.sleep(0.2)
    await asyncio.gather(*(online.provider.attach(online.sandbox.ref) for _ in range(8)))
    marker = str(online.directory / "egress.jsonl")
    holders = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()) == marker:
                holders.add(link.parts[2])
        except OSError:
            continue
    if os.geteuid() == 0:
        assert holders == {str(proxy_of(online)[0])}


async def test_the_proxy_ends_with_its_sandbox(online: Local) -> None:
    """Whether the sandbox dies or is killed."""
    first = proxy_of(online)
    os.kill(online.init_pid(), signal.SIGKILL)
    await until(lambda: not proxy_lives(first))
    with pytest.raises(SandboxGone):
        await online.provider.attach(online.sandbox.ref)
    ref = await online.provider.create(SPEC, "run-1", environment={}, labels={}, queue="q")
    second = proxy_of(online)
    assert proxy_lives(second)
    await online.provider.kill(ref)
    assert not proxy_lives(second)


async def test_closing_keeps_the_record(online: Local, plain: Site, tmp_path: Path) -> None:
    """The whole record is a blob named by the result, also when the closing is repeated after the sandbox is gone."""
    await online.text(f"curl -sS http://allowed.example:{plain.port}/hello; curl -sS http://evil.example:{plain.port}/")
    blobs = BlobStore(LocalStore(tmp_path / "store"))
    providers = ProviderRegistry({"local": lambda: online.provider})
    activities = SandboxActivities(providers, blobs, WorkspaceKeeper(providers, blobs), Queues("caisson"), "here")
    closing = CloseSandboxInput(sandbox=online.sandbox.ref, run_id="r")
    first = await ActivityEnvironment().run(activities.close_sandbox, closing)
    assert not online.directory.exists()
    assert first.egress is not None
    kept = [json.loads(line) for line in (await blobs.get(first.egress)).splitlines()]
    assert [line["verdict"] for line in kept] == ["allowed", "closed", "refused"]
    assert await ActivityEnvironment().run(activities.close_sandbox, closing) == first
