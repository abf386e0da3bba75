"""Agents: reading them from the agent directory, resolving one for a run, and giving it to activities by reference."""

from __future__ import annotations

import asyncio
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.json_schemas import check_schema
from activities.model.prices import PriceTable
from activities.plain_yaml import read_yaml
from activities.store.blobs import BlobStore
from activities.store.checkpoints import CheckpointStore, NoCheckpoint, RunStart
from activities.tools.definitions import compose_instructions, uses_sandbox
from activities.tools.guidance import read_guidance
from activities.workspace.snapshots import Contents, Scan, SnapshotStore
from activities.workspace.tree import HARD_LINK, Directory, Entry, find, walk
from contracts.activity_names import PREPARE_RUN, ErrorType
from contracts.agent import ActivityTool, AgentSpec, ShellTool
from contracts.base import BadInput, contract_digest, explain
from contracts.blob import BlobRef
from contracts.mcp import CALL_SECONDS
from contracts.prepare import ActivityRoute, Guidance, PrepareRunInput, PrepareRunResult, ResolvedAgent, RolePlan, RunPlan
from contracts.run import Checkpoint, RunInput, SubagentLink
from contracts.snapshot import SnapshotRef
from contracts.usage import Budget


class AgentDirectory:
    """Named agents: one YAML file `<name>.yaml` each, or `<name>.yml`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> list[str]:
        """Return the names of all agents, sorted."""
        return sorted(self._files())

    def load(self, name: str) -> AgentSpec:
        """Read an agent. Raises BadInput naming the file and field, or the names there are."""
        files = self._files()
        if name not in files:
            known = ", ".join(sorted(files)) or "none"
            raise BadInput(
                f"agent: no agent is named {name!r} in {self._root} (there: {known}); correct the name or add {name}.yaml"
            )
        path, *others = files[name]
        if others:
            raise BadInput(f"agent {name!r}: there are {path} and {others[0]}; remove one of them")
        try:
            raw = read_yaml(path)
        except BadInput as error:
            raise BadInput(f"agent {name!r}: {error}") from error
        if not isinstance(raw, dict):
            raise BadInput(f"agent {name!r}: {path} must hold a mapping of the fields of an agent spec")
        if raw.setdefault("name", name) != name:
            raise BadInput(f"agent {name!r}: {path} says name: {raw['name']!r}; the file and the agent must have one name")
        try:
            return AgentSpec.model_validate(raw)
        except ValidationError as error:
            raise BadInput(explain(error, f"agent {name!r} ({path})")) from error

    def _files(self) -> dict[str, list[Path]]:
        files: dict[str, list[Path]] = {}
        for ending in (".yaml", ".yml"):
            for path in self._root.glob(f"*{ending}") if self._root.is_dir() else ():
                files.setdefault(path.stem, []).append(path)
        return files


def resolve(
    request: RunInput, directory: AgentDirectory, default_model: str, origin: ResolvedAgent | None = None
) -> ResolvedAgent:
    """Decide everything about a run's agent: the named or inline spec, with the run's overrides, and the model.

    Without either it is that of `origin`, the run that this one goes on from, or the plain agent. A given budget replaces
    those of the agent's limits that it names; every other given field replaces the agent's whole.
    """
    if isinstance(request.agent, str):
        spec = directory.load(request.agent)
    else:
        spec = request.agent or (origin.spec if origin is not None else AgentSpec())
    names = ("manifest", "approvals", "sandbox", "output_schema")
    overrides = {name: value for name in names if (value := getattr(request, name)) is not None}
    if request.budget is not None:
        # Limit by limit: who bounds the tokens of a run does not mean to lift the agent's bound on its cost.
        overrides["budget"] = {**spec.budget.model_dump(), **request.budget.model_dump(exclude_unset=True)}
    try:
        # Validated again, because a rule may bind two fields of which only one was overridden.
        spec = AgentSpec.model_validate({**spec.model_dump(), **{n: _plain(v) for n, v in overrides.items()}})
    except ValidationError as error:
        raise BadInput(explain(error, "the agent with this run's overrides")) from error
    _check_schemas(spec)
    _check_roles(spec, directory, request.subagent.depth if request.subagent is not None else 0, set())
    inherited = origin.model if origin is not None and request.agent is None else None
    model = request.model or inherited or spec.model or default_model
    return ResolvedAgent(spec=spec, model=model, instructions=compose_instructions(spec))


def _plain(value: object) -> object:
    return value.model_dump() if hasattr(value, "model_dump") else value


def _check_schemas(spec: AgentSpec) -> None:
    if spec.output_schema is not None:
        check_schema("output_schema", spec.output_schema)
    for tool in spec.tools:
        if isinstance(tool, ActivityTool):
            check_schema(f"tools.{tool.name}.parameters", tool.parameters)
            if tool.parameters.get("type") != "object":
                raise BadInput(f"tools.{tool.name}.parameters: must describe an object (type: object); arguments are always one")


def _check_roles(spec: AgentSpec, directory: AgentDirectory, depth: int, known: set[str]) -> None:
    """Check the agents of all roles that can be started here, before a run spends anything. Raises BadInput naming the role.

    Those of a role with a task queue of its own are in the directory of other workers.
    """
    if depth >= spec.subagent_limits.depth or spec.subagent_limits.total == 0:
        return
    for role in spec.subagents:
        name = role.agent if isinstance(role.agent, str) else None
        if role.agent is None or role.task_queue is not None or name in known:
            continue
        try:
            agent = role.agent if isinstance(role.agent, AgentSpec) else directory.load(role.agent)
            if name is not None:
                known.add(name)
            _check_schemas(agent)
            _check_roles(agent, directory, depth + 1, known)
        except BadInput as error:
            raise BadInput(f"subagents.{role.name}: {error}") from None


class AgentReader:
    """Reads resolved agents from the store; the last ones stay in memory, since every step needs its own."""

    def __init__(self, blobs: BlobStore, capacity: int = 256) -> None:
        self._blobs = blobs
        self._capacity = capacity
        self._cache: OrderedDict[str, ResolvedAgent] = OrderedDict()

    async def get(self, ref: BlobRef) -> ResolvedAgent:
        """Return the agent that a run resolved."""
        if ref.digest not in self._cache:
            self._cache[ref.digest] = ResolvedAgent.model_validate(json.loads(await self._blobs.get(ref)))
        self._cache.move_to_end(ref.digest)
        while len(self._cache) > self._capacity:
            self._cache.popitem(last=False)
        return self._cache[ref.digest]


class PrepareActivities:
    """What happens before a run spends anything."""

    def __init__(self, directory: AgentDirectory, blobs: BlobStore, prices: PriceTable, default_model: str) -> None:
        self._directory = directory
        self._blobs = blobs
        self._prices = prices
        self._default_model = default_model
        self._checkpoints = CheckpointStore(blobs)

    @activity.defn(name=PREPARE_RUN.name)
    async def prepare_run(self, given: PrepareRunInput) -> PrepareRunResult:
        """Resolve and store the agent and the task. Raises ApplicationError `BadInput`, never retried."""
        try:
            request = RunInput.model_validate(given.request)
            origin, start = await self._origin(request)
            if request.subagent is not None:
                request, start = await self._as_subagent(request, request.subagent)
            # Files are read and schemas tried, which may take its time.
            agent = await asyncio.to_thread(resolve, request, self._directory, self._default_model, origin)
            if request.subagent is not None:
                agent = within(agent, request.subagent)
            guidance = await self._guidance(agent.spec, start)
            price_known = self._prices.of(agent.model) is not None
            if agent.spec.budget.cost_usd is not None and not price_known:
                raise BadInput(
                    f"budget.cost_usd: the price of model {agent.model!r} is unknown, so this limit could not be kept; "
                    "add the model to the price table, or limit budget.tokens instead"
                )
        except ValidationError as error:
            # An agent of a run that an earlier version began, which this one refuses.
            told = explain(error, "the agent of this run, or of the run that it goes on from,")
            raise ApplicationError(told, type=ErrorType.BAD_INPUT, non_retryable=True) from None
        except BadInput as error:
            raise ApplicationError(str(error), type=ErrorType.BAD_INPUT, non_retryable=True) from None
        prepared = PrepareRunResult(
            agent=await self._blobs.put_json(agent.model_dump(mode="json")),
            agent_digest=contract_digest(agent.spec),
            agent_name=agent.spec.name,
            model=agent.model,
            plan=await self._plan(agent.spec, request.subagent),
            task=await self._blobs.put_text(request.task),
            price_known=price_known,
            start=start,
            guidance=guidance,
        )
        begun = RunStart(
            run_id=given.run_id,
            chain=given.chain,
            started_at=activity.info().scheduled_time.timestamp(),
            agent=prepared.agent,
            agent_digest=prepared.agent_digest,
            agent_name=prepared.agent_name,
            task=prepared.task,
            labels=request.labels,
            origin=request.from_checkpoint,
        )
        await self._checkpoints.begin(begun)
        return prepared

    async def _guidance(self, spec: AgentSpec, start: Checkpoint | None) -> Guidance:
        """Return what the workspace that a run goes on from has for the model. Raises BadInput where skills can be nowhere."""
        if start is None or start.snapshot is None:
            if spec.skills and not spec.manifest.entries:
                raise BadInput(
                    "skills: the manifest brings no files, so that there are none; add an entry that fills the directory"
                )
            return Guidance()
        if not uses_sandbox(spec):
            return Guidance()
        goes_on = start.transcript is not None or bool(start.items)
        return (await read_guidance(self._blobs, start.snapshot, spec, again=goes_on))[0]

    async def _as_subagent(self, request: RunInput, link: SubagentLink) -> tuple[RunInput, Checkpoint | None]:
        """Return the request with its role's agent, and the workspace that it starts from. Raises BadInput."""
        if link.agent is not None:
            spec = AgentSpec.model_validate(json.loads(await self._blobs.get(link.agent)))
            request = request.model_copy(update={"agent": spec})
        if link.snapshot is None:
            return request, None
        snapshot = link.snapshot if link.paths is None else await pick(SnapshotStore(self._blobs), link.snapshot, link.paths)
        return request, Checkpoint(step=0, snapshot=snapshot)

    async def _plan(self, spec: AgentSpec, link: SubagentLink | None) -> RunPlan:
        depth = link.depth if link is not None else 0
        limits = spec.subagent_limits
        roles = [
            RolePlan(
                name=role.name,
                agent_name=role.agent if isinstance(role.agent, str) else None,
                agent=await self._blobs.put_json(role.agent.model_dump(mode="json"))
                if isinstance(role.agent, AgentSpec)
                else None,
                workspace=role.workspace,
                task_queue=role.task_queue,
                budget_share=role.budget_share,
            )
            for role in spec.subagents
        ]
        return plan_of(spec).model_copy(
            update={
                "roles": tuple(roles),
                "depth": depth,
                "depth_left": max(limits.depth - depth, 0) if link is not None else limits.depth,
                "subagents_left": limits.total if link is None else min(limits.total, link.allowance),
                "parallel_subagents": limits.parallel,
            }
        )

    async def _origin(self, request: RunInput) -> tuple[ResolvedAgent | None, Checkpoint | None]:
        """Return the agent and the checkpoint that a run goes on from, if it does. Raises BadInput."""
        if request.from_checkpoint is None:
            return None, None
        if request.manifest is not None:
            raise BadInput("manifest: a run from a checkpoint has the workspace of that checkpoint; leave the manifest out")
        try:
            start, checkpoint = await self._checkpoints.find(request.from_checkpoint)
        except NoCheckpoint as error:
            raise BadInput(f"from_checkpoint: {error}") from error
        return ResolvedAgent.model_validate(json.loads(await self._blobs.get(start.agent))), checkpoint


