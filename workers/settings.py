"""Settings: the only place that reads the environment. Each variable is checked here, and a bad one is named."""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationError

from contracts.base import BadInput, Contract, sha256_hex

PREFIX = "CAISSON_"


class Role(StrEnum):
    """What a worker process does. Each has a task queue, and an environment, of its own."""

    WORKFLOW = "workflow"
    MODEL = "model"
    SANDBOX = "sandbox"
    TOOLS = "tools"


def _queue_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise ValueError("letters, digits and ._- only, at most 100 of them")
    return name


_STORES = {
    "s3": "s3://BUCKET/PREFIX",
    "r2": "r2://ACCOUNT/BUCKET/PREFIX",
    "gs": "gs://BUCKET/PREFIX",
    "azure": "azure://ACCOUNT/CONTAINER/PREFIX",
}
_FORMS = "give a directory, " + ", ".join(_STORES.values())
_ACCOUNT, _BUCKET = re.compile(r"[a-z0-9-]{1,64}"), re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")
_SCHEME = re.compile(r"[A-Za-z0-9+]+:")
_STORE_PREFIX = re.compile(r"(?!.*(?:^|/)\.{1,2}(?:/|$))(?:[A-Za-z0-9._=-]+(?:/[A-Za-z0-9._=-]+)*)?")


@dataclass(frozen=True)
class StorePlace:
    """What CAISSON_STORE names: `kind` is `local`, with a directory for its bucket, or a service's scheme."""

    kind: str
    bucket: str
    prefix: str = ""
    account: str = ""

    @classmethod
    def parse(cls, place: str) -> StorePlace:
        """Read a CAISSON_STORE. Raises ValueError saying what is expected."""
        if not place or place != place.strip() or re.search(r"[\x00-\x1f\x7f]", place):
            raise ValueError(f"it is empty, or has white space around it or control characters in it; {_FORMS}")
        kind, found, rest = place.partition("://")
        if kind == "file" and found and not rest.startswith("/"):
            raise ValueError("file:// has a whole path behind it, such as file:///var/lib/caisson; or give the directory alone")
        if not found and _SCHEME.match(place):
            raise ValueError(f"this is neither a store nor a directory; {_FORMS}, or ./ before a directory of this name")
        if not found or kind == "file":
            return cls("local", place.removeprefix("file://"))
        if kind not in _STORES:
            raise ValueError(f"{kind}:// is no store; {_FORMS}")
        if "@" in rest or "?" in rest:
            raise ValueError("a store's name holds no credential; set CAISSON_STORE_ACCESS_KEY_ID and its like (docs/stores.md)")
        account, rest = rest.split("/", 1) if kind in ("r2", "azure") and "/" in rest else ("", rest)
        bucket, _, prefix = rest.partition("/")
        if kind in ("r2", "azure") and not _ACCOUNT.fullmatch(account):
            raise ValueError(f"no account and bucket in it; give {_STORES[kind]}")
        if not _BUCKET.fullmatch(bucket):
            raise ValueError(f"{bucket!r} is no bucket's name; give {_STORES[kind]}")
        prefix = prefix.strip("/")
        if not _STORE_PREFIX.fullmatch(prefix):
            raise ValueError(f"the prefix {prefix!r} may have parts of letters, digits and ._=- with / between them")
        return cls(kind, bucket, prefix, account)


def _store(place: str) -> str:
    StorePlace.parse(place)
    return place.removeprefix("file://")


def _endpoint(url: str) -> str:
    if not re.fullmatch(r"https?://[^/@?#\s]+(/[^@?#\s]*)?", url):
        raise ValueError("give http:// or https:// with a host, without a credential, such as https://s3.example.com")
    return url.rstrip("/")


