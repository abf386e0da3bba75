"""What an error of the model endpoint means: retry (when?), or stop (and say what to do). Decided here and nowhere else."""

from __future__ import annotations

import email.utils
import itertools
import json
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import httpx2
import openai
from temporalio.exceptions import ApplicationError

from contracts.activity_names import ErrorType

MAX_RETRY_AFTER = timedelta(minutes=15)
"""The longest wait that a server may ask for; a longer one is cut to this, and the run's wall-time budget bounds the rest."""

_RETRY_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_STOP_CODES = {
    "insufficient_quota": "the account's quota is used up: add credit, or use another key",
    "billing_hard_limit_reached": "the account's spending limit is reached: raise it, or use another key",
    "invalid_api_key": "the key is refused: set a valid OPENAI_API_KEY for the model worker",
    "model_not_found": "the model does not exist or the key may not use it: correct `model` in the agent",
    "context_length_exceeded": "the transcript is longer than the model's context: use a model with a larger one",
}
_RETRY_CODES = frozenset({"server_error", "rate_limit_exceeded", "rate_limit_error", "overloaded_error", "vector_store_timeout"})
_REMEDIES = {
    400: "the endpoint refused the request: see its message, and check the agent's model and model_settings",
    401: "the key is refused: set a valid OPENAI_API_KEY for the model worker",
    403: "the key may not do this: check the key's project, its permissions and its region",
    404: "the endpoint or the model does not exist: check `model` in the agent and OPENAI_BASE_URL",
    413: "the request is too large for the endpoint: use smaller tool outputs",
    422: "the endpoint refused the request: see its message, and check the agent's model_settings and tools",
}


@dataclass(frozen=True)
class ReplyFault(Exception):
    """The endpoint answered, but not with a whole response: a cut stream, an error event, a failed response."""

    message: str
    code: str | None = None

    def __str__(self) -> str:
        return self.message


def translate(error: Exception, now: datetime | None = None) -> ApplicationError:
    """Turn any error of a model call into the one failure that Temporal acts on.

    Retryable ones have type `ModelUnavailable`, with the server's own waiting time as `next_retry_delay` where it gave one;
    final ones have type `ModelStopped`, and their message says what a person must do.
    """
    if isinstance(error, openai.APIStatusError):
        return _from_status(error, now or datetime.now(UTC))
    if isinstance(error, ReplyFault):
        return _from_code(error.code, error.message)
    if isinstance(error, openai.APITimeoutError):
        return _retry(f"no reply in time: {_causes(error)}")
    if isinstance(error, openai.APIConnectionError):
        if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _chain(error)):
            return _stop(f"the endpoint's certificate is not trusted: {_causes(error)} - check OPENAI_BASE_URL and SSL_CERT_FILE")
        return _retry(f"the connection failed: {_causes(error)}")
    if isinstance(error, openai.APIError):
        return _from_code(error.code, f"the stream ended with an error: {error.message}")
    if isinstance(error, (httpx2.HTTPError, json.JSONDecodeError, UnicodeDecodeError)):
        return _retry(f"the reply broke off or is not what the API sends: {_causes(error)}")
    if isinstance(error, openai.OpenAIError):
        return _stop(f"{error}: check the model worker's settings")
    return ApplicationError(f"model call: {type(error).__name__}: {error}", type=ErrorType.MODEL_RETRY)


def retry_after(headers: Mapping[str, str], now: datetime) -> timedelta | None:
    """Return how long the server asks to wait (`retry-after-ms`, or `retry-after` in seconds or as an HTTP date).

    Source: RFC 9110 section 10.2.3; `retry-after-ms` is the OpenAI service's finer form, which wins.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return _bounded(timedelta(milliseconds=milliseconds))
    asked = headers.get("retry-after")
    if asked is None:
        return None
    seconds = _number(asked)
    if seconds is not None:
        return _bounded(timedelta(seconds=seconds))
    try:
        at = email.utils.parsedate_to_datetime(asked)
    except ValueError:
        return None
    return _bounded((at if at.tzinfo else at.replace(tzinfo=UTC)) - now)


def _from_status(error: openai.APIStatusError, now: datetime) -> ApplicationError:
    message = f"the model endpoint answered {error.status_code}: {_shortened(_said(error))}"
    code = error.code or error.type
    if code in _STOP_CODES:
        return _stop(f"{message} - {_STOP_CODES[code]}")
    if error.status_code in _RETRY_STATUS or error.status_code >= 500:
        return _retry(message, retry_after(error.response.headers, now))
    return _stop(f"{message} - {_REMEDIES.get(error.status_code, _REMEDIES[400])}")


def _said(error: openai.APIStatusError) -> str:
    """The endpoint's own words; the SDK's message is the whole body with the status before it."""
    body = error.body
    said = body.get("message") if isinstance(body, dict) else None
    return said if isinstance(said, str) and said else error.message


def _from_code(code: str | None, message: str) -> ApplicationError:
    # A reply that broke off is retried unless it says why it can never succeed: an unknown code is more often an outage.
    if code in _STOP_CODES:
        return _stop(f"{message} - {_STOP_CODES[code]}")
    if code is not None and code not in _RETRY_CODES and (code.startswith("invalid_") or code.endswith("_not_found")):
        return _stop(f"{message} - {_REMEDIES[400]}")
    return _retry(message)


def _retry(message: str, delay: timedelta | None = None) -> ApplicationError:
    return ApplicationError(message, type=ErrorType.MODEL_RETRY, next_retry_delay=delay)


def _stop(message: str) -> ApplicationError:
    return ApplicationError(message, type=ErrorType.MODEL_STOP, non_retryable=True)


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text is not None else None
    except ValueError:
        return None
    return number if number is not None and 0 <= number < 1e9 else None


def _bounded(delay: timedelta) -> timedelta:
    return min(max(delay, timedelta(milliseconds=1)), MAX_RETRY_AFTER)


def _chain(error: BaseException) -> Iterator[BaseException]:
    # Not every layer says `raise ... from`, so what was being handled counts as a cause too.
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def _causes(error: BaseException) -> str:
    parts = [str(cause) or type(cause).__name__ for cause in itertools.islice(_chain(error), 4)]
    return _shortened(": ".join(dict.fromkeys(parts)))


def _shortened(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
