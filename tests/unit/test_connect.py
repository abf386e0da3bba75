"""Connecting as `temporalio.envconfig` says, so that Temporal Cloud works by configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from temporalio.api.common.v1 import Payload
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from contracts.base import BadInput
from workers.connect import InputConverter, connect
from workers.settings import Settings


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the client would be connected with."""
    seen: dict[str, Any] = {}

    async def remember(target_host: str, **config: Any) -> None:
        seen.update(config, target_host=target_host)

    monkeypatch.setattr(Client, "connect", remember)
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_NAMESPACE", "TEMPORAL_API_KEY", "TEMPORAL_PROFILE", "TEMPORAL_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    return seen


async def test_a_profile_gives_address_namespace_key_and_tls(
    connected: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TEMPORAL_PROFILE names a profile of the configuration file."""
    file = tmp_path / "temporal.toml"
    file.write_text('[profile.cloud]\naddress = "ns.acct.example:7233"\nnamespace = "ns.acct"\napi_key = "k"\n')
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(file))
    monkeypatch.setenv("TEMPORAL_PROFILE", "cloud")
    await connect(Settings(store=str(tmp_path / "store")))
    assert connected["target_host"] == "ns.acct.example:7233"
    assert connected["namespace"] == "ns.acct"
    assert connected["api_key"] == "k"
    assert connected["data_converter"].external_storage is not None


async def test_variables_win_over_the_profile(connected: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As for the `temporal` command."""
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(tmp_path / "none.toml"))
    monkeypatch.setenv("TEMPORAL_ADDRESS", "here:1")
    monkeypatch.setenv("TEMPORAL_NAMESPACE", "mine")
    await connect(Settings(store=str(tmp_path / "store")))
    assert (connected["target_host"], connected["namespace"]) == ("here:1", "mine")


async def test_without_any_configuration_it_is_localhost(
    connected: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The development server's place."""
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(tmp_path / "none.toml"))
    await connect(Settings(store=str(tmp_path / "store")))
    assert connected["target_host"] == "localhost:7233"


async def test_a_server_that_is_not_there_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The address, and how to start or name a server."""
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:9")
    with pytest.raises(BadInput, match=r"127\.0\.0\.1:9.*\n.*caisson dev"):
        await connect(Settings(store=str(tmp_path / "store")))


def untyped(data: bytes) -> Any:
    """What a run is given of what a person sent."""
    (value,) = InputConverter().from_payloads([Payload(metadata={"encoding": b"json/plain"}, data=data)])
    return value


def test_a_field_given_twice_is_refused_and_not_one_of_the_two_chosen() -> None:
    """In an approval policy the second would lift what the first forbids."""
    with pytest.raises(ApplicationError, match="the field 'shell' is given twice in one object; keep one of them") as caught:
        untyped(b'{"task": "x", "approvals": {"tools": {"shell": "forbid", "shell": "allow"}}}')
    assert (caught.value.type, caught.value.non_retryable) == ("BadInput", True)


def test_a_byte_order_mark_is_no_part_of_the_input() -> None:
    """Some editors write one before every file."""
    assert untyped(b'\xef\xbb\xbf{"task": "x"}') == {"task": "x"}


@pytest.mark.parametrize("data", [b'{"task": "x', b'{"a":' * 100_000, b"\xff", b'{"a": ' + b"9" * 5000 + b"}"])
def test_what_is_no_json_is_told_as_such(data: bytes) -> None:
    """Looking for fields given twice hides no other fault."""
    with pytest.raises(ApplicationError, match="the input cannot be read: Invalid JSON"):
        untyped(data)
