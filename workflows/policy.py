"""What policy says of one tool call. Pure: the same call under the same policy always gets the same verdict."""

from __future__ import annotations

from contracts.agent import ApprovalPolicy, Verdict
from contracts.model import ToolCall


def decide(policy: ApprovalPolicy, call: ToolCall) -> Verdict:
    """Return the verdict for a call: its tool's own, or the policy's default."""
    return policy.tools.get(call.name, policy.default)