def within(agent: ResolvedAgent, link: SubagentLink) -> ResolvedAgent:
    """Return a subagent with no more budget than its parent gives it. Raises BadInput when it has two workspaces."""
    if link.snapshot is not None and agent.spec.manifest.entries:
        raise BadInput(
            "subagents: the role works on its parent's files, and its agent has manifest.entries of its own; "
            "give the role `workspace: own`, or take the entries out"
        )
    own, given = agent.spec.budget.model_dump(), link.budget.model_dump()
    least = {name: min((one for one in (own[name], given[name]) if one is not None), default=None) for name in own}
    return agent.model_copy(update={"spec": agent.spec.model_copy(update={"budget": Budget(**least)})})


async def pick(store: SnapshotStore, ref: SnapshotRef, paths: Sequence[str]) -> SnapshotRef:
    """Store a snapshot of some files and directories of another. Raises BadInput naming one that is not there."""
    root = (await store.load(ref)).root
    picked = Directory(root.mode, root.mtime, root.xattrs)
    for path in paths:
        parts = [os.fsencode(part) for part in path.split("/") if part not in ("", ".")]
        there = find(root, b"/".join(parts))
        if there is None or not parts:
            raise BadInput(f"subagents: inputs: there is no {path!r} in the parent's workspace; name files or directories of it")
        here = picked
        for part in parts[:-1]:
            below = here.children.setdefault(part, Directory(mtime=root.mtime))
            if not isinstance(below, Directory) or below.frame is not None:
                break  # it is brought already, as a part of a directory
            here = below
        else:
            here.children[parts[-1]] = _by_itself(root, there)
    return await store.save(Scan(picked), Contents(), None)


