"""How git may reach a server: which URLs and addresses, and how a credential gets to it without lying about anywhere.

A token or key is held in memory (memfd) and read from there by the one command that needs it: it is in no argument, in no
environment and in no file. The server's name is resolved here and its addresses are checked; git is made to use exactly those, so
that a name which resolves to something else an instant later reaches nothing.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from activities.governance.egress_policy import Network, Refused, address_fault, matches, normal_host
from activities.governance.redaction import Redactor
from activities.store.port import StoreUnavailable
from contracts.base import BadInput
from contracts.manifest import check_url

_PORTS = {"https": 443, "http": 80, "ssh": 22}
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_USERNAME = re.compile(r"[!-~]{1,255}")
_TOKEN_USER = "x-access-token"  # noqa: S105 - a name
"""GitHub asks for this name beside an installation's token; GitLab, Gitea, Azure DevOps and GitHub's own tokens take any."""
SSH_FORM = "a mapping in YAML or JSON: {private_key: <without a passphrase>, known_hosts: <the server's lines of known_hosts>}"
HTTPS_FORM = "a token alone, or a mapping in YAML or JSON: {username: <name>, token: <token or password>}"


@dataclass(frozen=True, slots=True)
class GitReach:
    """What the operator of a worker lets git entries reach.

    `private` are networks opened beside the public ones (never those of cloud metadata), `hosts` the only names there are, `*.`
    before one for every name below it (empty: all), `ca_file` certificates to trust instead of the system's.
    """

    private: tuple[Network, ...] = ()
    allow_http: bool = False
    hosts: tuple[str, ...] = ()
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Remote:
    """A repository's URL, taken apart; `url` is what git is given."""

    scheme: str
    host: str
    port: int
    path: str
    user: str = ""

    @property
    def server(self) -> str:
        """The URL without its path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = f"{self.user}@" if self.user else ""
        return f"{self.scheme}://{user}{host}" + ("" if self.port == _PORTS[self.scheme] else f":{self.port}")

    @property
    def url(self) -> str:
        """The whole URL."""
        return self.server + self.path

    def at(self, path: str) -> Remote:
        """Another repository of the same server."""
        return replace(self, path=path)


@dataclass(frozen=True, slots=True)
class Token:
    """A name and a token or password, for https."""

    username: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Key:
    """A private key and the keys that its server may have, for ssh."""

    private_key: str = field(repr=False)
    known_hosts: str


@dataclass(frozen=True, slots=True)
class Way:
    """What a git command is run with to reach one server: settings, environment, and open files that it inherits."""

    settings: tuple[tuple[str, str], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    fds: tuple[int, ...] = ()


def parse_remote(url: str, reach: GitReach) -> Remote:
    """Take a URL apart. Raises BadInput for what git is not given."""
    try:
        parts = urlsplit(check_url(url))
        port = parts.port
    except ValueError as error:
        raise BadInput(f"url: {error}") from None
    if parts.scheme == "http" and not reach.allow_http:
        raise BadInput("url: plain http is not allowed, since anybody on the way reads and changes what it brings; use https")
    if parts.query or parts.fragment or "\\" in url or "#" in url or not parts.path.strip("/"):
        raise BadInput("url: name a repository, without ? and #, for example https://host/team/project.git")
    user = (parts.username or "git") if parts.scheme == "ssh" else ""
    if user and not _USER.fullmatch(user):
        raise BadInput(f"url: {user!r} is no user name; give a URL such as ssh://git@host/path")
    host = _checked_host(parts.hostname or "", reach)
    return Remote(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, parts.path, user)


def _checked_host(text: str, reach: GitReach) -> str:
    try:
        host = str(ipaddress.ip_address(text))
    except ValueError:
        try:
            host = normal_host(text)
        except Refused:
            raise BadInput(f"url: {text[:253]!a} is no host name; give international names in their xn-- form") from None
    if reach.hosts and not any(matches(pattern, host) for pattern in reach.hosts):
        raise BadInput(f"url: the worker may not reach {host} (allowed: {', '.join(reach.hosts)}); ask its operator to allow it")
    return host


def parse_secret(scheme: str, secret: str | None) -> Token | Key | None:
    """Read a credential in the form that the scheme asks for. Raises BadInput, which repeats nothing of it."""
    if scheme == "ssh":
        given = _mapping(secret or "", {"private_key", "known_hosts"}, SSH_FORM)
        key, hosts = given.get("private_key", ""), given.get("known_hosts", "")
        if not key or not hosts:
            raise BadInput(f"secret: ssh needs one: {SSH_FORM}; ssh-keyscan shows the lines, to be compared with published ones")
        return Key(key.strip().replace("\r\n", "\n") + "\n", hosts.strip() + "\n")
    if secret is None:
        return None
    text = secret.strip()
    if re.match(r"\{|(username|token)\s*:", text):
        given = _mapping(text, {"username", "token"}, HTTPS_FORM)
        token = Token(given.get("username", _TOKEN_USER), given.get("token", ""))
    else:
        token = Token(_TOKEN_USER, text)
    if not _USERNAME.fullmatch(token.username) or not token.token or not token.token.isprintable():
        raise BadInput(f"secret: it has no form that https takes, which is {HTTPS_FORM}")
    return token


def _mapping(text: str, names: set[str], form: str) -> dict[str, str]:
    try:
        given = yaml.safe_load(text) if text else {}
    except (yaml.YAMLError, ValueError):
        # Its own message would quote the secret.
        given = None
    if not isinstance(given, dict) or not set(given) <= names or not all(isinstance(value, str) for value in given.values()):
        raise BadInput(f"secret: it cannot be read; give {form}")
    return given


@contextmanager
def way_to(remote: Remote, credential: Token | Key | None, reach: GitReach, quiet_seconds: int) -> Iterator[Way]:
    """Check a server's addresses and put the credential where one git command finds it, for as long as the context lasts.

    Raises BadInput for an address that may not be reached, StoreUnavailable when the name cannot be resolved now.
    """
    addresses = _addresses(remote, reach)
    allowed = {"GIT_ALLOW_PROTOCOL": remote.scheme}
    fds: list[int] = []
    try:
        if isinstance(credential, Key):
            fds = [_memory(credential.private_key), _memory(credential.known_hosts)]
            yield Way(environment=allowed | _ssh_environment(remote, addresses[0], fds[0], fds[1], quiet_seconds))
            return
        settings = [
            # A redirect could lead anywhere, inner networks included, and dumb HTTP's list of alternates as well.
            ("http.followRedirects", "false"),
            ("http.sslVerify", "true"),
            # Servers that prepare a pack send a few bytes every five seconds.
            ("http.lowSpeedLimit", "1"),
            ("http.lowSpeedTime", str(quiet_seconds)),
        ]
        if addresses != [remote.host]:
            pinned = ",".join(f"[{address}]" if ":" in address else address for address in addresses)
            settings.append(("http.curloptResolve", f"{remote.host}:{remote.port}:{pinned}"))
        if reach.ca_file is not None:
            settings.append(("http.sslCAInfo", str(reach.ca_file)))
        if credential is not None:
            fds = [_memory(f"username={credential.username}\npassword={credential.token}\n")]
            # Bound to the server: git asks it for no other. Opened anew each time, since git may ask more than once.
            helper = f'!f() {{ test "$1" = get && cat /dev/fd/{fds[0]}; }}; f'
            settings.append((f"credential.{remote.server}.helper", helper))
        yield Way(tuple(settings), allowed, tuple(fds))
    finally:
        for fd in fds:
            os.close(fd)


def _ssh_environment(remote: Remote, address: str, key: int, hosts: int, quiet_seconds: int) -> dict[str, str]:
    # ssh closes every file it inherits, so it reads the key through this process. It sees who owns it, and mode 0600.
    files = f"/proc/{os.getpid()}/fd"
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": f"{files}/{hosts}",
        "GlobalKnownHostsFile": "/dev/null",
        "UpdateHostKeys": "no",
        "CheckHostIP": "no",
        "IdentityFile": f"{files}/{key}",
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "PreferredAuthentications": "publickey",
        "ClearAllForwardings": "yes",
        "ForwardAgent": "no",
        "PermitLocalCommand": "no",
        "ProxyCommand": "none",
        "ControlPath": "none",
        "ConnectTimeout": str(quiet_seconds),
        "ServerAliveInterval": str(max(1, quiet_seconds // 3)),
        "ServerAliveCountMax": "3",
        # The address that was checked, under the name that known_hosts has (ssh(1) writes ports other than 22 like this).
        "HostName": address,
        "HostKeyAlias": remote.host if remote.port == 22 else f"[{remote.host}]:{remote.port}",
        "LogLevel": "ERROR",
    }
    words = ["ssh", "-F", "none", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    return {"GIT_SSH_COMMAND": shlex.join(words), "GIT_SSH_VARIANT": "ssh"}


def _memory(text: str) -> int:
    fd = os.memfd_create("git", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.pwrite(fd, text.encode(), 0)
    return fd


def _addresses(remote: Remote, reach: GitReach) -> list[str]:
    try:
        answers = socket.getaddrinfo(remote.host, remote.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
            raise BadInput(f"url: there is no host {remote.host}; correct the URL, or the worker's DNS") from None
        raise StoreUnavailable(f"{remote.host}: its address cannot be found now ({error.strerror}); try again") from None
    addresses = sorted({str(answer[4][0]) for answer in answers}, key=lambda text: (":" in text, text))
    for address in addresses:
        fault = address_fault(address.partition("%")[0], reach.private)
        if fault is not None:
            raise BadInput(
                f"url: {remote.host} may not be reached: {fault}; ask the worker's operator to open its network, if it is meant"
            )
    return addresses


def scrubber(credential: Token | Key | None) -> Callable[[str], str]:
    """Return what takes a credential out of a text, in every spelling in which it comes back by accident."""
    secrets: Iterable[str] = ()
    if isinstance(credential, Token):
        # The form of HTTP as a secret of its own too, so that the user's name in it does not stay.
        basic = base64.b64encode(f"{credential.username}:{credential.token}".encode()).decode()
        alone = base64.b64encode(credential.token.encode()).decode()
        secrets = (basic, alone, f"{credential.username}:{credential.token}", credential.token)
    elif isinstance(credential, Key):
        secrets = (line for line in credential.private_key.splitlines() if len(line) >= 16 and not line.startswith("-----"))
    return Redactor(secrets)
