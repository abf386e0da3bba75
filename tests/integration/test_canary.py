"""A secret is in the one process that uses it, and nowhere else."""

from __future__ import annotations

import base64
import json
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import yaml

from activities.model.transcript import TranscriptStore
from activities.store.s3 import S3Credential
from contracts.blob import BlobRef
from tests.emulators.mcp.http_server import HttpServer, http_server
from tests.integration.stack import Stack, make_stack
from tests.mcp_support import program, write_servers
from tests.stores.servers import seaweedfs
from workers.scripted_model.scenario import parse_scenarios
from workers.scripted_model.server import ScriptedModelServer

CANARY = f"sk-canary-{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def tickets() -> Iterator[HttpServer]:
    """An MCP server that is no part of the stack either."""
    with http_server() as server:
        yield server


@pytest.fixture(scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory, tickets: HttpServer) -> AsyncIterator[Stack]:
    """A stack whose model worker holds a canary as its key, and asks an endpoint that is no part of the stack.

    The tools worker has the same canary as a secret, for the header of an MCP server and the environment of another.
    """
    secrets = tmp_path_factory.mktemp("secrets")
    (secrets / "mcp").write_text(f"Bearer {CANARY}")
    (secrets / "mcp").chmod(0o600)
    file = secrets / "servers.yaml"
    gone = {"url": "http://127.0.0.1:9/mcp", "secret_headers": {"Authorization": "mcp"}}
    local = program("environment", secret_environment={"TOKEN": "mcp"})
    write_servers(file, tickets={"url": tickets.url, "secret_headers": {"Authorization": "mcp"}}, gone=gone, local=local)
    with endpoint() as server:
        environ = {"OPENAI_API_KEY": CANARY, "OPENAI_BASE_URL": server.base_url, "CANARY_KEY": CANARY}
        environ |= {"CAISSON_MCP": str(file), "CAISSON_SECRETS": str(secrets)}
        made = make_stack(tmp_path_factory.mktemp("guarded"), environ)
        async with made.dev:
            yield made
        await made.sweep()


def endpoint() -> ScriptedModelServer:
    """The endpoint that is no part of the stack."""
    scenarios = yaml.safe_dump(yaml.safe_load((Path(__file__).parent / "scenarios/canary.yaml").read_text()))
    return ScriptedModelServer(parse_scenarios(scenarios, "canary.yaml"))


def spellings(secret: str) -> list[bytes]:
    """The ways in which a secret is written down by accident."""
    raw = secret.encode()
    encoded = [base64.b64encode(b"\0" * shift + raw).rstrip(b"=")[4 if shift else 0 : -4] for shift in range(3)]
    return [raw, urllib.parse.quote(secret).encode(), raw.hex().encode(), *encoded]


def found(data: bytes) -> bool:
    """Whether a secret is in `data` in any spelling."""
    return any(spelling in data for spelling in spellings(CANARY))


def test_the_search_finds_what_it_looks_for() -> None:
    """Plain, in base64 at any offset, percent-encoded and in hexadecimal."""
    for prefix in ("", "a", "ab"):
        assert found(base64.b64encode((prefix + CANARY + "tail").encode()))
    assert found(b"x" + CANARY.encode() + b"y")
    assert found(CANARY.encode().hex().encode())
    assert not found(b"sk-canary-of-somebody-else")


async def test_the_key_is_nowhere_but_in_the_model_worker(guarded: Stack) -> None:
    """Not in what a hostile command can see, nor in history, store, logs, database, artifacts or another worker's environment.

    From NousResearch/hermes-agent#4427, openai/codex PR#1061, temporalio/features#685 and temporalio/sdk-python#1745.
    """
    handle = await guarded.start("look-for-secrets")
    result = await guarded.finish(handle)
    assert result["status"] == "completed"
    failing = await guarded.start("refused-key")
    error = await guarded.failure(failing)
    assert not found(error.message.encode())

    head = BlobRef.model_validate(result["checkpoint"]["transcript"])
    entries = await TranscriptStore(guarded.dev.blobs).load(head)
    outputs = [json.dumps(entry.item) for entry in entries if entry.origin == "tool"]
    assert len(outputs) == 4
    assert "HOME=/workspace" in outputs[0], "the commands did look"
    assert not any(found(output.encode()) for output in outputs)

    for one in (handle, failing):
        history = (await one.fetch_history()).to_json()
        assert not found(history.encode())
        shown = (await one.describe()).raw_description
        assert not found(shown.SerializeToString())

    for path in guarded.state.rglob("*"):
        # The store, the logs, the server's database with its write-ahead log, and what was left of sandboxes.
        if path.is_file():
            assert not found(path.read_bytes()), path


