"""JSON Schemas of what people and services send and get, for those who write in other languages or in an editor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

from contracts.agent import AgentSpec
from contracts.base import Contract
from contracts.batch import BatchInput, BatchResult, BatchStatus
from contracts.run import (
    ApprovalDecision,
    Message,
    Reason,
    RunInput,
    RunResult,
    StatusReport,
    StepsPage,
    StepsPageInput,
)
from contracts.usage import BudgetExtension

PUBLISHED: Mapping[str, type[Contract]] = MappingProxyType(
    {
        "AgentSpec": AgentSpec,
        "ApprovalDecision": ApprovalDecision,
        "BatchInput": BatchInput,
        "BatchResult": BatchResult,
        "BatchStatus": BatchStatus,
        "BudgetExtension": BudgetExtension,
        "Message": Message,
        "Reason": Reason,
        "RunInput": RunInput,
        "RunResult": RunResult,
        "StatusReport": StatusReport,
        "StepsPage": StepsPage,
        "StepsPageInput": StepsPageInput,
    }
)
"""The published types by name; each is a file `<name>.json` beside this one."""


def schema_text(name: str) -> str:
    """Return the schema of a published type as it stands in its file."""
    return json.dumps(PUBLISHED[name].model_json_schema(), indent=2, sort_keys=True) + "\n"
