"""Answers HTTP requests by the script: parses requests, refuses bad ones, injects faults, writes bodies and streams."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from aiohttp import web

from agl_testing.model_server.answer import ScriptedExchange, answer_of
from agl_testing.model_server.codec import ConversationTurn, render_prompt
from agl_testing.model_server.dialects import chat, completions, embeddings, messages, responses
from agl_testing.model_server.script import (
    Cut,
    Dialect,
    Flavour,
    Garbage,
    ModelRequest,
    Reply,
    Respond,
    Stall,
    Status,
    Step,
)

PATHS: dict[str, Dialect] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/models": "models",
}
_BACKEND_ARGUMENTS = ("return_token_ids", "return_prompt_token_ids", "enable_response_messages")
_FORMATS = {"chat": chat, "completions": completions, "responses": responses, "messages": messages}


@dataclass(kw_only=True)
class RecordedCall:
    """One HTTP exchange; the server updates the record while the exchange goes on.

    Attributes:
        path: Path with its query string, as the client sent it.
        method: The request's method.
        headers: The request's headers, by name in lower case.
        body: The bytes of the request's body.
        json: The parsed body; ``None`` if it is not JSON.
        dialect: The API of the path.
        status: Status of the response; 0 before the response begins.
        chunks: The bytes of the response's body, without transfer framing, one entry per write or streamed event.
        is_complete: True if the whole response was written; false if it was cut or the client disconnected.
        is_abandoned: True if the client closed the connection before the response was complete.
    """

    path: str
    method: str
    headers: dict[str, str]
    body: bytes
    json: Any
    dialect: Dialect
    status: int = 0
    chunks: list[bytes] = field(default_factory=list[bytes])
    is_complete: bool = False
    is_abandoned: bool = False

    @property
    def sent(self) -> bytes:
        """All bytes of the response's body."""
        return b"".join(self.chunks)


