"""The operator's file: where MCP servers are, and which secrets they are given. A run can only name them.

Whoever may start runs could otherwise have a secret sent to any address, or any program started with the worker's rights. No
message here quotes what stands in headers, environments or addresses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from activities.governance.redaction import Redactor
from activities.governance.secrets import Secrets
from contracts.base import BadInput, Contract
from contracts.mcp import CALL_SECONDS, McpServerName

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_OURS = (
    "host",
    "connection",
    "content-length",
    "content-type",
    "transfer-encoding",
    "accept",
    "accept-encoding",
    "user-agent",
)
_CREDENTIAL_HEADERS = ("authorization", "proxy-authorization", "cookie")
_CREDENTIAL = re.compile(r"(?i)(secret|token|password|passwd|api_?key|credential|private_?key|signature)")
_SHOWN = ("timeout_seconds", "allow_http", "include", "exclude")
"""Fields whose wrong value may be repeated in a message."""
MOST_BYTES = 1 << 20


def _header(name: str) -> str:
    if not _HEADER.fullmatch(name):
        raise ValueError("no name of a header; use letters, digits and -")
    if name.lower() in _OURS or name.lower().startswith("mcp-"):
        raise ValueError("this header is set by Caisson; leave it out")
    return name


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("no name of a variable; use letters, digits and _")
    return name


def _one_line(value: str) -> str:
    if not _VALUE.fullmatch(value):
        raise ValueError("a header's value is one line of printable ASCII characters")
    return value


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("holds a NUL byte, which no program can be given")
    return value


HeaderName = Annotated[str, AfterValidator(_header)]
Variable = Annotated[str, AfterValidator(_variable)]
Glob = Annotated[str, Field(min_length=1, max_length=128)]
Word = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_no_nul)]


class ToolFilter(Contract):
    """Globs of the tools that agents may use, by the names that they have at the server."""

    include: tuple[Glob, ...] = Field(default=(), description="none: all")
    exclude: tuple[Glob, ...] = ()


class ServerSpec(Contract):
    """One server: reached by streamable HTTP at `url`, or started as `command`."""

    url: str | None = None
    allow_http: bool = False
    headers: dict[HeaderName, Annotated[str, AfterValidator(_one_line)]] = Field(default_factory=dict)
    secret_headers: dict[HeaderName, str] = Field(default_factory=dict, description="header to the secret that is its value")
    command: tuple[Word, ...] = Field(default=(), max_length=200)
    environment: dict[Variable, Annotated[str, AfterValidator(_no_nul)]] = Field(default_factory=dict)
    secret_environment: dict[Variable, str] = Field(default_factory=dict, description="variable to secret")
    tools: ToolFilter = ToolFilter()
    timeout_seconds: float = Field(default=CALL_SECONDS, gt=0, le=3600)

    @model_validator(mode="after")
    def _one_kind(self) -> ServerSpec:
        if (self.url is None) == (not self.command):
            raise ValueError("give either url (a server to connect to) or command (a program to start), and not both")
        if self.url is not None:
            _check_url(self.url, allow_http=self.allow_http)
        wrong = ("environment", "secret_environment") if self.url else ("headers", "secret_headers", "allow_http")
        if given := [name for name in wrong if getattr(self, name)]:
            kind = "url" if self.url else "command"
            raise ValueError(f"{given[0]}: not for a server with {kind}; remove it")
        return self

    @model_validator(mode="after")
    def _each_name_once(self) -> ServerSpec:
        for name in self.headers:
            if name.lower() in _CREDENTIAL_HEADERS:
                raise ValueError(f"headers: {name} holds a credential; put it into a secret, and name that in secret_headers")
        names = [name.lower() for name in (*self.headers, *self.secret_headers)]
        names += [*self.environment, *self.secret_environment]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{twice[0]} is given more than once; keep one")
        return self


def _check_url(url: str, *, allow_http: bool) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise ValueError("url: no address; write for example https://mcp.example.com/mcp") from None
    if parts.scheme not in ("https", "http") or not host or re.search(r"[\s\\]", url):
        raise ValueError("url: no address; write for example https://mcp.example.com/mcp")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise ValueError("url: holds a credential or a fragment; name a secret in secret_headers instead")
    if any(_CREDENTIAL.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        raise ValueError("url: its query looks as if it held a credential; name a secret in secret_headers instead")
    if parts.scheme == "http" and not allow_http and not _is_loopback(host):
        raise ValueError("url: plain http:// would show headers to the network; use https://, or say allow_http: true")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _File(Contract):
    servers: dict[McpServerName, ServerSpec] = Field(default_factory=dict)


@dataclass(frozen=True)
class Connection:
    """A server with everything that is needed to reach it. Two that are equal are one and the same."""

    name: str
    seconds: float
    tools: ToolFilter = field(repr=False)
    url: str | None = field(default=None, repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    command: tuple[str, ...] = field(default=(), repr=False)
    environment: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def redactor(self) -> Redactor:
        """Return what takes this server's secrets out of what it says."""
        return Redactor(self.secrets)


