"""The parts of vLLM 0.32's server that a policy needs; the environment variable ``FAKE`` names a fault to show.

The weights are the number ``shift`` in ``weights.json`` in the model's folder; an adapter's ``shift`` is added.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

FAKE = os.environ.get("FAKE", "")
ANSWER = (7, 8, 9)


def logprob(token: int, shift: float) -> float:
    return -1.0 - shift - (token % 7) / 10


def shift_in(folder: str) -> float:
    return float(json.loads((Path(folder) / "weights.json").read_text())["shift"])


class Server:
    def __init__(self, args: argparse.Namespace) -> None:
        self.name = args.served_model_name
        self.model = args.model
        self.max_rank = args.max_lora_rank if args.enable_lora else 0
        self.shift = shift_in(args.model)
        self.is_processed = args.logprobs_mode == "processed_logprobs" and FAKE != "raw-logprobs"
        self.can_sleep = args.enable_sleep_mode
        self.asleep: set[str] = set()
        self.adapters: dict[str, float] = {}
        self.paths: list[str] = []
        self.bodies: list[Any] = []

    @web.middleware
    async def note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path not in ("/health", "/noted"):
            self.paths.append(request.path_qs)
            self.bodies.append(await request.json() if request.can_read_body else None)
        return await handler(request)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.note])
        app.router.add_get("/health", self.health)
        app.router.add_get("/noted", self.noted)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            app.router.add_post("/v1/load_lora_adapter", self.load_adapter)
            app.router.add_post("/v1/unload_lora_adapter", self.unload_adapter)
        if os.environ.get("VLLM_SERVER_DEV_MODE"):
            for path in ("/pause", "/resume", "/reset_prefix_cache"):
                app.router.add_post(path, self.health)
            app.router.add_post("/collective_rpc", self.rpc)
            if self.can_sleep:
                app.router.add_post("/sleep", self.sleep)
                app.router.add_post("/wake_up", self.wake_up)
        return app

    async def health(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"status": "ok"})

    async def noted(self, request: web.Request) -> web.Response:
        del request
        about = {"paths": self.paths, "bodies": self.bodies, "argv": sys.argv[1:], "pid": os.getpid()}
        return web.json_response({**about, "environ": dict(os.environ)})

    async def models(self, request: web.Request) -> web.Response:
        del request
        names = [self.name, *self.adapters]
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    def shift_of(self, model: str) -> float:
        if self.asleep:
            raise web.HTTPInternalServerError(text="the engine sleeps")
        if model not in (self.name, *self.adapters):
            text = json.dumps({"error": {"message": f"The model `{model}` does not exist."}})
            raise web.HTTPNotFound(text=text, content_type="application/json")
        return self.shift + self.adapters.get(model, 0.0)

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        shift, prompt = self.shift_of(body["model"]), body["prompt"]
        gives_ids = body.get("return_token_ids") and FAKE != "no-ids"
        choice: dict[str, Any] = {"index": 0, "text": "x", "finish_reason": "length", "stop_reason": None}
        choice["logprobs"] = {"token_logprobs": [logprob(ANSWER[0], shift)], "tokens": ["x"], "text_offset": [0]}
        if body.get("logprobs", 0) > 1:
            scale = body.get("temperature", 0.6 if FAKE == "own-temperature" else 1.0) if self.is_processed else 1.0
            cut = math.log(body.get("top_p", 0.9)) if FAKE == "own-top-p" and scale == 2 else 0.0
            choice["logprobs"]["top_logprobs"] = [{"token_id:7": -0.5 / scale - cut, "token_id:8": -1.5 / scale - cut}]
        choice["token_ids"] = [ANSWER[0]] if gives_ids else None
        choice["prompt_token_ids"] = prompt if gives_ids else None
        if body.get("prompt_logprobs") is not None:
            scored = [{str(t): {"logprob": logprob(t, shift), "rank": 1, "decoded_token": "x"}} for t in prompt[1:]]
            choice["prompt_logprobs"] = [None, *scored]
        return web.json_response({"object": "text_completion", "model": body["model"], "choices": [choice]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        shift = self.shift_of(body["model"])
        head = {"id": "chatcmpl-1", "created": int(time.time()), "model": body["model"]}
        content = [{"token": "x", "logprob": logprob(token, shift), "bytes": [120]} for token in ANSWER]
        if body.get("stream"):
            return await self.stream(request, head, content)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "xxx"},
            "logprobs": {"content": content} if body.get("logprobs") else None,
            "finish_reason": "stop",
            "token_ids": list(ANSWER) if body.get("return_token_ids") else None,
        }
        prompt_ids = [1, 2, 3] if body.get("return_token_ids") else None
        whole = {**head, "object": "chat.completion", "choices": [choice], "prompt_token_ids": prompt_ids}
        return web.json_response(whole)

    async def stream(self, request: web.Request, head: dict[str, Any], content: list[Any]) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        head = {**head, "object": "chat.completion.chunk"}
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        chunks = [{**head, "choices": [first], "prompt_token_ids": [1, 2, 3]}]
        for place, token in enumerate(ANSWER):
            reason = "stop" if place == len(ANSWER) - 1 else None
            delta = {"index": 0, "delta": {"content": "x"}, "finish_reason": reason, "token_ids": [token]}
            chunks.append({**head, "choices": [{**delta, "logprobs": {"content": [content[place]]}}]})
        for chunk in chunks:
            await reply.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["lora_name"] == self.name:
            return web.json_response({"error": {"message": "conflicts with a served base model"}}, status=400)
        if json.loads((Path(body["lora_path"]) / "adapter_config.json").read_text())["r"] > self.max_rank:
            return web.json_response({"error": {"message": "LoRA rank is greater than max_lora_rank"}}, status=500)
        self.adapters[body["lora_name"]] = shift_in(body["lora_path"])
        return web.Response(text="Success")

    async def unload_adapter(self, request: web.Request) -> web.Response:
        if self.adapters.pop((await request.json())["lora_name"], None) is None:
            raise web.HTTPNotFound(text="no such adapter")
        return web.Response(text="Success")

    async def sleep(self, request: web.Request) -> web.Response:
        assert "2" == request.query["level"]
        self.shift, self.asleep = 99.0, {"weights", "kv_cache"}
        return web.Response()

    async def wake_up(self, request: web.Request) -> web.Response:
        self.asleep.remove(request.query["tags"])
        return web.Response()

    async def rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "weights" in self.asleep:
            return web.json_response({"error": {"message": "no memory for the weights"}}, status=500)
        if FAKE != "reload-ignored":
            self.shift = shift_in(body["kwargs"]["weights_path"])
        return web.json_response({"results": [None]})


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--served-model-name", "--host", "--dtype", "--generation-config", "--logprobs-mode"):
        parser.add_argument(name)
    for name in ("--port", "--max-lora-rank", "--max-loras"):
        parser.add_argument(name, type=int)
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    args = parser.parse_args()
    if FAKE == "dies":
        print("loading the model", flush=True)
        sys.exit("RuntimeError: no GPU was found")
    if FAKE == "hangs":
        time.sleep(600)
    web.run_app(Server(args).app(), host=args.host, port=args.port, print=None, loop=asyncio.new_event_loop())


main()
