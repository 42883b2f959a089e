"""Serves the OpenAI-compatible endpoints over engines: chat completions, completions, models and health.

A request becomes one or more sequences of the engine of its model; their tokens come back through a queue. If the
handler ends early, mostly because the client has disconnected, sequences that still run are cancelled.

Answers name the model version: in the body (`model_version`, see `writers`), and in the header `x-agl-model-version`.
The header has the version of the first token for a stream, and that of the last token for a whole answer.

Requests are read in `wire`, prompts built in `templates`, answers written in `writers` and sent in `exchange`.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web
from jinja2 import TemplateError

from agl.contracts import POLICY_KEY_ENV
from agl_algo_torch.serving.codec import stop_checker
from agl_algo_torch.serving.exchange import CheckedRequest, json_response, serve, wire_error
from agl_algo_torch.serving.sequence import (
    EngineError,
    GenerationRequest,
)
from agl_algo_torch.serving.templates import Prompt
from agl_algo_torch.serving.wire import (
    ChatBody,
    CompletionBody,
    WireError,
    check_messages,
    check_template_kwargs,
    read_body,
    seeded,
)
from agl_algo_torch.serving.writers import AnswerHead, AnswerWriter, ChatWriter, CompletionWriter, new_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from agl_algo_torch.serving.codec import TextCodec
    from agl_algo_torch.serving.engine import Engine
    from agl_algo_torch.serving.prompting import PromptThreads
    from agl_algo_torch.serving.toolcalls import AnswerFormat
    from agl_algo_torch.serving.wire import Body

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)

_BODY_PER_TOKEN = 32
"""Largest number of bytes of a chat request for each token of the context; every request may have 1 MiB more."""

_LARGEST_BODY = 64 * 2**20
"""Largest number of bytes of a request of completions, which may have many prompts, and of a chat with pictures."""

_MOST_PROMPTS = 1024

_SEED_HEADER = "x-agl-seed"
"""Header with a seed that the gateway gives to a request without one."""

_ATTEMPT_HEADER = "x-agl-attempt-id"
"""Header in which the gateway names the attempt that calls, so that no attempt delays the calls of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyServerSettings:
    """The name and the limits of the served model.

    Attributes:
        model_name: Name of the model, which requests must use.
        context_length: Largest number of tokens of prompt and response together.
        default_max_tokens: Largest response of a request without a limit; None for the rest of the context.
    """

    model_name: str
    context_length: int
    default_max_tokens: int | None = None


