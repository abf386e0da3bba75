"""What each error of the model endpoint means: when it is retried, and what a person is told when it is not."""

from __future__ import annotations

import json
import ssl
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from activities.model.errors import MAX_RETRY_AFTER, ReplyFault, retry_after, translate

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
REQUEST = httpx2.Request("POST", "http://model/v1/responses")


def status(code: int, error: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> openai.APIStatusError:
    """What the SDK raises for an HTTP status."""
    response = httpx2.Response(code, headers=headers, json={"error": error} if error else None, request=REQUEST)
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
        ({"retry-after": "Mon, 30 Nov 2026 11:59:00 GMT"}, 0.001),
        ({"retry-after": "0"}, 0.001),
        ({"retry-after": "86400"}, MAX_RETRY_AFTER.total_seconds()),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after-ms": "x", "retry-after": "7"}, 7),
        ({}, None),
    ],
)
def test_the_wait_that_the_server_asks_for(headers: dict[str, str], seconds: float | None) -> None:
    """In milliseconds, seconds or as a date, never negative, never longer than a quarter of an hour (earendil-works/pi#4377)."""
    asked = translate(status(429, headers=headers), NOW).next_retry_delay
    assert asked == (None if seconds is None else timedelta(seconds=seconds))


@given(st.text(st.characters(codec="ascii"), max_size=40))
def test_no_header_breaks_the_translation(value: str) -> None:
    """Whatever a proxy sends."""
    asked = retry_after({"retry-after": value}, NOW)
    assert asked is None or timedelta(0) < asked <= MAX_RETRY_AFTER
