"""What each error of the model endpoint means: when it is retried, and what a person is told when it is not."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.api.failure.v1 import Failure
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.exceptions import ApplicationError

from activities.governance.redaction import Redactor
from activities.model.errors import MAX_RETRY_AFTER, MIN_RETRY_AFTER, ReplyFault, read_error, retry_after, translate

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
REQUEST = httpx2.Request("POST", "http://model/v1/responses")


def status(code: int, error: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> openai.APIStatusError:
    """What the SDK raises for an HTTP status."""
    response = httpx2.Response(code, headers=headers, content=json.dumps({"error": error}) if error else b"", request=REQUEST)
    return openai.APIStatusError((error or {}).get("message", "no"), response=response, body=error)


def connection(cause: Exception) -> openai.APIConnectionError:
    """What the SDK raises when there is no connection."""
    error = openai.APIConnectionError(request=REQUEST)
    error.__cause__ = cause
    return error


# temporalio/sdk-python#1177
@pytest.mark.parametrize("code", [408, 409, 425, 429, 500, 502, 503, 504, 507, 520, 529])
def test_a_status_that_passes_is_retried(code: int) -> None:
    """Overload, conflict and everything that the server itself calls its own fault."""
    failure = translate(status(code))
    assert (failure.type, failure.non_retryable) == ("ModelUnavailable", False)
    assert str(code) in failure.message


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (400, "check the agent's model and model_settings"),
        (401, "set a valid OPENAI_API_KEY"),
        (402, "add credit, or use another key"),
        (403, "check the key's project"),
        (404, "check `model` in the agent and OPENAI_BASE_URL"),
        (405, "the endpoint refused the request"),
        (413, "use smaller tool outputs"),
        (422, "check the agent's model_settings and tools"),
    ],
)
def test_a_status_that_stays_stops_the_run_and_says_what_to_do(code: int, remedy: str) -> None:
    """Asking again would cost the same answer."""
    failure = translate(status(code, {"message": "because of this"}))
    assert (failure.type, failure.non_retryable) == ("ModelStopped", True)
    assert [part for part in (str(code), "because of this", remedy) if part not in failure.message] == []


@pytest.mark.parametrize("code", ["insufficient_quota", "billing_hard_limit_reached"])
@pytest.mark.parametrize("where", ["code", "type"])
def test_an_exhausted_quota_is_not_waited_for(code: str, where: str) -> None:
    """It comes as a 429, but only money helps, whichever field says so."""
    failure = translate(status(429, {where: code, "message": "no credit"}, {"retry-after": "1"}))
    assert (failure.non_retryable, "use another key" in failure.message) == (True, True)


@pytest.mark.parametrize(
    "error",
    [
        connection(ConnectionResetError("reset by peer")),
        connection(httpx2.ConnectError("refused")),
        openai.APITimeoutError(request=REQUEST),
        httpx2.RemoteProtocolError("peer closed connection without sending complete message body"),
        httpx2.ReadTimeout("slow"),
        json.JSONDecodeError("cut", "{", 1),
        ReplyFault("the stream broke off"),
        ReplyFault("upstream", "server_error"),
        ReplyFault("busy", "rate_limit_exceeded"),
        ReplyFault("?", "a_code_nobody_knows"),
        ValueError("a surprise"),
    ],
    ids=repr,
)
def test_what_broke_off_is_retried(error: Exception) -> None:
    """A reply that was not whole says nothing about the next one."""
    assert (translate(error).type, translate(error).non_retryable) == ("ModelUnavailable", False)


def test_a_certificate_that_is_not_trusted_stops_the_run() -> None:
    """It will not be trusted in a minute either; both places to look at are named."""
    inner = httpx2.ConnectError("certificate verify failed")
    inner.__context__ = ssl.SSLCertVerificationError("self-signed certificate")
    failure = translate(connection(inner))
    assert (failure.type, failure.non_retryable) == ("ModelStopped", True)
    assert "check OPENAI_BASE_URL and SSL_CERT_FILE" in failure.message


@pytest.mark.parametrize("code", ["context_length_exceeded", "invalid_prompt", "model_not_found", "invalid_api_key"])
def test_an_error_inside_a_stream_that_can_never_succeed_stops_the_run(code: str) -> None:
    """Its code says so."""
    assert translate(ReplyFault("no", code)).non_retryable


def test_a_long_error_page_is_cut() -> None:
    """A failure is read by people, and stays in history."""
    assert len(translate(status(500, {"message": "x" * 100_000})).message) < 1000


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after": "Mon, 30 Nov 2026 12:00:03 GMT"}, 3),
        ({"retry-after": "Mon, 30 Nov 2026 11:59:00 GMT"}, None),
        ({"retry-after": "0"}, None),
        ({"retry-after-ms": "0", "retry-after": "7"}, 7),
        ({"retry-after-ms": "1"}, MIN_RETRY_AFTER.total_seconds()),
        ({"retry-after": "7, 7"}, 7),
        ({"retry-after": "86400"}, MAX_RETRY_AFTER.total_seconds()),
        ({"retry-after": "1e12"}, MAX_RETRY_AFTER.total_seconds()),
        ({"retry-after": "inf"}, MAX_RETRY_AFTER.total_seconds()),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, MAX_RETRY_AFTER.total_seconds()),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after-ms": "x", "retry-after": "7"}, 7),
        ({}, None),
    ],
)
def test_the_wait_that_the_server_asks_for(headers: dict[str, str], seconds: float | None) -> None:
    """In milliseconds, seconds or as a date, at most a quarter of an hour (earendil-works/pi#4377).

    No wait at all is left to backoff: all attempts would be used up at once.
    """
    asked = translate(status(429, headers=headers), NOW).next_retry_delay
    assert asked == (None if seconds is None else timedelta(seconds=seconds))


@given(st.text(st.characters(codec="ascii"), max_size=40))
def test_no_header_breaks_the_translation(value: str) -> None:
    """Whatever a proxy sends."""
    asked = retry_after({"retry-after": value}, NOW)
    assert asked is None or MIN_RETRY_AFTER <= asked <= MAX_RETRY_AFTER


async def encoded(failure: ApplicationError) -> Failure:
    """A failure as Temporal stores it."""
    stored = Failure()
    await pydantic_data_converter.encode_failure(failure, stored)
    return stored


@pytest.mark.parametrize("said", ["x" * 3_000_000, "half a character \ud83d"], ids=["long", "surrogate"])
@pytest.mark.parametrize(
    "make",
    [
        lambda said: status(400, {"message": said}),
        lambda said: status(500, {"message": said}),
        lambda said: openai.APIError(said, REQUEST, body={"message": said}),
        openai.OpenAIError,
        lambda said: connection(httpx2.ConnectError(said)),
        httpx2.ReadError,
        ReplyFault,
        lambda said: ReplyFault(said, "invalid_prompt"),
        ValueError,
    ],
)
async def test_whatever_an_endpoint_says_can_be_recorded(make: Callable[[str], Exception], said: str) -> None:
    """A failure that cannot be encoded, or is too long, would be retried in place of what it says."""
    failure = translate(make(said))
    assert (len(failure.message) < 1000, (await encoded(failure)).message) == (True, failure.message)


@pytest.mark.parametrize(
    "error",
    [
        status(401, {"message": "Incorrect API key provided: sk-live-0123456789"}),
        status(500, {"message": "x" * 590 + "sk-live-0123456789"}),
        ReplyFault("you sent sk-live-0123456789"),
        httpx2.ReadError("Bearer sk-live-0123456789"),
        ValueError("sk-live-0123456789"),
    ],
)
def test_a_key_that_the_endpoint_repeats_is_hidden(error: Exception) -> None:
    """Whichever way it comes back, and before the text is cut."""
    failure = translate(error, hide=Redactor(["sk-live-0123456789"]))
    assert "sk-l" not in failure.message
    assert "***" in failure.message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"error": {"message": "in so many words"}}, "in so many words"),
        ({"error": "in so many words"}, "in so many words"),
        ({"detail": "in so many words"}, "in so many words"),
        ({"detail": [{"loc": ["body", "x"], "msg": "in so many words"}]}, "in so many words"),
        ([{"error": {"message": "in so many words", "code": 400}}], "in so many words"),
        ("in so\n  many words", "in so many words"),
        ({"message": 7}, None),
        ([], None),
        ({"error": [[[[[["deep"]]]]]]}, None),
        (None, None),
    ],
)
def test_the_words_of_an_endpoint_are_found_in_every_form(body: object, words: str | None) -> None:
    """Each server wraps them in its own way."""
    assert read_error(body).words == words


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        ({"code": 502, "message": "no"}, None),
        ({"code": 402, "message": "no"}, "add credit"),
        ({"code": "rate_limit_exceeded", "type": "insufficient_quota"}, "add credit"),
        ({"code": "rate_limit_exceeded", "type": "invalid_request_error"}, None),
        ({"code": None, "type": "invalid_request_error"}, "the endpoint refused the request"),
        ({"code": {"a": 1}, "type": ["insufficient_quota"]}, None),
        ("boom", None),
    ],
)
def test_every_code_of_an_error_counts(body: object, remedy: str | None) -> None:
    """Of `code` and `type`, either may say what it is, and neither need be text."""
    failure = translate(openai.APIError("An error occurred during streaming", REQUEST, body=body))
    assert (failure.non_retryable, (remedy or "") in failure.message) == (remedy is not None, True)
    assert ("boom" in failure.message) == (body == "boom")


def test_a_quota_beside_another_code_is_not_waited_for() -> None:
    """The code alone would be retried."""
    error = {"code": "rate_limit_exceeded", "type": "insufficient_quota", "message": "no credit"}
    assert translate(status(429, error)).non_retryable