def _by_itself(root: Directory, entry: Entry | Directory) -> Entry | Directory:
    """Return a part of a tree without hard links, whose files may lie in another part."""
    if isinstance(entry, Entry):
        leader = find(root, entry.target) if entry.kind == HARD_LINK else entry
        return leader if isinstance(leader, Entry) else entry
    if not any(isinstance(below, Entry) and below.kind == HARD_LINK for _, below in walk(entry)):
        return entry
    children = {name: _by_itself(root, below) for name, below in entry.children.items()}
    return Directory(entry.mode, entry.mtime, entry.xattrs, children)


def plan_of(spec: AgentSpec) -> RunPlan:
    """Return what the workflow must know of an agent."""
    return RunPlan(
        budget=spec.budget,
        approvals=spec.approvals,
        sandbox=spec.sandbox,
        needs_sandbox=uses_sandbox(spec),
        has_entries=bool(spec.manifest.entries),
        has_schema=spec.output_schema is not None,
        environment=spec.manifest.environment,
        setup=tuple(command.strip().splitlines()[0][:80] for command in spec.manifest.setup),
        setup_seconds=spec.manifest.limits.setup_seconds,
        outputs=spec.manifest.outputs,
        model_seconds=spec.model_settings.timeout_seconds,
        shell_seconds=max((tool.max_timeout_seconds for tool in spec.tools if isinstance(tool, ShellTool)), default=60),
        mcp_servers={use.name: CALL_SECONDS for use in spec.mcp_servers},
        activity_tools={
            tool.name: ActivityRoute(
                activity=tool.activity,
                task_queue=tool.task_queue,
                timeout_seconds=tool.timeout_seconds,
                queue_seconds=tool.queue_seconds,
                max_attempts=tool.max_attempts,
            )
            for tool in spec.tools
            if isinstance(tool, ActivityTool)
        },
    )
