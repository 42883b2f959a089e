"""The embedded policy: a model, its engine and its server, in this process and on a free local port.

The policy serves a copy of the model, so training may change its own weights while requests run. `publish` (weights in
memory) and `load` (weights on disk, or offered from memory) update the copy between two tokens. `serve_versions` adds
further versions, each under a model name of its own. The server runs on its
own event loop in its own thread, so a training step that blocks the caller's loop delays no answer.

Limit: Python threads share one interpreter, so a busy agent in the same process slows the engine.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from aiohttp import web
from msgspec.structs import replace

from agl.contracts import POLICY_KEY_ENV, ServedModel
from agl.errors import ConfigError, PolicyError
from agl.hints import did_you_mean
from agl.schemas import ResourceVersion, Weights
from agl_algo_torch.learner.model import LoadedModel, load_model
from agl_algo_torch.learner.weights import serving_copy
from agl_algo_torch.serving.codec import TextCodec
from agl_algo_torch.serving.engine import Engine, EngineSettings
from agl_algo_torch.serving.prompting import PromptThreads
from agl_algo_torch.serving.server import PolicyServer, PolicyServerSettings
from agl_algo_torch.serving.templates import PromptBuilder
from agl_algo_torch.serving.toolcalls import read_format
from agl_algo_torch.serving.weight_swap import ServedWeights, Swap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from agl_objectives.adapters import HeldAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The name, address and limits with which a policy serves.

    Attributes:
        model_name: Name of the model in requests.
        host: Interface to listen on.
        port: Port to listen on; 0 for a free one.
        context_length: Largest number of tokens of prompt and response together; None for the model's own limit.
        max_tokens: Largest response of chat requests without `max_tokens`; None for the rest of the context.
        tool_parser: Notation of tool calls, by vLLM's name (`hermes`, `qwen3_coder`, `llama3_json`, ...) or as
            `"package.module:PARSER"`; `auto` for the one that the chat template writes; `none` to leave reasoning and
            tool calls in the text.
        prompt_s: Seconds that a request may wait until its prompt is rendered and tokenised.
        drain_s: Seconds that running requests have to finish before new weights replace the old ones.
        merge_adapters: Whether a LoRA version is merged into its base. Merging takes long, needs peft and rounds in
            `bfloat16`; without merging every adapted layer multiplies two more small matrices.
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 0
    context_length: int | None = None
    max_tokens: int | None = None
    tool_parser: str = "auto"
    prompt_s: float = 30.0
    drain_s: float = 30.0
    merge_adapters: bool = False


class TorchPolicy:
    """The role `Policy` over a Hugging Face causal LM on the CPU or one GPU.

    Args:
        name: The policy's name, which is also the model name in requests unless `model_name` is given.
        model: Directory or hub name; or a model in memory, which is copied.
        device: `auto`, `cpu`, `cuda` or `cuda:1`.
        dtype: `float32`, `bfloat16` or `float16`.
        max_rows: Largest number of sequences that run at once.
        max_waiting: Largest number of sequences that wait; more are answered with 429.
        prefix_mb: Memory for common prefixes of prompts, in MiB; 0 computes every prompt from its first token.
        seed: Seed of the draws of requests without a seed.
        threads: Torch's CPU threads in this process; 0 changes nothing. 1 is fastest for models of a few million
            weights.
        settings: The fields of `PolicySettings`, as keyword arguments.

    Raises:
        ConfigError: The model cannot be loaded or served, or a setting is unknown.
    """

    def __init__(
        self,
        *,
        name: str,
        model: str | LoadedModel,
        device: str = "auto",
        dtype: str = "float32",
        max_rows: int = 64,
        max_waiting: int = 1024,
        prefix_mb: int = 256,
        seed: int = 0,
        threads: int = 0,
        **settings: Any,
    ) -> None:
        self.name = name
        self._settings = _settings(name, settings)
        loaded = load_model(model, device=device, dtype=dtype) if isinstance(model, str) else serving_copy(model)
        self._loaded = loaded
        stops = loaded.tokenizer.convert_ids_to_tokens(sorted(loaded.stop_ids))
        self._format = read_format(loaded.tokenizer, tool_parser=self._settings.tool_parser, stop_texts=stops)
        self._weights = ServedWeights(loaded, merges=self._settings.merge_adapters)
        self._swapping = asyncio.Lock()
        self._offered: tuple[Weights, LoadedModel | Mapping[str, Tensor] | HeldAdapter] | None = None
        limits = EngineSettings(max_rows=max_rows, max_waiting=max_waiting, prefix_bytes=prefix_mb * 2**20, seed=seed)
        self._engine = Engine(loaded.model, settings=limits, modality=loaded.modality)
        self._engines = {self.model_name: self._engine}  # by the name of the model in requests
        self._thread: ServerThread | None = None
        self._base_url = ""
        if threads:
            torch.set_num_threads(threads)

    @property
    def model_name(self) -> str:
        """Name of the model in requests."""
        return self._settings.model_name

    @property
    def model_version(self) -> str:
        """Version of the weights that serve now."""
        return self._engine.version

    @property
    def base_url(self) -> str:
        """The server's address, with `/v1`; `""` before `start`."""
        return self._base_url

    @property
    def has_token_ids(self) -> bool:
        """True: answers have token ids and log-probabilities if the request asks for them."""
        return True

    def resource(self) -> Weights:
        """Return the weights with which the policy was constructed, as a resource."""
        return Weights(uri=self._loaded.name)

    async def start(self) -> ServedModel:
        """Start serving; raises PolicyError if the policy already serves or the port is taken."""
        if self._thread is not None:
            raise PolicyError(f"The policy {self.name!r} is already serving at {self._base_url}; stop it first.")
        self._engine.start()
        thread = ServerThread(self._server().app, host=self._settings.host, port=self._settings.port)
        port = await asyncio.to_thread(thread.start)
        self._thread = thread
        self._base_url = f"http://{self._settings.host}:{port}/v1"
        return self._served()

    def _server(self) -> PolicyServer:
        config = cast("Any", self._loaded.model).config
        codec = TextCodec(self._loaded.tokenizer, stop_ids=self._loaded.stop_ids, visible=self._format.tags)
        context_length = self._settings.context_length or config.get_text_config().max_position_embeddings
        builder = PromptBuilder(codec, context_length=context_length, modality=self._loaded.modality)
        return PolicyServer(
            engines=self._engines,
            codec=codec,
            prompts=PromptThreads(builder, limit_s=self._settings.prompt_s),
            key=_key(),
            answers=self._format,
            settings=PolicyServerSettings(
                model_name=self.model_name,
                context_length=context_length,
                default_max_tokens=self._settings.max_tokens,
            ),
        )

    async def stop(self) -> None:
        """Stop the engine, answer requests that still run with 503, and close the port; idempotent."""
        for engine in list(self._engines.values()):
            await asyncio.to_thread(engine.stop)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)
            self._thread, self._base_url = None, ""

    def offer_weights(self, weights: Weights, held: LoadedModel | Mapping[str, Tensor] | HeldAdapter) -> None:
        """Let the next `load` take `weights` from memory, so that they need not be on disk.

        Args:
            weights: The resource that the next `load` serves; if it serves another one, the offer is dropped.
            held: The model with these weights, its state, or its adapter. It must not change until `load` returns.
        """
        self._offered = (weights, held)

    async def load(self, version: ResourceVersion) -> ServedModel:
        """Serve the weights of a version, from memory if they were offered for it, else from disk.

        Returns when they are live. Raises ConfigError if the resource is not weights, or if they do not fit the model.
        """
        weights = self._weights_of(version)
        async with self._swapping:
            offered, self._offered = self._offered, None
            if offered is not None and offered[0] == weights:
                swap = await asyncio.to_thread(self._weights.take, offered[1])
            else:
                swap = await asyncio.to_thread(self._weights.read, weights)
            await self._swap(swap, version.version)
        return self._served()

    def _weights_of(self, version: ResourceVersion) -> Weights:
        if not isinstance(version.resource, Weights):
            raise ConfigError(
                f"The policy {self.name!r} can load weights, and {version.name}@{version.version} is a "
                f"{type(version.resource).__name__}. Let an algorithm that trains weights tune it."
            )
        return version.resource

    async def serve_versions(self, versions: Sequence[ResourceVersion]) -> Mapping[str, ServedModel]:
        """Serve exactly these versions in addition to the weights of `load`, each with an engine of its own.

        A LoRA version takes the memory of its adapter while its base is the policy's model, and other weights that of a
        model. Requests that run on a version when it is unloaded have `drain_s` seconds to finish.
        Raises ConfigError if weights cannot be read or do not fit.
        """
        names = {f"{self.model_name}@{each.version}": each for each in versions}
        async with self._swapping:
            for name in self._engines.keys() - names.keys() - {self.model_name}:
                await self._retire(self._engines.pop(name))
            for name in names.keys() - self._engines.keys():
                weights = await asyncio.to_thread(self._weights.beside, self._weights_of(names[name]))
                engine = Engine(
                    weights.model,
                    version=names[name].version,
                    settings=self._engine.settings,
                    modality=self._loaded.modality,
                )
                engine.start()
                self._engines[name] = engine
        served = self._served()
        return {each.version: replace(served, model=name, version=each.version) for name, each in names.items()}

    async def _retire(self, engine: Engine) -> None:
        drained = engine.swap(lambda _: None, version=engine.version, drain_s=self._settings.drain_s)
        await asyncio.wrap_future(drained)
        await asyncio.to_thread(engine.stop)

    def _served(self) -> ServedModel:
        return ServedModel(
            base_urls=(self._base_url,),
            model=self.model_name,
            version=self.model_version,
            api_key_env=POLICY_KEY_ENV,
        )

    async def publish(self, state: Mapping[str, Tensor], version: str, *, drain_s: float | None = None) -> None:
        """Serve `state` as `version`; returns when the version is live. Do not change `state` until then.

        Requests in flight finish on the old weights, for at most `drain_s` seconds, while new ones wait.
        If names or shapes differ from the model's, the old weights stay, and this raises ConfigError.
        """
        async with self._swapping:
            await self._swap(self._weights.whole(state), version, drain_s=drain_s)

    async def _swap(self, swap: Swap, version: str, *, drain_s: float | None = None) -> None:
        drain = self._settings.drain_s if drain_s is None else drain_s
        self._engine.start()
        done = self._engine.swap(lambda _: self._weights.apply(swap), version=version, drain_s=drain)
        await asyncio.wrap_future(done)

    def health(self) -> dict[str, Any]:
        """Return the model's name, its version and the engine's counters, as the endpoint `/health` shows them."""
        return {"model": self.model_name, "model_version": self.model_version, **self._engine.snapshot()}


