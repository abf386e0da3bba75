"""The HTTP endpoint: `/v1/responses` as the Responses API has it, and `/scripted/*` for tests to look inside."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import formatdate
from typing import TypeVar

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers.scripted_model.conversation import (
    Compacted,
    CreateRequest,
    InputItem,
    RequestFault,
    check_input,
    compacted,
    conversation_key,
    first_user_text,
    groups,
    message_texts,
    output_texts,
    since_last_turn,
    text_of,
)
from workers.scripted_model.delivery import Connections, Delivery
from workers.scripted_model.generation import Generation
from workers.scripted_model.journal import Journal, JournalEntry, now
from workers.scripted_model.replies import make_reply, response_object, stream_events
from workers.scripted_model.scenario import ConnectionFault, HttpFault, Scenario, ScenarioFile, TurnSpec
from workers.scripted_model.templates import ExpectationFailed

MODEL_HEADER = "scripted, not a language model"

# How many responses and last requests are kept; a test looks at the newest ones.
_KEPT = 1024

_KeptT = TypeVar("_KeptT")

_ERROR_TYPES = {401: "invalid_request_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass
class _Call:
    """What is known so far of one `create` request, for the journal."""

    request: CreateRequest
    items: list[InputItem]
    conversation: str
    idempotency_key: str | None
    turn: int = 0
    attempt: int = 0


class ScriptedEndpoint:
    """Plays a scenario file. Its only memory: stored responses, as the API has them, and how often a turn was tried."""

    def __init__(self, scenarios: ScenarioFile, journal: Journal, connections: Connections) -> None:
        self._scenarios = scenarios
        self._journal = journal
        self._connections = connections
        self._attempts: dict[tuple[str, int], int] = {}
        self._stored: dict[str, Generation] = {}
        self._last: dict[str, bytes] = {}

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        routes = [
            Route("/v1/responses", self._create, methods=["POST"]),
            Route("/v1/responses/{response_id}", self._retrieve, methods=["GET"]),
            Route("/v1/responses/{response_id}/cancel", self._cancel, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/scripted/health", self._health, methods=["GET"]),
            Route("/scripted/journal", self._show_journal, methods=["GET"]),
            Route("/scripted/last", self._show_last, methods=["GET"]),
        ]
        return _Guard(Starlette(routes=routes, lifespan=self._lifespan))

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        yield
        for generation in list(self._stored.values()):
            await generation.cancel()

    async def _create(self, http: Request) -> Response:
        body = await http.body()
        try:
            request = CreateRequest.model_validate_json(body)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            return _error(400, fault["msg"], param=".".join(map(str, fault["loc"])) or None)
        call = _Call(request, request.items(), "", http.headers.get("idempotency-key"))
        try:
            call.conversation = conversation_key(request.prompt_cache_key, call.items)
            _remember(self._last, call.conversation, body)
            return self._answer(call, len(body))
        except RequestFault as refusal:
            self._note(call, "create", "refused", detail=str(refusal))
            return _error(400, str(refusal), param=refusal.param, code=refusal.code)
        except ExpectationFailed as failure:
            self._note(call, "create", "expectation_failed", detail=str(failure))
            return _error(400, f"scenario expectation failed: {failure}", code="scenario_expectation_failed")

    def _answer(self, call: _Call, body_chars: int) -> Response:
        """Play the turn that `call` asks for. Nothing is awaited here, so that attempts are counted one by one."""
        request = call.request
        self._check_request(call)
        turn, place, outputs = self._find_turn(call)
        response_id = f"resp_{uuid.uuid4().hex}"
        reply = make_reply(turn, outputs, request, place, response_id, body_chars)
        key = (call.conversation, call.turn)
        call.attempt = self._attempts[key] = self._attempts.get(key, 0) + 1
        fault = turn.faults[call.attempt - 1] if call.attempt <= len(turn.faults) else None
        if isinstance(fault, HttpFault):
            self._note(call, "create", fault.kind, detail=str(fault.status))
            return _http_fault(fault)
        generation = Generation(request, call.items, call.conversation, call.turn, call.attempt)
        response = response_object(request, response_id, time.time(), "in_progress")
        events = stream_events(response, reply, fault, time.time())
        generation.start(response, events, reply)
        if request.store is not False:
            _remember(self._stored, response_id, generation)
        if generation.background and not request.stream and not isinstance(fault, ConnectionFault):
            self._note(call, "create", "accepted", response_id=response_id)
            return JSONResponse({**response, "status": "queued"})
        return Delivery(
            generation,
            self._connections,
            self._settler(call, "create", response_id),
            stream=bool(request.stream),
            fault=fault,
        )

    def _check_request(self, call: _Call) -> None:
        request = call.request
        if request.conversation is not None:
            raise RequestFault("The scripted model keeps no conversations; send the items.", param="conversation")
        if request.background and request.store is False:
            raise RequestFault("Background mode requires store=true.", param="store")
        if request.previous_response_id is not None:
            earlier = self._stored.get(request.previous_response_id)
            if earlier is None:
                raise RequestFault(
                    f"Previous response with id '{request.previous_response_id}' not found.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            call.items = [*earlier.items, *earlier.output, *call.items]
            call.conversation = conversation_key(request.prompt_cache_key, call.items)
        check_input(call.items)

    def _find_scenario(self, call: _Call) -> tuple[Scenario | None, Compacted]:
        """Return the scenario to play, and where in the conversation the request stands. Raises RequestFault."""
        items = call.items
        start, before = compacted(items)
        turn = before.turn + len(groups(items[start:]))
        spoken = [n for n, item in enumerate(items) if item.type == "message" and item.role == "user"]
        # The first message that is left of a conversation whose beginning is compacted was a later one.
        for n in reversed([n for n in spoken if n > start] if before.text else spoken[1:]):
            text = text_of(items[n].content)
            scenario = self._scenarios.find(call.request.model, (text,), later=True)
            if scenario is not None:
                return scenario, Compacted(turn=turn, number=len(groups(items[n:])) + 1, text=text, later=True)
        text = before.text or first_user_text(items)
        texts = (text,) if before.later else (text, call.request.instructions or "")
        scenario = self._scenarios.find(call.request.model, texts, later=before.later)
        number = before.number + turn - before.turn
        return scenario, Compacted(turn=turn, number=number, text=text, later=before.later)

    def _find_turn(self, call: _Call) -> tuple[TurnSpec, Compacted, list[str]]:
        """Return the turn to play, where it stands, and all tool outputs so far. Raises RequestFault and ExpectationFailed."""
        scenario, place = self._find_scenario(call)
        if scenario is None:
            names = ", ".join(one.name for one in self._scenarios.scenarios)
            raise RequestFault(
                f"no scenario matches this request (model {call.request.model!r}; scenarios: {names}). The scripted model is "
                "not a language model: it answers only what its scenario file holds."
            )
        call.turn, number = place.turn, place.number
        turn = scenario.turn(number)
        if turn is None:
            raise RequestFault(f"scenario {scenario.name!r} has {scenario.length()} turns; turn {number} was asked for")
        new = since_last_turn(call.items)
        for pattern, found, what in (
            (turn.expect, output_texts(new), "tool outputs"),
            (turn.expect_message, message_texts(new), "messages"),
        ):
            if pattern is not None and not any(re.search(pattern, text) for text in found):
                shown = "\n".join(found)
                raise ExpectationFailed(
                    f"scenario {scenario.name!r} turn {call.turn} expects {pattern!r} in the {what} since the previous "
                    f"turn; found {shown[:400]!r}"
                )
        return turn, place, output_texts(call.items)

    async def _retrieve(self, http: Request) -> Response:
        generation = self._stored.get(http.path_params["response_id"])
        if generation is None:
            return _not_found(http)
        call = _call_of(generation)
        if http.query_params.get("stream") != "true":
            if generation.over:
                return Delivery(
                    generation, self._connections, self._settler(call, "retrieve", generation.response_id), stream=False
                )
            return JSONResponse(generation.response)
        if not (generation.background and generation.request.stream):
            return _error(400, "Only a response created with background=true and stream=true can be streamed again.")
        after = http.query_params.get("starting_after", "-1")
        if not re.fullmatch(r"-1|\d+", after):
            return _error(400, "starting_after must be a non-negative integer.", param="starting_after")
        return Delivery(
            generation,
            self._connections,
            self._settler(call, "retrieve", generation.response_id),
            stream=True,
            first=int(after) + 1,
        )

    async def _cancel(self, http: Request) -> Response:
        generation = self._stored.get(http.path_params["response_id"])
        if generation is None:
            return _not_found(http)
        if not generation.background:
            return _error(400, "Cannot cancel a synchronous response.")
        await generation.cancel()
        self._note(_call_of(generation), "cancel", str(generation.response["status"]), response_id=generation.response_id)
        return JSONResponse(generation.response)

    async def _models(self, _http: Request) -> Response:
        model = {"id": "scripted-model", "object": "model", "created": 0, "owned_by": MODEL_HEADER}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, _http: Request) -> Response:
        names = [scenario.name for scenario in self._scenarios.scenarios]
        return JSONResponse({"status": "ok", "model": MODEL_HEADER, "scenarios": names})

    async def _show_journal(self, _http: Request) -> Response:
        return JSONResponse([entry.model_dump() for entry in self._journal.entries()])

    async def _show_last(self, http: Request) -> Response:
        body = self._last.get(http.query_params.get("conversation", ""))
        if body is None:
            return _error(404, "no request of this conversation was seen", param="conversation")
        return Response(body, media_type="application/json")

    def _settler(self, call: _Call, request: str, response_id: str) -> Callable[[str], None]:
        return lambda outcome: self._note(call, request, outcome, response_id=response_id)

    def _note(self, call: _Call, request: str, outcome: str, *, response_id: str | None = None, detail: str = "") -> None:
        self._journal.add(
            JournalEntry(
                at=now(),
                request=request,
                conversation=call.conversation,
                turn=call.turn,
                attempt=call.attempt,
                outcome=outcome,
                detail=detail,
                response_id=response_id,
                model=call.request.model,
                input_items=len(call.items),
                metadata=call.request.metadata or {},
                stream=bool(call.request.stream),
                background=bool(call.request.background),
                idempotency_key=call.idempotency_key,
            )
        )


class _Guard:
    """Labels every answer as scripted, numbers it, and refuses a request for the API without a key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-caisson-model"] = MODEL_HEADER
                headers["x-request-id"] = f"req_{uuid.uuid4().hex}"
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scheme, _, key = Request(scope).headers.get("authorization", "").partition(" ")
        if scope["path"].startswith("/v1/") and not (scheme.lower() == "bearer" and key.strip()):
            refusal = _error(401, "You didn't provide an API key. Send it as: Authorization: Bearer YOUR_KEY")
            await refusal(scope, receive, labelled)
            return
        await self._app(scope, receive, labelled)


def _call_of(generation: Generation) -> _Call:
    return _Call(generation.request, generation.items, generation.conversation, None, generation.turn, generation.attempt)


def _remember(memory: dict[str, _KeptT], key: str, value: _KeptT) -> None:
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > _KEPT:
        del memory[next(iter(memory))]


def _error(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def _not_found(http: Request) -> JSONResponse:
    return _error(404, f"Response with id '{http.path_params['response_id']}' not found.")


def _http_fault(fault: HttpFault) -> Response:
    headers = dict(fault.headers)
    if fault.retry_after_date_s is not None:
        headers["retry-after"] = formatdate(time.time() + fault.retry_after_date_s, usegmt=True)
    if fault.body is None:
        return _error(fault.status, "a scripted fault", headers=headers)
    if isinstance(fault.body, str):
        return Response(fault.body, status_code=fault.status, headers=headers)
    return Response(json.dumps(fault.body), status_code=fault.status, headers=headers, media_type="application/json")
