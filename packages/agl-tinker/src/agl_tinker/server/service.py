"""The state of a server between requests: sessions, models in training, samplers, and the queue of training requests.

Training requests of all clients run in one thread, in the order of their arrival, because one pass uses the whole
machine. Sampling runs at the same time. Everything in memory is lost when the process ends: models in training, and
results that were not fetched. Checkpoints survive, and so do sampling sessions, whose ids contain their weights' paths.
"""

import asyncio
import base64
import re
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from tinker import types

from agl_algo_torch.serving.hosting import AdamStep, Adapter, HostedModel, Sampler, Trainee
from agl_tinker.server.checkpoints import Checkpoint, Checkpoints
from agl_tinker.server.losses import make_loss
from agl_tinker.server.problems import RefusedError, not_offered
from agl_tinker.server.promises import Promises, Result
from agl_tinker.server.wire import config_of, read_sampling, rows_of, sampling_output, training_output

T = TypeVar("T")
_SESSION = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
_MOST_RANK = 512


@dataclass(kw_only=True)
class TrainingRun:
    """A model in training, with the id of its run."""

    run: str
    trainee: Trainee


class TinkerService:
    """The state that all requests share; must be used in one event loop, and closed with :meth:`close`.

    Args:
        model: The base model.
        name: The name by which clients know the model.
        folder: The folder of the checkpoints.
        threads: CPU threads of torch; 0 keeps torch's own number.
        samplers: The number of sets of weights that stay ready for sampling.
        most_models: The number of models that may be in training at once.
    """

    def __init__(
        self, model: HostedModel, *, name: str, folder: Path, threads: int, samplers: int, most_models: int
    ) -> None:
        self.model, self.name = model, name
        self.checkpoints = Checkpoints(folder)
        self.promises = Promises()
        self._samplers = Samplers(model, most=samplers)
        self._runs: dict[str, TrainingRun] = {}
        self._adding = asyncio.Lock()
        self._most_models, self._threads = most_models, threads
        self._trainer = ThreadPoolExecutor(1, thread_name_prefix="agl-tinker-training")

    async def close(self) -> None:
        """Stop all work and release the models."""
        await self.promises.close()
        await self._samplers.close()
        self._trainer.shutdown(wait=True, cancel_futures=True)
        self._runs.clear()

    def run_of(self, run: str) -> TrainingRun:
        """Return a model in training; raises :class:`RefusedError` if the run has no model here."""
        if run not in self._runs:
            last = [one.path for one in self.checkpoints.of(run) if one.kind == "weights"][-1:]
            again = f"continue from its last state, {last[0]}" if last else "create a training client again"
            raise RefusedError(
                f"The model {run[:200]!r} is not in training here. It may have been before this server was started; "
                f"{again}.",
                status=404,
            )
        self._runs[run] = self._runs.pop(run)  # the most recently used run is last
        return self._runs[run]

    def create_model(self, body: types.CreateModelRequest) -> str:
        """Start to create a model; return the id of the promise."""
        run = _run_id(body.session_id, body.model_seq_id)
        return self._promise(f"{run}:create", lambda: self._created(run, body))

    async def _created(self, run: str, body: types.CreateModelRequest) -> Result:
        self._require_base(body.base_model)
        lora = body.lora_config
        if lora is None:
            raise not_offered("Training of all weights, without a lora_config,")
        if body.optimizer_config.type != "adamw":
            raise not_offered(f"The optimizer {body.optimizer_config.type!r}")
        if not 1 <= lora.rank <= _MOST_RANK:
            raise RefusedError(
                f"The LoRA rank {lora.rank} is not offered by this server; give one of 1 to {_MOST_RANK}."
            )
        adapter = Adapter(
            rank=lora.rank,
            attention=lora.train_attn,
            mlp=lora.train_mlp,
            head=lora.train_unembed,
            seed=lora.seed if lora.seed is not None else uuid.uuid4().int % 2**31,
        )
        await self._add(run, lambda: self.model.trainee(adapter))
        return {"type": "create_model", "model_id": run}

    def load_weights(self, body: types.LoadWeightsRequest) -> str:
        """Start to load a saved state, into a new model or an existing one; return the id of the promise."""
        if body.model_id is not None:
            found = self.run_of(body.model_id)
            return self._promise(f"{found.run}:{_number(body.seq_id)}", lambda: self._loaded(found, body))
        if body.session_id is None or body.model_seq_id is None:
            raise RefusedError("load_weights needs model_id and seq_id, or session_id and model_seq_id.")
        run = _run_id(body.session_id, body.model_seq_id)
        return self._promise(f"{run}:create", lambda: self._restored(run, body))

    async def _restored(self, run: str, body: types.LoadWeightsRequest) -> Result:
        if body.base_model is not None:
            self._require_base(body.base_model)
        found = self.checkpoints.find(body.path, "weights")
        await self._add(run, lambda: self.model.restored(found.folder, moments=body.optimizer))
        return {"type": "load_weights", "path": body.path, "model_id": run}

    async def _loaded(self, found: TrainingRun, body: types.LoadWeightsRequest) -> Result:
        state = self.checkpoints.find(body.path, "weights")
        await self._train(lambda: found.trainee.load(state.folder, moments=body.optimizer))
        return {"type": "load_weights", "path": body.path, "model_id": found.run}

    def forward_backward(self, message: Any) -> str:
        """Start a forward pass, and a backward pass unless the request excludes it; return the id of the promise."""
        found = self.run_of(message.model_id)
        # Read at once, so that a row that cannot be trained on is refused before anything runs.
        loss = make_loss(message.loss_fn, config_of(message))
        rows = rows_of(message, vocab_size=self.model.vocab_size, context_length=self.model.context_length)
        is_forward = bool(message.forward_only)

        async def work() -> Result:
            def passes() -> bytes:
                return training_output(*found.trainee.run(rows, loss, has_gradient=not is_forward))

            return await self._train(passes)

        return self._promise(f"{found.run}:{message.seq_id}", work)

    def optim_step(self, body: types.OptimStepRequest) -> str:
        """Start an update of a model's weights; return the id of the promise."""
        found, params = self.run_of(body.model_id), body.optim_params
        if not isinstance(params, types.AdamParams):
            raise not_offered(f"The optimizer {params.type!r}")
        if not (params.learning_rate >= 0 and 0 <= params.beta1 < 1 and 0 <= params.beta2 < 1 and params.eps >= 0):
            raise RefusedError(f"AdamParams are out of range: {params}.")
        settings = AdamStep(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            max_grad_norm=max(0.0, params.grad_clip_norm),
        )

        async def work() -> Result:
            norm = await self._train(lambda: found.trainee.step(settings))
            return {"type": "optim_step", "metrics": {"grad_norm:mean": norm}}

        return self._promise(f"{found.run}:{_number(body.seq_id)}", work)

    def save_weights(self, body: types.SaveWeightsRequest) -> str:
        """Start to save a state from which training can continue; return the id of the promise."""
        found = self.run_of(body.model_id)

        name = body.path or f"state-{_number(body.seq_id)}"

        def saved() -> Checkpoint:  # on the training thread: an earlier request may take the name
            place = self.checkpoints.new(found.run, "weights", name, overwrite=body.overwrite)
            found.trainee.save(place.folder)
            return place

        async def work() -> Result:
            return {"type": "save_weights", "path": (await self._train(saved)).path}

        return self._promise(f"{found.run}:{_number(body.seq_id)}", work)

    def save_for_sampler(self, body: types.SaveWeightsForSamplerRequest) -> str:
        """Start to save weights for sampling, under a name or for one sampling client; return the id of the promise."""
        found = self.run_of(body.model_id)
        if body.kind != "snapshot":
            raise not_offered(f"A sampling client of the kind {body.kind!r}")

        def saved() -> Checkpoint:
            if body.path:
                place = self.checkpoints.new(found.run, "sampler_weights", body.path)
            else:
                place = self.checkpoints.unnamed(found.run)
            found.trainee.save_adapter(place.folder)
            return place

        async def work() -> Result:
            place = await self._train(saved)
            answer: dict[str, Any] = {"type": "save_weights_for_sampler", "path": place.path}
            return answer if body.path else answer | {"path": None, "sampling_session_id": _sampler_id(place.path)}

        return self._promise(f"{found.run}:{_number(body.seq_id)}", work)

    def sampling_session(self, *, base_model: str | None, model_path: str | None) -> str:
        """Return the id of a new sampling session; raises :class:`RefusedError` if the server lacks the weights."""
        if model_path is not None:
            return _sampler_id(self.checkpoints.find(model_path, "sampler_weights").path)
        self._require_base(base_model or "")
        return _sampler_id("")

    def weights_of(self, sampler_id: str) -> Checkpoint | None:
        """Return the checkpoint that a sampling session uses; ``None`` for the base model."""
        path = _sampled_path(sampler_id)
        return self.checkpoints.find(path, "sampler_weights") if path else None

    def sample(self, body: types.SampleRequest) -> tuple[str, list[str]]:
        """Start to sample; return the id of the promise and the ids of the sequences."""
        session = body.sampling_session_id or self.sampling_session(
            base_model=body.base_model, model_path=body.model_path
        )
        found = self.weights_of(session)
        wanted = read_sampling(
            body,
            vocab_size=self.model.vocab_size,
            context_length=self.model.context_length,
            stop_ids=self.model.stop_ids,
        )

        async def work() -> Result:
            async with self._samplers.using(found.folder if found is not None else None) as sampler:
                samples = await asyncio.wrap_future(sampler.sample(wanted))
                scores = await asyncio.wrap_future(sampler.score(wanted.prompt_ids)) if body.prompt_logprobs else None
            return sampling_output(
                samples, prompt=scores, last=body.prompt_logprobs_last_n, alternatives=wanted.top_logprobs
            )

        promise = self._promise(f"{session}:sample:{_number(body.seq_id)}", work)
        return promise, [f"{promise}:{place}" for place in range(body.num_samples)]

    def _promise(self, request_id: str, work: Callable[[], Any]) -> str:
        if not self.promises.has(request_id):
            self.promises.make(request_id, work())
        return request_id

    async def _add(self, run: str, make: Callable[[], Trainee]) -> None:
        async with self._adding:  # otherwise concurrent creations would each count the same free place
            if len(self._runs) >= self._most_models:
                # The least recently used model; the answer to its client's next request says how to continue.
                self._runs.pop(next(iter(self._runs)))
            self._runs[run] = TrainingRun(run=run, trainee=await self._train(make))

    async def _train(self, work: Callable[[], T]) -> T:
        def on_its_thread() -> T:
            if self._threads:
                torch.set_num_threads(self._threads)
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._trainer, on_its_thread)

    def _require_base(self, name: str) -> None:
        if name != self.name:
            raise RefusedError(
                f"The base model {name[:200]!r} is not offered by this server; it has {self.name!r}.", status=404
            )