def _key() -> str:
    """Return the API key that all policies of this process share; it is created in the environment if it is missing."""
    return os.environ.setdefault(POLICY_KEY_ENV, secrets.token_urlsafe(32))


def _settings(name: str, values: dict[str, Any]) -> PolicySettings:
    known = set(PolicySettings.__dataclass_fields__)
    unknown = sorted(values.keys() - known)
    if unknown:
        near = did_you_mean(unknown[0], [*known, *inspect.signature(TorchPolicy).parameters])
        raise ConfigError(
            f"The policy {name!r} does not know {unknown}{f'; {near}' if near else '.'} Use one of: "
            f"{', '.join(sorted(known))}, or the arguments of TorchPolicy."
        )
    return PolicySettings(**(cast("dict[str, Any]", {"model_name": name}) | values))


class ServerThread:
    """An aiohttp server in its own thread, with its own event loop."""

    def __init__(self, make_app: Callable[[], web.Application], *, host: str, port: int) -> None:
        self._make_app, self._host, self._port = make_app, host, port
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._ready = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="agl-policy-server", daemon=True)

    def start(self) -> int:
        """Start to listen; returns the port. Raises PolicyError if the server cannot listen. Call this once."""
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise PolicyError(
                f"The policy server cannot listen on {self._host}:{self._port}: {self._error}. "
                "Choose another port, or 0 for a free one."
            ) from self._error
        return self._port

    def stop(self) -> None:
        """Close connections and end the thread."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._ready.set()

    async def _serve(self) -> None:
        runner = web.AppRunner(
            self._make_app(), handler_cancellation=True, access_log=None, shutdown_timeout=2.0, auto_decompress=False
        )
        await runner.setup()
        try:
            await self._listen(runner)
            self._ready.set()
            if self._error is None:
                await self._stopped.wait()
        finally:
            await runner.cleanup()

    async def _listen(self, runner: web.AppRunner) -> None:
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError as error:
            self._error = error
            return
        self._port = int(runner.addresses[0][1])
