"""The base of every contract, and how a validation error is told to a person."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError


class Contract(BaseModel):
    """A frozen type that refuses unknown fields, so that a misspelt name is an error and not a silent default."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class BadInput(ValueError):
    """What a person gave cannot be used. The message names the field, the value found, and what to do."""


def canonical_json(value: JsonValue | dict[str, Any] | list[Any]) -> bytes:
    """Encode `value` so that equal values give equal bytes: sorted keys, no white space, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def sha256_hex(data: bytes) -> str:
    """Return the SHA-256 of `data` as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def contract_digest(contract: BaseModel) -> str:
    """Return the SHA-256 of a contract's canonical JSON, the identity of a spec."""
    return sha256_hex(canonical_json(contract.model_dump(mode="json")))


def explain(error: ValidationError, what: str) -> str:
    """Tell a person which fields of `what` are wrong, what was found, and what is expected, one line a fault."""
    lines = [f"{what} cannot be used:"]
    for fault in error.errors(include_url=False):
        # A part in parentheses or brackets is pydantic's name for a branch of a type, not a name in the input.
        parts = [str(part) for part in fault["loc"] if not str(part).startswith(("(", "["))]
        field = ".".join(parts) or "(the whole input)"
        found, context = fault.get("input"), fault.get("ctx", {})
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            lines.append(f"  {field}: unknown field; remove it or correct its name")
        elif fault["type"] == "missing":
            lines.append(f"  {field}: required, but missing")
        elif fault["type"] == "union_tag_invalid":
            lines.append(f"  {field}: no type is named {context['tag']!r}; there are: {context['expected_tags']}")
        elif isinstance(found, (dict, BaseModel)) or "credential" in message:
            # A rule on a whole object says itself what is wrong; what must not be repeated, such as a key, is not.
            lines.append(f"  {field}: {message}")
        else:
            shown = repr(found)
            shown = shown if len(shown) <= 80 else shown[:77] + "..."
            lines.append(f"  {field}: {message} (found {shown})")
    return "\n".join(lines)
