"""Which activities and workflows each role has, built from the settings. The only place that knows all concrete classes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from activities.agents import AgentDirectory, PrepareActivities
from activities.model.prices import load_prices
from activities.sandbox.port import SandboxProvider
from activities.store.blobs import BlobStore
from contracts.activity_names import Queues
from workers.settings import Role, Settings, bare_environment


@dataclass(frozen=True)
class Crew:
    """What one worker does on one task queue."""

    queue: str
    activities: Sequence[Callable[..., Any]] = ()
    workflows: Sequence[type] = ()
    slots: int = 100
    grace: timedelta = field(default=timedelta(seconds=10))
    """How long work in flight may go on after SIGTERM before it is handed to another worker."""
    close: Callable[[], Awaitable[None]] | None = None
    """What is put away once the worker has stopped."""


def crews(role: Role, settings: Settings, blobs: BlobStore) -> list[Crew]:
    """Build the crews of a role. SDKs that the role does not use are not imported."""
    return _BUILDERS[role](settings, blobs, Queues(settings.task_queue))


def _workflow(settings: Settings, blobs: BlobStore, queues: Queues) -> list[Crew]:
    from activities.model.entries import RecordActivities
    from workflows.agent_batch import AgentBatch
    from workflows.agent_run import AgentRun

    prepare = PrepareActivities(AgentDirectory(settings.agents), blobs, load_prices(settings.prices), settings.model)
    return [Crew(queues.workflow, [prepare.prepare_run, RecordActivities(blobs).record_end], [AgentRun, AgentBatch])]


def _model(settings: Settings, blobs: BlobStore, queues: Queues) -> list[Crew]:
    from activities.model.activity import ModelActivities
    from activities.model.client import make_client

    key = settings.openai_api_key.get_secret_value() if settings.openai_api_key else ""
    model = ModelActivities(make_client(key, settings.openai_base_url), blobs, load_prices(settings.prices))
    return [Crew(queues.model, [model.call_model], slots=settings.model_slots, grace=timedelta(seconds=30))]


def _tools(settings: Settings, blobs: BlobStore, queues: Queues) -> list[Crew]:
    from activities.governance.secrets import Secrets
    from activities.tools.mcp.activity import McpActivities
    from activities.tools.mcp.servers import McpServers
    from activities.tools.mcp.sessions import SessionPool
    from activities.tools.skill_activity import SkillActivities
    from activities.workspace.deliver import DeliverActivities
    from activities.workspace.fetch import ManifestActivities
    from activities.workspace.lazy_activity import LazyActivities
    from activities.workspace.sources.git_access import GitReach

    secrets = Secrets(settings.secrets)
    reach = GitReach(settings.git_private, allow_http=settings.git_http, ca_file=settings.git_ca_file)
    manifest = ManifestActivities(blobs, settings.local_roots, secrets, settings.spool, reach)
    pool = SessionPool()
    mcp = McpActivities(blobs, McpServers(settings.mcp, secrets, bare_environment()), pool)
    everything: list[Callable[..., Any]] = [
        manifest.fetch_manifest,
        LazyActivities(blobs, secrets).fetch_files,
        DeliverActivities(blobs, secrets).deliver_outputs,
        SkillActivities(blobs).load_skill,
        mcp.list_mcp_tools,
        mcp.call_mcp_tool,
    ]
    return [Crew(queues.tools, everything, close=pool.close)]


def provider_factories(settings: Settings) -> dict[str, Callable[[], SandboxProvider]]:
    """Return how each provider is made that settings can say something of. Each raises SandboxAuth where its key is missing."""
    from activities.governance.egress_process import proxy_command
    from activities.sandbox.port import SandboxAuth
    from activities.sandbox.registry import provider_class

    def local() -> SandboxProvider:
        return provider_class("local")(settings.sandbox_dir, proxy=proxy_command(settings.egress_private))

    def e2b() -> SandboxProvider:
        if settings.e2b_api_key is None:
            raise SandboxAuth("sandbox.provider: e2b needs E2B_API_KEY; set it in the environment of the sandbox workers alone")
        where = {"domain": settings.e2b_domain, "api_url": settings.e2b_api_url, "sandbox_url": settings.e2b_sandbox_url}
        return provider_class("e2b")(settings.e2b_api_key.get_secret_value(), template=settings.e2b_template, **where)

    def modal() -> SandboxProvider:
        if settings.modal_token_id is None or settings.modal_token_secret is None:
            raise SandboxAuth(
                "sandbox.provider: modal needs MODAL_TOKEN_ID and MODAL_TOKEN_SECRET; set them in the environment of the sandbox "
                "workers alone"
            )
        token = settings.modal_token_id, settings.modal_token_secret.get_secret_value()
        return provider_class("modal")(*token, settings.modal_app, environment=settings.modal_environment)

    def docker() -> SandboxProvider:
        return provider_class("docker")(
            settings.docker_host,
            image=settings.docker_image,
            pull=settings.docker_pull,
            workspace=settings.docker_workspace,
            certificates=settings.docker_cert_path,
        )

    return {"local": local, "docker": docker, "e2b": e2b, "modal": modal}


def _sandbox(settings: Settings, blobs: BlobStore, queues: Queues) -> list[Crew]:
    from activities.sandbox.activity import SandboxActivities
    from activities.sandbox.registry import ProviderRegistry
    from activities.sandbox.turns import Turns
    from activities.workspace.activity import WorkspaceActivities
    from activities.workspace.keeper import WorkspaceKeeper

    providers = ProviderRegistry(provider_factories(settings))
    keeper = WorkspaceKeeper(providers, blobs)
    turns = Turns(settings.sandbox_slots)
    sandbox = SandboxActivities(providers, blobs, keeper, queues, settings.sandbox_host, turns)
    workspace = WorkspaceActivities(providers, blobs, keeper, turns)
    everything: list[Callable[..., Any]] = [
        sandbox.open_sandbox,
        sandbox.close_sandbox,
        sandbox.end_strays,
        sandbox.resume_sandbox,
        sandbox.run_shell,
        sandbox.apply_patch,
        workspace.restore_workspace,
        workspace.snapshot_workspace,
        workspace.run_setup,
        workspace.take_results,
        workspace.write_files,
        workspace.collect_outputs,
    ]
    # Commands outlive their worker, so a short grace loses nothing: the next worker finds them running.
    grace = timedelta(seconds=5)
    return [
        Crew(queues.sandbox, everything, slots=TAKEN_UP, grace=grace),
        Crew(queues.sandbox_host(settings.sandbox_host), everything, slots=TAKEN_UP, grace=grace),
    ]


TAKEN_UP = 1000
"""Calls that a sandbox worker takes up at one time; how many commands run is decided there, by turns."""

_BUILDERS: dict[Role, Callable[[Settings, BlobStore, Queues], list[Crew]]] = {
    Role.WORKFLOW: _workflow,
    Role.MODEL: _model,
    Role.SANDBOX: _sandbox,
    Role.TOOLS: _tools,
}
