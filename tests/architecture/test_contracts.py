"""Activities are what their stubs say, and the published JSON Schemas are what the types are."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from temporalio import activity

from activities.agents import PrepareActivities
from activities.model.activity import ModelActivities
from activities.model.entries import RecordActivities
from activities.sandbox.activity import SandboxActivities
from activities.tools.mcp.activity import McpActivities
from activities.tools.skill_activity import SkillActivities
from activities.workspace.activity import WorkspaceActivities
from activities.workspace.deliver import DeliverActivities
from activities.workspace.fetch import ManifestActivities
from activities.workspace.lazy_activity import LazyActivities
from contracts import activity_names
from contracts.activity_names import ActivityStub
from contracts.base import Contract
from contracts.schemas import PUBLISHED, schema_text

STUBS = {value.name: value for value in vars(activity_names).values() if isinstance(value, ActivityStub)}
CLASSES = (
    PrepareActivities,
    ModelActivities,
    RecordActivities,
    SandboxActivities,
    WorkspaceActivities,
    ManifestActivities,
    DeliverActivities,
    LazyActivities,
    McpActivities,
    SkillActivities,
)


def implementations() -> dict[str, Any]:
    """Every activity method by its registered name."""
    found: dict[str, Any] = {}
    for cls in CLASSES:
        for _, method in inspect.getmembers(cls, inspect.isfunction):
            definition = activity._Definition.from_callable(method)
            if definition is not None and definition.name is not None:
                found[definition.name] = method
    return found


def test_every_stub_has_its_activity_and_every_activity_its_stub() -> None:
    """No name is promised and not kept, and none is registered that workflows cannot call."""
    assert set(implementations()) == set(STUBS)


@pytest.mark.parametrize("name", sorted(STUBS))
def test_an_activity_has_one_argument_and_one_result(name: str) -> None:
    """Both are the stub's, pydantic models that refuse unknown fields."""
    method = implementations()[name]
    hints = get_type_hints(method)
    result = hints.pop("return")
    assert list(hints.values()) == [STUBS[name].input]
    assert result is STUBS[name].result
    for model in (STUBS[name].input, STUBS[name].result):
        assert issubclass(model, Contract)
        assert model.model_config.get("extra") == "forbid"


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_schemas_are_current(name: str) -> None:
    """`python -m contracts.schemas` writes them anew."""
    path = Path("contracts/schemas") / f"{name}.json"
    assert path.read_text() == schema_text(name), f"{path} is not current; run: python -m contracts.schemas"