class ScriptedHandler:
    """Answers requests at every path of a server; each server has one handler, used only in the server's event loop.

    Args:
        next_step: Returns the script's step for a request.
        record: Called with every call that arrives.
        default: The reply for a fault that defines no reply.
        flavour: The model server whose token ids the responses imitate.
        models: Names of models; the first is used if a request names no model.
        api_key: The key that calls must have, or else get a 401; ``None`` to accept all calls.
    """

    def __init__(
        self,
        *,
        next_step: Respond,
        record: Callable[[RecordedCall], None],
        default: Reply | None,
        flavour: Flavour,
        models: Sequence[str],
        api_key: str | None,
    ) -> None:
        self._next_step, self._record, self._default = next_step, record, default
        self._flavour: Flavour = flavour
        self._models = models
        self._api_key = api_key
        self.script_errors: list[Exception] = []
        self._count = 0
        self._conversations: dict[str, tuple[ConversationTurn, ...]] = {}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Record the request, then answer it."""
        dialect = PATHS.get(request.path)
        if dialect is None:
            return _error_response("chat", 404, f"no path {request.path!r} here; there are {sorted(PATHS)}")
        call = await _record_of(request, dialect)
        self._record(call)
        try:
            return await self._respond(request, call)
        except (asyncio.CancelledError, ConnectionError):
            call.is_abandoned = not call.is_complete
            raise

    async def _respond(self, request: web.BaseRequest, call: RecordedCall) -> web.StreamResponse:
        refusal = self._refusal(call)
        if refusal is not None:
            return await _send_plain(request, call, refusal)
        if call.dialect == "models":
            return await _send_plain(request, call, _json_response(self._model_list()))
        if call.dialect == "embeddings":
            body = embeddings.body_of(call.json, call.json.get("model", self._models[0]))
            return await _send_plain(request, call, _json_response(body))
        return await self._play(request, call)

    def _refusal(self, call: RecordedCall) -> web.Response | None:
        key = call.headers.get("x-api-key") or call.headers.get("authorization", "").removeprefix("Bearer ")
        if self._api_key is not None and key != self._api_key:
            return _error_response(call.dialect, 401, "the API key is not the one that this server expects")
        if call.dialect == "models":
            return None
        body: object = call.json
        if not isinstance(body, dict):
            return _error_response(call.dialect, 400, "the body is not a JSON object")
        message = self._argument_error(call.dialect, cast("dict[str, Any]", body))
        return _error_response(call.dialect, 400, message) if message else None

    def _argument_error(self, dialect: Dialect, body: dict[str, Any]) -> str:
        if self._flavour == "openai":
            unknown = [name for name in _BACKEND_ARGUMENTS if name in body]
            return f"Unrecognized request argument supplied: {unknown[0]}" if unknown else ""
        is_chat_stream = dialect == "chat" and body.get("stream")
        if self._flavour == "sglang" and is_chat_stream and body.get("return_token_ids"):
            return "return_token_ids is not supported with streaming"
        return ""

    async def _play(self, request: web.BaseRequest, call: RecordedCall) -> web.StreamResponse:
        try:
            model_request = self._model_request(call)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            message = f"the body is not what this API takes ({type(error).__name__}: {error})"
            return await _send_plain(request, call, _error_response(call.dialect, 400, message))
        try:
            step = self._next_step(model_request)
        except Exception as error:  # noqa: BLE001  # any error of the test's own function
            step = self._failed(error)
        if isinstance(step, Status):
            return await _send_plain(request, call, _status_response(call.dialect, step))
        if isinstance(step, Garbage):
            garbage = web.Response(body=step.body, headers={"content-type": step.content_type})
            return await _send_plain(request, call, garbage)
        reply = _reply_of(step, self._default)
        try:
            exchange = self._exchange(model_request, reply if isinstance(step, Stall | Cut) else step)
        except ValueError as error:
            return await _send_plain(request, call, _status_response(call.dialect, self._failed(error)))
        self._remember(model_request, exchange)
        await asyncio.sleep(reply.delay)
        form = _FORMATS[call.dialect]
        if call.json.get("stream"):
            return await _send_stream(request, call, form.events_of(exchange), step=step, reply=reply)
        response = _json_response(form.body_of(exchange), headers=reply.headers)
        return await _send_faulty(request, call, response, step)

    def _failed(self, error: Exception) -> Status:
        """Record an error of the script, which the server raises when it stops; return an HTTP 500 for the call."""
        self.script_errors.append(error)
        return Status(code=500, message=f"the script failed: {error!r}")

    def _model_request(self, call: RecordedCall) -> ModelRequest:
        _check_choices(call.json.get("n"))
        turns = _FORMATS[call.dialect].turns_of(call.json)
        turns = (*self._conversations.get(call.json.get("previous_response_id") or "", ()), *turns)
        if call.dialect == "completions":
            prompt = completions.prompts_of(call.json)[0]
        else:
            prompt = render_prompt(turns, tools=call.json.get("tools"))
        index, self._count = self._count, self._count + 1
        return ModelRequest(
            index=index, dialect=call.dialect, headers=call.headers, body=call.json, turns=turns, prompt_ids=prompt
        )

    def _exchange(self, request: ModelRequest, step: Reply | tuple[Reply, ...]) -> ScriptedExchange:
        body = request.body
        is_completion = request.dialect == "completions"
        prompts = completions.prompts_of(body) if is_completion else [request.prompt_ids]
        count = len(prompts) * (body.get("n") or 1)
        replies = step if isinstance(step, tuple) else (step,) * count
        if len(replies) != count:
            raise ValueError(f"the script gives {len(replies)} replies for {count} choices; give one per choice")
        number = request.index + 1
        answers = tuple(answer_of(reply, number=number, choice=choice) for choice, reply in enumerate(replies))
        return ScriptedExchange(
            number=number,
            dialect=request.dialect,
            flavour=self._flavour,
            model=body.get("model") or self._models[0],
            body=body,
            prompts=prompts,
            answers=answers,
            created=int(time.time()),
        )

    def _remember(self, request: ModelRequest, exchange: ScriptedExchange) -> None:
        if request.dialect == "responses" and request.body.get("store", True):
            answer = exchange.answers[0]
            said = ConversationTurn(role="assistant", text=answer.text, calls=answer.calls)
            self._conversations[f"resp_{exchange.number}"] = (*request.turns, said)

    def _model_list(self) -> dict[str, Any]:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "agl-testing"} for name in self._models]
        return {"object": "list", "data": data}


def _check_choices(asked: object) -> None:
    """Raise ValueError if the request's ``n`` is given and is not a positive integer."""
    if asked is not None and (not isinstance(asked, int) or asked < 1):
        raise ValueError(f"n is {asked!r}, and has to be 1 or more")