def _run_id(session: str, number: int) -> str:
    if not _SESSION.fullmatch(session) or number < 0:
        raise RefusedError(f"There is no session {session[:200]!r} here; create one first.", status=404)
    return f"{session}:train:{number}"


def _number(seq_id: int | None) -> str:
    """Return a request's number for its promise's id; a request without one is never repeated and gets a random id."""
    return uuid.uuid4().hex if seq_id is None else str(seq_id)


def _sampler_id(path: str) -> str:
    """Return a new session id that contains the weights' path, so that a restarted server still knows the session."""
    return f"{uuid.uuid4().hex}-{base64.urlsafe_b64encode(path.encode()).decode().rstrip('=')}"


def _sampled_path(sampler_id: str) -> str:
    """Return the path of a session's weights; ``""`` for the base model."""
    unique, _, coded = sampler_id.partition("-")
    try:
        if len(unique) != 32:
            raise ValueError("no session")
        return base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True).decode()
    except ValueError as error:
        raise RefusedError(
            f"There is no sampling session {sampler_id[:200]!r} here; create one first.", status=404
        ) from error


Key = tuple[Path | None, int]
"""The key of a sampler: the folder of its weights, and the time at which they were written.

The folder is ``None`` for the base model. The time is needed because a removed checkpoint's name may be used again.
"""


