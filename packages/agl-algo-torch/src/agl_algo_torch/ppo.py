"""PPO: policy gradients whose baseline is a learned value function, on the recorded tokens of any agent.

Papers: Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), equations 7 and 9, and
Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv 1506.02438).
One step:

    1. collect: run every task `group_size` times with the live weights
    2. values V_t from the critic, then advantages A_t and value targets R_t over the policy's tokens of each row
    3. `epochs` passes in `updates_per_step` parts, each one update of the critic and one of the policy:
           critic   sum w_t max((V - R)^2, (clip(V) - R)^2) / 2                             (`critic.py`)
           policy   sum w_t c_t max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))          (`objective.py`)
    4. publish the new weights; the critic is saved and never served

Deviations from the papers, and why:
- The critic is a separate network with its own optimizer, so equation 9 becomes two losses and needs no c1.
- There is no entropy bonus by default: it would make language models ramble at greater length.
- Rewards are differences of the returns that the configured credit gives (`call_rewards`), so every credit of returns
  works. A credit of finished advantages is refused, because the critic would have no effect.
- A row of the call forest is one trajectory. Its steps are the tokens that the policy wrote. The tokens that the policy
  read in between are not steps, so they cost no discount.
- Advantages are whitened with the weights of the loss. With `aggregation = "sequence"` the share of a rollout therefore
  does not grow with its calls or rows; with `"token"` every token counts once, as is usual.
- The log-probability gap between sampler and trainer is corrected by truncated importance sampling, as in `grpo.py`.
- With `replay` the policy trains some rollouts of earlier steps once more (`replay.py`), with the advantages of their
  own step. The critic does not train on them, because their targets are values of an older critic.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import torch

from agl.errors import ConfigError
from agl_algo_torch.learner.anchor import Anchor
from agl_algo_torch.learner.batch import RowSample, from_row
from agl_algo_torch.learner.critic import CriticLearner
from agl_algo_torch.learner.objective import PolicyObjective, Tally
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner, mean
from agl_algo_torch.learner.replay import ReplayBuffer
from agl_algo_torch.learner.token_numbers import TokenNumbers, mean_advantages
from agl_algo_torch.learner.tuned_policy import OnPolicy, TunedPolicy
from agl_algo_torch.learner.typed_torch import backward, numbers
from agl_objectives.aggregation import split_updates
from agl_objectives.answers import overlong_punishment, rollout_shares, without_truncated
from agl_objectives.groups import GroupSampler
from agl_objectives.replay import Replayed
from agl_objectives.reports import averaged
from agl_objectives.settings import (
    Compute,
    Correction,
    Count,
    GroupSampling,
    Lora,
    NotNegative,
    Objective,
    Optim,
    Positive,
    Replay,
    Saving,
    Settings,
    Share,
    Whole,
)
from agl_objectives.uses import group_uses

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from agl.contracts import CallUse, StepReport
    from agl.schemas import CallCredit, Episode, Json, Row


def call_rewards(row: Row, returns: Mapping[str, float]) -> Tensor:
    """Return the reward at each token of a row, [T] float64.

    Credit assignment gives a return G_k per call, but GAE needs rewards. The last token of call k gets
    r = G_k - G_{k+1}, and the last token of the row's last call n gets r = G_n. With gamma = 1 the rewards after any
    token of call k therefore sum to G_k, whichever credit was configured.

    `returns` are by span id; a call without a return gets no reward.
    """
    rewards_T = torch.zeros(len(row.mask), dtype=torch.float64)
    parts = sorted((part for part in row.segments if part.span_id in returns), key=lambda part: part.start)
    for index, part in enumerate(parts):
        # r = G_k - G_{k+1}; the sum over the calls from k on telescopes to G_k. After the last call G is 0.
        later = returns[parts[index + 1].span_id] if index + 1 < len(parts) else 0.0
        rewards_T[part.stop - 1] += returns[part.span_id] - later  # `stop` is exclusive
    return rewards_T


def gae(rewards_N: Tensor, values_N: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the advantage and the value target of every step of one trajectory, both [N].

    Equation 16 of the GAE paper, as the recursion that equations 11 and 12 of PPO's unroll:

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lambda A_{t+1}
        R_t     = A_t + V_t                            the target of the value function

    lambda = 0 gives A_t = delta_t: little variance, and the bias of V. lambda = 1 gives the discounted sum of rewards
    minus V_t: no bias, and all the variance. The trajectory ends with step N, so no value is bootstrapped.
    """
    backwards: list[float] = []
    # A_{N+1} = V_{N+1} = 0: an episode ends by itself here, it is never cut off at a horizon.
    following, next_value = 0.0, 0.0
    for reward, value in zip(reversed(numbers(rewards_N)), reversed(numbers(values_N)), strict=True):
        # A_t = (r_t + gamma V_{t+1} - V_t) + gamma lambda A_{t+1}
        following = reward + gamma * next_value - value + gamma * lam * following
        next_value = value
        backwards.append(following)
    advantages_N = torch.tensor(backwards[::-1], dtype=values_N.dtype)  # [N], in the order of the steps again
    return advantages_N, advantages_N + values_N  # R_t = A_t + V_t, the lambda-return


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuedRow:
    """A row with the critic's `values` before the update and the value `targets`, both [T], 0 at other tokens."""

    sample: RowSample
    values: Tensor  # V_old(s_t), [T]
    targets: Tensor  # R_t = A_t + V_old(s_t), [T]


