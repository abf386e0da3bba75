"""Connecting as `temporalio.envconfig` says, so that Temporal Cloud works by configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from contracts.base import BadInput
from workers.connect import connect
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