class Settings(Contract):
    """All settings with their defaults. A field's variable is its name in capitals with CAISSON_ before it."""

    task_queue: Annotated[str, AfterValidator(_queue_name)] = Field(default="caisson", description="where runs are started")
    store: Annotated[str, AfterValidator(_store)] = Field(
        default=".caisson/store", description=f"the blob store: {_FORMS.removeprefix('give ')}"
    )
    store_endpoint: Annotated[str, AfterValidator(_endpoint)] | None = Field(
        default=None, description="URL of the store's service; default: the provider's own"
    )
    store_region: str | None = Field(default=None, pattern=r"^[a-z0-9-]{1,40}$", description="region of an S3 bucket")
    store_access_key_id: str | None = Field(default=None, description="access key of S3 or R2; default: what the SDK finds")
    store_secret_key: SecretStr | None = Field(default=None, description="its secret, or the key of an Azure account")
    store_session_token: SecretStr | None = Field(default=None, description="session token of a temporary S3 credential")
    store_sas: SecretStr | None = Field(default=None, description="shared access signature of an Azure container")
    store_credentials_file: Path | None = Field(default=None, description="key file of a Google service account")
    store_cache: Path = Field(default=Path(".caisson/cache"), description="directory for copies of a remote store's blobs")
    store_cache_mb: int = Field(default=1024, ge=0, description="its most megabytes; 0: no copies are kept")
    agents: Path = Field(default=Path("agents"), description="directory of named agents, one YAML file each")
    local_roots: tuple[Path, ...] = Field(default=(), description="directories that `local` entries may read, separated by :")
    secrets: Path | None = Field(default=None, description="directory with one file for each secret: the tools worker's alone")
    spool: Path | None = Field(
        default=None, description="directory for large objects on their way into the store; default: one among temporary files"
    )
    git_private: tuple[IPv4Network | IPv6Network, ...] = Field(
        default=(), description="address ranges that git entries may reach though not public, such as 10.1.0.0/16, separated by ,"
    )
    git_http: bool = Field(default=False, description="whether git entries may use plain http")
    git_ca_file: Path | None = Field(default=None, description="certificates that git entries trust instead of the system's")
    sandbox_dir: Path = Field(default=Path(".caisson/sandboxes"), description="where local sandboxes live on this host")
    egress_private: tuple[IPv4Network | IPv6Network, ...] = Field(
        default=(), description="address ranges that sandboxes may reach though not public, such as 10.1.0.0/16, separated by ,"
    )
    mcp: Path | None = Field(default=None, description="file that says where MCP servers are; the tools worker's alone")
    host: str = Field(default="", description="this host's name in its task queue; default: the host name")
    model: str = Field(default="gpt-5.4", min_length=1, description="model of agents that name none")
    prices: Path | None = Field(default=None, description="price table; default: the one that comes with Caisson")
    model_slots: int = Field(default=32, gt=0, le=1000, description="model calls at a time in one worker")
    sandbox_slots: int = Field(default=64, gt=0, le=1000, description="commands at a time in one sandbox worker")
    log_format: Annotated[str, Field(pattern="^(auto|json|console)$")] = Field(
        default="auto", description="auto: console on a terminal"
    )
    log_level: Annotated[str, Field(pattern="^(debug|info|warning|error)$")] = "info"
    e2b_api_key: SecretStr | None = Field(default=None, description="E2B_API_KEY: the sandbox worker's alone")
    e2b_template: str = Field(default="base", min_length=1, description="template of E2B sandboxes whose spec names no image")
    e2b_domain: str | None = Field(default=None, pattern=r"^[a-z0-9.-]+$", description="E2B_DOMAIN: of an E2B of your own")
    e2b_api_url: str | None = Field(default=None, pattern=r"^https?://", description="E2B_API_URL")
    e2b_sandbox_url: str | None = Field(default=None, pattern=r"^https?://", description="E2B_SANDBOX_URL")
    modal_token_id: str | None = Field(default=None, pattern=r"^\S+$", description="MODAL_TOKEN_ID: the sandbox worker's alone")
    modal_token_secret: SecretStr | None = Field(default=None, description="MODAL_TOKEN_SECRET: the sandbox worker's alone")
    modal_app: str = Field(default="caisson", pattern=r"^[a-zA-Z0-9-_.]{1,64}$", description="app of Modal that sandboxes are in")
    modal_environment: str | None = Field(default=None, pattern=r"^\S+$", description="MODAL_ENVIRONMENT: that the app is in")
    docker_host: str = Field(
        default="unix:///var/run/docker.sock", description="DOCKER_HOST: the container engine, unix:///PATH or tcp://HOST:PORT"
    )
    docker_cert_path: Path | None = Field(
        default=None, description="DOCKER_CERT_PATH: directory with ca.pem, cert.pem and key.pem for an engine at tcp://"
    )
    docker_image: str = Field(default="python:3.13-slim", min_length=1, description="image of sandboxes whose spec names none")
    docker_pull: bool = Field(default=False, description="whether workers have the engine fetch images that it does not have")
    docker_workspace: Literal["volume", "memory"] = Field(
        default="volume", description="where workspaces are; memory: with limits, and counted as the sandbox's memory"
    )
    openai_api_key: SecretStr | None = Field(default=None, description="OPENAI_API_KEY: the model worker's alone")
    openai_base_url: str | None = Field(default=None, pattern=r"^https?://", description="OPENAI_BASE_URL")

    def services(self) -> tuple[str, ...]:
        """The providers, beside the local one, that there is something set for."""
        found = {"docker": "docker_host" in self.model_fields_set, "e2b": self.e2b_api_key, "modal": self.modal_token_secret}
        return tuple(name for name, is_set in found.items() if is_set)

    @property
    def store_place(self) -> StorePlace:
        """The store, taken apart."""
        return StorePlace.parse(self.store)

    @property
    def sandbox_host(self) -> str:
        """The name of this host's sandboxes: two sandbox directories on one machine are two hosts."""
        name = re.sub(r"[^A-Za-z0-9-]", "-", self.host or socket.gethostname())[:60]
        return f"{name}-{sha256_hex(str(self.sandbox_dir.resolve()).encode())[:8]}"