class Advantages(Settings, frozen=True, kw_only=True):
    """Generalised advantage estimation.

    Attributes:
        gamma: Discount per token of the policy. With 1 the length of an answer does not change its value.
        lam: Lambda, from 0 (little variance, the bias of the critic) to 1 (no bias, all the variance).
        is_whitened: Whether a step's advantages are scaled to mean 0 and standard deviation 1.
    """

    gamma: Share = 1.0
    lam: Share = 0.95
    is_whitened: bool = True


class Critic(Settings, frozen=True, kw_only=True):
    """The value function. Its optimizer has the policy's settings, except for the learning rate.

    Attributes:
        lr: Peak learning rate, above the policy's: values start at 0 everywhere, and wrong values make wrong
            advantages. Under LoRA the critic trains adapters too, which need about ten times the rate of whole weights.
        warmup: Steps at the start in which only the critic learns.
        clip: Clip distance of values within a step, in the unit of the returns; 0 turns it off.
    """

    lr: Positive = 1e-5
    warmup: Whole = 0
    clip: NotNegative = 0.5


class PPO(OnPolicy):
    """Trains the weights of one policy, and a critic with it.

    Args:
        steps: Number of steps; each collects once and publishes once.
        tasks_per_step: Tasks per step. Without a `curriculum` every task is drawn once before any is drawn again.
        group_size: Rollouts per task; the baseline is the critic, so 1 is enough.
        updates_per_step: Parts into which a step's rollouts are divided, one update of critic and policy for each part.
        epochs: Passes over a step's rollouts.
        gae: How advantages follow from rewards and values.
        critic: The value function.
        sampling: The choice of tasks, and the treatment of answers that are too long.
        replay: Share and age of the rollouts of earlier steps on which the policy trains once more.
        objective: The loss, the weights of tokens, and the KL penalties. `ppo-clip` has the paper's bounds here, 0.2 on
            both sides.
        correction: Importance weights for the difference between sampler and trainer.
        optim: AdamW of the policy.
        lora: Adapters in place of all weights of the policy.
        compute: Device, precision and memory.
        saving: When states of training are saved, and how many are kept.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        steps: Count = 100,
        tasks_per_step: Count = 16,
        group_size: Count = 4,
        updates_per_step: Count = 1,
        epochs: Count = 1,  # K
        gae: Advantages = Advantages(),
        critic: Critic = Critic(),
        sampling: GroupSampling = GroupSampling(),
        replay: Replay = Replay(),
        objective: Objective = Objective(),
        correction: Correction = Correction(),
        optim: Optim = Optim(),
        lora: Lora = Lora(),
        compute: Compute = Compute(),
        saving: Saving = Saving(),
    ) -> None:
        # L^CLIP has one epsilon in the paper, section 6.1.
        if objective.loss == "ppo-clip" and objective.loss_params is None:
            # epsilon = 0.2 on both sides, the paper's; the loss's own bounds are DAPO's.
            objective = msgspec.structs.replace(objective, loss_params={"clip_low": 0.2, "clip_high": 0.2})
        self._steps, self._updates_per_step, self._epochs = steps, updates_per_step, epochs
        updates = updates_per_step * epochs
        # V is trained by AdamW with the policy's settings, except for the learning rate.
        self._gae, self._critic_settings = gae, critic
        self._critic_optim = msgspec.structs.replace(optim, lr=critic.lr)
        # L^CLIP of equation 7, with beta KL and S, the entropy bonus of equation 9, where they have a weight.
        self._objective = PolicyObjective("ppo", objective, correction=correction, updates=updates)
        self._anchor = Anchor(coef=objective.anchor_coef, kl=objective.kl)
        self._mask_truncated, self._overlong = sampling.mask_truncated, overlong_punishment(sampling)
        # The N actors of algorithm 1 are the rollouts of a step; each runs to its end, so T is its number of tokens.
        self._groups = GroupSampler(
            "ppo",
            count=tasks_per_step,
            n=group_size,
            refill=sampling.refill,
            curriculum=sampling.curriculum,
            mask_truncated=self._mask_truncated,
            overlong=self._overlong,
        )
        self._replay, self._keep = ReplayBuffer("ppo", replay), saving.keep
        # pi_theta; and pi_ref, the policy at the start of this algorithm, where a penalty compares with it.
        self._tuned = TunedPolicy(
            "ppo",
            settings=LearnerSettings(
                optim=optim, lora=lora, compute=compute, total=steps * updates, per_step=updates, has_critic=True
            ),
            saving=saving,
            has_reference=bool(objective.kl_coef or objective.anchor_coef),
            others=self._write_others,
        )
        self._critic: CriticLearner | None = None
        self._critic_updates: int | None = None  # all that were done, also those that going back has undone

    async def step(self) -> StepReport:
        """Collect, evaluate, update policy and critic, save and publish."""
        learner = await self._tuned.learner()
        moves, version = learner.moves, self._context.current(self._tuned.name).version
        # V starts as a copy of the policy's network, made with the first step.
        critic = self._critic = self._critic or await asyncio.to_thread(self._make_critic, learner)

        # 1. Collect with the live weights, pi_theta_old.
        collected = await self._groups.collect(self._tuned.step + 1)
        metrics = {"reward": mean([e.reward for e in collected.episodes if e.reward is not None]), **collected.metrics}

        # 2. Values V_t, advantages A_t and targets R_t. All are fixed now, before the first update of the step.
        started = time.perf_counter()
        # G_k, the return that credit gives to each call, becomes rewards r_t at the last token of each call.
        groups = collected.groups
        returns = [by_span for group in groups for by_span in self._returns(group)]
        episodes = [episode for group in groups for episode in group]
        made = [pair for e, by_span in zip(episodes, returns, strict=True) for pair in self._rows(e, by_span)]
        valued = await asyncio.to_thread(self._evaluate, learner, critic, made)
        metrics |= _value_metrics(valued)
        # A rollout is loud if any of its tokens has an advantage. A token without one trains the critic alone.
        samples = [row.sample for row in valued]
        loud = {sample.rollout for sample in samples if not sample.is_silent}
        metrics |= rollout_shares(collected.episodes, dropped=collected.dropped.total(), loud=loud)

        # 3. Update policy and critic, the policy on some rollouts of earlier steps as well.
        self._tuned.start_updates()
        # A_t differs from token to token here, but `agl why` shows one number per call: the mean.
        means = mean_advantages(samples)
        advantages = [means[episode.rollout.rollout_id] for episode in episodes]
        uses = group_uses(groups, trained=advantages, loud=loud, credits=returns, advantages=advantages)
        # Rollouts that policies pi_k of earlier steps drew keep the A_t of their own step; their tokens count with
        # c_t = min(pi_theta_old / pi_k, bound).
        replayed = self._replayed(version, samples, uses=uses)
        held = self._anchor.rows(collected.episodes, policy=self._tuned.name, pictures=self._tuned.pictures)
        tokens = TokenNumbers()
        tokens.note_advantages(samples)
        metrics |= await self._train(learner, critic, valued, replayed=replayed.rows, held=held, tokens=tokens)
        metrics |= replayed.metrics() if self._replay.share else {}
        metrics["update_s"] = time.perf_counter() - started

        # 4. Publish the new weights, if there was an update. Save a state of training, unless saving is deferred.
        published = await self._tuned.finish(has_moved=learner.moves > moves)
        self._critic_updates = critic.updates
        uses = tokens.added(uses) | collected.uses | replayed.uses(bound=self._replay.bound)
        return self._report(metrics, trained=[sample.rollout for sample in samples], published=published, uses=uses)

    def _returns(self, group: Sequence[Episode]) -> list[dict[str, float]]:
        """Return, for each episode of a group, the return G_k of every call k, by span id."""
        credited = zip(group, self._context.credit.assign(group), strict=True)
        return [
            {credit.span_id: _return_of(credit) for credit in self._overlong.applied(episode, credits)}
            for episode, credits in credited
        ]

    def _rows(self, episode: Episode, returns: Mapping[str, float]) -> list[tuple[RowSample, Tensor]]:
        """Return the trained rows of an episode, each with the rewards at its tokens, [T]."""
        if self._mask_truncated:
            returns = without_truncated(episode, returns)
        temperatures = {call.span_id: call.temperature for call in episode.transitions}
        # s_t, the state before token t, is all of the row before it; a_t is the token. A row is one trajectory.
        # The returns take the place of advantages only to mark the calls that train; `_evaluate` replaces them.
        pictures = self._tuned.pictures
        made = [
            (row, from_row(row, advantages=returns, temperatures=temperatures, pictures=pictures))
            for row in episode.rows
        ]
        return [(sample, call_rewards(row, returns)) for row, sample in made if sample.trained_tokens]

    def _evaluate(
        self, learner: PolicyLearner, critic: CriticLearner, rows: Sequence[tuple[RowSample, Tensor]]
    ) -> list[ValuedRow]:
        """Return all rows with values, advantages and targets; with several updates per step, also with log pi_old."""
        learner.use_threads()
        samples = self._objective.prepared([sample for sample, _ in rows], learner=learner, skips_silent=False)
        # V_old(s_t) of all rows by one pass without gradient: the same values serve GAE and the clip of the value loss.
        valued: list[ValuedRow] = []
        for sample, values_T, (_, rewards_T) in zip(samples, critic.values(samples), rows, strict=True):
            predicted = sample.trained  # [T] bool, the steps of the trajectory
            advantages_T, targets_T = torch.zeros_like(rewards_T), torch.zeros_like(rewards_T)  # [T] f64
            # GAE sees the N policy tokens side by side, as if nothing had been read between them. float64, because
            # the recursion adds up over thousands of steps.
            advantages_T[predicted], targets_T[predicted] = gae(
                rewards_T[predicted], values_T.double()[predicted], gamma=self._gae.gamma, lam=self._gae.lam
            )
            trained = replace(sample, advantages=advantages_T.float(), mask=predicted)  # from here on A_t, not G_k
            valued.append(ValuedRow(sample=trained, values=values_T, targets=targets_T))
        # Whitening is not in the paper; it is usual since the implementation of the paper's authors.
        return self._whitened(valued) if self._gae.is_whitened else valued

    def _whitened(self, rows: list[ValuedRow]) -> list[ValuedRow]:
        """Return the rows with advantages scaled to mean 0 and deviation 1, weighted as in the loss.

        If all advantages are equal, they become 0. The statistics are those of the whole step, not of one update.
        """
        if not rows:
            return rows
        weight, _ = self._objective.weights([row.sample for row in rows])
        # M counts the trained tokens of all rows of the step here.  A and w, both [M]
        values_M = torch.cat([row.sample.advantages[row.sample.mask] for row in rows]).double()
        weight_M = torch.cat(
            [torch.full((row.sample.trained_tokens,), w) for row, w in zip(rows, weight, strict=True)]
        ).double()
        # mean = sum w A / sum w, var = sum w (A - mean)^2 / sum w: the mean that the loss takes. Whitened so, the
        # advantages push as hard towards good tokens as away from bad ones, whatever the critic's bias.
        average = (weight_M * values_M).sum() / weight_M.sum()
        deviation = ((weight_M * (values_M - average) ** 2).sum() / weight_M.sum()).sqrt()

        def whiten(sample: RowSample) -> RowSample:
            # 1e-8 avoids a division by 0. Outside of the mask the subtraction leaves -mean / std, which the product
            # removes.
            scaled_T = ((sample.advantages.double() - average) / (deviation + 1e-8)).float()  # [T]
            return replace(sample, advantages=scaled_T * sample.mask)

        return [replace(row, sample=whiten(row.sample)) for row in rows]

    async def _train(
        self,
        learner: PolicyLearner,
        critic: CriticLearner,
        rows: Sequence[ValuedRow],
        *,
        replayed: list[RowSample],
        held: Sequence[RowSample],
        tokens: TokenNumbers,
    ) -> dict[str, float]:
        """Do all updates of a step and return their metrics, averaged over the updates that report them."""
        if not rows:
            return {"updates_skipped": 1.0}
        if replayed:
            replayed = await asyncio.to_thread(
                self._replay.weighed, replayed, objective=self._objective, learner=learner
            )
        by_row = {id(row.sample): row for row in rows}  # samples hold tensors, which cannot be compared for equality
        parts = split_updates([row.sample for row in rows], updates=self._updates_per_step)  # rollouts stay whole
        old = split_updates(replayed, updates=len(parts))  # so that every update has its share of old rollouts
        reports: list[dict[str, float]] = []
        # K epochs over the same rollouts (algorithm 1): A_t and R_t stay as they are, r_t and V move.
        for epoch in range(self._epochs):
            for index, part in enumerate(parts):
                chosen = [by_row[id(sample)] for sample in part]
                more = old[index] if index < len(old) else []
                reports.append(
                    await asyncio.to_thread(
                        self._update, learner, critic, chosen, replayed=more, held=held, tokens=tokens
                    )
                )
                self._context.progress(epoch * len(parts) + index + 1, self._epochs * len(parts), "update")
        return averaged(reports) | self._replay.truncated(replayed)

    def _update(
        self,
        learner: PolicyLearner,
        critic: CriticLearner,
        rows: Sequence[ValuedRow],
        *,
        replayed: Sequence[RowSample] = (),
        held: Sequence[RowSample],
        tokens: TokenNumbers | None = None,
    ) -> dict[str, float]:
        """Do one update of the critic and, after the critic's warm-up, one of the policy; returns metrics."""
        learner.use_threads()
        samples = [row.sample for row in rows]  # of this step; the critic learns from these alone
        # Critic and policy weight a token alike, so both see a rollout with the same share.
        weight, total = self._objective.weights(samples)
        # The order of the two does not matter: the policy's advantages were computed before either moved.
        report = critic.update(
            samples,
            weight,
            total=total,
            targets=[row.targets for row in rows],
            old=[row.values for row in rows],
            left=learner.left,
        )
        # While V is still near 0, A is the return without a baseline, whose variance would only shake the policy.
        if self._tuned.step < self._critic_settings.warmup:
            return report
        samples = [*samples, *replayed]
        weight, total = self._objective.weights(samples)
        tally = Tally(tokens=tokens)
        for batch in learner.batches(self._objective.surveyed(samples, learner=learner), weight, total=total):
            # L^CLIP of equation 7 with r_t = pi_theta(a_t | s_t) / pi_theta_old(a_t | s_t),
            #     sum_t w_t c_t min(r_t A_t, clip(r_t, 1 - epsilon, 1 + epsilon) A_t) / total,
            # negated because the optimizer descends, or another loss in its place.
            loss = self._objective.loss(batch, model=learner.loaded.model, tuned=self._tuned, tally=tally)
            backward(loss)  # gradients of micro-batches add up in the parameters
        # + anchor_coef KL(pi_theta, pi_ref) on the tokens of agents that are not trained.
        rollouts = {sample.rollout for sample in samples}
        anchored = self._anchor.add_gradient(learner, self._tuned, held, rollouts=rollouts)
        return learner.apply(report | tally.report() | anchored)

    def _replayed(
        self, version: str, samples: Sequence[RowSample], *, uses: Mapping[str, tuple[CallUse, ...]]
    ) -> Replayed[RowSample]:
        """Return the old rows that a step replays, and add the step's own rows to the buffer.

        During the critic's warm-up, nothing is replayed or added.
        """
        # Rollouts of the warm-up are not kept: their A_t come from values near 0.
        if self._tuned.step < self._critic_settings.warmup:
            return Replayed()
        replayed = self._replay.pool.take(version, own=len({sample.rollout for sample in samples}))
        self._replay.add(version, samples, uses=uses)
        return replayed

    def state(self) -> Mapping[str, Json]:
        """Return the state of `OnPolicy` together with the critic's number of updates."""
        return {**super().state(), "critic_updates": self._critic_updates}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint: policy, critic, moments of both, rollouts to replay, KL reference."""
        # The count alone is in the state; weights and moments of V are next to the policy's checkpoint.
        done = state.get("critic_updates")
        self._critic_updates = None if done is None else int(done)
        await super().restore(state)
        context, step = self._context, int(state["step"])
        await self._replay.load(context.workdir, step=step, shown=self._tuned.shown, say=context.say)
        await self._open_critic()

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Return to the weights and optimizer moments of an earlier state, with `rate` times the learning rate."""
        self._replay.pool.clear()  # what other weights drew
        self._critic = None  # V of other weights is wrong here; that of the earlier state is read again below
        await asyncio.to_thread(self._write_others, self._tuned.step, ())
        await super().go_back(state, rate=rate)
        await self._open_critic()

    async def close(self) -> None:
        """Release the model, the critic and the reference."""
        await super().close()
        self._critic = None

    def _write_others(self, step: int, kept: Collection[int]) -> None:
        self._replay.save(self._context.workdir, step=step, keep=self._keep, kept=kept)
        if self._critic is not None:
            self._critic.save(self._context.workdir, self._tuned.opened, step=step, keep=self._keep, kept=kept)

    async def _open_critic(self) -> None:
        """Load the critic that was saved with the policy's checkpoint; without one the next step makes a critic."""
        if step := self._tuned.saved_step:
            learner = await self._tuned.learner()
            self._critic = await asyncio.to_thread(self._make_critic, learner, step=step)

    def _make_critic(self, learner: PolicyLearner, *, step: int = 0) -> CriticLearner:
        """Return the critic of a step's checkpoint, or a new critic for step 0.

        After going back, the factor of the policy's learning rate applies to the critic too, and the critic's
        learning-rate schedule continues from the number of updates done.
        """
        optim = msgspec.structs.replace(self._critic_optim, lr=self._critic_optim.lr * self._tuned.rate)
        # A copy of the policy's network as it is now: it already knows the language and has only the head to learn.
        critic = CriticLearner(learner, optim, clip=self._critic_settings.clip)
        if step:
            critic.load(self._context.workdir, step=step)
        if self._critic_updates is not None:
            critic.updates = self._critic_updates
        return critic


