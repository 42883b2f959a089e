"""A stand-in for a vLLM 0.32 server with ``--enable-scale-out``, within the test's process.

It follows vLLM's schemas (`entrypoints/scale_out/token_in_token_out/protocol.py`, `entrypoints/serve/tokenize`) and is
stricter: fields that they do not have are refused. Tokens are bytes and two special ones. Its model calls `calc` in
every turn, without white space, where the template prints calls with it; a prompt that ends in `plain` gets text, and
one with `think` a call with reasoning, in the template's notation. The template drops reasoning that precedes a
message of the user.
"""

import json
import re
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web

SPECIAL = {"<|im_start|>": 256, "<|im_end|>": 257}
NAMES = {number: name for name, number in SPECIAL.items()}
END = 257


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None


class GenerateRequest(Strict):
    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    token_offsets: list[tuple[int, int]] | None = None
    features: None = None
    content_parts: None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    output_mode: str = "tokens"
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: None = None
    ec_transfer_params: None = None


class Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[Any] = []


class Logprobs(msgspec.Struct, forbid_unknown_fields=True):
    content: list[Entry] | None = None


class TokensChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    index: int
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: None = None
    sampling_mask: None = None
    weight_versions: None = None
    logprobs: Logprobs | None = None


class TokensResponse(Strict):
    request_id: str
    choices: list[TokensChoice]
    created: int | None = None
    usage: dict[str, int] | None = None
    prompt_logprobs: None = None
    prompt_token_id_logprobs: None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: None = None
    metrics: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    output_mode: str = "tokens"


class DerenderRequest(Strict):
    generate_response: TokensResponse
    chat_request: dict[str, Any]  # optional to vLLM, and needed where it has a parser of tool calls
    stream: bool = False
    prompt_tokens: int | None = None
    prompt_token_ids: list[int] | None = None


class TokenizeRequest(Strict):
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class DetokenizeRequest(Strict):
    tokens: list[int]


def encode(text: str) -> list[int]:
    parts = re.split(r"(<\|im_start\|>|<\|im_end\|>)", text)
    return [token for part in parts for token in ([SPECIAL[part]] if part in SPECIAL else part.encode())]


def decode(ids: list[int]) -> str:
    return b"".join(NAMES[i].encode() if i in NAMES else bytes([i]) for i in ids).decode(errors="replace")


def render(messages: list[dict[str, Any]]) -> str:
    text, last = "", max((at for at, m in enumerate(messages) if m["role"] == "user"), default=0)
    for at, message in enumerate(messages):
        body = message.get("content") or ""
        if isinstance(body, list):
            body = "".join(part.get("text", "<|image_pad|>") for part in body)
        if message.get("reasoning") and at > last:
            body = f"<think>{message['reasoning']}</think>{body}"
        for call in message.get("tool_calls") or ():
            function = call["function"]
            shown = {"name": function["name"], "arguments": json.loads(function["arguments"])}
            body += f"<tool_call>\n{json.dumps(shown)}\n</tool_call>"
        text += f"<|im_start|>{message['role']}\n{body}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


class RefusedError(Exception):
    pass