class McpServers:
    """Reads the operator's file, anew each time, so that what is changed there is used at once.

    `environment` is all that a program is given of this process's own.
    """

    def __init__(self, path: Path | None, secrets: Secrets, environment: Mapping[str, str]) -> None:
        self._path = path
        self._secrets = secrets
        self._environment = dict(environment)

    def names(self) -> list[str]:
        """Return the names of all servers. Raises BadInput."""
        return sorted(self._read())

    def connection(self, name: str, where: str = "mcp_servers") -> Connection:
        """Return a server by its name, with its secrets. Raises BadInput naming the field, the server, and what to do."""
        if self._path is None:
            raise BadInput(
                f"{where}: {name!r}: the tools worker has no MCP servers; set its CAISSON_MCP to a file that says where they are "
                "(docs/mcp.md), or remove the server from the agent"
            )
        every = self._read()
        if name not in every:
            raise BadInput(
                f"{where}: no MCP server is named {name!r} in the tools worker's CAISSON_MCP ({self._path}); there are: "
                f"{', '.join(sorted(every)) or 'none'}; correct the name, or add the server there"
            )
        spec, at = every[name], f"{self._path}: servers.{name}"
        headers, environment = dict(spec.headers), {**self._environment, **spec.environment}
        secrets = []
        for header, secret in spec.secret_headers.items():
            headers[header] = self._secret(secret, f"{at}.secret_headers.{header}")
            secrets.append(headers[header])
            if not _VALUE.fullmatch(headers[header]):
                raise BadInput(
                    f"{at}.secret_headers.{header}: secret {secret!r} is not one line of printable ASCII; write it anew"
                )
        for variable, secret in spec.secret_environment.items():
            environment[variable] = self._secret(secret, f"{at}.secret_environment.{variable}")
            secrets.append(environment[variable])
            if "\0" in environment[variable]:
                raise BadInput(f"{at}.secret_environment.{variable}: secret {secret!r} holds a NUL byte; write it anew")
        return Connection(
            name=name,
            seconds=spec.timeout_seconds,
            tools=spec.tools,
            url=spec.url,
            headers=tuple(headers.items()),
            command=spec.command,
            environment=tuple(environment.items()) if spec.command else (),
            secrets=tuple(secrets),
        )

    def _secret(self, name: str, at: str) -> str:
        try:
            return self._secrets.text(name)
        except BadInput as error:
            raise BadInput(f"{at}: {error}") from None

    def _read(self) -> dict[str, ServerSpec]:
        if self._path is None:
            return {}
        try:
            data = self._path.read_bytes()
        except OSError as error:
            raise BadInput(
                f"CAISSON_MCP: {self._path} cannot be read ({error.strerror}); correct the setting or the file"
            ) from None
        if len(data) > MOST_BYTES:
            raise BadInput(f"CAISSON_MCP: {self._path} has more than {MOST_BYTES} bytes; it is a list of servers and no more")
        try:
            raw = yaml.safe_load(data)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f" at line {mark.line + 1}" if mark is not None else ""
            # The error itself quotes the line.
            raise BadInput(f"CAISSON_MCP: {self._path} is not YAML{line}; correct it") from None
        try:
            return _File.model_validate({} if raw is None else raw).servers
        except ValidationError as error:
            raise BadInput(_faults(error, self._path)) from None


def _faults(error: ValidationError, path: Path) -> str:
    lines = [f"CAISSON_MCP: {path} cannot be used:"]
    for fault in error.errors(include_url=False):
        place = [str(part) for part in fault["loc"]]
        where = ".".join(part for part in place if part != "[key]") or "(the whole file)"
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = "unknown field; remove it or correct its name"
        elif len(place) == 3 and place[-1] == "[key]":
            message = "no server's name; use small letters, digits and -, at most 31, the first a letter"
        elif len(place) > 2 and any(part in _SHOWN for part in place):
            message = f"{message} (found {fault.get('input')!r:.80})"
        lines.append(f"  {where}: {message}")
    return "\n".join(lines)
