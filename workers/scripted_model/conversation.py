"""Reading a request: which turn it asks for, what came back since the last one, and what it may not contain.

All of it is a function of the request alone, so that a retry, a restarted server or a second server gives the same answer.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, JsonValue

# The items a model produces. What stands between two groups of them came from the harness.
_MODEL_ITEMS = frozenset(
    {"reasoning", "compaction", "function_call", "custom_tool_call", "shell_call", "local_shell_call", "apply_patch_call"}
)
_SEALED = "scripted:"
_CALL_OF_OUTPUT = {
    "function_call_output": "function_call",
    "custom_tool_call_output": "custom_tool_call",
    "shell_call_output": "shell_call",
    "apply_patch_call_output": "apply_patch_call",
}


class RequestFault(Exception):
    """The request cannot be answered; the message is what the endpoint's error says."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InputItem(BaseModel):
    """One item of a request's input; fields that are not needed here are kept."""

    model_config = ConfigDict(extra="allow")

    type: str = "message"
    id: str | None = None
    role: str | None = None
    call_id: str | None = None
    content: JsonValue = None
    output: JsonValue = None
    encrypted_content: str | None = None

    @property
    def from_model(self) -> bool:
        """Tell whether a model produced this item."""
        return self.type in _MODEL_ITEMS or (self.type == "message" and self.role == "assistant")


class ReasoningOptions(BaseModel):
    """What a request says about reasoning."""

    model_config = ConfigDict(extra="allow")

    summary: str | None = None


class ContextManagement(BaseModel):
    """An entry of `context_management`."""

    model_config = ConfigDict(extra="allow")

    type: str
    compact_threshold: int | None = None


class CreateRequest(BaseModel):
    """The part of `POST /v1/responses` that the scripted model reads; the rest is accepted and echoed."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    reasoning: ReasoningOptions | None = None
    context_management: list[ContextManagement] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: JsonValue = None
    prompt_cache_key: str | None = None

    def compacts(self, tokens: int) -> bool:
        """Tell whether a request of so many tokens is to be compacted."""
        return any(
            entry.type == "compaction" and entry.compact_threshold is not None and tokens >= entry.compact_threshold
            for entry in self.context_management or ()
        )

    def items(self) -> list[InputItem]:
        """Return the input as items; a bare string is one user message."""
        if isinstance(self.input, str):
            return [InputItem(role="user", content=self.input)]
        return self.input


def text_of(value: JsonValue) -> str:
    """Return the text in an item's `content` or `output`: a string, or parts with text, stdout or stderr."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, (text_of(part) for part in value)))
    if isinstance(value, dict):
        return "\n".join(filter(None, (text_of(value[key]) for key in ("text", "stdout", "stderr") if key in value)))
    return ""


def groups(items: Iterable[InputItem]) -> list[list[InputItem]]:
    """Return the runs of consecutive model-produced items: the turns that were already taken."""
    found: list[list[InputItem]] = []
    inside = False
    for item in items:
        if item.from_model:
            if not inside:
                found.append([])
            found[-1].append(item)
        inside = item.from_model
    return found


class Compacted(BaseModel):
    """What a compaction item stands for: the turn that it begins, in the conversation and in its scenario, and which that is.

    `text` is the message that the scenario was found by; `later` says that it was not the first.
    """

    turn: int = 1
    number: int = 1
    text: str = ""
    later: bool = False

    def seal(self) -> str:
        """Return it as an item's encrypted content (here: encoded)."""
        return _SEALED + base64.b64encode(self.model_dump_json().encode()).decode()


def compacted(items: Sequence[InputItem]) -> tuple[int, Compacted]:
    """Return where the last compaction item stands, and what it stands for; (0, nothing) where there is none.

    Raises RequestFault for one that comes from elsewhere.
    """
    for index in range(len(items) - 1, -1, -1):
        if items[index].type == "compaction":
            try:
                sealed = (items[index].encrypted_content or "").removeprefix(_SEALED)
                return index, Compacted.model_validate_json(base64.b64decode(sealed, validate=True))
            except ValueError:
                raise RequestFault("The encrypted content for a compaction item could not be verified.", param="input") from None
    return 0, Compacted()


def first_user_text(items: Sequence[InputItem]) -> str:
    """Return the text of the first user message, or an empty string."""
    return next((text_of(item.content) for item in items if item.type == "message" and item.role == "user"), "")


def conversation_key(prompt_cache_key: str | None, items: Sequence[InputItem]) -> str:
    """Return what names a conversation: the request's cache key, else a digest of its first user message."""
    if prompt_cache_key:
        return prompt_cache_key
    return hashlib.sha256(first_user_text(items).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def since_last_turn(items: list[InputItem]) -> list[InputItem]:
    """Return the items after the last model-produced one."""
    for index in range(len(items) - 1, -1, -1):
        if items[index].from_model:
            return items[index + 1 :]
    return items


def output_texts(items: Iterable[InputItem]) -> list[str]:
    """Return the text of each tool output, in order."""
    return [text_of(item.output) for item in items if item.type in _CALL_OF_OUTPUT]


def message_texts(items: Iterable[InputItem]) -> list[str]:
    """Return the text of each message that does not come from the model, in order."""
    return [text_of(item.content) for item in items if item.type == "message" and item.role != "assistant"]


def check_input(items: list[InputItem]) -> None:
    """Refuse what the real endpoint refuses about pairs of items. Raises RequestFault.

    Calls and outputs belong together, and a reasoning item is followed by the item it led to. The messages follow those
    in openai/openai-agents-python#1660 and anthropics/claude-code#21041.
    """
    ids = Counter(item.id for item in items if item.id is not None)
    double = next((item_id for item_id, count in ids.items() if count > 1), None)
    if double is not None:
        raise RequestFault(f"Duplicate item found with id {double}. Remove duplicate items and try again.", param="input")
    calls = {(item.type, item.call_id) for item in items}
    outputs = {(_CALL_OF_OUTPUT[item.type], item.call_id) for item in items if item.type in _CALL_OF_OUTPUT}
    for index, item in enumerate(items):
        if item.type == "reasoning" and not (index + 1 < len(items) and items[index + 1].from_model):
            raise RequestFault(
                f"Item '{item.id}' of type 'reasoning' was provided without its required following item.", param="input"
            )
        if item.type in _CALL_OF_OUTPUT and (_CALL_OF_OUTPUT[item.type], item.call_id) not in calls:
            raise RequestFault(f"No tool call found for function call output with call_id {item.call_id}.", param="input")
        if item.type in _CALL_OF_OUTPUT.values() and (item.type, item.call_id) not in outputs:
            raise RequestFault(f"No tool output found for function call {item.call_id}.", param="input")
