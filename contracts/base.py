"""The base of every contract, and how a validation error is told to a person."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, JsonValue, ValidationError


class Contract(BaseModel):
    """A frozen type that refuses unknown fields, so that a misspelt name is an error and not a silent default.

    It refuses numbers that are not finite too, wherever they stand: no JSON could carry them on.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BadInput(ValueError):
    """What a person gave cannot be used. The message names the field, the value found, and what to do."""


class GivenTwice(ValueError):
    """A field stands twice in one object."""


def no_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, for `object_pairs_hook`. Raises GivenTwice, as one of two values would be lost without a word."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise GivenTwice(f"the field {name[:200]!r} is given twice in one object; keep one of them")
        result[name] = value
    return result


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")
    return value


NOT_BOOLEAN = BeforeValidator(_no_boolean)
"""Of a number: `true` is not read as 1."""


def canonical_json(value: JsonValue | dict[str, Any] | list[Any]) -> bytes:
    """Encode `value` so that equal values give equal bytes: sorted keys, no white space, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def sha256_hex(data: bytes) -> str:
    """Return the SHA-256 of `data` as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def contract_digest(contract: BaseModel) -> str:
    """Return the SHA-256 of a contract's canonical JSON, the identity of a spec."""
    return sha256_hex(canonical_json(contract.model_dump(mode="json")))


MAX_FAULTS, MAX_TOLD = 20, 8000
"""Faults that are told of one input, and characters of all of them: a failure that is too large could not be reported at all."""

CREDENTIAL = r"(?:sk-[a-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY)"
"""The forms of common credentials."""
CREDENTIAL_NAME = re.compile(r"(?i)(secret|token|password|passwd|api_?key|credential|private_?key)")
_CREDENTIAL = re.compile(rf"(?i)(?<![a-z0-9]){CREDENTIAL}")
_UNTOLD = frozenset(("url", "endpoint", "secret", "environment", "options"))
"""Fields whose values are never repeated: people put credentials there by mistake."""

_BRANCH = re.compile(r"^[(\[]|^[a-z-]+\[|^(constrained-)?(str|int|float|bool)$")
_ENTRY_OR_TOOL = frozenset(("inline", "local", "git", "s3", "r2", "gcs", "azure", "snapshot", "shell", "apply_patch", "activity"))
_WHOLE_JSON = ("output_schema", "parameters")


def explain(error: ValidationError, what: str) -> str:
    """Tell a person which fields of `what` are wrong, what was found, and what is expected, one line a fault.

    Of many faults the first are told, and how many more there are. What could be a credential is not repeated.
    """
    lines = [f"{_short(what, 400)} cannot be used:"]
    lines += map(_told, error.errors(include_url=False)[:MAX_FAULTS])
    while sum(map(len, lines)) > MAX_TOLD:
        lines.pop()
    if more := error.error_count() - len(lines) + 1:
        lines.append(f"  and {more} more")
    return "\n".join(lines)


def _told(fault: Mapping[str, Any]) -> str:
    parts = _names(fault["loc"], fault["type"])
    found, context = fault.get("input"), fault.get("ctx", {})
    message = fault["msg"].removeprefix("Value error, ").replace("valid tuple", "valid list")
    shown = ""
    if fault["type"] == "extra_forbidden":
        message = "unknown field; remove it or correct its name"
    elif fault["type"] == "missing":
        message = "required, but missing"
    elif fault["type"] == "union_tag_invalid":
        message = f"no type is named {context['tag']!r}; there are: {context['expected_tags']}"
    elif not isinstance(found, (dict, BaseModel)) and "credential" not in message and not _is_untold(parts):
        # A rule on a whole object says itself what is wrong.
        shown = _shown(found)
    field = "".join(c if c.isprintable() else "\ufffd" for c in _short(".".join(parts), 200)) or "(the whole input)"
    return f"  {_CREDENTIAL.sub('...', field)}: {_CREDENTIAL.sub('...', _short(message, 400))}{shown}"


def _shown(found: object) -> str:
    try:
        shown = repr(found)
    except ValueError:  # a number of more digits than Python writes
        return ""
    return "" if _CREDENTIAL.search(shown) else f" (found {shown if len(shown) <= 80 else shown[:77] + '...'})"


def _names(place: Sequence[int | str], kind: str) -> list[str]:
    """Return the names in the input that lead to a fault, without pydantic's own names for the branches of a type."""
    parts: list[str] = []
    for n, part in enumerate(place):
        before = place[n - 2 : n] if n >= 2 else ()
        tags_follow = before and (before[0] == "entries" or (before[0] == "tools" and isinstance(before[1], int)))
        if tags_follow and part in _ENTRY_OR_TOOL:
            continue
        if part in _WHOLE_JSON and n + 1 < len(place):
            # Below, every other part is the kind of a JSON value.
            return [*parts, str(part), *(str(one) for one in place[n + 1 :: 2])]
        parts.append(str(part))
    is_name = kind in ("extra_forbidden", "missing")
    last = len(parts) - 1
    return [
        part
        for n, part in enumerate(parts)
        if not part.startswith(("(", "[")) and (is_name or n < last or not _BRANCH.match(part))
    ]


def _is_untold(parts: Sequence[str]) -> bool:
    return any(
        part in _UNTOLD or (CREDENTIAL_NAME.search(part) and part not in ("tokens", "max_output_tokens")) for part in parts
    )


def _short(text: str, length: int) -> str:
    """Cut a text in its middle, so that what stands at its end, such as a remedy, is still read."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= length else f"{text[: length // 2]}...{text[-(length // 2 - 3) :]}"
