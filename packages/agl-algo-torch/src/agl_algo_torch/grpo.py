"""GRPO: policy gradients with group-relative advantages, on the recorded tokens of whatever the agent did.

Paper: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1. One step:

    1. collect: run every task `group_size` times with the live weights
    2. advantages (`advantages.py`): credit per call, minus its group's baseline, scaled by `estimator`
    3. update: sum over trained tokens of  w_t * c_t * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
                                           + w_t * kl_coef * KL_t              (`losses.py`), r = pi / pi_old
    4. publish the new weights, which the policy then serves

Deviations from the paper, and why:
- The clip has two bounds and the loss is averaged over tokens by default, both as in DAPO (arXiv 2503.14476).
  `estimator`, `aggregation` and `clip_*` restore the paper, or give RLOO, REINFORCE++ and Dr. GRPO.
- There is no KL penalty by default (`kl_coef = 0`), so no reference is held in memory.
- pi_old is recomputed by the trainer and not taken from the sampler. The difference to the recorded behaviour
  log-probabilities is corrected by truncated importance sampling (`tis_cap`) and logged as `logprob_gap`.
- Agents have several calls, several rows and several roles. The unit of every statistic, normalisation and minibatch
  is therefore the rollout, and splitting a rollout into rows changes nothing.
- Groups whose advantages are all zero cost no forward pass (unless a KL penalty needs one) but stay in the
  denominators: skipping them changes the time and not the update. They are counted in `groups_silent`.

Collecting, sampling and serving are left to the experiment and its policy; nothing here talks to a model server.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from agl.contracts import StepReport
from agl.errors import ConfigError
from agl_algo_torch.advantages import ESTIMATORS, Estimator
from agl_algo_torch.batch import MicroBatch, RowSample, loss_weights, micro_batches, split_updates
from agl_algo_torch.forward import recompute_logprobs
from agl_algo_torch.learner import LearnerSettings, PolicyLearner, mean
from agl_algo_torch.losses import (
    AGGREGATIONS,
    KL,
    Aggregation,
    check_penalty,
    entropy,
    kl_estimate,
    policy_loss,
    truncated_importance,
)
from agl_algo_torch.model import LoraSettings
from agl_algo_torch.optim import Decay, OptimSettings
from agl_algo_torch.overlong import SoftOverlong
from agl_algo_torch.preparation import prepare, rollout_shares
from agl_algo_torch.tuned_policy import (
    TunedPolicy,
    at_least_one,
    check_tasks,
    draw_tasks,
    not_negative,
    off_or_above_one,
    one_of,
)
from agl_algo_torch.typed_torch import backward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from agl.contracts import AlgorithmContext
    from agl.schemas import Json


class GRPO:
    """Trains the weights of one policy on groups of rollouts that share a task.

    Args:
        steps: Steps in all; one step collects once and publishes once.
        tasks_per_step: Groups per step, drawn without repetition until the training tasks are used up.
        group_size: Rollouts per task, whose rewards are compared.
        estimator: `grpo`, `dr_grpo`, `rloo`, `reinforce++` or `reinforce++-baseline`; a credit that gives finished
            advantages leaves it nothing to do, which the first such step says.
        aggregation: `token`, `sequence`, or `constant` (divide by `constant_tokens`, as Dr. GRPO does).
        updates_per_step: Optimizer updates that share a step's rollouts; `epochs` passes over them.
        clip_low: Lower clip distance of the ratio; `clip_high` the upper one.
        clip_dual: Above 1, the ratio at which the loss of a negative advantage is bounded; 0 leaves it unbounded.
        kl: `k2` or `k3`, weighted by `kl_coef`; the reference is the policy at this algorithm's start.
        mask_truncated: Whether calls that were cut at a limit of tokens are left out of the loss.
        overlong_limit: Tokens of an answer at which it loses a reward of 1; it begins to lose `overlong_buffer` tokens
            before, as in DAPO. 0 turns that off.
        tis_cap: Largest weight `pi_old / pi_behaviour` of truncated importance sampling; 0 turns it off.
        lr: Peak learning rate; `warmup` and `decay` shape it, `betas`, `weight_decay`, `max_grad_norm` are AdamW's.
        token_budget: Padded tokens that one forward pass may take.
        lora_rank: 0 trains all weights; else the rank of LoRA adapters on `lora_targets` with `lora_alpha`.
        device: `auto`, `cpu`, `cuda` ...; `dtype` that of passes and exports; `threads` 0 leaves torch's.
        keep: Saved states and exported weights that stay on disk.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        steps: int = 100,
        tasks_per_step: int = 16,
        group_size: int = 8,  # G, 64 in the paper
        estimator: Estimator = "grpo",
        aggregation: Aggregation = "token",
        constant_tokens: int = 1024,
        updates_per_step: int = 1,
        epochs: int = 1,  # mu, the iterations of the paper's algorithm 1
        clip_low: float = 0.2,  # epsilon
        clip_high: float = 0.28,  # DAPO's epsilon_high: unlikely tokens get more room to grow
        clip_dual: float = 0.0,
        kl: KL = "k3",  # the estimator of the paper's equation 4
        kl_coef: float = 0.0,  # beta, 0.04 in the paper
        mask_truncated: bool = False,
        overlong_limit: int = 0,
        overlong_buffer: int = 0,
        tis_cap: float = 2.0,  # C
        lr: float = 1e-6,
        warmup: int = 0,
        decay: Decay = "constant",
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        token_budget: int = 16_384,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
        lora_targets: tuple[str, ...] = ("all-linear",),
        device: str = "auto",
        dtype: str = "float32",
        threads: int = 0,
        keep: int = 2,
    ) -> None:
        one_of("grpo", estimator=(estimator, ESTIMATORS), aggregation=(aggregation, AGGREGATIONS))
        check_penalty("grpo", kl)
        off_or_above_one("grpo", clip_dual=clip_dual)
        not_negative("grpo", clip_low=clip_low, clip_high=clip_high, kl_coef=kl_coef, tis_cap=tis_cap)
        at_least_one(
            "grpo",
            steps=steps,
            tasks_per_step=tasks_per_step,
            group_size=group_size,
            updates_per_step=updates_per_step,
            epochs=epochs,
            constant_tokens=constant_tokens,
            token_budget=token_budget,
            keep=keep,
        )
        # One rollout is its own mean, so every advantage of a group of one is 0 and nothing would ever be learned.
        if group_size == 1 and estimator != "reinforce++":
            raise ConfigError(
                f"grpo with estimator {estimator!r} compares the rollouts of a group, but group_size is 1. "
                'Give at least 2, or estimator = "reinforce++", which compares over the batch.'
            )
        self._steps, self._tasks_per_step, self._group_size = steps, tasks_per_step, group_size
        self._estimator: Estimator = estimator
        self._aggregation: Aggregation = aggregation
        self._constant_tokens = constant_tokens
        self._updates_per_step, self._epochs = updates_per_step, epochs
        self._clip_low, self._clip_high, self._clip_dual = clip_low, clip_high, clip_dual
        self._kl: KL = kl
        self._kl_coef, self._tis_cap = kl_coef, tis_cap
        self._mask_truncated = mask_truncated
        self._overlong = SoftOverlong(limit=overlong_limit, buffer=overlong_buffer)
        self._overlong.check("grpo")
        self._token_budget = token_budget
        settings = LearnerSettings(
            optim=OptimSettings(
                lr=lr,
                betas=(betas[0], betas[1]),
                weight_decay=weight_decay,
                warmup=warmup,
                decay=decay,
                total=steps * updates_per_step * epochs,  # updates of the whole run, where the decay ends
                max_grad_norm=max_grad_norm,
            ),
            lora=LoraSettings(rank=lora_rank, alpha=lora_alpha, targets=tuple(lora_targets)) if lora_rank else None,
            device=device,
            dtype=dtype,
            threads=threads,
        )
        self._tuned = TunedPolicy(settings=settings, algorithm="grpo", keep=keep, has_reference=bool(kl_coef))
        self._step = 0
        self._has_told = False

    async def setup(self, context: AlgorithmContext) -> None:
        """Check that one policy with reachable weights is tuned and that there are tasks to train on."""
        self._context = context
        self._tuned.begin(context)
        check_tasks(context, algorithm="grpo")

    async def step(self) -> StepReport:
        """Collect one batch of groups, update, save and publish."""
        context, step = self._context, self._step + 1
        # `updates` places a learner that is opened anew on the curve of the learning rate.
        learner = await self._tuned.learner(updates=self._step * self._updates_per_step * self._epochs)

        # 1. Collect: G rollouts of each task, sampled from the weights that are live now (pi_theta_old).
        started = time.perf_counter()
        tasks = draw_tasks(context, step=step, count=self._tasks_per_step)
        collected = await context.collect(tasks, step=step, n=self._group_size)
        collect_s = time.perf_counter() - started

        # 2. Advantages: one number per call, spread over the call's tokens.
        groups = collected.groups()
        batch = prepare(
            groups,
            credit=context.credit,
            estimator=self._estimator,
            mask_truncated=self._mask_truncated,
            overlong=self._overlong,
        )
        self._tell_unused(batch.final, batch.calls)
        metrics = batch.metrics | {"collect_s": collect_s}
        loud = {sample.rollout for sample in batch.samples if not sample.is_silent}
        metrics |= rollout_shares(groups, dropped=collected.dropped, loud=loud)
        # Rollouts that were not handed over, by reason: they failed, or have no reward, and the experiment drops such.
        metrics |= {f"dropped_{reason}": float(count) for reason, count in collected.dropped.items()}

        # 3. Update.
        started = time.perf_counter()
        metrics |= await self._train(learner, batch.samples)
        metrics["update_s"] = time.perf_counter() - started

        # 4. Save what training continues from, then make the new weights live.
        await self._tuned.save(step=step)
        version = await self._tuned.publish(step=step)
        self._step = step
        is_finished = step >= self._steps
        return StepReport(
            step=step,
            is_finished=is_finished,
            metrics=metrics,
            trained=tuple(dict.fromkeys(sample.rollout for sample in batch.samples)),  # each id once, in order
            published=(version,),
            stop_reason=f"{self._steps} steps done" if is_finished else "",
        )

    def state(self) -> Mapping[str, Json]:
        """The step count, the newest checkpoint and the version that training started from."""
        return {"step": self._step, **self._tuned.state(step=self._step)}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint, optimizer moments and the KL reference included."""
        self._step = int(state["step"])
        await self._tuned.restore(state)

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true while `steps` exceeds the steps done; a decaying rate then follows the new length."""
        del tasks, sources_go_on
        return int(state["step"]) < self._steps

    async def close(self) -> None:
        """Drop the model and the reference."""
        self._tuned.close()

    def _tell_unused(self, final: int, calls: int) -> None:
        """Say once that the credit leaves the estimator nothing to do."""
        if final and not self._has_told:
            self._has_told = True
            self._context.say(
                f"{self._context.name}: the credit gave {final} of {calls} calls finished advantages, in which "
                f'estimator = "{self._estimator}" has no part'
            )

    async def _train(self, learner: PolicyLearner, samples: list[RowSample]) -> dict[str, float]:
        """Do all updates of a step and return their metrics, averaged over the updates that report them."""
        # With one update pi_old is pi itself (r = 1), and the forward pass of the update gives it for free.
        # With several, the weights move under the samples, so pi_old is fixed before the first of them.
        if self._updates_per_step * self._epochs > 1:
            samples = await asyncio.to_thread(self._with_old_logprobs, learner, samples)
        parts = split_updates(samples, updates=self._updates_per_step)
        reports: list[dict[str, float]] = []
        for epoch in range(self._epochs):
            for index, part in enumerate(parts):
                reports.append(await asyncio.to_thread(self._update, learner, part))
                self._context.progress(epoch * len(parts) + index + 1, self._epochs * len(parts), "update")
        # Updates report different names: one that had nothing to train on says only that it was skipped.
        names = dict.fromkeys(name for report in reports for name in report)
        return {name: mean([report[name] for report in reports if name in report]) for name in names}

    def _batches(
        self, learner: PolicyLearner, samples: Sequence[RowSample]
    ) -> tuple[list[RowSample], list[MicroBatch]]:
        """Return the rows that have a gradient and their micro-batches, weighted as part of all `samples`."""
        # Weights and total come from all rows, silent ones included, before the silent ones are left out:
        # the mean of the paper is over every rollout of the group, with and without advantage.
        weight, total = loss_weights(samples, aggregation=self._aggregation, constant=self._constant_tokens)
        kept = [index for index, sample in enumerate(samples) if self._has_gradient(sample)]
        rows = [samples[i] for i in kept]
        # How rows are cut into micro-batches is a matter of memory and changes no gradient beyond rounding.
        batches = micro_batches(
            rows,
            [weight[i] for i in kept],
            total=total,
            token_budget=self._token_budget,
            device=learner.loaded.device,
        )
        return rows, list(batches)

    def _with_old_logprobs(self, learner: PolicyLearner, samples: list[RowSample]) -> list[RowSample]:
        """Return `samples` with log pi_old, the log-probabilities before the step's first update.

        Rows without a gradient are passed on without it and cost no forward pass.
        """
        learner.use_threads()
        rows = [sample for sample in samples if self._has_gradient(sample)]
        old = recompute_logprobs(
            learner.loaded.model, rows, token_budget=self._token_budget, device=learner.loaded.device
        )
        found = iter(old)  # one [T] per row that has a gradient, in order
        return [replace(s, old=next(found)) if self._has_gradient(s) else s for s in samples]

    def _has_gradient(self, sample: RowSample) -> bool:
        # A = 0 makes the policy gradient exactly 0; the KL penalty has one all the same.
        return bool(sample.trained_tokens) and (bool(self._kl_coef) or not sample.is_silent)

    def _update(self, learner: PolicyLearner, samples: Sequence[RowSample]) -> dict[str, float]:
        """Do one optimizer update on whole rollouts, none when no row has a gradient; returns its metrics."""
        learner.use_threads()  # the setting belongs to the calling thread, and each update may run in another
        rows, batches = self._batches(learner, samples)
        if not rows:
            return {"updates_skipped": 1.0}
        sums: defaultdict[str, float] = defaultdict(float)
        peaks = {"ratio_max": 0.0, "logprob_gap": 0.0}
        # Gradients of micro-batches add up in the parameters; the weights make the sum that of one big batch.
        for batch in batches:
            logits_M_V = batch.logits(learner.loaded.model)  # [M, V], trained tokens only
            logp_M = batch.logprobs(logits_M_V)  # [M], log pi(y_t), with gradient
            # log pi_old(y_t), [M]. In a step of one update it is logp itself: r = 1 in value, but the detach keeps
            # the gradient of r, which is that of logp.
            old_M = logp_M.detach() if batch.old_M is None else batch.old_M
            importance_M = None
            if self._tis_cap:
                # c_t = min(pi_old / pi_behaviour, cap), [M]: what was sampled came from the server's numerics.
                importance_M = truncated_importance(old_M, batch.behaviour_M, cap=self._tis_cap)
                sums["tis_truncated"] += int((importance_M >= self._tis_cap).sum())
            # sum_t w_t c_t max(-A r, -A clip(r)) / total: this batch's part of the update's loss.
            result = policy_loss(
                logp_M,
                old_logp_M=old_M,
                advantages_M=batch.advantages_M,
                weight_M=batch.weight_M,
                total=batch.total,
                clip_low=self._clip_low,
                clip_high=self._clip_high,
                clip_dual=self._clip_dual,
                importance_M=importance_M,
            )
            loss = result.loss
            if self._kl_coef:
                # The penalty is a term of the loss, as in the paper, and not of the reward, as in PPO for RLHF:
                # the advantages stay those of the task.
                kl_M = kl_estimate(logp_M, self._reference_logprobs(batch), kind=self._kl)  # [M]
                loss = loss + self._kl_coef * batch.mean(kl_M)
                sums["kl"] += float(kl_M.detach().sum())
            backward(loss)  # frees this batch's graph before the next forward pass
            sums["loss"] += float(loss.detach())  # already divided by the total
            sums["entropy"] += float(entropy(logits_M_V.detach()).sum())
            sums["clipped_low"] += result.clipped_low
            sums["clipped_high"] += result.clipped_high
            sums["tokens"] += len(logp_M)
            peaks["ratio_max"] = max(peaks["ratio_max"], result.ratio_max)
            # In nats. Large values mean that sampler and trainer disagree about the same tokens.
            peaks["logprob_gap"] = max(peaks["logprob_gap"], float((old_M - batch.behaviour_M).abs().max()))
        totals = {"loss", "tokens"}  # the other sums are reported per token
        report = {name: value if name in totals else value / sums["tokens"] for name, value in sums.items()}
        return report | peaks | {"grad_norm": learner.apply()}

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Return log pi_ref of the batch's trained tokens, [M], without gradient."""
        with self._tuned.reference.active() as model:
            return batch.logprobs(batch.logits(model))
