"""What git may reach, how servers fail, and ssh."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from activities.store.port import StoreUnavailable
from activities.workspace.sources.git_access import GitReach, parse_remote
from activities.workspace.sources.git_process import GitLimits
from contracts.base import BadInput
from tests.unit.source_git.support import (
    LOCAL,
    TOKEN,
    Repository,
    Server,
)


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        (404, BadInput, "no such repository"),
        (403, BadInput, "does not let"),
        (500, StoreUnavailable, "try again"),
        (503, StoreUnavailable, "try again"),
        (429, StoreUnavailable, "try again"),
        (301, BadInput, "redirects"),
    ],
)
async def test_answers_of_servers(
    server: Server, repository: Repository, get: Any, status: int, kind: type[Exception], said: str
) -> None:
    """What may go well another time is told apart from what will not."""
    server.status = status
    with pytest.raises(kind, match=said):
        await get()


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [(socket.EAI_NONAME, BadInput, "there is no host"), (socket.EAI_AGAIN, StoreUnavailable, "try again")],
)
async def test_names_that_are_not_found(
    get: Any, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], said: str
) -> None:
    """A name that does not exist is an error of the manifest; a resolver that does not answer now is not."""

    def fail(*given: Any, **named: Any) -> Any:
        raise socket.gaierror(number, "as it says")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(kind, match=said):
        await get(url="https://example.invalid/t/r.git", secret=TOKEN)


async def test_https(server: Server, repository: Repository, get: Any, tmp_path: Path) -> None:
    """Certificates are checked: against the system's authorities, or the operator's own."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=t"]
    made += ["-days", "2", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    commit = repository.files({"a": b"1"})
    secure = Server(server.root, (certificate, key))
    secure.token = TOKEN
    try:
        with pytest.raises(BadInput, match="certificate is not trusted"):
            await get(url=f"{secure.url}/r.git", secret=TOKEN)
        assert secure.asked == []
        reach = GitReach(private=LOCAL.private, ca_file=certificate)
        assert (await get(url=f"{secure.url}/r.git", secret=TOKEN, reach=reach)).pin == commit
    finally:
        secure.close()


async def test_nobody_listens(get: Any) -> None:
    """A refused connection may go well another time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(StoreUnavailable, match="the connection failed"):
        await get(url=f"http://127.0.0.1:{port}/r.git")


async def test_a_server_that_falls_silent(server: Server, repository: Repository, get: Any) -> None:
    """Silence ends after a while, and so does a command that takes too long."""
    repository.files({"a": b"1"})
    server.delay = 8
    with pytest.raises(StoreUnavailable, match="the connection failed"):
        await get(limits=GitLimits(quiet_seconds=1))
    with pytest.raises(StoreUnavailable, match=r"took longer than 0\.5 seconds"):
        await get(limits=GitLimits(seconds=0.5))


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/r", "https://127.0.0.1/r", "https://localhost/r", "https://10.1.2.3/r", "https://169.254.169.254/r"]
)
async def test_inner_addresses(get: Any, url: str) -> None:
    """Addresses that are not public are refused, by name too, unless the operator opened them; those of metadata for ever."""
    with pytest.raises(BadInput, match=r"plain http|may not be reached"):
        await get(url=url, reach=GitReach())
    if "169" in url:
        with pytest.raises(BadInput, match="metadata"):
            await get(url=url, reach=GitReach(private=(ipaddress.ip_network("0.0.0.0/0"),)))


async def test_a_name_stands_for_the_addresses_that_were_checked(
    server: Server, repository: Repository, get: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git reaches the checked address, whatever the name would resolve to for itself an instant later."""
    commit = repository.files({"a": b"1"})
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *more, **named: real("127.0.0.1" if host.startswith("git.") else host, *more, **named)
    )
    assert (await get(url=f"http://git.invalid:{server.port}/r.git")).pin == commit


def test_urls_that_are_refused() -> None:
    """What git could take for an option or another protocol, and what is no plain URL, is refused here too."""
    for url in (
        "https://-x/y",
        "ext::sh",
        "file:///etc",
        "https://h/",
        "https://h/a?b",
        "https://h/a#b",
        "ssh://-o@h/x",
        "https://h:0x/a",
    ):
        with pytest.raises(BadInput, match="url: "):
            parse_remote(url, GitReach())
    with pytest.raises(BadInput, match=r"may not reach evil.org \(allowed: \*\.example.com\)"):
        parse_remote("https://evil.org/x", GitReach(hosts=("*.example.com",)))


async def test_a_missing_git_is_told(monkeypatch: pytest.MonkeyPatch, get: Any) -> None:
    """Without the program, the message says who must install what."""
    monkeypatch.setattr(shutil, "which", lambda *given, **named: None)
    with pytest.raises(BadInput, match=r"no `git` program.*apt-get install git"):
        await get()


async def test_nothing_configures_git(
    server: Server, repository: Repository, get: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the worker's environment nor a person's configuration changes what git does."""
    commit = repository.files({"a": b"1"})
    (tmp_path / ".gitconfig").write_text('[url "http://127.0.0.1:1/"]\n\tinsteadOf = http://127.0.0.1\n')
    for name, value in {"HOME": str(tmp_path), "GIT_SSH_COMMAND": "false", "http_proxy": "http://127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    assert (await get()).pin == commit


# ssh


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[tuple[int, str, str]]:
    """A server of ssh on a free port: (port, a private key, its line of known_hosts)."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip("no sshd")
    home = tmp_path / "ssh"
    home.mkdir(mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True)
    (home / "keys").write_bytes((home / "user.pub").read_bytes())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": home / "host",
        "AuthorizedKeysFile": home / "keys",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
        "PasswordAuthentication": "no",
        "AcceptEnv": "GIT_PROTOCOL",
    }
    arguments = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen([program, "-D", "-e", "-f", "/dev/null", *arguments], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 10
        while True:
            if process.poll() is not None or time.monotonic() > until:
                pytest.skip(f"sshd does not run here: {(home / 'log').read_text()[:300]}")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        public = " ".join((home / "host.pub").read_text().split()[:2])
        yield port, (home / "user").read_text(), f"[127.0.0.1]:{port} {public}"
    finally:
        process.terminate()
        process.wait()


async def test_ssh(sshd: tuple[int, str, str], repository: Repository, get: Any) -> None:
    """A key opens a repository over ssh; a server of another key, and a key that nobody knows, are told apart."""
    port, key, known = sshd
    commit = repository.files({"a": b"1"})
    user = pwd.getpwuid(os.getuid()).pw_name
    url = f"ssh://{user}@127.0.0.1:{port}{repository.path}"
    assert (await get(url=url, secret=json.dumps({"private_key": key, "known_hosts": known}))).pin == commit
    stranger = known.rpartition(" ")[0] + " AAAAC3NzaC1lZDI1NTE5AAAAIJ" + "A" * 42
    with pytest.raises(BadInput, match="known_hosts"):
        await get(url=url, secret=json.dumps({"private_key": key, "known_hosts": stranger}))
    lines = key.splitlines()
    with pytest.raises(BadInput, match="credential") as caught:
        await get(url=url, secret=json.dumps({"private_key": "\n".join(lines[:-3] + lines[-1:]), "known_hosts": known}))
    assert lines[1] not in str(caught.value)
    with pytest.raises(BadInput, match="no such repository"):
        await get(url=url + ".none", secret=json.dumps({"private_key": key, "known_hosts": known}))
