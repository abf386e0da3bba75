"""The scenario file: what a person writes, validated so that a mistake names the file and the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from contracts.base import BadInput, explain
from workers.scripted_model.templates import check_templates


def _check_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


Regex = Annotated[str, AfterValidator(_check_regex)]
Template = Annotated[str, AfterValidator(check_templates)]
TemplateJson = Annotated[dict[str, JsonValue], AfterValidator(check_templates)]


class ScenarioError(BadInput):
    """A scenario file cannot be read or does not describe a scenario."""


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HttpFault(_Spec):
    """The request is answered with an HTTP error; a `retry-after` date is computed when it is played."""

    kind: Literal["http"]
    status: int = Field(ge=400, le=599)
    headers: dict[str, str] = Field(default_factory=dict)
    body: JsonValue | None = None
    retry_after_date_s: float | None = Field(default=None, ge=0, description="sends Retry-After as an HTTP date")


class CutFault(_Spec):
    """The stream ends, as if it were whole, after some events: the SDK raises nothing."""

    kind: Literal["cut"]
    after_events: int = Field(default=3, ge=0)


class CutMidEventFault(_Spec):
    """The stream ends, as if it were whole, in the middle of the bytes of one event."""

    kind: Literal["cut_mid_event"]
    after_events: int = Field(default=3, ge=0)


class ErrorEventFault(_Spec):
    """The stream carries an `error` event and ends; without streaming it is an HTTP 500."""

    kind: Literal["error_event"]
    code: str = "server_error"
    message: str = "The server had an error while processing your request."
    after_events: int = Field(default=3, ge=0)


class FailedFault(_Spec):
    """The response ends with status `failed` and an error code."""

    kind: Literal["failed"]
    code: str = "server_error"
    message: str = "The model failed to generate a response."
    after_events: int = Field(default=2, ge=2)


class DisconnectFault(_Spec):
    """The TCP connection is reset, before any header (`after_events: 0`) or in the middle of the stream."""

    kind: Literal["disconnect"]
    after_events: int = Field(default=0, ge=0)


class HangFault(_Spec):
    """Nothing is sent for some seconds, then the connection is reset."""

    kind: Literal["hang"]
    seconds: float = Field(gt=0)
    after_events: int = Field(default=0, ge=0)


# Faults of the connection; the response itself is made, and in the background it can be retrieved.
ConnectionFault = CutFault | CutMidEventFault | DisconnectFault | HangFault

Fault = Annotated[
    HttpFault | CutFault | CutMidEventFault | ErrorEventFault | FailedFault | DisconnectFault | HangFault,
    Field(discriminator="kind"),
]


class CallSpec(_Spec):
    """One tool call. A mapping is sent as JSON; a string is sent as it is, so that it may be malformed."""

    name: str = Field(min_length=1)
    arguments: TemplateJson | Template = Field(default_factory=dict)
    call_id: str | None = Field(default=None, min_length=1, description="default: call_<turn>_<index>")


class UsageSpec(_Spec):
    """The token counts reported instead of the estimate by characters."""

    input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    cached_tokens: int = Field(default=0, ge=0)
    reasoning_tokens: int = Field(default=0, ge=0)


class TurnSpec(_Spec):
    """One model response: what must have come back before it, what it says, and how it fails first."""

    expect: Regex | None = Field(default=None, description="must be found in the tool outputs since the previous turn")
    expect_message: Regex | None = Field(default=None, description="must be found in the messages since then")
    reasoning: Template | None = None
    text: Template | None = None
    calls: tuple[CallSpec, ...] = ()
    status: Literal["completed", "incomplete", "refusal"] = "completed"
    incomplete_reason: Literal["max_output_tokens", "content_filter"] = "max_output_tokens"
    usage: UsageSpec | None = None
    delay_ms: int = Field(default=0, ge=0)
    chunk_delay_ms: int = Field(default=0, ge=0)
    faults: tuple[Fault, ...] = Field(default=(), description="one for each of the first attempts at this turn")

    @model_validator(mode="after")
    def _says_something(self) -> TurnSpec:
        if self.text is None and not self.calls and self.status != "incomplete":
            raise ValueError("a turn needs `text` or `calls`")
        if self.status == "refusal" and (self.text is None or self.calls):
            raise ValueError("a refusal has a `text`, which is the refusal, and no `calls`")
        return self


class RepeatBody(_Spec):
    """One turn played several times; `${turn}` in its strings is the turn's number."""

    times: int = Field(ge=1, le=1_000_000)
    turn: TurnSpec


class RepeatSpec(_Spec):
    """A run of equal turns, so that a run of 2,000 steps needs no 2,000 entries."""

    repeat: RepeatBody


class MatchSpec(_Spec):
    """Which requests a scenario answers; a pattern left out matches all."""

    model: Regex | None = None
    text: Regex | None = Field(default=None, description="in the first user message or the instructions")
    later: bool = Field(default=False, description="the scenario may also begin at a later user message that has the text")

    def matches(self, model: str, texts: tuple[str, ...]) -> bool:
        """Tell whether the request's `model` and one of its `texts` are what this scenario is for."""
        if self.model is not None and not re.search(self.model, model):
            return False
        return self.text is None or any(re.search(self.text, text) for text in texts)


class Scenario(_Spec):
    """A scripted conversation."""

    name: str = Field(min_length=1)
    match: MatchSpec = MatchSpec()
    turns: tuple[TurnSpec | RepeatSpec, ...] = Field(min_length=1)

    def turn(self, number: int) -> TurnSpec | None:
        """Return the turn with this number, counted from 1 through the repeats, or None after the last."""
        for entry in self.turns:
            times = entry.repeat.times if isinstance(entry, RepeatSpec) else 1
            if number <= times:
                return entry.repeat.turn if isinstance(entry, RepeatSpec) else entry
            number -= times
        return None

    def length(self) -> int:
        """Return how many turns the scenario has, repeats counted."""
        return sum(entry.repeat.times if isinstance(entry, RepeatSpec) else 1 for entry in self.turns)


class ScenarioFile(_Spec):
    """The whole file. The first scenario that matches a request is played."""

    scenarios: tuple[Scenario, ...] = Field(min_length=1)

    def find(self, model: str, texts: tuple[str, ...], *, later: bool = False) -> Scenario | None:
        """Return the first scenario for a request of `model` with these `texts`; `later`: of those that may begin later."""
        return next((one for one in self.scenarios if (one.match.later or not later) and one.match.matches(model, texts)), None)


def load_scenarios(*paths: Path) -> ScenarioFile:
    """Read scenario files, in order, as one. Raises ScenarioError, which names the file and the wrong field."""
    files = [_load(path) for path in paths]
    return ScenarioFile(scenarios=tuple(one for file in files for one in file.scenarios))


def _load(path: Path) -> ScenarioFile:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"scenario file {path} cannot be read: {error}") from error
    return parse_scenarios(text, str(path))


def parse_scenarios(text: str, origin: str) -> ScenarioFile:
    """Parse the YAML `text` of a scenario file; `origin` names it in errors. Raises ScenarioError."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ScenarioError(f"scenario file {origin} is not YAML: {error}") from error
    if not isinstance(value, dict):
        raise ScenarioError(f"scenario file {origin}: expected a mapping with `scenarios`")
    try:
        return ScenarioFile.model_validate(value)
    except ValidationError as error:
        raise ScenarioError(explain(error, f"scenario file {origin}")) from error
