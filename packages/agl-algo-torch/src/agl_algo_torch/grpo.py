"""GRPO: policy gradients with group-relative advantages, on the recorded tokens of any agent.

Paper: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1. One step:

    1. collect: run every task `group_size` times with the live weights
    2. advantages (`agl_objectives.estimators`): the credit of a call minus the baseline, scaled, both by `estimator`
    3. update: sum over trained tokens of  w_t * c_t * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
                                           + w_t * kl_coef * KL_t              (`objective.py`), r = pi / pi_old
    4. publish the new weights, which the policy then serves

Deviations from the paper, and why:
- The clip has two bounds and the loss is averaged over tokens by default, both as in DAPO (arXiv 2503.14476).
  `estimator`, `aggregation` and `loss_params` restore the paper, or give RLOO, REINFORCE++ and Dr. GRPO; `loss` puts
  another loss in the place of the clipped one.
- There is no KL penalty by default (`kl_coef = 0`), so no reference is held in memory.
- pi_old is recomputed by the trainer and not taken from the sampler. The difference to the recorded behaviour
  log-probabilities is corrected by truncated importance sampling (`correction`) and logged as `logprob_gap`.
- Agents have several calls, several rows and several roles. The unit of every statistic, normalisation and minibatch
  is therefore the rollout, and splitting a rollout into rows changes nothing.
- A penalty keeps agents that share the weights but are not trained near their start (`anchor_coef`, see `anchor.py`).
- Groups whose advantages are all zero cost no forward pass (unless a KL penalty needs one) but stay in the
  denominators, so skipping the pass saves time and leaves the update as it is. The metric `groups_silent` counts these
  groups. With `refill` other groups replace them, as in DAPO (`agl_objectives.groups`).
- With `replay` some rollouts of earlier steps are trained once more (`replay.py`).

The experiment and its policy collect, sample and serve; nothing here talks to a model server.
"""

from __future__ import annotations

import asyncio
import time
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from agl.errors import ConfigError
from agl_algo_torch.data.credited_rows import prepare
from agl_algo_torch.learner.anchor import Anchor
from agl_algo_torch.learner.batch import RowSample
from agl_algo_torch.learner.objective import PolicyObjective, Tally
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner, update_seconds
from agl_algo_torch.learner.replay import ReplayBuffer
from agl_algo_torch.learner.token_numbers import TokenNumbers
from agl_algo_torch.learner.tuned_policy import OnPolicy, TunedPolicy
from agl_algo_torch.learner.typed_torch import backward
from agl_objectives.aggregation import split_updates
from agl_objectives.answers import overlong_punishment, rollout_shares
from agl_objectives.groups import GroupSampler
from agl_objectives.registry import find_estimator
from agl_objectives.reports import UnusedEstimator, averaged
from agl_objectives.settings import Compute, Correction, Count, GroupSampling, Lora, Objective, Optim, Replay, Saving

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from agl.contracts import StepReport
    from agl.schemas import Json, Weights


