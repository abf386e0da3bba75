"""The activities by name and type, so that workflows can call them without importing them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from contracts.base import Contract
from contracts.mcp import CallMcpToolInput, CallMcpToolResult, ListMcpToolsInput, ListMcpToolsResult
from contracts.model import (
    CallModelInput,
    CallModelResult,
    ToolCallInput,
    ToolCallResult,
)
from contracts.prepare import (
    CollectOutputsInput,
    CollectOutputsResult,
    DeliverOutputsInput,
    DeliverOutputsResult,
    FetchFilesInput,
    FetchFilesResult,
    FetchManifestInput,
    FetchManifestResult,
    LoadSkillInput,
    LoadSkillResult,
    PrepareRunInput,
    PrepareRunResult,
    RecordEndInput,
    RecordEndResult,
    RestoreWorkspaceInput,
    RestoreWorkspaceResult,
    RunSetupInput,
    RunSetupResult,
    SnapshotWorkspaceInput,
    SnapshotWorkspaceResult,
    TakeResultsInput,
    TakeResultsResult,
    WriteFilesInput,
    WriteFilesResult,
)
from contracts.sandbox import (
    CloseSandboxInput,
    CloseSandboxResult,
    EndStraysInput,
    EndStraysResult,
    OpenSandboxInput,
    OpenSandboxResult,
    ResumeSandboxInput,
)

Input = TypeVar("Input", bound=Contract)
Result = TypeVar("Result", bound=Contract)


@dataclass(frozen=True)
class ActivityStub(Generic[Input, Result]):
    """An activity's registered name with the types of its one argument and its result."""

    name: str
    input: type[Input]
    result: type[Result]


PREPARE_RUN = ActivityStub("prepare_run", PrepareRunInput, PrepareRunResult)
CALL_MODEL = ActivityStub("call_model", CallModelInput, CallModelResult)
RECORD_END = ActivityStub("record_end", RecordEndInput, RecordEndResult)
FETCH_MANIFEST = ActivityStub("fetch_manifest", FetchManifestInput, FetchManifestResult)
OPEN_SANDBOX = ActivityStub("open_sandbox", OpenSandboxInput, OpenSandboxResult)
RESUME_SANDBOX = ActivityStub("resume_sandbox", ResumeSandboxInput, OpenSandboxResult)
RESTORE_WORKSPACE = ActivityStub("restore_workspace", RestoreWorkspaceInput, RestoreWorkspaceResult)
SNAPSHOT_WORKSPACE = ActivityStub("snapshot_workspace", SnapshotWorkspaceInput, SnapshotWorkspaceResult)
RUN_SETUP = ActivityStub("run_setup", RunSetupInput, RunSetupResult)
RUN_SHELL = ActivityStub("run_shell", ToolCallInput, ToolCallResult)
APPLY_PATCH = ActivityStub("apply_patch", ToolCallInput, ToolCallResult)
TAKE_RESULTS = ActivityStub("take_results", TakeResultsInput, TakeResultsResult)
COLLECT_OUTPUTS = ActivityStub("collect_outputs", CollectOutputsInput, CollectOutputsResult)
DELIVER_OUTPUTS = ActivityStub("deliver_outputs", DeliverOutputsInput, DeliverOutputsResult)
FETCH_FILES = ActivityStub("fetch_files", FetchFilesInput, FetchFilesResult)
LOAD_SKILL = ActivityStub("load_skill", LoadSkillInput, LoadSkillResult)
LIST_MCP_TOOLS = ActivityStub("list_mcp_tools", ListMcpToolsInput, ListMcpToolsResult)
CALL_MCP_TOOL = ActivityStub("call_mcp_tool", CallMcpToolInput, CallMcpToolResult)
WRITE_FILES = ActivityStub("write_files", WriteFilesInput, WriteFilesResult)
END_STRAYS = ActivityStub("end_strays", EndStraysInput, EndStraysResult)
CLOSE_SANDBOX = ActivityStub("close_sandbox", CloseSandboxInput, CloseSandboxResult)


@dataclass(frozen=True)
class Queues:
    """Task queue names, all made from the one that runs are started on."""

    workflow: str

    @property
    def model(self) -> str:
        """Model calls: the only workers with a model key."""
        return f"{self.workflow}-model"

    @property
    def tools(self) -> str:
        """Harness work that reads the company's files and stores."""
        return f"{self.workflow}-tools"

    @property
    def sandbox(self) -> str:
        """Where any sandbox worker may make a sandbox."""
        return f"{self.workflow}-sandbox"

    def sandbox_host(self, host: str) -> str:
        """Where one host's sandboxes are reached."""
        return f"{self.workflow}-sandbox.{host}"


class ErrorType:
    """The `type` of every ApplicationError that Caisson raises, by which workflows and services tell them apart."""

    BAD_INPUT = "BadInput"
    MODEL_RETRY = "ModelUnavailable"
    MODEL_STOP = "ModelStopped"
    SANDBOX_GONE = "SandboxGone"
    HOST_LOST = "HostLost"
    SANDBOX_UNAVAILABLE = "SandboxUnavailable"
    SANDBOX_STOP = "SandboxRefused"
    WORKER_SHUTDOWN = "WorkerShutdown"
    RUN_FAILED = "RunFailed"
