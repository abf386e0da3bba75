"""Committed histories replay on today's code: a deploy never breaks a run that is going on."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from temporalio import workflow
from temporalio.client import WorkflowHistory
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.worker import Replayer, UnsandboxedWorkflowRunner

from contracts.activity_names import PREPARE_RUN, Queues
from contracts.model import CallModelResult
from contracts.prepare import PrepareRunInput
from workers.process import workflow_runner
from workflows.activities import call
from workflows.agent_batch import AgentBatch
from workflows.agent_run import AgentRun

HISTORIES = sorted((Path(__file__).parent / "histories").glob("*.json.gz"))


def load(path: Path) -> WorkflowHistory:
    """Read a committed history."""
    return WorkflowHistory.from_json(path.name.removesuffix(".json.gz"), gzip.decompress(path.read_bytes()).decode())


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.name.removesuffix(".json.gz"))
async def test_a_committed_history_replays(path: Path) -> None:
    """No non-determinism, in the sandbox that workers use."""
    replayer = Replayer(
        workflows=[AgentRun, AgentBatch], data_converter=pydantic_data_converter, workflow_runner=workflow_runner()
    )
    await replayer.replay_workflow(load(path))


def test_every_case_is_recorded() -> None:
    """A case without its history would be replayed by nobody."""
    from tests.integration.record_histories import CASES

    assert {path.name for path in HISTORIES} == {f"{case.__name__.replace('_', '-')}.json.gz" for case in CASES}


async def test_an_unguarded_change_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more activity before the model call, without a patch, does not replay: the replay test is one that can fail.

    From temporalio/sdk-python#1109, temporalio/sdk-typescript#1935 and TracecatHQ/tracecat#971.
    """
    as_it_is = AgentRun._call_model

    async def careless(self: AgentRun) -> CallModelResult:
        given = PrepareRunInput(run_id="x", chain="x", request={"task": "x"})
        await call(PREPARE_RUN, given, queue=Queues("caisson").workflow, summary="careless")
        return await as_it_is(self)

    monkeypatch.setattr(AgentRun, "_call_model", careless)
    # Temporal's sandbox would load the module anew, without the change.
    replayer = Replayer(workflows=[AgentRun], data_converter=pydantic_data_converter, workflow_runner=UnsandboxedWorkflowRunner())
    history = load(HISTORIES[0].with_name("completed.json.gz"))
    result = await replayer.replay_workflow(history, raise_on_replay_failure=False)
    assert isinstance(result.replay_failure, workflow.NondeterminismError)
