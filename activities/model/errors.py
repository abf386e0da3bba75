"""What an error of the model endpoint means: retry (when?), or stop (and say what to do). Decided here and nowhere else."""

from __future__ import annotations

import email.utils
import itertools
import json
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import httpx2
import openai
from temporalio.exceptions import ApplicationError

from activities.model.shown import shortened
from contracts.activity_names import ErrorType
from contracts.blob import whole_characters

MIN_RETRY_AFTER = timedelta(milliseconds=100)
"""The shortest wait that a server may ask for: below it, all attempts would be used up at once."""
MAX_RETRY_AFTER = timedelta(minutes=15)
"""The longest wait that a server may ask for; a longer one is cut to this, and the run's wall-time budget bounds the rest."""

_RETRY_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_STOP_CODES = {
    "insufficient_quota": "the account's quota is used up: add credit, or use another key",
    "billing_hard_limit_reached": "the account's spending limit is reached: raise it, or use another key",
    "invalid_api_key": "the key is refused: set a valid OPENAI_API_KEY for the model worker",
    "model_not_found": "the model does not exist or the key may not use it: correct `model` in the agent",
    "context_length_exceeded": (
        "the transcript is longer than the model's context: set model_settings.compact_tokens, or take a larger model"
    ),
}
_RETRY_CODES = frozenset({"server_error", "rate_limit_exceeded", "rate_limit_error", "overloaded_error", "vector_store_timeout"})
_REMEDIES = {
    400: "the endpoint refused the request: see its message, and check the agent's model and model_settings",
    401: "the key is refused: set a valid OPENAI_API_KEY for the model worker",
    402: "the account has no credit left: add credit, or use another key",
    403: "the key may not do this: check the key's project, its permissions and its region",
    404: "the endpoint or the model does not exist: check `model` in the agent and OPENAI_BASE_URL",
    413: "the request is too large for the endpoint: use smaller tool outputs",
    422: "the endpoint refused the request: see its message, and check the agent's model_settings and tools",
}
_WORDS = 600
"""Characters of foreign words in a message, which people read and history keeps."""
_LOOKED_AT = 60_000
"""Characters of foreign words in which secrets are looked for before they are cut."""
_LEVELS = 4


class ReplyFault(Exception):
    """The endpoint answered, but not with a whole response: a cut stream, an error event, a failed response.

    `codes` are what the endpoint calls it: its `code` and its `type`, as far as there are any.
    """

    def __init__(self, message: str, *codes: str) -> None:
        super().__init__(message)
        self.message = message
        self.codes = codes


@dataclass(frozen=True)
class ErrorBody:
    """What an endpoint says of an error, in whatever form: its own words, and the codes by which it names it."""

    words: str | None = None
    codes: tuple[str, ...] = ()


def read_error(body: object, levels: int = _LEVELS) -> ErrorBody:
    """Read an error of any form in use: an object, one within `error` or `detail`, a list of them, or plain text."""
    if isinstance(body, str):
        return ErrorBody(" ".join(body[:_LOOKED_AT].split()) or None)
    if isinstance(body, list):
        return read_error(body[0], levels - 1) if body and levels else ErrorBody()
    if not isinstance(body, Mapping):
        return ErrorBody()
    said = next((body[name] for name in ("message", "msg") if isinstance(body.get(name), str) and body[name]), None)
    codes = tuple(str(body[name]) for name in ("code", "type") if isinstance(body.get(name), (str, int)) and body[name])
    inner = next((body[name] for name in ("error", "detail", "errors") if body.get(name)), None)
    within = read_error(inner, levels - 1) if levels else ErrorBody()
    return ErrorBody(said or within.words, codes + within.codes)


@dataclass(frozen=True)
class _Meaning:
    """What happened and in whose words; it is retried, after `delay` if the server named one, unless a `remedy` is needed."""

    what: str
    words: str
    remedy: str | None = None
    delay: timedelta | None = None


def translate(error: Exception, now: datetime | None = None, hide: Callable[[str], str] = str) -> ApplicationError:
    """Turn any error of a model call into the one failure that Temporal acts on.

    Retryable ones have type `ModelUnavailable`, with the server's own waiting time as `next_retry_delay` where it gave one;
    final ones have type `ModelStopped`, and their message says what a person must do. `hide` takes secrets out of the message;
    it is short, and can be encoded, whatever the endpoint sends.
    """
    meaning = _meaning(error, now or datetime.now(UTC))
    words = shortened(whole_characters(hide(meaning.words[:_LOOKED_AT])), _WORDS)
    message = ": ".join(part for part in (meaning.what, words) if part)
    if meaning.remedy is not None:
        return ApplicationError(f"{message} - {meaning.remedy}", type=ErrorType.MODEL_STOP, non_retryable=True)
    return ApplicationError(message, type=ErrorType.MODEL_RETRY, next_retry_delay=meaning.delay)


