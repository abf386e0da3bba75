"""A run whose sandbox has a network policy."""

from __future__ import annotations

import json

from contracts.blob import BlobRef
from tests.integration.crew import replay
from tests.integration.stack import Stack


async def test_a_runs_connections_are_named_by_its_result(stack: Stack) -> None:
    """The model is told why a host is refused, and the record of it is a blob of the result."""
    handle = await stack.start("network", sandbox={"network": {"allow": ["allowed.example"]}})
    result = await stack.finish(handle)
    assert (result["status"], result["output"]) == ("completed", "it is not allowed")
    record = await stack.dev.blobs.get(BlobRef.model_validate(result["egress_log"]))
    (line,) = [json.loads(line) for line in record.splitlines()]
    assert (line["verdict"], line["method"], line["host"], line["port"]) == ("refused", "GET", "evil.example", 80)
    assert b"secret-path" not in record
    await replay(stack, handle)


async def test_a_run_without_a_network_has_no_record(stack: Stack) -> None:
    """Nothing was connected, so there is nothing to name."""
    result = await stack.finish(await stack.start("files"))
    assert (result["status"], result["egress_log"]) == ("completed", None)