async def test_an_mcp_servers_secret_is_in_its_header_and_nowhere_else(guarded: Stack, tickets: HttpServer) -> None:
    """It arrives; a server that tells it again, in a result or in an environment, is not believed that it may be shown.

    A command looks for it while both sessions are open.
    """
    handle = await guarded.start("look-beside-mcp", {"mcp_servers": ["tickets", "gone", "local"]})
    result = await guarded.finish(handle)
    assert result["status"] == "completed"
    assert tickets.seen
    assert {one["authorization"] for one in tickets.seen} == {f"Bearer {CANARY}"}
    entries = await TranscriptStore(guarded.dev.blobs).load(BlobRef.model_validate(result["checkpoint"]["transcript"]))
    outputs = [json.dumps(entry.item) for entry in entries if entry.origin == "tool"]
    assert "'authorization': '***'" in outputs[0]
    assert "TOKEN" in outputs[1]
    assert "HOME=/workspace" in outputs[2], "the command did look"
    assert not found(json.dumps([entry.item for entry in entries]).encode())
    assert not found((await handle.fetch_history()).to_json().encode())
    for path in guarded.state.rglob("*"):
        if path.is_file():
            assert not found(path.read_bytes()), path


async def test_only_the_model_worker_has_the_key_in_its_environment(guarded: Stack) -> None:
    """Every process of the stack is looked at; the model worker shows that the search would find it."""
    for name, supervised in guarded.dev.running.items():
        environment = Path(f"/proc/{supervised.pid}/environ").read_bytes()
        assert found(environment) == (name == "model-worker"), name


@pytest.mark.soak
async def test_the_stores_key_and_a_manifests_secret_are_nowhere_else(tmp_path: Path) -> None:
    """Blobs lie in object storage, and the manifest reads a bucket with a secret: both are canaries, on a real server.

    The store's key is in the environment of every worker, since all of them read blobs; the secret is in a file that the tools
    worker alone is told of. Neither is in a sandbox, history, log, blob, artifact or database.
    """
    server_at, state, secrets_at = tmp_path / "seaweedfs", tmp_path / "stack", tmp_path / "secrets"
    for directory in (server_at, state, secrets_at):
        directory.mkdir(mode=0o700)
    with seaweedfs(server_at, S3Credential("testaccess", CANARY)) as server, endpoint() as model:
        bucket = server.make()
        server.admin.put_object(Bucket=bucket, Key="in/given.txt", Body=b"from the bucket")
        secret = secrets_at / "claims"
        key = {"access_key_id": "testaccess", "secret_access_key": CANARY, "endpoint": server.endpoint}
        secret.write_text(json.dumps(key))
        secret.chmod(0o600)
        environ = {
            "OPENAI_API_KEY": "sk-of-nobody",
            "OPENAI_BASE_URL": model.base_url,
            "CAISSON_STORE": f"s3://{bucket}/blobs",
            "CAISSON_STORE_ENDPOINT": server.endpoint,
            "CAISSON_STORE_ACCESS_KEY_ID": "testaccess",
            "CAISSON_STORE_SECRET_KEY": CANARY,
            "CAISSON_SECRETS": str(secrets_at),
        }
        stack = make_stack(state, environ)
        entry = {"type": "s3", "bucket": bucket, "prefix": "in/", "secret": "claims", "endpoint": server.endpoint}
        async with stack.dev:
            handle = await stack.start("look-for-secrets", manifest={"entries": {"given": entry}})
            result = await stack.finish(handle)
            assert result["status"] == "completed"
            elsewhere = {"entries": {"given": {**entry, "bucket": "no-such-bucket"}}}
            refused = await stack.start("look-for-secrets", manifest=elsewhere)
            error = await stack.failure(refused)
            assert "manifest.entries.given" in error.message
            assert not found(error.message.encode())
            for one in (handle, refused):
                assert not found((await one.fetch_history()).to_json().encode())
            async for stored in stack.dev.blobs.objects.list(""):
                assert not found(await stack.dev.blobs.objects.get(stored.key)), stored.key
        await stack.sweep()
        for path in state.rglob("*"):
            if path.is_file():
                assert not found(path.read_bytes()), path