_FOREIGN = {
    "OPENAI_API_KEY": "openai_api_key",
    "OPENAI_BASE_URL": "openai_base_url",
    "E2B_API_KEY": "e2b_api_key",
    "E2B_DOMAIN": "e2b_domain",
    "E2B_API_URL": "e2b_api_url",
    "E2B_SANDBOX_URL": "e2b_sandbox_url",
    "MODAL_TOKEN_ID": "modal_token_id",
    "MODAL_TOKEN_SECRET": "modal_token_secret",
    "MODAL_ENVIRONMENT": "modal_environment",
    "DOCKER_HOST": "docker_host",
    "DOCKER_CERT_PATH": "docker_cert_path",
}
_OWN = {PREFIX + name.upper(): name for name in Settings.model_fields if not name.startswith("openai_")}
_SECRET = {name for name, field in {**_OWN, **_FOREIGN}.items() if "SecretStr" in str(Settings.model_fields[field].annotation)}


def _bare(variable: str) -> str:
    return variable.removeprefix(PREFIX)


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings. Raises BadInput naming each bad variable, its value, and what is expected."""
    environ = os.environ if environ is None else environ
    variables = {**_FOREIGN, **_OWN}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in variables:
            # Compared without the prefix, or everything would look like everything.
            close = [PREFIX + near for near in difflib.get_close_matches(_bare(name), map(_bare, _OWN), n=1)]
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(sorted(_OWN))}"
            raise BadInput(f"{name}: no such setting; {hint}")
    given: dict[str, object] = {field: environ[name] for name, field in variables.items() if environ.get(name)}
    if "local_roots" in given:
        given["local_roots"] = [part for part in str(given["local_roots"]).split(":") if part]
    for name in ("egress_private", "git_private"):
        if name in given:
            given[name] = [part.strip() for part in str(given[name]).split(",") if part.strip()]
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        names = {field: name for name, field in variables.items()}
        faults = []
        for fault in error.errors(include_url=False):
            name = names[str(fault["loc"][0])]
            shown = "(hidden)" if name in _SECRET or "@" in environ.get(name, "") else repr(environ.get(name))
            faults.append(f"{name}: {fault['msg']} (found {shown})")
        raise BadInput("\n".join(faults)) from error


_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")


def inherited_environment() -> dict[str, str]:
    """Return all that a service of the dev stack sees of this process's environment: never a key."""
    return {name: os.environ[name] for name in _INHERITED if name in os.environ}


def bare_environment() -> dict[str, str]:
    """Return all that a program of an MCP server is given of this process's environment."""
    return {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}


def whole_environment() -> dict[str, str]:
    """Return this process's environment, from which a Compose file's `${NAME}` are filled in."""
    return dict(os.environ)


def check_role(settings: Settings, roles: frozenset[Role]) -> None:
    """Refuse an environment that a role must not have, or that lacks what it needs. Raises BadInput."""
    has_key = settings.openai_api_key is not None and settings.openai_api_key.get_secret_value() != ""
    if Role.MODEL in roles and not has_key:
        raise BadInput("OPENAI_API_KEY: the model worker needs it, but it is not set; set it in that worker's environment alone")
    if Role.MODEL not in roles and has_key:
        others = ", ".join(sorted(roles))
        raise BadInput(
            f"OPENAI_API_KEY: set in the environment of a {others} worker, which must not hold it; unset it there "
            "(env -u OPENAI_API_KEY caisson worker ...)"
        )
    if Role.SANDBOX not in roles and settings.e2b_api_key is not None:
        raise BadInput(
            f"E2B_API_KEY: set in the environment of a {', '.join(sorted(roles))} worker, which must not hold it; unset it there "
            "(env -u E2B_API_KEY -u CAISSON_E2B_API_KEY caisson worker ...)"
        )
    if Role.SANDBOX not in roles and settings.modal_token_secret is not None:
        raise BadInput(
            f"MODAL_TOKEN_SECRET: set in the environment of a {', '.join(sorted(roles))} worker, which must not hold it; unset "
            "it there (env -u MODAL_TOKEN_SECRET -u CAISSON_MODAL_TOKEN_SECRET caisson worker ...)"
        )
    if Role.MODEL in roles and Role.SANDBOX in roles:
        raise BadInput("--role: model and sandbox cannot be one process; the key must not be where model-written code is started")