def _return_of(credit: CallCredit) -> float:
    """Return the return of a call; raises ConfigError if the credit gives a finished advantage instead."""
    # A finished advantage has its baseline taken off already, and V would be a second one.
    if credit.is_advantage:
        raise ConfigError(
            "ppo subtracts its critic's values from returns, and the configured credit gives finished advantages. "
            'Use a credit of returns, such as [credit] use = "turn", or the algorithm "grpo".'
        )
    return credit.value


def _value_metrics(rows: Sequence[ValuedRow]) -> dict[str, float]:
    """Return the metrics of the critic: the explained share of the targets' variance, the mean value, and row count.

    The share is 1 for a perfect critic, 0 for a constant one, and negative for one that is worse than a constant.
    """
    if not rows:
        return {}
    # explained = 1 - var(R - V) / var(R), over the trained tokens, [M] each
    values_M = torch.cat([row.values[row.sample.mask] for row in rows]).double()
    targets_M = torch.cat([row.targets[row.sample.mask] for row in rows]).double()
    # R is the return that was measured, A_t + V_old(s_t), so the share says how much of it the critic foresaw.
    spread = float(targets_M.var(correction=0))  # 0 when all targets are equal: then nothing is to be explained
    explained = 1.0 - float((targets_M - values_M).var(correction=0)) / spread if spread > 0 else 0.0
    return {"value": float(values_M.mean()), "explained_variance": explained, "rows": float(len(rows))}