async def _record_of(request: web.BaseRequest, dialect: Dialect) -> RecordedCall:
    body = await request.read()
    try:
        parsed = msgspec.json.decode(body) if body else None
    except msgspec.DecodeError:
        parsed = None
    return RecordedCall(
        path=request.raw_path,
        method=request.method,
        headers={name.lower(): value for name, value in request.headers.items()},
        body=body,
        json=parsed,
        dialect=dialect,
    )


def _reply_of(step: Reply | tuple[Reply, ...] | Stall | Cut, default: Reply | None) -> Reply:
    if isinstance(step, Stall | Cut):
        return step.reply or default or Reply(text="ok")
    return step[0] if isinstance(step, tuple) else step


def _json_response(body: dict[str, Any], *, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json", headers=headers)


def _error_response(
    dialect: Dialect, status: int, message: str, *, headers: dict[str, str] | None = None
) -> web.Response:
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
        status, "api_error" if status >= 500 else "invalid_request_error"
    )
    body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    if dialect == "messages":
        body = {"type": "error", "error": {"type": kind, "message": message}}
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json", headers=headers)


def _status_response(dialect: Dialect, step: Status) -> web.Response:
    headers = {} if step.retry_after is None else {"retry-after": f"{step.retry_after:g}"}
    return _error_response(dialect, step.code, step.message, headers=headers)


async def _send_plain(request: web.BaseRequest, call: RecordedCall, response: web.Response) -> web.Response:
    call.status = response.status
    call.chunks.append(bytes(response.body))  # pyright: ignore[reportArgumentType]  # ours are always bytes
    call.is_complete = True
    await response.prepare(request)
    await response.write_eof()
    return response


async def _send_faulty(
    request: web.BaseRequest, call: RecordedCall, response: web.Response, step: Step
) -> web.StreamResponse:
    if isinstance(step, Stall):
        await asyncio.sleep(step.seconds)
    if not isinstance(step, Cut):
        return await _send_plain(request, call, response)
    body = bytes(response.body)  # pyright: ignore[reportArgumentType]  # ours are always bytes
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    half = web.StreamResponse(headers=headers)
    call.status = 200
    await half.prepare(request)
    call.chunks.append(body[: len(body) // 2])
    await half.write(body[: len(body) // 2])
    return _abort(request, half)


async def _send_stream(
    request: web.BaseRequest, call: RecordedCall, events: Iterable[bytes], *, step: Step, reply: Reply
) -> web.StreamResponse:
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **reply.headers}
    response = web.StreamResponse(headers=headers)
    call.status = 200
    pending = list(events)
    for index, event in enumerate(pending):
        if isinstance(step, Stall) and index == step.after_chunks:
            await asyncio.sleep(step.seconds)
        if index == 0:
            await response.prepare(request)
        if isinstance(step, Cut) and index == step.after_chunks:
            return _abort(request, response)
        await asyncio.sleep(reply.chunk_delay)
        call.chunks.append(event)
        call.is_complete = index == len(pending) - 1 and not isinstance(step, Cut)
        await response.write(event)
    if isinstance(step, Cut):
        return _abort(request, response)
    await response.write_eof()
    return response


def _abort(request: web.BaseRequest, response: web.StreamResponse) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.close()
    return response