class PolicyServer:
    """The request handlers of one model; all run on one event loop.

    `engines` has the engine of each version of the weights by the name of its model in requests, and may change.
    """

    def __init__(
        self,
        *,
        engines: Mapping[str, Engine],
        codec: TextCodec,
        prompts: PromptThreads,
        answers: AnswerFormat,
        settings: PolicyServerSettings,
        key: str,
    ) -> None:
        self._engines, self._codec, self._prompts = engines, codec, prompts
        self._engine = engines[settings.model_name]
        self._answers, self._settings = answers, settings
        self._key = key.encode()
        largest = 2**20 + _BODY_PER_TOKEN * settings.context_length
        self._largest_chat = max(largest, _LARGEST_BODY) if prompts.builder.modality else largest
        self._rendering_arguments = codec.rendering_arguments
        self._created = int(time.time())

    def app(self) -> web.Application:
        """Return the application; run it with `handler_cancellation=True`, or sequences outlive their clients."""
        largest = max(_LARGEST_BODY, self._largest_chat)
        app = web.Application(client_max_size=largest, middlewares=[_errors, self._check_key])
        app.on_cleanup.append(self._close)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _close(self, _app: web.Application) -> None:
        self._prompts.close()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests without the key (except for `/health`) and compressed requests, before the body is read."""
        sent = request.headers.get("authorization", "").partition(" ")[2].strip()
        if request.path != "/health" and not hmac.compare_digest(sent.encode("utf-8", "replace"), self._key):
            raise WireError(
                f"This policy answers requests with its key as API key; it is in the environment variable "
                f"{POLICY_KEY_ENV} of the process that serves it.",
                status=401,
                code="invalid_api_key",
            )
        if request.headers.get("content-encoding", "identity") != "identity":
            raise WireError(
                "This policy reads no compressed requests. Send the body without content-encoding.",
                status=415,
                code="unsupported_encoding",
            )
        return await handler(request)

    async def _models(self, _request: web.Request) -> web.Response:
        limit, created = self._settings.context_length, self._created
        model = {"object": "model", "created": created, "owned_by": "agl", "max_model_len": limit}
        return json_response({"object": "list", "data": [{"id": name, **model} for name in list(self._engines)]})

    async def _health(self, _request: web.Request) -> web.Response:
        state = {"status": "ok", "model": self._settings.model_name, "model_version": self._engine.version}
        return json_response(state | self._engine.snapshot())

    async def _metrics(self, _request: web.Request) -> web.Response:
        """Answer with the numbers that vLLM's servers give under these names, in Prometheus' text format."""
        states = [engine.snapshot() for engine in list(self._engines.values())]
        lines = [
            f"policy:num_requests_{name} {sum(state[name] for state in states)}\n" for name in ("running", "waiting")
        ]
        return web.Response(text="".join(lines))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, ChatBody)
        check_messages(body.messages, sees=self._prompts.builder.modality is not None)
        tools = self._tools(body)
        attempt = _attempt(request)
        prompt = await self._prompt(body, tools, attempt=attempt)
        stop_ids = self._stop_ids(body)
        writer = ChatWriter(
            body=body,
            prompt=prompt,
            codec=self._codec,
            builder=self._prompts.builder,
            answers=self._answers,
            tools=tools,
            stop_ids=stop_ids,
        )
        head = AnswerHead(id=new_id("chatcmpl"), model=body.model, created=int(time.time()), kind="chat")
        call = self._call(body, head, writer, [prompt], stop_ids, attempt=attempt)
        return await serve(request, call, self._engine_of(body))

    def _tools(self, body: ChatBody) -> list[dict[str, Any]]:
        """Return the tools to show in the prompt; raises WireError for a tool choice that cannot be enforced."""
        choice = body.tool_choice
        if choice == "none":
            return []
        if body.tools and self._answers.refusal:
            raise WireError(
                f"The model's chat template {self._answers.refusal}, so tools cannot be used. Use another model or "
                'template, describe the tools in a message, or set the policy\'s tool_parser = "none" to get the text '
                "as it is.",
                code="unsupported_parameter",
                param="tools",
            )
        if choice == "auto":
            return body.tools
        if choice == "required" and body.tools and "tool_choice" in self._codec.chat_template:
            return body.tools
        raise WireError(
            f"tool_choice={choice!r} cannot be enforced: this server does not constrain decoding, and the model's chat "
            "template has no way to ask for it. Use 'auto' or 'none'.",
            code="unsupported_parameter",
            param="tool_choice",
        )

    async def _prompt(self, body: ChatBody, tools: Sequence[dict[str, Any]], *, attempt: str) -> Prompt:
        options = dict(body.chat_template_kwargs)
        check_template_kwargs(options, refused=self._rendering_arguments)
        if body.tool_choice == "required":
            options["tool_choice"] = "required"
        try:
            return await self._prompts.build(body.messages, tools=tools, options=options, attempt=attempt)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise WireError(
                f"The model's chat template refuses these messages: {error}. Change their roles, order or fields.",
                code="template_error",
                param="messages",
            ) from error

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, CompletionBody)
        attempt = _attempt(request)
        prompts = [await self._ids(prompt, attempt=attempt) for prompt in _prompts(body.prompt)]
        stop_ids = self._stop_ids(body)
        scores = await self._scores(body, prompts)
        writer = CompletionWriter(body=body, prompts=prompts, codec=self._codec, stop_ids=stop_ids, scores=scores)
        head = AnswerHead(id=new_id("cmpl"), model=body.model, created=int(time.time()), kind="completions")
        call = self._call(body, head, writer, [Prompt("", ids) for ids in prompts], stop_ids, attempt=attempt)
        return await serve(request, call, self._engine_of(body))

    async def _scores(self, body: CompletionBody, prompts: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Return the log-probabilities of each prompt's tokens after the first; None if not requested."""
        if body.prompt_logprobs is None:
            return None
        if body.stream:
            raise WireError("The parameter 'prompt_logprobs' goes with stream = false only.", param="prompt_logprobs")
        for prompt in prompts:
            self._max_tokens(len(prompt), body.limit)  # refuse a prompt that is too long before computing it
        return [await asyncio.wrap_future(self._engine_of(body).score(prompt)) for prompt in prompts]

    async def _ids(self, prompt: str | list[int], *, attempt: str) -> tuple[int, ...]:
        ids = await self._prompts.encode(prompt, attempt=attempt) if isinstance(prompt, str) else prompt
        if not ids or not all(0 <= i < self._engine.vocab_size for i in ids):
            raise WireError(
                f"The prompt must have at least one token, and ids from 0 to {self._engine.vocab_size - 1}.",
                param="prompt",
            )
        return tuple(ids)

    async def _body(self, request: web.Request, kind: type[Body]) -> Body:
        """Read a request for this model, with the gateway's seed."""
        data = await request.read()
        if kind is ChatBody and len(data) > self._largest_chat:
            raise WireError(
                f"The request has {len(data):,} bytes, more than the {self._largest_chat:,} that a chat may have for "
                f"the model's context of {self._settings.context_length:,} tokens. Shorten the messages.",
                status=413,
                code="request_too_large",
            )
        body = seeded(read_body(data, kind), request.headers.get(_SEED_HEADER))
        self._engine_of(body)  # refuses a model that does not exist before its prompt is built
        return body

    def _engine_of(self, body: ChatBody | CompletionBody) -> Engine:
        engine = self._engines.get(body.model)
        if engine is None:
            raise WireError(
                f"The model {body.model!r} does not exist here; this server has {', '.join(map(repr, self._engines))}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return engine

    def _stop_ids(self, body: ChatBody | CompletionBody) -> frozenset[int]:
        return frozenset(body.stop_token_ids) if body.ignore_eos else self._codec.stop_ids.union(body.stop_token_ids)

    def _call(
        self,
        body: ChatBody | CompletionBody,
        head: AnswerHead,
        writer: AnswerWriter,
        prompts: Sequence[Prompt],
        stop_ids: frozenset[int],
        *,
        attempt: str,
    ) -> CheckedRequest:
        check = stop_checker(self._codec, body.stops)
        requests = [
            GenerationRequest(
                prompt_ids=prompt.ids,
                max_tokens=self._max_tokens(len(prompt.ids), body.limit),
                params=body.params(choice),
                stop_ids=stop_ids,
                stop_check=check,
                wants_tokens=body.stream,
                attempt=attempt,
                media=prompt.media,
                blobs=prompt.blobs,
            )
            for prompt in prompts
            for choice in range(body.n)
        ]
        return CheckedRequest(
            body=body, head=head, writer=writer, requests=requests, prompt_tokens=sum(len(one.ids) for one in prompts)
        )

    def _max_tokens(self, prompt_tokens: int, limit: int | None) -> int:
        left = self._settings.context_length - prompt_tokens
        wanted = limit or min(self._settings.default_max_tokens or left, left)
        if wanted > left or left < 1:
            raise WireError(
                f"This model's context is {self._settings.context_length} tokens; the prompt has {prompt_tokens}, and "
                f"the request asks for up to {max(wanted, 1)}. Shorten the messages or lower max_tokens.",
                code="context_length_exceeded",
                param="messages",
            )
        return wanted


def _attempt(request: web.Request) -> str:
    return request.headers.get(_ATTEMPT_HEADER, "")


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """Return the prompts of a request, each as text or token ids; raises WireError for other values, or too many."""
    items = [prompt] if isinstance(prompt, str) or all(type(item) is int for item in prompt) else prompt
    if len(items) > _MOST_PROMPTS:
        raise WireError(f"A request has at most {_MOST_PROMPTS} prompts, and this one {len(items)}.", param="prompt")
    for item in items:
        is_ids = isinstance(item, list) and all(type(i) is int for i in cast("list[Any]", item))
        if not (isinstance(item, str) or is_ids):
            raise WireError("The prompt must be text, token ids, or a list of either.", param="prompt")
    return items


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure into an error response in OpenAI's format."""
    try:
        return await handler(request)
    except WireError as error:
        answer = error
    except EngineError as error:
        answer = wire_error(error)
    except web.HTTPRequestEntityTooLarge as error:
        answer = WireError(f"{error.text}. Shorten the request, or send its prompts in several.", status=413)
    except web.HTTPException as error:
        answer = WireError(f"{request.method} {request.path}: {error.reason}.", status=error.status)
    except Exception as error:  # noqa: BLE001 - isolation point: one request's failure is that request's answer
        _log.exception("the request %s failed", request.path)
        answer = WireError(f"{type(error).__name__}: {error}.", status=500, code="internal_error")
    headers = {"retry-after": "1"} if answer.status == 429 else None
    return web.Response(body=answer.body(), status=answer.status, headers=headers, content_type="application/json")
