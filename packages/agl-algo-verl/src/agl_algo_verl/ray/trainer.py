"""The algorithm `verl` with `engine = "ray"`: VERL's own V1 trainer on a Ray cluster, and agl's agents outside it.

VERL's trainer owns the loop; it runs in an actor of the cluster. One step:

    1. VERL asks for rollouts, with the addresses of its replicas, which serve the current weights (`ray/loops.py`)
    2. agl sends the policy's calls there (`policy.py`), runs the agents, and makes rows with advantages from credit
       (`rows/rows.py`, `ray/rows.py`)
    3. VERL recomputes log-probabilities, updates, saves a checkpoint, and passes the new weights to its replicas
    4. VERL asks for the next step: this one is finished, and its weights are published

Groups that were requested ahead (`rows/supply.py`) continue meanwhile. Replicas that share the trainer's GPUs cannot
serve while it trains: calls are held then, and the agents continue with everything else. The replicas on the CPU have
their own memory and serve the old weights until they have the new ones.

Deviations from VERL as it is usually run, and why:
- Advantages come with the rows, because credit knows which call earned which reward; VERL sees only tokens.
- Updates have whole rollouts: `ppo_mini_batch_size` counts tasks. VERL would cut after a number of rows.
- A step without a gradient never reaches VERL, whose optimizer would still move the weights: VERL's request waits for
  the next step's rows. Schedules of learning rates count the steps that VERL gets (`ray/schedule.py`).
- `save_every` decides when a checkpoint is saved. VERL saves it at the end of a step if one is due by then, before its
  replicas wake. For a validation or a stop, VERL is asked for one while it waits for rows (`ray/loops.py`).
- Importance weights and rejection are over whole rollouts, and agents that share the weights but are not trained are
  held near their start (`completion.py`, `anchor.py`). If agents are filtered, VERL's reference runs for that.
- If a run goes back, VERL starts again from the earlier checkpoint, and its schedule keeps its position. With Megatron
  it starts from the earlier weights with new moments, because its checkpoints take no other rate, and its schedule
  falls over the remaining steps.
- VERL's trainer runs in its mode `sync`, even if groups are collected ahead. In VERL's own asynchronous modes its
  replicas interrupt calls in the middle, and only VERL's own client would resume them.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agl.errors import AglError, ConfigError
from agl.schemas import Weights
from agl_algo_verl.local.critic import check_model
from agl_algo_verl.losses.anchor import held_rows
from agl_algo_verl.losses.choice import chosen_loss
from agl_algo_verl.losses.metrics import COUNTS, finite
from agl_algo_verl.ray.bridge import StepRequest
from agl_algo_verl.ray.checkpoints import (
    STARTS,
    Unsaved,
    complete,
    count,
    forget_after,
    number,
    origins,
    prune,
    weights_in,
)
from agl_algo_verl.ray.configuration import CHECKPOINTS, METRICS, compose, environment, module_path
from agl_algo_verl.ray.schedule import schedule_after
from agl_algo_verl.ray.validation import check_composed
from agl_algo_verl.rows.replay import with_replayed
from agl_algo_verl.rows.training import VerlTraining, own_checkpoint
from agl_algo_verl.serving.policy import VerlPolicy
from agl_algo_verl.settings.packing import with_packing
from agl_algo_verl.settings.ray import check_machine, read_ray_settings
from agl_algo_verl.weights.adapters import own_weights, prune_merged, tuned_policy, whole_weights
from agl_objectives.reports import Skipped

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Mapping, Sequence

    from agl.contracts import AlgorithmContext, StepReport
    from agl.schemas import Json
    from agl_algo_verl.ray.bridge import StepRows
    from agl_algo_verl.ray.cluster import Cluster
    from agl_algo_verl.rows.rows import PreparedStep, RowSample

T = TypeVar("T")

TEXT_TURNS = (
    "VERL's replicas take no prompts of token ids, so the turns of a conversation may become separate rows. vLLM 0.24 "
    "takes them, and later versions with actor_rollout_ref.rollout.engine_kwargs.vllm.enable_scale_out = true; SGLang "
    "does not"
)
"""The warning for replicas to which later turns cannot be sent as recorded tokens."""

REPORTED = {
    **{
        f"actor/{name}": name
        for name in ["loss", "pg_loss", "grad_norm", "lr", "pg_clipfrac", "ppo_kl", "kl_loss", "ratio_max"]
    },
    **{f"agl/{name}": name for name in ["entropy", "kl", "logprob_gap", "logprob_gap_mean", "effective_share"]},
    **{f"agl/{name}": name for name in ["tis_truncated", "tis_masked", "rejected_share", "replay_weight"]},
    **{f"agl/{name}": name for name in ("replay_truncated", "updates_skipped")},
    **{f"critic/{name}": name for name in ("vf_loss", "vf_clipfrac")},
    "actor/anchor_kl": "anchor_kl",
    "training/rollout_probs_diff_max": "probability_gap",
    "training/rollout_probs_diff_mean": "probability_gap_mean",
    "timing_s/old_log_prob": "old_log_prob_s",
    "critic/grad_norm": "critic_grad_norm",
    "critic/lr": "critic_lr",
    "critic/values/mean": "value",
    "critic/vf_explained_var": "explained_variance",
    "timing_s/update_actor": "update_s",
    "timing_s/update_critic": "update_critic_s",
    "timing_s/save_checkpoint": "save_s",
    "timing_s/update_weights": "weight_sync_s",
}
"""Maps VERL's names of the logged metrics to the names that training in one process uses."""


