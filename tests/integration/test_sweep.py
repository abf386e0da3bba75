"""Sandboxes that outlived their runs are found and ended; those of open runs are not touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from activities.sandbox.providers.local import LocalProvider
from activities.sandbox.registry import ProviderRegistry
from contracts.sandbox import NAMESPACE_LABEL, RUN_LABEL, SandboxSpec
from tests.integration.stack import Handle, Stack
from tests.integration.test_command import caisson
from tests.integration.test_durability import alive, until
from workers.sweep_services import SUSPECT_SECONDS, ServiceSweep


async def busy(stack: Stack) -> tuple[Handle, Path]:
    """Start a run that stays in a command, and return it with the directory of its sandbox, which counts as an hour old."""
    before = set(stack.sandboxes())
    handle = await stack.start("left-session")
    await until(lambda: any((new / "workspace/marker").exists() for new in set(stack.sandboxes()) - before), "the command")
    (sandbox,) = set(stack.sandboxes()) - before
    record: dict[str, Any] = json.loads((sandbox / "state.json").read_text())
    assert record["labels"] == {"caisson_run": handle.id, "caisson_namespace": "default"}
    (sandbox / "state.json").write_text(json.dumps({**record, "created_at": record["created_at"] - 3600}))
    return handle, sandbox


async def test_the_sandbox_of_a_terminated_run_is_swept(stack: Stack) -> None:
    """A terminated workflow ends nothing itself; the command lists what it left and ends it, and spares an open run's."""
    leaked, its = await busy(stack)
    going_on, other = await busy(stack)
    await leaked.terminate()
    code, out, err = await caisson(stack, "sandboxes", "--json")
    assert code == 0, err
    # Other tests may have left some of their own, which are too young to be swept.
    rows = {row["run_id"]: row for row in json.loads(out) if row["run_id"] in (leaked.id, going_on.id)}
    assert {run_id: (row["run"], row["alive"]) for run_id, row in rows.items()} == {
        leaked.id: ("closed", True),
        going_on.id: ("open", True),
    }
    assert rows[leaked.id]["age_seconds"] > 3600
    assert rows[leaked.id]["disk_bytes"] > 0
    code, out, _ = await caisson(stack, "sandboxes")
    assert f"run {leaked.id} is closed" in out

    code, out, err = await caisson(stack, "sandboxes", "sweep", "--dry-run")
    assert (code, its.name in out, other.name in out, its.exists()) == (0, True, False, True), err
    assert "would be ended" in out

    code, out, err = await caisson(stack, "sandboxes", "sweep")
    assert (code, its.exists(), other.exists()) == (0, False, True), err
    assert alive(b"616.5") == 2
    assert await caisson(stack, "sandboxes", "sweep") == (0, "nothing to sweep\n", "")
    await going_on.cancel()
    await until(lambda: not other.exists(), "the end of the other run")


async def test_a_sandbox_whose_run_has_moved_is_swept(stack: Stack) -> None:
    """A host that counted as lost comes back with a sandbox that its run has replaced meanwhile."""
    handle, its = await busy(stack)
    record = json.loads((its / "state.json").read_text())
    left = its.with_name("local-0123456789abcdef")
    left.mkdir()
    (left / "state.json").write_text(json.dumps({**record, "id": left.name, "nonce": "another", "pid": 2**22 + 1}))
    code, out, err = await caisson(stack, "sandboxes", "sweep")
    assert (code, left.exists(), its.exists()) == (0, False, True), (out, err)
    assert "elsewhere" in out
    await handle.cancel()
    await until(lambda: not its.exists(), "the end of the run")


async def test_what_no_run_has_at_a_service_is_swept_at_the_second_look(stack: Stack) -> None:
    """A crash between making a sandbox and taking note of it leaves one that costs; an open run's is not touched.

    The local provider stands for a service here: the sweep knows of it only what every provider can do.
    """
    handle, its = await busy(stack)
    provider = LocalProvider(stack.state / "sandboxes")
    labels = {RUN_LABEL: "nobody", NAMESPACE_LABEL: "default"}
    orphan = await provider.create(SandboxSpec(), "orphan", environment={}, labels=labels, queue="q")
    sweep = ServiceSweep(ProviderRegistry({"local": lambda: provider}), ("local",), stack.dev.client)
    assert await sweep.sweep(1000.0) == []
    assert await sweep.sweep(1000.0 + SUSPECT_SECONDS - 1) == []
    assert orphan in await sweep.sweep(1000.0 + SUSPECT_SECONDS)
    assert its.exists()
    assert orphan not in await provider.list({})
    await handle.cancel()
    await until(lambda: not its.exists(), "the end of the run")


async def test_a_young_sandbox_is_spared(stack: Stack) -> None:
    """For five minutes nobody takes it for a leak."""
    leaked, its = await busy(stack)
    record = json.loads((its / "state.json").read_text())
    (its / "state.json").write_text(json.dumps({**record, "created_at": record["created_at"] + 3600}))
    await leaked.terminate()
    code, _, err = await caisson(stack, "sandboxes", "sweep")
    assert (code, its.exists()) == (0, True), err
    (its / "state.json").write_text(json.dumps(record))
    code, _, err = await caisson(stack, "sandboxes", "sweep")
    assert (code, its.exists()) == (0, False), err


async def test_a_sandbox_worker_sweeps_when_it_starts(own_stack: Stack) -> None:
    """A worker that starts ends what the one before it left, says so in its log, and spares what is needed."""
    leaked, its = await busy(own_stack)
    going_on, other = await busy(own_stack)
    await leaked.terminate()
    own_stack.kill("sandbox-worker")
    await until(lambda: told_of_sweep(own_stack) != [], "the sweep", 30)
    (told,) = told_of_sweep(own_stack)
    assert (told["run"], told["run_is"]) == (leaked.id, "closed")
    assert (its.exists(), other.exists()) == (False, True)
    await going_on.cancel()
    # A call that the killed worker had begun is only known to be lost when its heartbeat has been missed.
    await until(lambda: not other.exists(), "the end of the other run", 30)


def told_of_sweep(stack: Stack) -> list[dict[str, Any]]:
    """What the sandbox worker's log says of sandboxes that it ended."""
    lines = (stack.dev.logs / "sandbox-worker.log").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == "ended a sandbox that no run needs"]