class Server:
    """The server; `paths` lists the paths of requests, and `prompts` the token ids that the model read.

    With `is_old` it answers as vLLM 0.24: `generate` returns no prompt, and `derender` shows special tokens.
    """

    def __init__(self, *, is_old: bool = False) -> None:
        self.is_old = is_old
        self.paths: list[str] = []
        self.prompts: list[list[int]] = []
        self.count = 0

    @web.middleware
    async def answered(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.paths.append(request.path)
        try:
            return await handler(request)
        except (msgspec.ValidationError, RefusedError) as error:
            return web.json_response({"error": {"message": str(error), "code": 400}}, status=400)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.answered])
        routes = {
            "/v1/chat/completions": self.chat,
            "/v1/chat/completions/render": self.render,
            "/v1/chat/completions/derender": self.derender,
            "/inference/v1/generate": self.generate,
            "/v1/completions": self.completions,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }
        for path, handler in routes.items():
            app.router.add_post(path, handler)
        app.router.add_get("/v1/models", self.models)
        return app

    async def models(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"data": [{"id": "main_llm"}]})

    async def completions(self, request: web.Request) -> web.Response:
        """Answer a request for a completion, as far as a policy needs that at its start."""
        body = await request.json()
        scale = body.get("temperature", 1.0) or 1.0
        scored = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
        logprobs = {"top_logprobs": [{"token_id:7": -0.5 / scale, "token_id:8": -1.5 / scale}]}
        choice = {"token_ids": [7], "prompt_token_ids": body["prompt"], "prompt_logprobs": scored, "logprobs": logprobs}
        return web.json_response({"choices": [choice]})

    async def tokenize(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=TokenizeRequest)
        ids = encode(asked.prompt)
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 100_000})

    async def detokenize(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=DetokenizeRequest)
        return web.json_response({"prompt": decode(asked.tokens)})

    async def render(self, request: web.Request) -> web.Response:
        return web.json_response(msgspec.to_builtins(self.rendered(await request.json())))

    def rendered(self, body: dict[str, Any]) -> GenerateRequest:
        self.count += 1
        if any("refuse" in (message.get("content") or "") for message in body["messages"]):
            raise RefusedError("the template refuses this conversation")
        ids = encode(render(body["messages"]))
        limit = body.get("max_tokens") or 100_000 - len(ids)
        sampling = {"max_tokens": limit, "logprobs": 0 if body.get("logprobs") else None, "temperature": 1.0}
        return GenerateRequest(
            request_id=f"chatcmpl-{self.count}", token_ids=ids, sampling_params=sampling, model=body["model"]
        )

    async def generate(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=GenerateRequest)
        return web.json_response(msgspec.to_builtins(self.generated(asked)))

    def generated(self, asked: GenerateRequest) -> TokensResponse:
        self.prompts.append(asked.token_ids)
        prompt = decode(asked.token_ids)
        turn = prompt.count("<tool_call>")
        text = f'<tool_call>{{"name":"calc","arguments":{{"b":{turn},"a":"x"}}}}</tool_call>'
        if prompt.endswith("plain<|im_end|>\n<|im_start|>assistant\n"):
            text = "It is 7."
        if "think<|im_end|>" in prompt:
            text = f'<think>hm</think><tool_call>\n{{"name": "calc", "arguments": {{"b": {turn}}}}}\n</tool_call>'
        ids = [*encode(text), END]
        limit = asked.sampling_params.get("max_tokens", 100_000 - len(asked.token_ids))
        content = [Entry(token_id=token, logprob=-token / 1000, rank=1) for token in ids[:limit]]
        choice = TokensChoice(
            index=0,
            finish_reason="length" if len(ids) > limit else "stop",
            token_ids=ids[:limit],
            logprobs=Logprobs(content) if asked.sampling_params.get("logprobs") is not None else None,
        )
        return TokensResponse(
            request_id=asked.request_id,
            choices=[choice],
            prompt_token_ids=asked.token_ids if asked.return_token_ids and not self.is_old else None,
        )

    async def derender(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=DerenderRequest)
        return web.json_response(self.derendered(asked))

    def derendered(self, asked: DerenderRequest) -> dict[str, Any]:
        (choice,) = asked.generate_response.choices
        ids = choice.token_ids or []
        made = choice.logprobs.content if choice.logprobs and choice.logprobs.content else []
        content = [{"token": decode([e.token_id]), "logprob": e.logprob, "top_logprobs": []} for e in made]
        found = {
            "index": 0,
            "message": self.message(decode([i for i in ids if self.is_old or i not in NAMES])),
            "logprobs": {"content": content} if choice.logprobs else None,
            "finish_reason": choice.finish_reason,  # `stop` beside tool calls, as in 0.32
            "stop_reason": choice.stop_reason,
            "token_ids": ids if asked.chat_request.get("return_token_ids") else None,
        }
        usage = {"prompt_tokens": asked.prompt_tokens or 0, "completion_tokens": len(ids)}
        usage["total_tokens"] = sum(usage.values())
        head = {"id": asked.generate_response.request_id, "object": "chat.completion", "created": 1}
        return {**head, "model": asked.model, "choices": [found], "usage": usage, "prompt_token_ids": None}

    def message(self, text: str) -> dict[str, Any]:
        found = re.fullmatch(r"(?:<think>(.*)</think>)?<tool_call>(.*)</tool_call>", text, re.DOTALL)
        if found is None:
            return {"role": "assistant", "content": text, "tool_calls": []}
        self.count += 1
        made = json.loads(found[2])
        function = {"name": made["name"], "arguments": json.dumps(made["arguments"])}
        call = {"id": f"chatcmpl-tool-{self.count}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "reasoning": found[1], "tool_calls": [call]}

    async def chat(self, request: web.Request) -> web.Response:
        """Render, generate and derender at once; the answer also has the prompt's ids and the reason `tool_calls`."""
        body = await request.json()
        output = self.generated(self.rendered(body))
        length = len(self.prompts[-1])
        answer = self.derendered(
            DerenderRequest(
                model=body["model"], generate_response=output, chat_request=body, prompt_tokens=length, stream=False
            )
        )
        (choice,) = answer["choices"]
        made = output.choices[0].token_ids or []
        choice["message"] = self.message(decode([i for i in made if i not in NAMES]))
        choice["token_ids"] = made if body.get("return_token_ids") else None
        choice["finish_reason"] = "tool_calls" if choice["message"]["tool_calls"] else choice["finish_reason"]
        ids = self.prompts[-1] if body.get("return_token_ids") else None
        return web.json_response({**answer, "prompt_token_ids": ids})


@asynccontextmanager
async def running(server: Server) -> Any:
    """Run the server, and yield its base URL."""
    runner = web.AppRunner(server.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