class RayVERL(VerlTraining):
    """Trains the weights of one policy with VERL's trainer on Ray.

    Args:
        config: VERL's configuration, by its groups, and the parameters of agl (`algorithm.py`).

    Raises:
        ConfigError: A key is unknown or would be ignored, keys contradict each other, or VERL is missing or too new.
    """

    def __init__(self, **config: Any) -> None:
        self.read = read_ray_settings(config)
        super().__init__(self.read.settings, self.read.notes)
        self._nonfinite = Skipped(self.settings.max_nonfinite)
        self._cluster: Cluster | None = None
        self._request: StepRequest | None = None
        # `_base` steps were completed before VERL's count began; `_skipped` steps since then never reached VERL.
        self._base = self._skipped = 0
        self._opened: str = ""
        self._origin: str = ""
        self._start: str = ""  # name of the directory that VERL writes to
        self._checkpoint: str = ""
        self._rate = 1.0  # factor of the configured learning rate
        self._unsaved: Unsaved | None = None

    async def check(self, context: AlgorithmContext) -> None:
        """Check the machine, and let VERL check the whole configuration; starts nothing.

        Raises ConfigError for missing hardware or packages, and for settings that VERL refuses.
        """
        import torch

        check_machine(self.read, has_gpu=torch.cuda.is_available())
        self._use_agents(context.agents)
        tasks = min(self.settings.data.train_batch_size, len(context.train))
        await asyncio.to_thread(check_composed, self.read, steps=self.settings.steps(len(context.train)), tasks=tasks)

    async def setup(self, context: AlgorithmContext) -> None:
        """Check policy, tasks and machine, and log the keys that are overruled; Ray starts with the first step.

        Raises ConfigError for a run that cannot be trained here.
        """
        import torch

        self._tuned, weights = tuned_policy(context)
        self._context = context
        agent_notes = self._use_agents(context.agents)
        # The GPUs of a cluster elsewhere are not visible from here; its machines are assumed to have the same packages.
        has_gpu = not self.read.is_cpu and (torch.cuda.is_available() or bool(self.read.ray_init.get("address")))
        self.settings, notes = with_packing(self.settings, has_gpu=has_gpu)
        self.read = replace(self.read, settings=self.settings)
        check_machine(self.read, has_gpu=torch.cuda.is_available())
        if self.settings.has_critic:
            await asyncio.to_thread(check_model, weights.base_model or weights.uri)
        policy = context.policy(self._tuned)
        if not isinstance(policy, VerlPolicy):
            raise ConfigError(
                f'engine = "ray" serves the policy {self._tuned!r} with VERL\'s replicas, and it is a '
                f'{type(policy).__name__}. Write [policy.{self._tuned}] use = "verl".'
            )
        self._policy = policy
        self._tasks = min(self.settings.data.train_batch_size, len(context.train))
        self._begin(context, extra=[*notes, *agent_notes])

    async def step(self) -> StepReport:
        """Answer VERL's request with a step's rows, wait until VERL has trained on them, and publish the new weights.

        The weights are saved unless saving may wait. A step that can move no weights does not reach VERL, which keeps
        waiting.
        """
        step = self._step + 1
        cluster = await self._open()
        request = self._request
        if request is None or request.step != self._done + 1:
            raise AglError(
                f"VERL asked for its step {request.step if request else 'none'} where agl is at step {step}; "
                "continue with --resume (resume=True)"
            )
        started = time.perf_counter()
        supplied = await self._while_served(cluster, self._supply.take(step))
        metrics = {"collect_s": time.perf_counter() - started, **await self._policy.counts()}
        prepared = await self._prepare(supplied, self._context)
        metrics |= prepared.metrics | supplied.metrics
        version = self._context.current(self._tuned).version
        replayed = self._replay.take(prepared, version=version)
        self._replay.add(prepared.samples, version=version, uses=prepared.uses)
        metrics |= self._replay.metrics(replayed)
        every = with_replayed(prepared, replayed)
        self._interval.stepped()
        is_trained = self._can_train(every)
        if is_trained:
            others = supplied.groups if self.read.holds else ()
            held, unheld = held_rows(others, policy=self._tuned, settings=self.settings)
            answer = self._answer(every, held, step=step, replayed={row.rollout for row in replayed.rows})
            metrics |= unheld | await self._train(cluster, answer, request=request)
            is_trained = (
                not self.settings.has_critic or self.settings.trainer.critic_warmup - self._base <= request.step
            )
        else:
            metrics["updates_skipped"] = 1.0
            self._skipped += 1
        self._step = step
        if self._context.defer is None:
            await self.save(True)
        published = (await self._publish(step),) if is_trained else ()
        uses = prepared.uses | supplied.uses | self._replay.uses(replayed)
        return self._report(prepared, metrics=metrics, published=published, uses=uses)

    async def save(self, must: bool) -> bool:
        """Complete the last step's checkpoint, which VERL writes first if it has not yet; see the context's `defer`."""
        if self._is_moving or not (must or self._interval.is_due()):
            return False
        started, waiting, kept = time.perf_counter(), self._unsaved, self._context.kept()
        if waiting is not None:
            if not waiting.is_written:
                await self._running().save()
                self._unsaved = waiting = replace(waiting, is_written=True)
            # Reading and merging the weights would block the agents.
            await asyncio.to_thread(
                complete, self._weights(waiting.folder), waiting.folder, read=self.read, probes=self.settings.probe
            )
            self._unsaved = None
        await asyncio.to_thread(self._replay.save, step=self._step, kept=kept)
        if self._checkpoint:
            await asyncio.to_thread(count, Path(self._checkpoint), step=self._step, origin=self._origin)
        used = (self._checkpoint, self._origin)
        await asyncio.to_thread(prune, self._workdir, keep=max(2, self.settings.saving.keep), kept=kept, used=used)
        await prune_merged(self._context, name=self._tuned, used=[self._origin, *origins(self._workdir)])
        self._interval.saved(time.perf_counter() - started + (0.0 if waiting is None else waiting.seconds))
        return True

    def state(self) -> Mapping[str, Json]:
        """Return the state to save: step counts, newest checkpoint, and the version and weights of VERL's start."""
        names = {"checkpoint": self._checkpoint, "opened": self._opened, "origin": self._origin, "start": self._start}
        counts = {"step": self._step, "base": self._base, "skipped": self._skipped}
        return {**counts, "supply": self._supply.state(), **names, "rate": self._rate}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Restore the state; VERL continues from its checkpoint when the next step begins."""
        self._step, self._base = int(state["step"]), int(state["base"])
        self._skipped = int(state["skipped"])
        self._opened, self._origin = str(state["opened"]), str(state["origin"])
        self._checkpoint = own_checkpoint(state, workdir=self._workdir)
        self._start, self._rate = str(state["start"]), float(state["rate"])
        self._restore_rollouts(state, self._context)
        if self._checkpoint and not Path(self._checkpoint).is_dir():
            raise ConfigError(
                f"VERL's checkpoint {self._checkpoint} is not here. Resume where the run's files are, or start the "
                "run with --fresh."
            )

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Go back: the next step restarts VERL from an earlier checkpoint, with `rate` times the learning rate.

        If the checkpoint is missing or `state` is empty, VERL starts from the live weights.
        """
        await self._stop()
        self._supply.go_back(step=self._step)
        await asyncio.to_thread(self._replay.clear, step=self._step)
        checkpoint = own_checkpoint(state, workdir=self._workdir)
        self._rate, self._unsaved, self._start = rate, None, STARTS.format(self._step)
        self._opened, self._origin, self._checkpoint = str(state.get("opened", "")), "", ""
        if checkpoint and self.read.strategy == "fsdp2" and Path(checkpoint).is_dir():
            self._origin, self._checkpoint = str(state["origin"]), checkpoint
            self._base, self._skipped = self._step - number(Path(checkpoint)), 0
        elif checkpoint:
            self._context.say(
                f"the saved state {checkpoint} is gone or of Megatron; training goes on with new moments of AdamW"
                + (", and the KL is one to the live weights" if self.settings.actor.use_kl_loss else "")
            )

    async def close(self) -> None:
        """Stop the cluster and stop waiting for rollouts; the policy then serves without VERL's replicas again."""
        if hasattr(self, "_supply"):
            await self._supply.close()
        await self._stop()

    async def _stop(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            await self._policy.detach()
            await cluster.stop()

    @property
    def _done(self) -> int:
        """Number of steps that VERL has completed since it was last started on other weights."""
        return self._step - self._base - self._skipped

    @property
    def _workdir(self) -> Path:
        return self._context.workdir.absolute()

    @property
    def _folder(self) -> Path:
        """The directory for the checkpoints of VERL's current start."""
        return self._workdir / self._start

    def _weights(self, folder: Path) -> Weights:
        """Return the resource that names the weights in a checkpoint; their files need not exist yet."""
        return Weights(uri=str(weights_in(folder, self.read)), format="hf")

    def _running(self) -> Cluster:
        """Return the running cluster; raises AglError if it has stopped."""
        if self._cluster is None:
            raise AglError("VERL's trainer has stopped before it saved its last steps")
        return self._cluster

    async def _open(self) -> Cluster:
        """Return the running cluster, started if needed; restart it if another algorithm has published weights."""
        version = self._context.current(self._tuned)
        is_foreign = version.algorithm != self._context.name and version.version != self._opened
        if self._cluster is not None and not is_foreign:
            return self._cluster
        if self._unsaved is not None:
            await self.save(True)
        await self._stop()
        if is_foreign or not self._origin:
            weights = own_weights(version.resource, name=self._tuned)
            self._origin = (await asyncio.to_thread(whole_weights, weights, workdir=self._workdir)).uri
            # New weights: VERL counts from 1 again, and has no checkpoint of them from which to continue.
            self._opened, self._base, self._skipped, self._checkpoint = version.version, self._step, 0, ""
            self._start = STARTS.format(self._step)
        self._cluster = await self._launch()
        return self._cluster

    async def _launch(self) -> Cluster:
        from agl_algo_verl.ray.cluster import Cluster

        self._context.say("starts VERL's trainer on Ray")
        await asyncio.to_thread(forget_after, self._folder, step=self._done)
        schedule = schedule_after(self._base + self._done, settings=self.settings, steps=self._steps)
        variables = environment(self.read, folder=self._folder, threads=self.settings.threads, schedule=schedule)
        variables |= module_path(self._context.folder)
        self._cluster = cluster = Cluster(self.read, environment=variables)
        await cluster.start(self._config)
        self._request = await cluster.request()
        if self._request is None:
            raise AglError(f"VERL's trainer ended before step {self._step + 1}; continue with --resume (resume=True)")
        if not await self._attach(self._request) and not self.read.is_cpu:
            self._context.say(TEXT_TURNS)
        return cluster

    def _can_train(self, prepared: PreparedStep) -> bool:
        """Return true if a step can move weights; a critic also learns from groups with equal rewards."""
        from agl_algo_verl.rows.batches import has_gradient

        samples = prepared.samples
        return bool(samples) and (self.settings.has_critic or has_gradient(samples, self.settings))

    async def _train(self, cluster: Cluster, answer: StepRows, *, request: StepRequest) -> dict[str, float]:
        """Let VERL train on a step's rows; returns metrics to log."""
        saves = self._context.defer is None or self._interval.is_due()
        answer, started = replace(answer, saves=saves), time.perf_counter()
        # VERL asks for the next step only when this one is trained, served and, if due, saved.
        self._is_moving = True
        self._request = await self._exchange(cluster, answer, after=request)
        self._is_moving = False
        metrics = self._trained(request.step) | {"train_s": time.perf_counter() - started}
        folder = self._folder / CHECKPOINTS.format(request.step)
        is_written = saves or self._request is None  # VERL saves its last step anyway
        self._unsaved = Unsaved(folder=folder, is_written=is_written, seconds=metrics.get("save_s", 0.0))
        self._checkpoint = str(folder)
        return metrics

    async def _publish(self, step: int) -> str:
        """Publish the weights, which VERL's replicas already serve; returns `name@version`."""
        weights = self._weights(Path(self._checkpoint))
        version = await self._context.publish(self._tuned, weights, step=step)
        return f"{self._tuned}@{version.version}"

    async def _exchange(self, cluster: Cluster, answer: StepRows, *, after: StepRequest) -> StepRequest | None:
        """Send a step's rows and wait until VERL has trained on them; returns its next request, None after the last."""
        if not self.read.is_cpu:
            await self._policy.hold()  # the replicas' GPUs train now
        await cluster.answer(answer)
        request = await cluster.request()
        # After the last step VERL sends no request; its replicas serve the final weights until they stop.
        await self._attach(request or StepRequest(step=after.step + 1, addresses=after.addresses))
        return request

    async def _while_served(self, cluster: Cluster, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`; if VERL ends first, cancel `work` and raise AglError.

        Interrupted rollouts are repeated when the run is resumed.
        """
        task = asyncio.ensure_future(work)
        gone = {asyncio.ensure_future(self._policy.lost()), asyncio.ensure_future(cluster.ended())}
        try:
            await asyncio.wait({task, *gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            for each in (task, *gone):
                each.cancel()
            await asyncio.gather(task, *gone, return_exceptions=True)
        gone = AglError(
            "none of VERL's replicas answers any more. Every saved step is kept, and rollouts that were under way "
            "are repeated: continue with --resume (resume=True)"
        )
        raise cluster.failure() or self._policy.failure() or gone

    async def _attach(self, request: StepRequest) -> bool:
        """Send calls to the replicas; returns true if they get later turns as recorded tokens from the relay."""
        version = f"global_step_{request.step - 1}"
        # The replica for the CPU needs no relay for that: it remembers the tokens of its own turns.
        return await self._policy.attach(request.addresses, version=version, asks_tokens=not self.read.is_cpu)

    def _config(self) -> Any:
        return compose(
            self.read,
            model=self._origin,
            folder=self._folder,
            steps=self._steps - self._base,
            tasks=self._tasks,
            before=self._base,
            checkpoint=Path(self._checkpoint) if self._checkpoint else None,
            threads=self.settings.threads,
            rate=self._rate,
        )

    def _use_agents(self, agents: str) -> list[str]:
        """Decide if agents that are not trained are held (only with an agent filter); returns the messages about it."""
        self.read = replace(self.read, holds=bool(agents) and self.settings.anchor_coef > 0)
        if self.read.holds:
            return [
                "agents that share the weights and are not trained are held near the start, for which VERL keeps a "
                "reference; anchor_coef = 0 saves its memory and passes"
            ]
        return [self.read.unheld] if agents and self.read.unheld else []

    def _answer(
        self, prepared: PreparedStep, held: Sequence[RowSample], *, step: int, replayed: Collection[str]
    ) -> StepRows:
        from agl_algo_verl.ray.completion import Completion
        from agl_algo_verl.ray.rows import rows_for_verl
        from agl_algo_verl.rows.batches import has_gradient

        settings, choice, mode = self.settings, chosen_loss(self.settings), self.settings.actor.loss_agg_mode
        can_learn = partial(has_gradient, settings=settings)
        completion = Completion(
            correction=settings.correction,
            anchor_coef=settings.anchor_coef if self.read.holds else 0.0,
            measures_kl=settings.actor.use_kl_loss,
            choice=choice,
            mode=mode,
            has_gradient=None if settings.has_critic else can_learn,
            epochs=settings.actor.ppo_epochs,
        )
        return rows_for_verl(
            prepared,
            mode=mode,
            step=step,
            has_critic=settings.has_critic,
            choice=choice,
            tasks=settings.actor.ppo_mini_batch_size,
            has_gradient=can_learn,
            held=held,
            replayed=replayed,
            completion=completion if completion.is_needed else None,
        )

    def _trained(self, step: int) -> dict[str, float]:
        """Return VERL's metrics of a step under the names in `REPORTED`, and the loss's own; empty without a log."""
        lines = (self._folder / METRICS).read_text(encoding="utf-8").splitlines()
        for line in reversed(lines):
            record = json.loads(line)
            if record["step"] == step:
                data = record["data"]
                counts = {key.partition(COUNTS)[2]: float(value) for key, value in data.items() if COUNTS in key}
                return self._noted(counts | {name: float(data[key]) for key, name in REPORTED.items() if key in data})
        return {}

    def _noted(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return VERL's metrics of a step; an update that VERL skipped is counted and reported.

        VERL reports the mean over its updates, which is not a number if one of them is not.
        """
        if not self._nonfinite.note(metrics.get("grad_norm", 0.0), update=self._step + 1):
            return metrics
        self._context.say(self._nonfinite.news())
        return finite(metrics) | {"updates_nonfinite": 1.0}
