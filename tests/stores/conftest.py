"""Stores to test: each on a real server, which runs for the session."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.store.local import LocalStore
from activities.store.port import ObjectStore
from activities.store.remote import Bucket, RemoteStore
from tests.stores.servers import AzureServer, GcsServer, S3Server, azurite, fake_gcs, seaweedfs

REMOTE = ("s3", "r2", "azure", "gs")
SERVERS = {"s3": "s3_server", "r2": "s3_server", "azure": "azure_server", "gs": "gcs_server"}
Server = S3Server | AzureServer | GcsServer


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """SeaweedFS."""
    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """Azurite."""
    with azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """fake-gcs-server."""
    with fake_gcs(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture(params=["s3", "azure", "gs"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each of the services."""
    found: Server = request.getfixturevalue(SERVERS[request.param])
    return found


@pytest.fixture(params=REMOTE)
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """An empty bucket of each service; of R2 as it is spoken to, on the S3 server."""
    opened = open_empty(request, request.param)
    yield opened
    opened.close()


@pytest.fixture(params=["local", "s3", "azure", "gs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    """An empty store of each kind, the remote ones below a prefix of their own."""
    if request.param == "local":
        yield LocalStore(tmp_path / "store")
        return
    server: Server = request.getfixturevalue(SERVERS[request.param])
    yield RemoteStore(server.opened, f"caisson/{secrets.token_hex(6)}")


def open_empty(request: pytest.FixtureRequest, scheme: str) -> Bucket:
    """Make a bucket and open it."""
    server: Server = request.getfixturevalue(SERVERS[scheme])
    return (
        server.bucket(server.make(), scheme="r2")
        if scheme == "r2" and isinstance(server, S3Server)
        else server.bucket(server.make())
    )
