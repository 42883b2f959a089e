"""OpenAI-compatible endpoints over a sampling client: chat completions, completions, models and health.

Answers carry token ids, log-probabilities and the version of the weights. Every request is answered by the weights that
were live when it arrived. The endpoints have an event loop in a separate thread, so that a busy agent delays no
answer. Limit: a streamed answer is sent in one piece, because Tinker's API returns only whole answers.
"""

import asyncio
import hmac
import json
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import tinker
from aiohttp import web
from tinker import types

from agl.errors import PolicyError
from agl_tinker.rendering import ChatText

_LOG = logging.getLogger("agl_tinker")
_MAX_BODY = 64 * 2**20
_NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
    "logit_bias": {},
    "top_logprobs": 0,
    "stop_token_ids": [],
    "ignore_eos": False,
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
}
"""Unsupported options that would change the answer, each with its neutral value, which is accepted."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Json = dict[str, Any]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Body(msgspec.Struct, kw_only=True):
    """The body of a request, with the fields of chat completions and of completions."""

    model: str
    messages: list[Json] = []
    prompt: str | list[int] = ""
    tools: list[Json] = []
    tool_choice: Any = "auto"
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    return_token_ids: bool | None = None
    chat_template_kwargs: Json = {}

    @property
    def stops(self) -> list[str]:
        """The request's stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class _ChatError(Exception):
    def __init__(self, text: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(text)
        self.status, self.code = status, code


@dataclass(frozen=True, kw_only=True)
class Live:
    """The live weights: a client that samples from them, and their version."""

    sampler: tinker.SamplingClient
    version: str


@dataclass(frozen=True, kw_only=True)
class ChatLimits:
    """Limits in tokens; 0 means no limit.

    Attributes:
        context_length: The most tokens of a prompt and its answer together.
        max_tokens: The length limit of an answer if the request gives none.
    """

    context_length: int = 0
    max_tokens: int = 0


class ChatServer:
    """The endpoints of one model; can be started and stopped only once.

    Args:
        model: The model name that requests must give.
        text: The tokenizer with its chat template.
        key: The API key that requests must send.
        limits: The limits of prompts and answers.

    Attributes:
        live: The live weights; set it before the first request, and whenever they change.
    """

    live: Live

    def __init__(self, *, model: str, text: ChatText, key: str, limits: ChatLimits) -> None:
        self._model, self._text, self._key, self._limits = model, text, key.encode(), limits
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._ready = threading.Event()
        self._port = 0
        self._thread = threading.Thread(target=self._run, name="agl-tinker-chat", daemon=True)

    def start(self) -> str:
        """Listen on a free local port, and return the URL with ``/v1``; blocks until the port is open."""
        self._thread.start()
        self._ready.wait()
        if not self._port:
            raise PolicyError("the policy's endpoints cannot listen on 127.0.0.1; allow local ports")
        return f"http://127.0.0.1:{self._port}/v1"

    def stop(self) -> None:
        """Close connections and end the thread; idempotent. Blocks until then."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_errors, self._check_key])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._port = int(runner.addresses[0][1])
            self._ready.set()
            await self._stopped.wait()
        finally:
            await runner.cleanup()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.headers.get("authorization", "").partition(" ")[2].strip()
        if request.path != "/health" and not hmac.compare_digest(sent.encode("utf-8", "replace"), self._key):
            raise _ChatError("This policy answers requests with its key alone.", status=401, code="invalid_api_key")
        return await handler(request)

    async def _models(self, _request: web.Request) -> web.Response:
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "agl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "model": self._model, "model_version": self.live.version})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = self._read(await request.read())
        tools = [] if body.tool_choice == "none" else body.tools
        if body.tool_choice not in ("auto", "none", None):
            raise _ChatError(f"tool_choice={body.tool_choice!r} cannot be enforced here; use 'auto' or 'none'.")
        if not body.messages:
            raise _ChatError("The request has no messages.")
        prompt = self._text.prompt(body.messages, tools=tools, options=body.chat_template_kwargs)
        sequences, version = await self._sampled(body, prompt)
        choices: list[Json] = []
        for place, one in enumerate(sequences):
            message = self._text.message(one.tokens, stops=body.stops, has_tools=bool(tools))
            reason = "tool_calls" if message.get("tool_calls") else one.stop_reason
            choices.append({"index": place, "message": message, "finish_reason": reason} | self._tokens(body, one))
        return self._answer("chat", body, prompt, choices, version=version, sequences=sequences)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = self._read(await request.read())
        prompt = self._text.encode(body.prompt) if isinstance(body.prompt, str) else body.prompt
        if not prompt:
            raise _ChatError("The request has no prompt.")
        sequences, version = await self._sampled(body, prompt)
        choices: list[Json] = []
        for place, one in enumerate(sequences):
            text = self._text.text(one.tokens, stops=body.stops)
            details: Json = {"logprobs": {"token_logprobs": one.logprobs}}
            if body.return_token_ids:
                details |= {"token_ids": one.tokens, "prompt_token_ids": prompt}
            choices.append({"index": place, "text": text, "finish_reason": one.stop_reason} | details)
        return self._answer("completions", body, prompt, choices, version=version, sequences=sequences)

    def _read(self, content: bytes) -> Body:
        try:
            given = msgspec.json.decode(content, type=dict[str, Any])
            body = msgspec.convert({key: value for key, value in given.items() if value is not None}, Body)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise _ChatError(f"The request cannot be read: {error}.") from error
        if body.model != self._model:
            raise _ChatError(
                f"The model {body.model!r} does not exist here; this policy has {self._model!r}.",
                status=404,
                code="model_not_found",
            )
        refused = [name for name, neutral in _NEUTRAL.items() if given.get(name) not in (None, neutral)]
        if refused:
            raise _ChatError(
                f"This policy has no {', '.join(refused)}; send the request without.", code="unsupported_parameter"
            )
        return body

    async def _sampled(self, body: Body, prompt: list[int]) -> tuple[Sequence[types.SampledSequence], str]:
        """Sample answers with the live weights; return the answers and the weights' version.

        If the request is cancelled, the sampling is too.
        """
        live = self.live
        params = types.SamplingParams(
            max_tokens=self._max_tokens(body, len(prompt)),
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or -1,
            seed=body.seed,
            stop=body.stops or None,
        )
        try:
            found = await live.sampler.sample(types.ModelInput.from_ints(prompt), body.n or 1, params)
        except (tinker.TinkerError, ValueError) as error:
            status = getattr(error, "status_code", 0)
            is_user = getattr(error, "category", None) == types.RequestErrorCategory.User or status in (400, 422)
            raise _ChatError(
                f"The server of Tinker's API did not sample: {error}", status=400 if is_user else 502, code="upstream"
            ) from error
        for one in found.sequences:
            self._text.remember(prompt, one.tokens)
        return found.sequences, live.version

    def _max_tokens(self, body: Body, prompt: int) -> int | None:
        asked = body.max_completion_tokens or body.max_tokens or self._limits.max_tokens or None
        if not self._limits.context_length:
            return asked
        left = self._limits.context_length - prompt
        if left < 1 or (body.max_completion_tokens or body.max_tokens or 1) > left:
            raise _ChatError(
                f"This model's context is {self._limits.context_length} tokens, and the prompt has {prompt}. Shorten "
                "the messages or lower max_tokens.",
                code="context_length_exceeded",
            )
        return min(asked or left, left)

    def _tokens(self, body: Body, one: types.SampledSequence) -> Json:
        logprobs: list[Json] = [
            {"token": self._text.token(token), "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(one.tokens, one.logprobs or (), strict=bool(one.logprobs))
        ]
        details: Json = {"logprobs": {"content": logprobs, "refusal": None}}
        return details | ({"token_ids": one.tokens} if body.return_token_ids else {})

    def _answer(
        self,
        kind: Literal["chat", "completions"],
        body: Body,
        prompt: list[int],
        choices: list[Json],
        *,
        version: str,
        sequences: Sequence[types.SampledSequence],
    ) -> web.Response:
        completion = sum(len(one.tokens) for one in sequences)
        is_exact = body.top_p in (None, 1.0) and body.top_k in (None, 0, -1) and body.temperature != 0
        answer: Json = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "chat.completion" if kind == "chat" else "text_completion",
            "created": int(time.time()),
            "model": body.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": completion,
                "total_tokens": len(prompt) + completion,
            },
            "model_version": version,
            "logprobs_exact": is_exact,
        }
        if body.return_token_ids and kind == "chat":
            answer["prompt_token_ids"] = prompt
        return _streamed(answer, body, kind=kind) if body.stream else web.json_response(answer)


def _streamed(answer: Json, body: Body, *, kind: Literal["chat", "completions"]) -> web.Response:
    """Return a stream with the whole answer in one chunk, and the usage in another if the request asks for it."""
    usage = answer.pop("usage")
    if kind == "chat":
        answer["object"] = "chat.completion.chunk"
        answer["choices"] = [_delta(choice) for choice in answer["choices"]]
    chunks = [answer]
    if (body.stream_options or {}).get("include_usage"):
        head = {name: answer[name] for name in ("id", "object", "created", "model", "model_version")}
        chunks.append({**head, "choices": [], "usage": usage})
    content = b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"
    return web.Response(body=content, content_type="text/event-stream")


def _delta(choice: Json) -> Json:
    message = {name: value for name, value in choice["message"].items() if value is not None}
    if message.get("tool_calls"):
        message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
    return {name: value for name, value in choice.items() if name != "message"} | {"delta": message}


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every failure in the form of OpenAI's errors."""
    try:
        return await handler(request)
    except _ChatError as error:
        return _failed(str(error), status=error.status, code=error.code)
    except ValueError as error:
        return _failed(str(error), status=400, code="invalid_request")
    except web.HTTPException as error:
        return _failed(f"{request.method} {request.path}: {error.reason}.", status=error.status, code="http")
    except Exception as error:  # noqa: BLE001 - isolation point: one request's failure is that request's answer
        _LOG.exception("the request %s failed", request.path)
        return _failed(f"{type(error).__name__}: {error}.", status=500, code="internal_error")


def _failed(text: str, *, status: int, code: str) -> web.Response:
    error = {"message": text, "type": "invalid_request_error" if status < 500 else "server_error", "code": code}
    return web.json_response({"error": error}, status=status)
