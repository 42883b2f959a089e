"""Policy gradients with group-relative advantages on a server that speaks Tinker's API. One step:

    1. collect: run every task `group_size` times; the policy `tinker` samples with the live weights
    2. advantages (`advantages.py`): credit per call, minus its group's baseline, scaled by `estimator`
    3. `forward_backward` on the recorded tokens with one of the server's losses, then `optim_step`
    4. `save_state`, from which a killed run continues, and `save_weights_for_sampler`, whose path is published

The losses compare the policy with the recorded log-probabilities of the sampler, so nothing is recomputed: with r the
ratio of the two, `importance_sampling` is -r A, `ppo` clips r, `cispo` clips it as a weight that has no gradient.

Deviations from GRPO's paper (Shao et al. 2024, arXiv 2402.03300), and why:
- The ratio is that to the sampler and not to the policy before the step; the server computes no other.
- The loss is averaged over tokens by default. Tinker's losses divide by nothing, so the advantages are divided.
- There is no KL penalty, because Tinker has no loss with one.
- A rollout may have several calls and rows; they share an update, and statistics count rollouts.

A server that has lost the model (it was started again) gets the last saved state, and the update of the step is
repeated there; the rollouts of the step are in memory. Weights stay on the server: nothing is downloaded.
"""

from __future__ import annotations

import random
import time
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from tinker import types

from agl.contracts import StepReport
from agl.errors import ConfigError, PolicyError
from agl_objectives.groups import GroupSampler
from agl_objectives.reports import UnusedEstimator, averaged, mean_and_deviation
from agl_objectives.settings import Adam, Count, Sampling, Whole
from agl_objectives.uses import group_uses
from agl_tinker.advantages import call_advantages
from agl_tinker.connection import told
from agl_tinker.datums import Aggregation, TrainedRow, split_rows, token_weights, trained_rows
from agl_tinker.policy import TinkerPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import tinker

    from agl.contracts import AlgorithmContext
    from agl.schemas import Episode, Json


