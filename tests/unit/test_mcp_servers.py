"""The operator's file of MCP servers: what it may say, and that no message tells what must not be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from activities.governance.secrets import Secrets
from activities.tools.mcp.servers import McpServers
from contracts.base import BadInput

VALUE = "Bearer s3cret-value-1"


def servers(tmp_path: Path, content: Any) -> McpServers:
    """A file of servers beside a directory with the secret `token`."""
    secrets = tmp_path / "secrets"
    secrets.mkdir(exist_ok=True)
    (secrets / "token").write_text(VALUE + "\n")
    (secrets / "token").chmod(0o600)
    (secrets / "lines").write_text("one\ntwo")
    (secrets / "lines").chmod(0o600)
    file = tmp_path / "mcp.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return McpServers(file, Secrets(secrets), {"PATH": "/bin", "LANG": "C"})


def test_a_server_by_url_gets_its_headers_and_the_whole_secret(tmp_path: Path) -> None:
    """The header's value is the secret; nothing of it is in the connection's repr."""
    spec = {"url": "https://mcp.example.com/mcp", "headers": {"X-Tenant": "acme"}, "secret_headers": {"Authorization": "token"}}
    there = servers(tmp_path, {"servers": {"tickets": {**spec, "timeout_seconds": 5}}}).connection("tickets")
    assert dict(there.headers) == {"X-Tenant": "acme", "Authorization": VALUE}
    assert (there.seconds, there.secrets) == (5, (VALUE,))
    assert "s3cret" not in repr(there)


def test_a_program_gets_path_and_language_and_what_the_file_gives(tmp_path: Path) -> None:
    """Its environment holds nothing else of the worker's."""
    spec = {"command": ["lint"], "environment": {"MODE": "x"}, "secret_environment": {"TOKEN": "token"}}
    there = servers(tmp_path, {"servers": {"lint": spec}}).connection("lint")
    assert dict(there.environment) == {"PATH": "/bin", "LANG": "C", "MODE": "x", "TOKEN": VALUE}


def test_the_file_and_secrets_are_read_anew_each_time(tmp_path: Path) -> None:
    """A changed secret makes another connection, by which a pool opens a new session."""
    file = servers(tmp_path, {"servers": {"a": {"url": "https://x.example", "secret_headers": {"Authorization": "token"}}}})
    first = file.connection("a")
    assert file.connection("a") == first
    (tmp_path / "secrets" / "token").write_text("another one")
    assert file.connection("a") != first


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({}, "servers.a: give either url"),
        ({"url": "https://x.example", "command": ["y"]}, "servers.a: give either url"),
        ({"url": "http://x.example/mcp"}, "plain http:// would show headers"),
        ({"url": "https://user:hunter2@x.example"}, "holds a credential or a fragment"),
        ({"url": "https://x.example?api_key=hunter2"}, "its query looks as if it held a credential"),
        ({"url": "ftp://x.example"}, "url: no address"),
        ({"url": "https://x.example", "environment": {"A": "hunter2"}}, "environment: not for a server with url"),
        ({"command": ["y"], "headers": {"A": "hunter2"}}, "headers: not for a server with command"),
        ({"url": "https://x.example", "headers": {"Authorization": "hunter2"}}, "name that in secret_headers"),
        ({"url": "https://x.example", "headers": {"A": "hunter2\nB: c"}}, "servers.a.headers.A: a header's value is one line"),
        ({"url": "https://x.example", "headers": {"Host": "hunter2"}}, "this header is set by Caisson"),
        (
            {"url": "https://x.example", "headers": {"X": "hunter2"}, "secret_headers": {"x": "token"}},
            "x is given more than once",
        ),
        ({"url": "https://x.example", "header": {"A": "hunter2"}}, "servers.a.header: unknown field"),
        (
            {"url": "https://x.example", "timeout_seconds": 0},
            "servers.a.timeout_seconds: Input should be greater than 0 (found 0)",
        ),
        ({"command": "hunter2"}, "servers.a.command: Input should be a valid tuple"),
    ],
)
def test_what_cannot_be_used_is_named_without_its_value(tmp_path: Path, spec: dict[str, Any], told: str) -> None:
    """File, server and field are told; values of headers, environments and addresses never."""
    file = servers(tmp_path, {"servers": {"a": spec}})
    with pytest.raises(BadInput) as caught:
        file.connection("a")
    assert told in str(caught.value)
    assert "mcp.yaml" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/mcp", "http://localhost/mcp", "http://[::1]:5/"])
def test_plain_http_is_for_this_machine(tmp_path: Path, url: str) -> None:
    """Loopback is no network."""
    assert servers(tmp_path, {"servers": {"a": {"url": url}}}).connection("a").url == url


def test_a_file_that_is_not_yaml_is_told_by_its_line_alone(tmp_path: Path) -> None:
    """The parser's own error would quote it."""
    with pytest.raises(BadInput, match=r"is not YAML at line 2; correct it") as caught:
        servers(tmp_path, "servers:\n  a: {url: hunter2: x\n").names()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["Tickets", "a__b", "9a", "x" * 32])
def test_names_that_could_be_mistaken_are_refused(tmp_path: Path, name: str) -> None:
    """A server's name is the beginning of its tools' names."""
    with pytest.raises(BadInput, match="no server's name"):
        servers(tmp_path, {"servers": {name: {"url": "https://x.example"}}}).names()


def test_an_unknown_server_and_a_missing_file_are_told_with_what_to_do(tmp_path: Path) -> None:
    """The names that there are, or the setting that is missing."""
    file = servers(tmp_path, {"servers": {"a": {"url": "https://x.example"}}})
    with pytest.raises(BadInput, match=r"mcp_servers\.0: no MCP server is named 'b' .* there are: a; correct the name"):
        file.connection("b", "mcp_servers.0")
    with pytest.raises(BadInput, match=r"'b': the tools worker has no MCP servers; set its CAISSON_MCP"):
        McpServers(None, Secrets(None), {}).connection("b")
    with pytest.raises(BadInput, match=r"CAISSON_MCP: .* cannot be read"):
        McpServers(tmp_path / "none", Secrets(None), {}).names()


@pytest.mark.parametrize(("secret", "told"), [("absent", "there is no such file"), ("lines", "not one line of printable ASCII")])
def test_a_secret_that_cannot_be_sent_is_named_with_its_place(tmp_path: Path, secret: str, told: str) -> None:
    """Server and header are told, and never the value."""
    spec = {"url": "https://x.example", "secret_headers": {"Authorization": secret}}
    with pytest.raises(BadInput, match=rf"servers\.a\.secret_headers\.Authorization: secret '{secret}'.*{told}") as caught:
        servers(tmp_path, {"servers": {"a": spec}}).connection("a")
    assert "two" not in str(caught.value)
