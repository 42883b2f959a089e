"""Policy gradients with group-relative advantages on a server that speaks Tinker's API. One step:

    1. collect: run every task `group_size` times; the policy `tinker` samples with the live weights
    2. advantages: credit per call, minus its group's baseline, scaled by `estimator`
    3. `forward_backward` on the recorded tokens with one of the server's losses, then `optim_step`
    4. `save_state`, from which a killed run continues, and `save_weights_for_sampler`, whose path is published

The losses compare the policy with the sampler's recorded log-probabilities, so these are not recomputed. With r the
ratio of the two probabilities, `importance_sampling` is -r A, `ppo` clips r, and `cispo` clips r as a constant weight.

Deviations from GRPO's paper (Shao et al. 2024, arXiv 2402.03300), and why:
- The ratio is taken to the sampler, not to the policy before the step; the server computes no other ratio.
- The loss is averaged over tokens by default. Tinker's losses are sums, so the advantages are divided beforehand.
- There is no KL penalty, because no loss of Tinker has one.
- A rollout may have several calls and rows; they share an update, and statistics count rollouts.

If the server has lost the model because it was restarted, it loads the last saved state, and the step's update is
repeated with the step's rollouts, which are in memory. Weights stay on the server: nothing is downloaded.
This module does not need torch.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
from tinker import types

from agl.contracts import StepReport
from agl.errors import ConfigError, PolicyError
from agl.schemas import unpack_floats, unpack_ids
from agl_objectives.aggregation import loss_weights, split_updates
from agl_objectives.comparison import Rule, compare_calls, group_relative
from agl_objectives.groups import GroupSampler
from agl_objectives.reports import UnusedEstimator, averaged, mean_and_deviation
from agl_objectives.settings import Adam, Count, Sampling, Whole
from agl_objectives.uses import group_uses
from agl_tinker.connection import described
from agl_tinker.policy import TinkerPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import tinker

    from agl.contracts import AlgorithmContext
    from agl.schemas import Episode, Json, Row

Aggregation = Literal["token", "sequence", "sum"]


@dataclass(frozen=True, kw_only=True)
class TrainedRow:
    """A row of the call forest with its trained tokens; ``ids``, ``logprobs`` and ``advantages`` have equal length.

    Attributes:
        rollout: The rollout of the row; all rows of a rollout are trained in one update.
        ids: Token ids: the prompt and o_1 ... o_T of the paper.
        logprobs: The sampler's log-probabilities, log pi_theta_old.
        advantages: The advantages A_t; 0 for tokens that are not trained.
        trained: Indices of the trained tokens; never 0, because the first token has nothing before it to predict it.
    """

    rollout: str
    ids: list[int]
    logprobs: list[float]
    advantages: list[float]
    trained: list[int]

    @property
    def trained_tokens(self) -> int:
        """Number of trained tokens."""
        return len(self.trained)

    @property
    def is_silent(self) -> bool:
        """True if every advantage is 0, so that the row has no gradient."""
        return not any(self.advantages[place] for place in self.trained)

    def datum(self, *, weight: float) -> types.Datum:
        """Return the row in Tinker's format, with its advantages multiplied by ``weight``."""
        # Tinker's losses have no mask: with advantage 0 and log-probability 0 a token adds nothing to them.
        size = len(self.ids)
        logprobs, advantages = np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.float32)
        logprobs[self.trained] = [self.logprobs[place] for place in self.trained]
        # They add up and divide by nothing, so the weight w_t of a token's loss goes into its advantage:
        # w_t (-r_t A_t) = -r_t (w_t A_t).
        advantages[self.trained] = [self.advantages[place] * weight for place in self.trained]
        # A datum reads all tokens of a row but the last, and predicts all but the first.
        return types.Datum(
            model_input=types.ModelInput.from_ints(self.ids[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(np.asarray(self.ids[1:], dtype=np.int64)),
                "logprobs": types.TensorData.from_numpy(logprobs[1:]),
                "advantages": types.TensorData.from_numpy(advantages[1:]),
            },
        )


def trained_row(row: Row, advantages: Mapping[str, float]) -> TrainedRow:
    """Return a row with its calls' advantages, given by span id, at the tokens that each call sampled."""
    ids = unpack_ids(row.ids)
    spread, trained = [0.0] * len(ids), list[int]()
    for part in row.segments:
        if part.span_id in advantages:
            # A_{i,t} = A_i for every token t of the call.
            spread[part.start : part.stop] = [advantages[part.span_id]] * (part.stop - part.start)
            trained += range(max(1, part.start), part.stop)
    return TrainedRow(
        rollout=row.rollout_id, ids=ids, logprobs=unpack_floats(row.logprobs), advantages=spread, trained=trained
    )


def token_weights(rows: Sequence[TrainedRow], aggregation: Aggregation) -> list[float]:
    """Return the weight w_t of the trained tokens of each row, in an update that consists of ``rows``.

    With ``token`` every token of the update has one weight, with ``sequence`` every rollout has one; the weights add up
    to 1. With ``sum`` every weight is 1.
    """
    if aggregation == "sum":
        return [1.0] * len(rows)
    weights, total = loss_weights(rows, aggregation=aggregation)  # silent rows included: the mean is over every rollout
    return [weight / total for weight in weights]


class Tinker:
    """Trains LoRA adapters of one policy `tinker` on groups of rollouts that share a task.

    Args:
        steps: Steps in all; one step collects once and publishes once.
        tasks_per_step: Groups per step; every epoch is a shuffle of the training tasks.
        group_size: Rollouts per task, whose rewards are compared.
        sampling: How tasks and groups are chosen.
        estimator: `grpo`, `dr_grpo` or `rloo`. It has no effect with a credit that gives finished advantages, which
            the first such step reports.
        loss: `importance_sampling`, `ppo` or `cispo`, computed by the server.
        loss_params: Parameters of the loss, such as `{clip_low_threshold = 0.8, clip_high_threshold = 1.2}`.
        aggregation: `token` gives every token of an update the same weight, `sequence` every rollout; `sum` adds up
            the tokens' losses undivided, as recipes for Tinker do.
        updates_per_step: The number of updates into which a step's rollouts are divided.
        lora_rank: Rank of the adapters.
        optim: Settings of the server's AdamW.
        ttl_s: Seconds after which the server may remove saved states and weights; 0 for never.
    """

    def __init__(
        self,
        *,
        steps: Count = 100,
        tasks_per_step: Count = 16,
        group_size: Annotated[int, msgspec.Meta(ge=2)] = 8,  # G, 64 in the paper
        sampling: Sampling = Sampling(),
        estimator: Rule = "grpo",
        loss: Literal["importance_sampling", "ppo", "cispo"] = "importance_sampling",
        loss_params: dict[str, float] | None = None,
        aggregation: Aggregation = "token",
        updates_per_step: Count = 1,
        lora_rank: Count = 32,
        optim: Adam = Adam(lr=4e-5),
        ttl_s: Whole = 0,
    ) -> None:
        self._steps = steps
        # The groups of G rollouts of a task; `refill` is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2).
        self._groups = GroupSampler(
            "tinker", count=tasks_per_step, n=group_size, refill=sampling.refill, curriculum=sampling.curriculum
        )
        self._unused = UnusedEstimator(estimator)
        self._estimator: Rule = estimator
        # The server computes the loss: r_t against the sampler, clipped or not, times the A_t that come with the rows.
        self._loss, self._loss_params = loss, dict(loss_params or {})
        self._aggregation: Aggregation = aggregation
        self._updates_per_step, self._rank = updates_per_step, lora_rank
        self._lr = optim.lr
        # One update of AdamW per `optim_step`; the server keeps the moments. The rate is given with each update.
        self._adam = types.AdamParams(
            beta1=optim.betas[0],
            beta2=optim.betas[1],
            eps=1e-8,
            weight_decay=optim.weight_decay,
            grad_clip_norm=optim.max_grad_norm,
        )
        self._ttl = ttl_s or None
        self._step = 0
        # theta is the server's; here is what a resumed run needs to find it again.
        self._rate = 1.0  # factor of the learning rate, smaller after each time that training went back
        self._state = ""  # path of the last saved state, "" before the first
        self._model: tinker.TrainingClient | None = None

    async def check(self, context: AlgorithmContext) -> None:
        """Raise ConfigError unless the experiment tunes exactly one policy and has training tasks."""
        _tuned(context)

    async def setup(self, context: AlgorithmContext) -> None:
        """Check the experiment, create the adapters on the server, and try the loss.

        Raises:
            ConfigError: Another package serves the policy, or the server does not offer the loss or the adapters.
        """
        self._context = context
        self._name = _tuned(context)
        # The policy samples and this trains on one server: weights travel between them as paths.
        self._groups.begin(context)
        policy = context.policy(self._name)
        if not isinstance(policy, TinkerPolicy):
            raise ConfigError(
                f"tinker trains on a server of Tinker's API, and the policy {self._name!r} is served otherwise; write "
                f'[policy.{self._name}] use = "tinker"'
            )
        self._policy = policy
        if policy.losses is not None and self._loss not in policy.losses:
            raise ConfigError(_lacks(policy, self._loss, f"it has {', '.join(policy.losses)}"))
        try:
            self._model = await self._fresh()
        except PolicyError as error:
            raise ConfigError(f"{error}. Choose another lora_rank or another base model") from error
        await self._try_loss(self._model)

    async def _try_loss(self, model: tinker.TrainingClient) -> None:
        """Compute the loss of one token without a gradient, because Tinker's API does not list a server's losses."""
        # A = 0, so the answer is 0 whatever the loss is; only a refusal of its name or parameters matters.
        # Two tokens, because the first one of a row is never predicted.
        row = TrainedRow(rollout="", ids=[0, 0], logprobs=[0.0, 0.0], advantages=[0.0, 0.0], trained=[1])
        try:
            with described("it answered"):
                await model.forward([row.datum(weight=0.0)], self._loss, self._loss_params or None)  # pyright: ignore[reportArgumentType] - one of its losses
        except PolicyError as error:
            raise ConfigError(_lacks(self._policy, self._loss, str(error))) from error

    async def _fresh(self) -> tinker.TrainingClient:
        # LoRA starts from random A and B = 0; the seed draws A, so a repeated run starts from the same adapters.
        seed = random.Random(f"{self._context.seed}/{self._context.name}").getrandbits(31)
        return await self._policy.connection.new_model(self._policy.base_model, rank=self._rank, seed=seed)

    async def step(self) -> StepReport:
        """Collect one batch of groups, update, save and publish."""
        context, step = self._context, self._step + 1

        # 1. Collect: G rollouts o_1 ... o_G of each task q, sampled with the live weights, pi_theta_old.
        # J(theta) = E[1/G sum_i 1/|o_i| sum_t r_t A_i], the paper's equation 3 without clip and KL, estimated by this
        # sample.
        collected = await self._groups.collect(step)
        groups = collected.groups

        # 2. Advantages A_i: one number per call, spread over the call's tokens.
        episodes = [episode for group in groups for episode in group]
        # Credit sees one group at a time: it may compare rollouts of one task, and no others.
        credits = [list(calls) for group in groups for calls in context.credit.assign(group)]
        final = sum(call.is_advantage for calls in credits for call in calls)
        if notice := self._unused.news(final=final, calls=sum(map(len, credits))):
            context.say(notice)
        # The task of each rollout, whose G rewards R_1 ... R_G are compared.
        places = [index for index, group in enumerate(groups) for _ in group]
        # `grpo`: A_i = (R_i - mean(R)) / (std(R) + eps), section 4.1.2; `dr_grpo` leaves out the division (Liu et al.
        # 2025, arXiv 2503.20783), `rloo` takes the mean of the others (Ahmadian et al. 2024, arXiv 2402.14740).
        advantages = compare_calls(credits, groups=places, estimate=partial(group_relative, rule=self._estimator))
        # A row is one trajectory of the call forest: what the policy read has mask 0, what it wrote has its A_t.
        rows = [trained_row(row, own) for e, own in zip(episodes, advantages, strict=True) for row in e.rows]
        # A row of which the policy wrote nothing has no r_t.
        rows = [row for row in rows if row.trained]
        # Rollouts with A_i = 0 everywhere have no gradient: all right, all wrong, or nothing to train.
        own = {row.rollout for row in rows if not row.is_silent}
        loud = sum(any(e.rollout.rollout_id in own for e in group) for group in groups)
        metrics = _metrics(groups, rows=rows, loud=loud) | collected.metrics

        # 3. Update: theta moves by the gradient of sum_t w_t r_t A_t. Without any advantage it stays.
        started = time.perf_counter()
        # All rows go along, silent ones too: they have a share in the denominators.
        published: tuple[str, ...] = ()
        if own:
            found, paths = await self._trained(rows, step=step)
            metrics |= found
            # 4. Publish: the policy samples with the new weights from here on.
            version = await context.publish(self._name, self._policy.trained(paths[1]), step=step)
            published = (f"{self._name}@{version.version}",)
            # A run that is killed here repeats this step from the state before it: the new one is not stored yet.
            self._state = paths[0]
        else:  # theta stays, and so does what is served
            # Every A_i is 0, so the gradient is 0, and AdamW would move theta by its momentum alone.
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
            stop_reason=f"reached steps = {self._steps}" if is_finished else "",
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
        """Train on a step's rows; return the metrics of its updates, and the paths of the saved state and weights."""
        try:
            return await self._train(rows, step=step)
        except PolicyError as error:
            self._context.say(f"{error}; going on from the last saved state")
        # The weights are again those before the step, so repeating all its updates gives the same result.
        self._model = None
        return await self._train(rows, step=step)

    async def _train(self, rows: Sequence[TrainedRow], *, step: int) -> tuple[dict[str, float], tuple[str, str]]:
        model = await self._opened()
        reports: list[dict[str, float]] = []
        # From the second update on the policy is no longer the sampler, and r_t leaves 1; `ppo` and `cispo` bound it.
        for number, part in enumerate(split_updates(rows, updates=self._updates_per_step), 1):
            reports.append(await self._update(model, part))
            self._context.progress(number, self._updates_per_step, "update")
        name = f"{self._context.name}-{step:06d}"
        with described(f"the server at {self._policy.connection.base_url} did not save step {step}"):
            # theta with the moments to continue from, and theta alone to sample from, pi_theta_old of the next step.
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
        """Do one update on whole rollouts, and return its metrics; without any gradient the update is skipped."""
        # The server adds up -J of equation 3 without its KL term,
        #     sum_t w_t (-r_t A_t)          or with r_t clipped, as `loss` has it,
        #     r_t = pi_theta(o_t | q, o_<t) / pi_sampler(o_t | q, o_<t).
        # Rows without an advantage have no gradient and are not sent; they count in the weights.
        weights = token_weights(rows, self._aggregation)
        # 1 / tokens of the update with "token", 1 / (|o_i| rollouts) with "sequence", equation 3's mean over i and t.
        chosen = [(row, weight) for row, weight in zip(rows, weights, strict=True) if not row.is_silent]
        if not chosen:
            return {"updates_skipped": 1.0}
        data = [row.datum(weight=weight) for row, weight in chosen]
        # Both are sent before the first is answered, so that the server does one right after the other.
        with described(f"the server at {self._policy.connection.base_url} did not train"):
            passing = model.forward_backward(data, self._loss, self._loss_params or None)  # pyright: ignore[reportArgumentType] - one of its losses
            # The gradient is clipped to `max_grad_norm` by the server; after going back the rate is smaller.
            stepping = model.optim_step(self._adam.model_copy(update={"learning_rate": self._lr * self._rate}))
            passed, stepped = await passing, await stepping
        found = {name.partition(":")[0]: value for name, value in (stepped.metrics or {}).items()}
        # With weights that add up to 1 the server's sum is the update's mean, -J.
        found |= {"loss": passed.metrics["loss:sum"]} if "loss:sum" in passed.metrics else {}
        return found | _gaps([row for row, _ in chosen], passed.loss_fn_outputs)

    def state(self) -> Mapping[str, Json]:
        """Return the step count, the path of the last saved state, the learning rate's factor, and the curriculum."""
        return {"step": self._step, "state": self._state, "rate": self._rate, "groups": self._groups.state()}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a saved state, including AdamW's moments.

        Raises:
            PolicyError: The server no longer has the state.
        """
        self._step = int(state["step"])
        self._groups.restore(state.get("groups", {}))
        await self._continue(state, rate=float(state["rate"]))

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Continue from the weights and moments of an earlier state with `rate` times the learning rate."""
        await self._continue(state, rate=rate)

    async def _continue(self, state: Mapping[str, Json], *, rate: float) -> None:
        # theta and the moments of AdamW come from the server's saved state; the rate is given with each update.
        self._state, self._rate, self._model = str(state.get("state", "")), rate, None
        await self._opened()

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true if `steps` exceeds the number of steps taken."""
        del tasks, sources_go_on
        return int(state["step"]) < self._steps

    async def close(self) -> None:
        """Drop the model's client; the policy ends the session."""
        self._model = None


def _tuned(context: AlgorithmContext) -> str:
    """Return the policy to train; raises ConfigError unless there is exactly one policy, and tasks."""
    # theta is one policy's adapters: another policy needs a model of its own on the server.
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
    # Statistics count rollouts, so that how often an agent calls its model changes no weight.
    episodes = [episode for group in groups for episode in group]
    # A missing reward is left out of the mean, not taken for 0.
    mean, deviation = mean_and_deviation([e.reward for e in episodes if e.reward is not None])
    # Sampling with top-p or penalties draws from another distribution than the one that r_t compares with.
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
    """Return the gaps between the trainer's and the sampler's log-probabilities, in nats; empty without outputs."""
    # log pi_theta(o_t) - log pi_sampler(o_t) by the trainer's numerics. In the first update of a step both are the same
    # weights, so a gap there is numerics alone, and shifts r_t away from 1.
    gaps: list[float] = []
    for row, output in zip(rows, outputs, strict=False):
        if "logprobs" in output:
            found = output["logprobs"].tolist()
            gaps += [found[place - 1] - row.logprobs[place] for place in row.trained]
    if not gaps:
        return {}
    return {"logprob_gap": max(abs(gap) for gap in gaps), "logprob_drift": fmean(gaps)}