class GRPO(OnPolicy):
    """Trains the weights of one policy on groups of rollouts that share a task.

    Args:
        steps: Number of steps; each collects once and publishes once. With a source, an upper limit.
        tasks_per_step: Groups per step. Without a `curriculum` every task is drawn once before any is drawn again.
            Refused with a source, which brings its own groups.
        group_size: Rollouts per task; their rewards are compared. Refused with a source.
        estimator: `grpo`, `dr_grpo`, `rloo`, `remax`, `reinforce++`, `reinforce++-baseline`, another estimator's name,
            or `module:name`. `remax` runs every task once more with greedy decoding and compares with the reward of
            that run. If the credit gives finished advantages, the estimator has no effect, and the run says so.
        estimator_params: Parameters of the estimator.
        updates_per_step: Parts into which a step's rollouts are divided, one optimizer update for each part.
        epochs: Passes over a step's rollouts.
        sampling: The choice of tasks, and the treatment of answers that are too long.
        replay: Share and age of the rollouts of earlier steps that are trained once more.
        objective: The loss, the weights of tokens, and the KL penalties.
        correction: Importance weights for the difference between sampler and trainer.
        optim: AdamW.
        lora: Adapters in place of all weights.
        compute: Device, precision and memory.
        saving: When states of training are saved, and how many are kept.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        steps: Count = 100,
        tasks_per_step: Count = 16,
        group_size: Count = 8,  # G, 64 in the paper
        estimator: str = "grpo",
        estimator_params: dict[str, Any] | None = None,
        updates_per_step: Count = 1,
        epochs: Count = 1,  # mu, the iterations of the paper's algorithm 1
        sampling: GroupSampling = GroupSampling(),
        replay: Replay = Replay(),
        objective: Objective = Objective(),  # beta is kl_coef, 0.04 in the paper; its KL estimate is k3, equation 4
        correction: Correction = Correction(),
        optim: Optim = Optim(),
        lora: Lora = Lora(),
        compute: Compute = Compute(),
        saving: Saving = Saving(),
    ) -> None:
        self._steps, self._updates_per_step, self._epochs = steps, updates_per_step, epochs
        updates = updates_per_step * epochs
        self._estimator = find_estimator(estimator, estimator_params)
        entry = self._estimator.entry
        # One rollout is its own mean, so every advantage of a group of one is 0 and nothing would ever be learned.
        if group_size == 1 and entry.compares == "group" and not entry.needs_baseline:
            raise ConfigError(
                f"grpo with estimator {estimator!r} compares the rollouts of a group, but group_size is 1. "
                'Give at least 2, or estimator = "reinforce++", which compares over the batch.'
            )
        # J of equation 3: the clipped ratio, the weights 1/(G |o_i|) and beta KL, or what the settings put in their
        # place.
        self._objective = PolicyObjective("grpo", objective, correction=correction, updates=updates)
        self._anchor = Anchor(coef=objective.anchor_coef, kl=objective.kl)
        self._mask_truncated, self._overlong = sampling.mask_truncated, overlong_punishment(sampling)
        # The groups of G rollouts of a task; `refill` is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2).
        self._groups = GroupSampler(
            "grpo",
            count=tasks_per_step,
            n=group_size,
            refill=sampling.refill,
            curriculum=sampling.curriculum,
            mask_truncated=self._mask_truncated,
            overlong=self._overlong,
            has_greedy=entry.needs_baseline,
            compares_batch=entry.compares == "batch",
        )
        self._replay, self._keep = ReplayBuffer("grpo", replay), saving.keep
        # pi_theta; and pi_ref, the policy at the start of this algorithm, where a penalty compares with it.
        self._tuned = TunedPolicy(
            "grpo",
            settings=LearnerSettings(optim=optim, lora=lora, compute=compute, total=steps * updates, per_step=updates),
            saving=saving,
            has_reference=bool(objective.kl_coef or objective.anchor_coef),
            others=self._write_replay,
        )
        # Credit may give finished advantages (hierarchical, counterfactual), which leave A_i nothing to do.
        self._unused = UnusedEstimator(entry.name)

    async def step(self) -> StepReport:
        """Collect one batch of groups, update, save and publish."""
        context, learner = self._context, await self._tuned.learner()
        moves, version = learner.moves, context.current(self._tuned.name).version

        # 1. Collect G rollouts o_1 ... o_G of each task q, sampled from the weights that are live now, pi_theta_old.
        collected = await self._groups.collect(self._tuned.step + 1)

        # 2. Advantages, section 4.1.2. With outcome rewards R_1 ... R_G of a task,
        #        A_i = (R_i - mean(R)) / (std(R) + eps)
        #    and every token of rollout i has A_{i,t} = A_i. Credit may give the calls of a rollout values of their own;
        #    R_i is then their mean, and a call gets A_i plus its distance from the mean in the same unit.
        batch = prepare(
            collected.groups,
            credit=context.credit,
            estimator=self._estimator.call,
            mask_truncated=self._mask_truncated,
            overlong=self._overlong,
            baselines=collected.baselines,
            pictures=self._tuned.pictures,
        )
        if notice := self._unused.news(final=batch.final, calls=batch.calls):
            context.say(notice)
        metrics = batch.metrics | collected.metrics
        metrics |= rollout_shares(collected.episodes, dropped=collected.dropped.total(), loud=batch.loud)

        # 3. Update on these rollouts, and on some of earlier steps.
        started = time.perf_counter()
        self._tuned.start_updates()
        # Calls of agents that share the weights and are not trained: the anchor holds the policy to pi_ref on them.
        held = self._anchor.rows(collected.episodes, policy=self._tuned.name, pictures=self._tuned.pictures)
        own = [sample.rollout for sample in batch.samples]
        # Rollouts that policies pi_k of earlier steps drew; their tokens count with c_t = min(pi_theta_old / pi_k,
        # bound).
        replayed = self._replay.pool.take(version, own=len(set(own)))
        self._replay.add(version, batch.samples, uses=batch.uses)
        tokens = TokenNumbers()
        tokens.note_advantages(batch.samples)
        metrics |= await self._train(learner, batch.samples, replayed=replayed.rows, held=held, tokens=tokens)
        metrics |= replayed.metrics() if self._replay.share else {}
        metrics["update_s"] = time.perf_counter() - started

        # 4. Publish the new weights, if there was an update. Save a state of training, unless saving is deferred.
        published = await self._tuned.finish(has_moved=learner.moves > moves)
        uses = tokens.added(batch.uses) | collected.uses | replayed.uses(bound=self._replay.bound)
        return self._report(metrics, trained=own, published=published, uses=uses)

    def _update(
        self,
        learner: PolicyLearner,
        samples: Sequence[RowSample],
        *,
        held: Sequence[RowSample],
        tokens: TokenNumbers | None = None,
    ) -> dict[str, float]:
        """Do one optimizer update on whole rollouts and return its metrics; without any gradient, do nothing."""
        learner.use_threads()  # the setting belongs to the calling thread, and each update may run in another
        # The objective, equation 3, with r_t = pi_theta(o_t | q, o_<t) / pi_theta_old(o_t | q, o_<t):
        #   J = 1/G sum_i 1/|o_i| sum_t { min(r_t A_t, clip(r_t, 1 - eps, 1 + eps) A_t) - beta KL_t(pi_theta, pi_ref) }
        # The sums over i and t are one sum with weights w_t here: 1/(G |o_i|) with `aggregation = "sequence"`, and 1
        # over the tokens of the update with `"token"`. Weights are computed before rows without an advantage are left
        # out: the paper's mean is over every rollout of a group.
        weight, total = self._objective.weights(samples)
        kept = [index for index, sample in enumerate(samples) if self._objective.has_gradient(sample)]
        if not kept:
            return {"updates_skipped": 1.0}
        rows = self._objective.surveyed(samples, learner=learner)
        tally = Tally(tokens=tokens)
        # Rows are cut into micro-batches by memory. Their gradients add up in the parameters, and the weights make the
        # sum that of one big batch.
        for batch in learner.batches([rows[i] for i in kept], [weight[i] for i in kept], total=total):
            # -J of these tokens: sum_t w_t c_t max(-A_t r_t, -A_t clip(r_t)) / total + beta sum_t w_t KL_t / total,
            # c_t = min(pi_theta_old / pi_behaviour, cap), because the server's numerics are not the trainer's.
            loss = self._objective.loss(batch, model=learner.loaded.model, tuned=self._tuned, tally=tally)
            backward(loss)  # frees this batch's graph before the next forward pass
        rollouts = {sample.rollout for sample in samples}
        # + anchor_coef KL(pi_theta, pi_ref) on the tokens of agents that are not trained.
        anchored = self._anchor.add_gradient(learner, self._tuned, held, rollouts=rollouts)
        return learner.apply(tally.report() | anchored)

    async def _train(
        self,
        learner: PolicyLearner,
        samples: list[RowSample],
        *,
        replayed: list[RowSample],
        held: Sequence[RowSample],
        tokens: TokenNumbers,
    ) -> dict[str, float]:
        """Do all updates of a step and return their metrics, averaged over the updates that report them."""
        samples = await asyncio.to_thread(self._objective.prepared, samples, learner=learner)
        if replayed:
            replayed = await asyncio.to_thread(
                self._replay.weighed, replayed, objective=self._objective, learner=learner
            )
        # New and old rollouts are split separately and then joined, so that every update has its share of old ones.
        parts = split_updates(samples, updates=self._updates_per_step)
        old = split_updates(replayed, updates=len(parts))
        parts = [part + more for part, more in zip_longest(parts, old, fillvalue=list[RowSample]())]
        reports: list[dict[str, float]] = []
        # mu iterations over the same rollouts (algorithm 1): r_t leaves 1 from the second update on, and the
        # clip then bounds how far the policy moves away from pi_theta_old.
        for epoch in range(self._epochs):
            for index, part in enumerate(parts):
                reports.append(await asyncio.to_thread(self._update, learner, part, held=held, tokens=tokens))
                self._context.progress(epoch * len(parts) + index + 1, self._epochs * len(parts), "update")
        return (averaged(reports) or {"updates_skipped": 1.0}) | self._replay.truncated(replayed)

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint: weights, optimizer moments, the rollouts to replay and the KL reference."""
        await super().restore(state)
        context, step = self._context, int(state["step"])
        await self._replay.load(context.workdir, step=step, shown=self._tuned.shown, say=context.say)

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Return to the weights and optimizer moments of an earlier state, with `rate` times the learning rate."""
        self._replay.pool.clear()  # what other weights drew
        await asyncio.to_thread(self._write_replay, self._tuned.step, ())
        await super().go_back(state, rate=rate)

    def measure_update(self, weights: Weights, rows: Sequence[tuple[int, int]]) -> float:
        """Measure the seconds of a step's updates on rows of (tokens, trained tokens), for `agl check --forecast`."""
        learner = self._tuned.tried_out(weights)

        def update(samples: Sequence[RowSample]) -> None:
            rows = self._objective.prepared(samples, learner=learner)
            for _ in range(self._epochs):
                for part in split_updates(rows, updates=self._updates_per_step):
                    self._update(learner, part, held=())

        return update_seconds(update, rows, vocabulary=len(learner.loaded.tokenizer))

    def _write_replay(self, step: int, kept: Collection[int]) -> None:
        self._replay.save(self._context.workdir, step=step, keep=self._keep, kept=kept)