class Tinker:
    """Trains LoRA adapters of one policy `tinker` on groups of rollouts that share a task.

    Args:
        steps: Steps in all; one step collects once and publishes once.
        tasks_per_step: Groups per step; every epoch is a shuffle of the training tasks.
        group_size: Rollouts per task, whose rewards are compared.
        sampling: The choice of tasks and groups.
        estimator: `grpo`, `dr_grpo` or `rloo`. A credit that gives finished advantages leaves it nothing to do,
            which the first such step says.
        loss: `importance_sampling`, `ppo` or `cispo`, computed by the server; `loss_params` are its parameters, such
            as `{clip_low_threshold = 0.8, clip_high_threshold = 1.2}`.
        aggregation: `token` gives every token of an update one weight, `sequence` every rollout; `sum` divides by
            nothing, as recipes for Tinker do.
        updates_per_step: Updates that share a step's rollouts.
        lora_rank: Rank of the adapters.
        optim: AdamW of the server.
        ttl_s: Seconds after which the server may remove saved states and weights; 0 for never.
    """

    def __init__(
        self,
        *,
        steps: Count = 100,
        tasks_per_step: Count = 16,
        group_size: Annotated[int, msgspec.Meta(ge=2)] = 8,
        sampling: Sampling = Sampling(),
        estimator: Literal["grpo", "dr_grpo", "rloo"] = "grpo",
        loss: Literal["importance_sampling", "ppo", "cispo"] = "importance_sampling",
        loss_params: dict[str, float] | None = None,
        aggregation: Aggregation = "token",
        updates_per_step: Count = 1,
        lora_rank: Count = 32,
        optim: Adam = Adam(lr=4e-5),
        ttl_s: Whole = 0,
    ) -> None:
        self._steps = steps
        self._groups = GroupSampler(
            "tinker", count=tasks_per_step, n=group_size, refill=sampling.refill, curriculum=sampling.curriculum
        )
        self._unused = UnusedEstimator(estimator)
        self._estimator, self._loss, self._loss_params = estimator, loss, dict(loss_params or {})
        self._aggregation: Aggregation = aggregation
        self._updates_per_step, self._rank = updates_per_step, lora_rank
        self._lr = optim.lr
        self._adam = types.AdamParams(
            beta1=optim.betas[0],
            beta2=optim.betas[1],
            eps=1e-8,
            weight_decay=optim.weight_decay,
            grad_clip_norm=optim.max_grad_norm,
        )
        self._ttl = ttl_s or None
        self._step = 0
        self._rate = 1.0  # factor of the learning rate, smaller after each time that training went back
        self._state = ""  # path of the last saved state, "" before the first
        self._model: tinker.TrainingClient | None = None

    async def check(self, context: AlgorithmContext) -> None:
        """Raise ConfigError for an experiment without one tuned policy or without tasks."""
        _tuned(context)

    async def setup(self, context: AlgorithmContext) -> None:
        """Check the experiment, and have the server make the adapters and try the loss.

        Raises:
            ConfigError: The policy is none of this package, or the server lacks the loss or the adapters.
        """
        self._context = context
        self._name = _tuned(context)
        self._groups.begin(context)
        policy = context.policy(self._name)
        if not isinstance(policy, TinkerPolicy):
            raise ConfigError(
                f"tinker trains on a server of Tinker's API, and the policy {self._name!r} is served otherwise; write "
                f'[policy.{self._name}] use = "tinker"'
            )
        self._policy = policy
        offered = policy.server.losses
        if offered is not None and self._loss not in offered:
            raise ConfigError(_lacks(policy, self._loss, f"it has {', '.join(offered)}"))
        try:
            self._model = await self._fresh()
        except PolicyError as error:
            raise ConfigError(f"{error}. Choose another lora_rank or another base model") from error
        await self._try_loss(self._model)

    async def _try_loss(self, model: tinker.TrainingClient) -> None:
        """Ask for the loss of one token without a gradient: Tinker's API does not list the losses of a server."""
        row = TrainedRow(rollout="", ids=[0, 0], logprobs=[0.0, 0.0], advantages=[0.0, 0.0], trained=[1])
        try:
            with told("it answered"):
                await model.forward([row.datum(weight=0.0)], self._loss, self._loss_params or None)  # pyright: ignore[reportArgumentType] - one of its losses
        except PolicyError as error:
            raise ConfigError(_lacks(self._policy, self._loss, str(error))) from error

    async def _fresh(self) -> tinker.TrainingClient:
        seed = random.Random(f"{self._context.seed}/{self._context.name}").getrandbits(31)
        return await self._policy.connection.new_model(self._policy.base_model, rank=self._rank, seed=seed)

    async def step(self) -> StepReport:
        """Collect one batch of groups, update, save and publish."""
        context, step = self._context, self._step + 1

        # 1. Collect: G rollouts of each task, sampled with the live weights.
        started = time.perf_counter()
        collected = await self._groups.collect(step)
        groups = collected.groups
        metrics = {"collect_s": time.perf_counter() - started}
        metrics |= {f"dropped_{reason}": float(count) for reason, count in collected.dropped.items()}

        # 2. Advantages: one number per call, spread over the call's tokens.
        episodes = [episode for group in groups for episode in group]
        credits = [list(calls) for group in groups for calls in context.credit.assign(group)]
        final = sum(call.is_advantage for calls in credits for call in calls)
        if notice := self._unused.news(final=final, calls=sum(map(len, credits))):
            context.say(f"{context.name}: {notice}")
        places = [index for index, group in enumerate(groups) for _ in group]
        advantages = call_advantages(credits, groups=places, estimator=self._estimator)
        rows = trained_rows(episodes, advantages)
        own = {row.rollout for row in rows if not row.is_silent}
        loud = sum(any(e.rollout.rollout_id in own for e in group) for group in groups)
        metrics |= _metrics(groups, rows=rows, loud=loud) | collected.metrics

        # 3. Update.
        started = time.perf_counter()
        published: tuple[str, ...] = ()
        if own:
            found, paths = await self._trained(rows, step=step)
            metrics |= found
            # 4. Publish: the policy samples with the new weights from here on.
            version = await context.publish(self._name, self._policy.trained(paths[1]), step=step)
            published = (f"{self._name}@{version.version}",)
            self._state = paths[0]
        else:
            metrics["updates_skipped"] = 1.0
        metrics["update_s"] = time.perf_counter() - started
        self._step = step
        is_finished = step >= self._steps
        return StepReport(
            step=step,
            is_finished=is_finished,
            metrics=metrics,
            trained=tuple(dict.fromkeys(row.rollout for row in rows)),
            published=published,
            stop_reason=f"{self._steps} steps done" if is_finished else "",
            uses=group_uses(
                groups,
                trained=advantages,
                loud=own,
                credits=[{call.span_id: call.value for call in calls} for calls in credits],
                advantages=advantages,
            )
            | collected.uses,
        )

    async def _trained(self, rows: Sequence[TrainedRow], *, step: int) -> tuple[dict[str, float], tuple[str, str]]:
        """Return the metrics of a step's updates, and the paths of the state and of the weights after them."""
        try:
            return await self._train(rows, step=step)
        except PolicyError as error:
            self._context.say(f"{self._context.name}: {error}; going on from the last saved state")
        self._model = None
        return await self._train(rows, step=step)

    async def _train(self, rows: Sequence[TrainedRow], *, step: int) -> tuple[dict[str, float], tuple[str, str]]:
        model = await self._opened()
        reports: list[dict[str, float]] = []
        for number, part in enumerate(split_rows(rows, self._updates_per_step), 1):
            reports.append(await self._update(model, part))
            self._context.progress(number, self._updates_per_step, "update")
        name = f"{self._context.name}-{step:06d}"
        with told(f"the server at {self._policy.connection.base_url} did not save step {step}"):
            # Both are asked for before the first is waited for; the server does one after the other.
            saving = model.save_state(name, ttl_seconds=self._ttl)
            exporting = model.save_weights_for_sampler(name, ttl_seconds=self._ttl)
            paths = (await saving).path, (await exporting).path
        return averaged(reports), paths

    async def _opened(self) -> tinker.TrainingClient:
        if self._model is None:
            connection = self._policy.connection
            self._model = await connection.restored_model(self._state) if self._state else await self._fresh()
        return self._model

    async def _update(self, model: tinker.TrainingClient, rows: Sequence[TrainedRow]) -> dict[str, float]:
        """Do one update on whole rollouts; returns its metrics, none if no row has a gradient."""
        weights = token_weights(rows, self._aggregation)
        chosen = [(row, weight) for row, weight in zip(rows, weights, strict=True) if not row.is_silent]
        if not chosen:
            return {"updates_skipped": 1.0}
        data = [row.datum(weight=weight) for row, weight in chosen]
        with told(f"the server at {self._policy.connection.base_url} did not train"):
            passing = model.forward_backward(data, self._loss, self._loss_params or None)  # pyright: ignore[reportArgumentType] - one of its losses
            stepping = model.optim_step(self._adam.model_copy(update={"learning_rate": self._lr * self._rate}))
            passed, stepped = await passing, await stepping
        found = {name.partition(":")[0]: value for name, value in (stepped.metrics or {}).items()}
        found |= {"loss": passed.metrics["loss:sum"]} if "loss:sum" in passed.metrics else {}
        return found | _gaps([row for row, _ in chosen], passed.loss_fn_outputs)

    def state(self) -> Mapping[str, Json]:
        """The step count, the path of the last saved state, the learning rate's factor, what the curriculum knows."""
        return {"step": self._step, "state": self._state, "rate": self._rate, "groups": self._groups.state()}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a saved state, moments of AdamW included.

        Raises:
            PolicyError: The server does not have it any more.
        """
        self._step = int(state["step"])
        self._groups.restore(state.get("groups", {}))
        await self._continue(state, rate=float(state["rate"]))

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Continue from the weights and moments of an earlier state with `rate` times the learning rate."""
        await self._continue(state, rate=rate)

    async def _continue(self, state: Mapping[str, Json], *, rate: float) -> None:
        self._state, self._rate, self._model = str(state.get("state", "")), rate, None
        await self._opened()

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true while `steps` exceeds the steps done."""
        del tasks, sources_go_on
        return int(state["step"]) < self._steps

    async def close(self) -> None:
        """Let go of the model; the policy ends the session."""
        self._model = None


def _tuned(context: AlgorithmContext) -> str:
    """Return the policy to train; raises ConfigError unless there is one, with tasks."""
    if len(context.tunes) != 1:
        raise ConfigError(
            f"tinker trains the adapters of one policy, but tunes {list(context.tunes)}. Give one name, such as "
            'tunes = "main_llm", and one [[algorithm]] per policy'
        )
    if not context.train:
        raise ConfigError("tinker needs training tasks, but the experiment has none; set `train` to a dataset")
    return context.tunes[0]


def _lacks(policy: TinkerPolicy, loss: str, why: str) -> str:
    return (
        f"the server at {policy.connection.base_url} does not compute the loss {loss!r} with these loss_params: {why}. "
        "Choose another loss or other parameters"
    )


def _metrics(groups: Sequence[Sequence[Episode]], *, rows: Sequence[TrainedRow], loud: int) -> dict[str, float]:
    episodes = [episode for group in groups for episode in group]
    mean, deviation = mean_and_deviation([e.reward for e in episodes if e.reward is not None])
    calls = [call for episode in episodes for call in episode.transitions if not call.reject]
    return {
        "reward": mean,
        "reward_std": deviation,
        "groups": float(len(groups)),
        "groups_silent": float(len(groups) - loud),
        "rollouts": float(len(episodes)),
        "rows": float(len(rows)),
        "tokens": float(sum(len(row.trained) for row in rows)),
        "calls_distribution_changed": float(sum(call.is_distribution_changed for call in calls)),
    }


def _gaps(rows: Sequence[TrainedRow], outputs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return how far the trainer's log-probabilities are from the sampler's, in nats; nothing where none came."""
    gaps: list[float] = []
    for row, output in zip(rows, outputs, strict=False):
        if "logprobs" in output:
            found = output["logprobs"].tolist()
            gaps += [found[place - 1] - row.logprobs[place] for place in row.trained]
    if not gaps:
        return {}
    return {"logprob_gap": max(abs(gap) for gap in gaps), "logprob_drift": fmean(gaps)}