class Samplers:
    """Ready samplers by their weights; must be used in one event loop.

    Args:
        model: The base model.
        most: The number of samplers that stay ready; for a new one, the least recently used idle sampler is closed.
    """

    def __init__(self, model: HostedModel, *, most: int) -> None:
        self._model, self._most = model, most
        self._ready: OrderedDict[Key, Sampler] = OrderedDict()
        self._users: dict[Key, int] = {}
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def using(self, folder: Path | None) -> AsyncGenerator[Sampler]:
        """Yield the sampler of a checkpoint's folder, or of the base model; it stays open during the block."""
        key = (folder, folder.stat().st_mtime_ns if folder is not None else 0)
        self._users[key] = self._users.get(key, 0) + 1
        try:
            # Shielded, so that a cancelled request leaves a sampler that the next one uses and that is closed at the
            # end.
            yield await asyncio.shield(self._opened(key))
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]

    async def close(self) -> None:
        """Close all samplers."""
        async with self._opening:  # wait for a sampler that is being opened
            while self._ready:
                _, sampler = self._ready.popitem()
                await asyncio.to_thread(sampler.close)

    async def _opened(self, key: Key) -> Sampler:
        async with self._opening:  # otherwise two requests for the same new weights would read them twice
            if key not in self._ready:
                idle = [ready for ready in self._ready if ready not in self._users]
                for old in idle[: max(0, len(self._ready) + 1 - self._most)]:
                    await asyncio.to_thread(self._ready.pop(old).close)
                self._ready[key] = await asyncio.to_thread(self._model.sampler, key[0])
            self._ready.move_to_end(key)
            return self._ready[key]