def retry_after(headers: Mapping[str, str], now: datetime) -> timedelta | None:
    """Return how long the server asks to wait (`retry-after-ms`, or `retry-after` in seconds or as an HTTP date).

    None when it asks for nothing, or for no wait at all: then Temporal's own backoff holds. Source: RFC 9110 section 10.2.3;
    `retry-after-ms` is the OpenAI service's finer form, which wins.
    """
    asked = headers.get("retry-after", "")
    for seconds in (_number(headers.get("retry-after-ms", ""), 1000), _number(asked), _until(asked, now)):
        if seconds is not None and seconds > 0:
            return max(timedelta(seconds=min(seconds, MAX_RETRY_AFTER.total_seconds())), MIN_RETRY_AFTER)
    return None


def _meaning(error: Exception, now: datetime) -> _Meaning:
    if isinstance(error, openai.APIStatusError):
        return _of_status(error, now)
    if isinstance(error, ReplyFault):
        return _Meaning("", error.message, _remedy_of(error.codes))
    if isinstance(error, openai.APITimeoutError):
        return _Meaning("no reply in time", _causes(error))
    if isinstance(error, openai.APIConnectionError):
        if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _chain(error)):
            return _Meaning(
                "the endpoint's certificate is not trusted", _causes(error), "check OPENAI_BASE_URL and SSL_CERT_FILE"
            )
        return _Meaning("the connection failed", _causes(error))
    if isinstance(error, openai.APIError):
        said = read_error(error.body)
        return _Meaning("the stream ended with an error", said.words or error.message, _remedy_of(said.codes))
    if isinstance(error, (httpx2.HTTPError, json.JSONDecodeError, UnicodeDecodeError)):
        return _Meaning("the reply broke off or is not what the API sends", _causes(error))
    if isinstance(error, openai.OpenAIError):
        return _Meaning("", str(error), "check the model worker's settings")
    return _Meaning("model call", f"{type(error).__name__}: {error}")


def _of_status(error: openai.APIStatusError, now: datetime) -> _Meaning:
    said = read_error(error.body)
    what, words = f"the model endpoint answered {error.status_code}", said.words or error.message
    for code in said.codes:
        if code in _STOP_CODES:
            return _Meaning(what, words, _STOP_CODES[code])
    if error.status_code in _RETRY_STATUS or error.status_code >= 500:
        return _Meaning(what, words, delay=retry_after(error.response.headers, now))
    return _Meaning(what, words, _REMEDIES.get(error.status_code, _REMEDIES[400]))


def _remedy_of(codes: Iterable[str]) -> str | None:
    """Say what a person must do about a reply that broke off, or None when asking again may help.

    It is retried unless it says why it can never succeed: an unknown code is more often an outage.
    """
    named = tuple(codes)
    for code in named:
        if code in _STOP_CODES:
            return _STOP_CODES[code]
    if any(code in _RETRY_CODES for code in named):
        return None
    # Some endpoints give the HTTP status that they met behind them as the code.
    statuses = [int(code) for code in named if len(code) == 3 and code.isascii() and code.isdecimal()]
    if statuses:
        return _REMEDIES.get(statuses[0])
    if any(code.startswith("invalid_") or code.endswith("_not_found") for code in named):
        return _REMEDIES[400]
    return None


def _number(text: str, parts: int = 1) -> float | None:
    """The number that a header begins with; a header that was sent twice arrives as both values behind each other."""
    try:
        return float(text.partition(",")[0]) / parts
    except ValueError:
        return None


def _until(text: str, now: datetime) -> float | None:
    try:
        at = email.utils.parsedate_to_datetime(text)
        return ((at if at.tzinfo else at.replace(tzinfo=UTC)) - now).total_seconds()
    except (ValueError, OverflowError):
        return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    # Not every layer says `raise ... from`, so what was being handled counts as a cause too.
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def _causes(error: BaseException) -> str:
    parts = [str(cause) or type(cause).__name__ for cause in itertools.islice(_chain(error), 4)]
    return ": ".join(dict.fromkeys(parts))
