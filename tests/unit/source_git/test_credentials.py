"""Git's credential is nowhere but where it is needed (case SE03); what is left when a source ends."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import html
import json
import subprocess
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from activities.store.port import StoreUnavailable
from activities.workspace.sources.git import GitSource
from activities.workspace.sources.git_access import Token, parse_secret, scrubber
from contracts.base import BadInput
from contracts.manifest import GitEntry
from tests.unit.source_git.support import (
    FORMS,
    LOCAL,
    TOKEN,
    Repository,
    Server,
    below,
    comm,
    holding,
    processes,
    read,
)


async def test_a_private_repository(server: Server, repository: Repository, get: Any) -> None:
    """A token opens it, alone or with a name in JSON or YAML."""
    server.token = TOKEN
    repository.files({"a": b"1"})
    for secret in (TOKEN, TOKEN + "\n", json.dumps({"token": TOKEN}), f"username: x-access-token\ntoken: {TOKEN}\n"):
        assert (await get(secret=secret)).content == {"a": b"1"}


async def test_no_credential_and_a_wrong_one(server: Server, repository: Repository, get: Any) -> None:
    """A missing and a refused credential are told apart, and neither is worth another try."""
    server.token = "another"
    repository.files({"a": b"1"})
    with pytest.raises(BadInput, match="asks for a credential; name one in `secret`"):
        await get()
    with pytest.raises(BadInput, match="does not let this credential read") as caught:
        await get(secret=TOKEN)
    assert not any(form in str(caught.value) for form in FORMS)


@pytest.mark.parametrize("status", [403, 500])
async def test_a_server_that_repeats_the_credential(server: Server, repository: Repository, get: Any, status: int) -> None:
    """SE03: whatever the server says of the credential, in whichever form, no message has it."""
    server.token, server.status = TOKEN, status
    server.said = b"\n".join(form.encode() for form in FORMS)
    with pytest.raises((BadInput, StoreUnavailable)) as caught:
        await get(secret=TOKEN)
    shown = f"{caught.value} {caught.value!r} {caught.value.__cause__!r}"
    assert not any(form in shown for form in FORMS)


def test_the_scrubber_knows_every_form() -> None:
    """Plain, percent-encoded and basic authentication are taken out."""
    scrub = scrubber(Token("x-access-token", TOKEN))
    for form in (*FORMS, TOKEN.replace("-", "%2d"), "".join(f"%{byte:02X}" for byte in TOKEN.encode())):
        assert scrub(f"<{form}>") == "<***>"
    for text in (TOKEN, f"{TOKEN}\n", f"git:{TOKEN}", f"https://u:{TOKEN}@h/x"):
        encoded = base64.b64encode(text.encode()).decode()
        assert "***" in scrub(f"<{encoded}>") and "***" in scrub(f"<{encoded.rstrip('=')}>")
    assert scrub(TOKEN.encode().hex()) == "***"
    odd = 'p@ss/w0rd"&x'
    for form in (
        json.dumps(odd),
        odd.replace("/", "\\/"),
        html.escape(odd),
        urllib.parse.quote(urllib.parse.quote(odd, safe="")),
    ):
        assert "w0rd" not in scrubber(Token("u", odd))(form)


async def test_the_credential_lies_nowhere(
    server: Server, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SE03: while git runs, the token is in no argument and no environment of a process, and in no file; nor afterwards."""
    server.token, server.delay = TOKEN, 0.5
    repository.files({"a": b"1"})
    scratch = tmp_path / "scratch"
    seen: set[str] = set()
    samples = 0
    is_over = threading.Event()

    def sample() -> None:
        nonlocal samples
        while not is_over.is_set():
            samples += 1
            for pid in processes():
                for what in ("cmdline", "environ"):
                    with contextlib.suppress(OSError):
                        data = Path(f"/proc/{pid}/{what}").read_bytes()
                        seen.update(f"{what} of {pid}" for form in FORMS if form.encode() in data)
                        if str(scratch).encode() in data:
                            seen.add("looked at git")
            seen.update(f"file {path}" for path in holding(scratch))

    watcher = threading.Thread(target=sample)
    watcher.start()
    source = GitSource(GitEntry(type="git", url=f"{server.url}/r.git"), TOKEN, scratch, reach=LOCAL)
    try:
        found = await source.find(10)
        assert [read(item) for item in found if item.open] == [b"1"]
        assert list(holding(scratch)) == []
    finally:
        is_over.set()
        watcher.join()
        await source.close()
    assert seen == {"looked at git"} and samples > 5
    assert TOKEN not in repr(source._credential)


async def test_the_credential_is_for_its_server_alone(server: Server, repository: Repository, get: Any, tmp_path: Path) -> None:
    """A redirect is not followed, so no other server is asked, or given the token."""
    other = Server(server.root)
    try:
        server.status, server.location = 302, f"{other.url}/r.git/info/refs?service=git-upload-pack"
        repository.files({"a": b"1"})
        with pytest.raises(BadInput, match="the server redirects to another URL"):
            await get(secret=TOKEN)
        assert server.asked and other.asked == []
    finally:
        other.close()


@pytest.mark.parametrize("secret", ["a\nb", "{token: [}", '{"token": 1}', '{"password": "x"}', "", "username: a b\ntoken: x"])
def test_secrets_of_no_known_form(secret: str) -> None:
    """A secret that cannot be read is told by its form, and never repeated."""
    with pytest.raises(BadInput, match="secret: ") as caught:
        parse_secret("https", secret)
    assert "{username: <name>" in str(caught.value)
    with pytest.raises(BadInput, match="known_hosts: <the server's") as caught:
        parse_secret("ssh", secret)
    assert not secret or secret not in str(caught.value)


# Endings


async def test_cancelling_kills_git(server: Server, repository: Repository, tmp_path: Path) -> None:
    """A cancelled source leaves no process and no file."""
    repository.files({"a": b"1"})
    server.delay = 30
    scratch = tmp_path / "scratch"
    source = GitSource(GitEntry(type="git", url=f"{server.url}/r.git"), TOKEN, scratch, reach=LOCAL)
    finding = asyncio.create_task(source.find(10))
    while not below(scratch):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    started = time.monotonic()
    finding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finding
    await source.close()
    assert time.monotonic() - started < 5
    assert below(scratch) == [] and not scratch.exists()


WORKER = """
import asyncio, ipaddress, sys
from pathlib import Path
from activities.workspace.sources.git import GitSource
from activities.workspace.sources.git_access import GitReach
from contracts.manifest import GitEntry
reach = GitReach(private=(ipaddress.ip_network("127.0.0.0/8"),), allow_http=True)
asyncio.run(GitSource(GitEntry(type="git", url=sys.argv[1]), sys.stdin.read(), Path(sys.argv[2]), reach=reach).find(10))
"""


async def test_git_dies_with_its_worker(server: Server, repository: Repository, tmp_path: Path) -> None:
    """A worker that is killed leaves no git behind, and no credential in what stays on the disk."""
    repository.files({"a": b"1"})
    server.delay = 30
    scratch = tmp_path / "scratch"
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, f"{server.url}/r.git", str(scratch)],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
    )
    try:
        assert worker.stdin
        worker.stdin.write(TOKEN.encode())
        worker.stdin.close()
        while not any(comm(pid) == "git-remote-http" for pid in below(scratch)):
            assert worker.poll() is None
            await asyncio.sleep(0.02)
    finally:
        worker.kill()
        worker.wait()
    until = time.monotonic() + 10
    while below(scratch) and time.monotonic() < until:
        await asyncio.sleep(0.05)
    assert below(scratch) == []
    assert list(holding(scratch)) == []
