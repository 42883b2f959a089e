"""PPO: policy gradients whose baseline is a learned value function, on the recorded tokens of whatever the agent did.

Paper: Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv 1707.06347), equations 7 and 9, with the
advantages of arXiv 1506.02438 (`gae.py`). One step:

    1. collect: run every task `group_size` times with the live weights
    2. values V_t from the critic, then advantages A_t and value targets R_t over the policy's tokens of each row
    3. `epochs` passes in `updates_per_step` parts, each one update of the critic and one of the policy:
           critic   sum w_t max((V - R)^2, (clip(V) - R)^2) / 2                             (`critic.py`)
           policy   sum w_t c_t max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))          (`objective.py`)
    4. publish the new weights; the critic is saved and never served

Deviations from the paper, and why:
- The critic is a network of its own with its own optimizer, so equation 9 falls apart into two losses and needs no c1.
- There is no entropy bonus by default: its effect on language models is to lengthen rambling.
- Rewards come from the configured credit as differences of returns (`gae.py`), so every credit works that gives
  returns. One that gives finished advantages is refused, because it would leave the critic nothing to do.
- Advantages are whitened with the weights of the loss, so a rollout's share does not grow with its calls or rows when
  `aggregation = "sequence"`; with `"token"` every token counts once, as is usual.
- The log-probability gap between sampler and trainer is corrected by truncated importance sampling, as in `grpo.py`.
- With `replay` the policy trains some rollouts of earlier steps once more (`replay.py`), with the advantages that they
  had; the critic does not, because their targets are values of an older critic.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agl.contracts import StepReport
from agl.errors import ConfigError
from agl_algo_torch.data.preparation import overlong
from agl_algo_torch.learner.anchor import Anchor
from agl_algo_torch.learner.batch import RowSample, from_row, micro_batches_apart, split_updates
from agl_algo_torch.learner.critic import CriticLearner
from agl_algo_torch.learner.model import LoraSettings
from agl_algo_torch.learner.objective import CONSTANT_TOKENS, Objective, Tally
from agl_algo_torch.learner.optim import Decay, OptimSettings
from agl_algo_torch.learner.packing import packs_rows
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner, mean
from agl_algo_torch.learner.replay import ReplayBuffer
from agl_algo_torch.learner.token_numbers import TokenNumbers, mean_advantages
from agl_algo_torch.learner.tuned_policy import TunedPolicy, at_least_one, check_tasks, not_negative, shares
from agl_algo_torch.learner.typed_torch import backward, numbers
from agl_objectives.aggregation import Aggregation  # noqa: TC001 - the parameter check resolves it
from agl_objectives.answers import rollout_shares, without_truncated
from agl_objectives.groups import GroupSampler
from agl_objectives.importance import Importance, Level, Mode
from agl_objectives.kl import KL  # noqa: TC001 - the parameter check resolves it
from agl_objectives.replay import Replayed
from agl_objectives.reports import averaged
from agl_objectives.saving import SAVE_EVERY
from agl_objectives.tasks import Curriculum  # noqa: TC001 - the parameter check resolves it
from agl_objectives.uses import group_uses

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from agl.contracts import AlgorithmContext, CallUse
    from agl.schemas import CallCredit, Episode, Json, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedRow:
    """A row of the call forest, its sample, and the reward at each of its tokens, [T]."""

    row: Row
    sample: RowSample
    rewards: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuedRow:
    """A row with the critic's `values` before the update and their `targets`, both [T], 0 where nothing is trained."""

    sample: RowSample
    values: Tensor  # V_old(s_t), [T]
    targets: Tensor  # R_t = A_t + V_old(s_t), [T]


class PPO:
    """Trains the weights of one policy, and a critic beside it.

    Args:
        steps: Steps in all; one step collects once and publishes once.
        tasks_per_step: Tasks per step, drawn without repetition until the training tasks are used up.
        group_size: Rollouts per task; the baseline is the critic, so 1 is enough.
        refill: Rounds in which groups that do not differ are replaced by those of further tasks (DAPO's dynamic
            sampling); 0 keeps every group.
        curriculum: `frontier` prefers tasks of which about half of the rollouts succeeded when they were last drawn,
            `unsolved` those with the worst rewards; at least the share `curriculum_uniform` of a step's tasks is drawn
            without preference.
        replay: Share of a step's trained rollouts that earlier steps have trained on already, each once more at most
            (`replay.py`); their importance weights are truncated at `replay_bound`, and none is more than
            `replay_max_staleness` versions of the policy old.
        gamma: Discount per token of the policy; `lam` is GAE's lambda.
        is_whitened: Whether a step's advantages are brought to mean 0 and deviation 1.
        aggregation: `token`, `sequence`, or `constant` (divide by `constant_tokens`); by default what the loss
            asks for.
        updates_per_step: Parts that a step's rollouts are dealt into; `epochs` passes over them.
        loss: `ppo-clip`, another loss's name, or `module:name`; `loss_params` are its parameters, for `ppo-clip` by
            default `{clip_low = 0.2, clip_high = 0.2}`.
        value_clip: Clip distance of the critic's values; 0 turns it off.
        kl: `k2` or `k3`, weighted by `kl_coef`; the reference is the policy at this algorithm's start.
        anchor_coef: Weight of a KL penalty on the calls of agents that share the weights and are not trained; without
            it their skills drift away once the trained agents have learned theirs. 0 turns it off.
        mask_truncated: Whether calls that were cut at a limit of tokens are left out of the loss.
        overlong_limit: Tokens of an answer at which it loses a reward of 1; it begins to lose `overlong_buffer` tokens
            before, as in DAPO. 0 turns that off.
        entropy_coef: Weight of an entropy bonus.
        tis_cap: Largest weight `pi_old / pi_behaviour` of importance sampling; 0 turns it off. `tis_level` is `token`,
            `sequence` or `geometric`; `tis_mode` is `truncate` or `mask`, which drops tokens beyond the cap and below
            `tis_floor`; `tis_normalised` divides by the mean over rollouts.
        critic_warmup: Steps at the start in which only the critic learns.
        critic_lr: Peak learning rate of the critic, whose updates are shaped as the policy's are.
        lr: Peak learning rate; `warmup` and `decay` shape it, `betas`, `weight_decay`, `max_grad_norm` are AdamW's.
        max_nonfinite: Updates in a row that are skipped for a gradient that is not finite; one more ends the run.
        token_budget: Tokens that one forward pass may compute, padding included where rows are padded.
        lora_rank: 0 trains all weights; else the rank of LoRA adapters on `lora_targets` with `lora_alpha`.
        device: `auto`, `cpu`, `cuda` ...; `dtype` that of passes and exports; `threads` 0 leaves torch's.
        gradient_checkpointing: Whether layers are computed again in the backward pass, which takes less memory and
            a third more time.
        keep: Saved states and exported weights that stay on disk.
        save_every: Steps between two saves of weights and moments, a time such as `"60s"`, or the largest share of the
            time that may go into saving. A run that is killed repeats the steps since the last save.
    """

    def __init__(  # noqa: PLR0913 - one argument per key of the experiment file
        self,
        *,
        steps: int = 100,
        tasks_per_step: int = 16,
        group_size: int = 4,
        refill: int = 0,
        curriculum: Curriculum = "",
        curriculum_uniform: float = 0.5,
        replay: float = 0.0,
        replay_bound: float = 2.0,
        replay_max_staleness: int = 4,
        gamma: float = 1.0,  # an answer is worth as much when it took more tokens
        lam: float = 0.95,  # lambda
        is_whitened: bool = True,
        loss: str = "ppo-clip",
        loss_params: dict[str, Any] | None = None,
        aggregation: Aggregation | None = None,
        constant_tokens: int = CONSTANT_TOKENS,
        updates_per_step: int = 1,
        epochs: int = 1,  # K
        value_clip: float = 0.5,  # in the unit of the returns
        kl: KL = "k3",
        kl_coef: float = 0.0,
        anchor_coef: float = 0.1,
        entropy_coef: float = 0.0,
        mask_truncated: bool = False,
        overlong_limit: int = 0,
        overlong_buffer: int = 0,
        tis_cap: float = 2.0,
        tis_level: Level = "token",
        tis_mode: Mode = "truncate",
        tis_floor: float = 0.0,
        tis_normalised: bool = False,
        critic_warmup: int = 0,
        critic_lr: float = 1e-5,
        lr: float = 1e-6,
        warmup: int = 0,
        decay: Decay = "constant",
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        max_nonfinite: int = 3,
        token_budget: int = 16_384,
        lora_rank: int = 0,
        lora_alpha: float = 32.0,
        lora_targets: tuple[str, ...] = ("all-linear",),
        device: str = "auto",
        dtype: str = "float32",
        threads: int = 0,
        gradient_checkpointing: bool = False,
        keep: int = 2,
        save_every: int | str = SAVE_EVERY,
    ) -> None:
        not_negative("ppo", kl_coef=kl_coef, tis_cap=tis_cap)
        not_negative("ppo", value_clip=value_clip, critic_warmup=critic_warmup, critic_lr=critic_lr)
        shares("ppo", gamma=gamma, lam=lam)
        # The paper's bounds, epsilon = 0.2 on both sides; the loss's own are DAPO's.
        params = {"clip_low": 0.2, "clip_high": 0.2} if loss == "ppo-clip" and loss_params is None else loss_params
        self._objective = Objective(
            "ppo",
            loss=loss,
            loss_params=params,
            aggregation=aggregation,
            constant_tokens=constant_tokens,
            importance=Importance(
                cap=tis_cap, level=tis_level, mode=tis_mode, floor=tis_floor, is_normalised=tis_normalised
            ),
            kl=kl,
            kl_coef=kl_coef,
            entropy_coef=entropy_coef,
            token_budget=token_budget,
        )
        at_least_one(
            "ppo",
            steps=steps,
            tasks_per_step=tasks_per_step,
            group_size=group_size,
            updates_per_step=updates_per_step,
            epochs=epochs,
            constant_tokens=constant_tokens,
            token_budget=token_budget,
            keep=keep,
        )
        self._objective.check_effect("ppo", updates=updates_per_step * epochs)
        if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0) or value_clip < 0 or critic_warmup < 0:
            raise ConfigError(
                f"ppo got {gamma=}, {lam=}, {value_clip=} and {critic_warmup=}; "
                "the first two are between 0 and 1, the others not below 0."
            )
        self._steps = steps
        self._gamma, self._lam, self._is_whitened = gamma, lam, is_whitened
        self._updates_per_step, self._epochs = updates_per_step, epochs
        self._value_clip = value_clip
        self._critic_warmup = critic_warmup
        self._mask_truncated = mask_truncated
        self._overlong = overlong("ppo", limit=overlong_limit, buffer=overlong_buffer)
        self._groups = GroupSampler(
            "ppo",
            count=tasks_per_step,
            n=group_size,
            refill=refill,
            curriculum=curriculum,
            uniform=curriculum_uniform,
            mask_truncated=mask_truncated,
            overlong=self._overlong,
        )
        self._replay = ReplayBuffer("ppo", share=replay, bound=replay_bound, max_staleness=replay_max_staleness)
        self._token_budget, self._keep = token_budget, keep
        optim = OptimSettings(
            lr=lr,
            betas=(betas[0], betas[1]),
            weight_decay=weight_decay,
            warmup=warmup,
            decay=decay,
            total=steps * updates_per_step * epochs,
            max_grad_norm=max_grad_norm,
            max_nonfinite=max_nonfinite,
        )
        # The critic learns faster: it starts at 0 everywhere, and bad values are bad advantages.
        self._critic_optim = replace(optim, lr=critic_lr)
        settings = LearnerSettings(
            optim=optim,
            lora=LoraSettings.of(lora_rank, lora_alpha, lora_targets),
            device=device,
            dtype=dtype,
            threads=threads,
            gradient_checkpointing=gradient_checkpointing,
        )
        self._anchor = Anchor("ppo", coef=anchor_coef, kl=kl, token_budget=token_budget)
        self._tuned = TunedPolicy(
            settings=settings,
            algorithm="ppo",
            keep=keep,
            save_every=save_every,
            has_reference=bool(kl_coef or anchor_coef),
        )
        self._critic: CriticLearner | None = None
        self._critic_updates: int | None = None  # done so far, those that training went back from included
        self._step, self._updates = 0, 0

    async def setup(self, context: AlgorithmContext) -> None:
        """Check that one policy with reachable weights is tuned and that there are tasks to train on."""
        self._context = context
        self._tuned.begin(context, others=self._write_others)
        check_tasks(context, algorithm="ppo")
        self._groups.begin(context)

    async def step(self) -> StepReport:
        """Collect, evaluate, update policy and critic, save and publish."""
        step = self._step + 1
        learner = await self._tuned.learner(updates=self._updates)
        moves, version = learner.moves, self._context.current(self._tuned.name).version
        critic = self._critic = self._critic or await asyncio.to_thread(self._make_critic, learner)

        # 1. Collect with the live weights.
        started = time.perf_counter()
        collected = await self._groups.collect(step)
        metrics = {"collect_s": time.perf_counter() - started}
        metrics |= {f"dropped_{reason}": float(count) for reason, count in collected.dropped.items()}
        metrics |= {"reward": mean([e.reward for e in collected.episodes if e.reward is not None]), **collected.metrics}

        # 2. Values, advantages and targets. All are fixed now, before the first update of the step.
        started = time.perf_counter()
        groups = collected.groups
        returns = [by_span for group in groups for by_span in self._returns(group)]
        rows = [row for e, by_span in zip(_flat(groups), returns, strict=True) for row in self._rows(e, by_span)]
        valued = await asyncio.to_thread(self._evaluate, learner, critic, rows)
        metrics |= _value_metrics(valued)
        loud = {row.sample.rollout for row in valued if not row.sample.is_silent}
        metrics |= rollout_shares(collected.episodes, dropped=sum(collected.dropped.values()), loud=loud)

        # 3. Update policy and critic, the policy on some rollouts of earlier steps as well.
        self._tuned.start_updates()
        own = tuple(dict.fromkeys(row.sample.rollout for row in valued))
        uses = _uses(groups, returns, valued, loud=loud)
        replayed = self._replayed(version, valued, uses=uses)
        held = self._anchor.rows(collected.episodes, policy=self._tuned.name)
        tokens = TokenNumbers()
        tokens.note_advantages(row.sample for row in valued)
        metrics |= await self._train(learner, critic, valued, replayed=replayed.rows, held=held, tokens=tokens)
        metrics |= replayed.metrics() if self._replay.share else {}
        metrics["update_s"] = time.perf_counter() - started

        # 4. Make the new weights live; without an update there are none. Save them unless that may wait.
        published = await self._tuned.finish(step=step, has_moved=learner.moves > moves)
        self._step, self._updates, self._critic_updates = step, learner.updates, critic.updates
        is_finished = step >= self._steps
        return StepReport(
            step=step,
            is_finished=is_finished,
            metrics=metrics,
            trained=own,
            published=published,
            stop_reason=f"{self._steps} steps done" if is_finished else "",
            uses=tokens.added(uses) | collected.uses | replayed.uses(bound=self._replay.bound),
        )

    def state(self) -> Mapping[str, Json]:
        """Counts, what the curriculum knows, the newest checkpoint and the version that training started from."""
        own: dict[str, Json] = {"step": self._step, "updates": self._updates, "critic_updates": self._critic_updates}
        return own | {"groups": self._groups.state()} | self._tuned.state(step=self._step)

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint of policy and critic, optimizer moments and the KL reference included."""
        self._step, self._updates = int(state["step"]), int(state["updates"])
        done = state.get("critic_updates")
        self._critic_updates = None if done is None else int(done)
        self._groups.restore(state.get("groups", {}))
        self._replay.load(self._context.workdir, step=self._step)
        await self._tuned.restore(state)
        await self._open_critic(state)

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Continue from the weights and moments of an earlier state with `rate` times the learning rate."""
        self._replay.clear()
        await asyncio.to_thread(self._replay.save, self._context.workdir, step=self._step, keep=self._keep)
        await self._tuned.go_back(state, rate=rate, updates=self._updates)
        self._critic = None
        await self._open_critic(state)

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true while `steps` exceeds the steps done; a decaying rate then follows the new length."""
        del tasks, sources_go_on
        return int(state["step"]) < self._steps

    async def close(self) -> None:
        """Drop the model, the critic and the reference."""
        self._tuned.close()
        self._critic = None

    def _replayed(
        self, version: str, rows: Sequence[ValuedRow], *, uses: Mapping[str, tuple[CallUse, ...]]
    ) -> Replayed[RowSample]:
        """Return what is replayed beside the rows of a step, and keep those; nothing while the critic learns alone."""
        if self._step < self._critic_warmup:
            return Replayed()
        samples = [row.sample for row in rows]
        replayed = self._replay.take(version, own=len({sample.rollout for sample in samples}))
        self._replay.add(version, samples, uses=uses)
        return replayed

    def _write_others(self, step: int, kept: Collection[int]) -> None:
        self._replay.save(self._context.workdir, step=step, keep=self._keep, kept=kept)
        if self._critic is not None:
            self._critic.save(self._context.workdir, self._tuned.opened, step=step, keep=self._keep, kept=kept)

    async def _open_critic(self, state: Mapping[str, Json]) -> None:
        """Continue with the critic that was saved beside the checkpoint; without one the next step makes it."""
        checkpoint = str(state.get("checkpoint", ""))
        if checkpoint and Path(checkpoint).is_dir():
            learner = await self._tuned.learner(updates=self._updates)
            step = int(Path(checkpoint).name)
            self._critic = await asyncio.to_thread(self._make_critic, learner, step=step)

    def _make_critic(self, learner: PolicyLearner, *, step: int = 0) -> CriticLearner:
        """Return a critic that goes on from the checkpoint of a step; a new one for 0.

        After going back its learning rate is scaled as the policy's is, and its curve goes on where it was.
        """
        optim = replace(self._critic_optim, lr=self._critic_optim.lr * self._tuned.rate)
        # A copy of the policy's network as it is now: it already knows the language and has only the head to learn.
        critic = CriticLearner(learner, optim, clip=self._value_clip, token_budget=self._token_budget)
        if step:
            critic.load(self._context.workdir, step=step)
        if self._critic_updates is not None:
            critic.updates = self._critic_updates
        return critic

    def _returns(self, group: Sequence[Episode]) -> list[dict[str, float]]:
        """Return G_k of every call k of each episode, by span id."""
        found: list[dict[str, float]] = []
        for episode, credits in zip(group, self._context.credit.assign(group), strict=True):
            credits = self._overlong.applied(episode, credits)
            found.append({credit.span_id: _return_of(credit) for credit in credits})
        return found

    def _rows(self, episode: Episode, returns: Mapping[str, float]) -> list[RewardedRow]:
        """Return the trained rows of an episode, each with the reward at its tokens."""
        if self._mask_truncated:
            returns = without_truncated(episode, returns)
        temperatures = {call.span_id: call.temperature for call in episode.transitions}
        # The returns stand in for advantages here only to say which calls train; `_evaluate` replaces them.
        made = [(row, from_row(row, advantages=returns, temperatures=temperatures)) for row in episode.rows]
        return [
            RewardedRow(row=row, sample=sample, rewards=call_rewards(row, returns))
            for row, sample in made
            if sample.trained_tokens
        ]

    def _evaluate(self, learner: PolicyLearner, critic: CriticLearner, rows: Sequence[RewardedRow]) -> list[ValuedRow]:
        """Return all rows with values, advantages and targets, and with log pi_old where several updates need it."""
        learner.use_threads()
        samples = [row.sample for row in rows]
        # With one update pi_old is pi itself and the update's own forward pass gives it.
        if self._updates_per_step * self._epochs > 1 or self._objective.needs_rollouts:
            samples = self._objective.with_old_logprobs(
                samples, model=learner.loaded.model, device=learner.loaded.device, skips_silent=False
            )
        valued: list[ValuedRow] = []
        for sample, values_T, row in zip(samples, critic.values(samples), rows, strict=True):
            predicted = sample.mask.clone()  # [T] bool, the steps of the trajectory
            predicted[0] = False  # nothing stands before the first token, so it has neither logit nor value
            advantages_T, targets_T = torch.zeros_like(row.rewards), torch.zeros_like(row.rewards)  # [T] f64
            # GAE sees the N policy tokens side by side, as if nothing had been read between them. float64, because
            # the recursion adds up over thousands of steps.
            advantages_T[predicted], targets_T[predicted] = gae(
                row.rewards[predicted], values_T.double()[predicted], gamma=self._gamma, lam=self._lam
            )
            trained = replace(sample, advantages=advantages_T.float(), mask=predicted)  # from here on A_t, not G_k
            valued.append(ValuedRow(sample=trained, values=values_T, targets=targets_T))
        return self._whitened(valued) if self._is_whitened else valued

    def _whitened(self, rows: list[ValuedRow]) -> list[ValuedRow]:
        """Return the rows with advantages of mean 0 and deviation 1 under the weights of the loss.

        Equal advantages become 0. The statistics are those of the whole step, not of one update.
        """
        weight, _ = self._objective.weights([row.sample for row in rows])
        # M counts the trained tokens of all rows of the step here.  A and w, both [M]
        values_M = torch.cat([row.sample.advantages[row.sample.mask] for row in rows] or [torch.zeros(0)]).double()
        weight_M = torch.cat(
            [torch.full((row.sample.trained_tokens,), w) for row, w in zip(rows, weight, strict=True)]
            or [torch.zeros(0)]
        ).double()
        if not len(values_M):
            return rows
        # mean = sum w A / sum w, var = sum w (A - mean)^2 / sum w: the mean that the loss takes. Whitened so, the
        # advantages push as hard towards good tokens as away from bad ones, whatever the critic's bias.
        average = (weight_M * values_M).sum() / weight_M.sum()
        deviation = ((weight_M * (values_M - average) ** 2).sum() / weight_M.sum()).sqrt()

        def whiten(sample: RowSample) -> RowSample:
            # 1e-8 against a deviation of 0. Outside of the mask the subtraction left -mean / std, hence the product.
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
            replayed = await asyncio.to_thread(self._weighed, learner, replayed)
        by_row = {id(row.sample): row for row in rows}  # samples hold tensors, which cannot be compared for equality
        parts = split_updates([row.sample for row in rows], updates=self._updates_per_step)  # rollouts stay whole
        old = split_updates(replayed, updates=len(parts))  # so that every update has its share of them
        reports: list[dict[str, float]] = []
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

    def _weighed(self, learner: PolicyLearner, rows: list[RowSample]) -> list[RowSample]:
        """Return replayed rows with log pi_old and their importance weights."""
        learner.use_threads()
        loaded = learner.loaded
        return self._replay.weighed(rows, objective=self._objective, model=loaded.model, device=loaded.device)

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
        """Do one update of the critic, and one of the policy once the critic's warm-up is over; returns metrics."""
        learner.use_threads()
        samples = [row.sample for row in rows]  # of this step; the critic learns from these alone
        # Critic and policy weight a token alike, so both see a rollout with the same share.
        weight, total = self._objective.weights(samples)
        # The critic first; it does not matter to the policy, whose advantages were computed before either moved.
        report = critic.update(
            samples,
            weight,
            total=total,
            targets=[row.targets for row in rows],
            old=[row.values for row in rows],
        )
        # While V is still near 0, A is the return without a baseline, whose variance would only shake the policy.
        if self._step < self._critic_warmup:
            return report
        model, device, tally = learner.loaded.model, learner.loaded.device, Tally(tokens=tokens)
        samples = [*samples, *replayed]
        weight, total = self._objective.weights(samples)
        surveyed = self._objective.surveyed(samples, model=model, device=device)
        for batch in micro_batches_apart(
            surveyed,
            weight,
            total=total,
            token_budget=self._token_budget,
            device=device,
            is_packed=packs_rows(model),
        ):
            # L^CLIP of equation 7, negated because the optimizer descends, or another loss in its place.
            loss = self._objective.loss(batch, model=model, tuned=self._tuned, tally=tally)
            backward(loss)  # gradients of micro-batches add up in the parameters
        rollouts = {sample.rollout for sample in samples}
        anchored = self._anchor.add_gradient(learner, self._tuned, held, rollouts=rollouts)
        return learner.apply(report | tally.report() | anchored)


def _return_of(credit: CallCredit) -> float:
    """Return the call's return; raises ConfigError for a finished advantage."""
    if credit.is_advantage:
        raise ConfigError(
            "ppo subtracts its critic's values from returns, and the configured credit gives finished advantages. "
            'Use a credit of returns, such as [credit] use = "turn", or the algorithm "grpo".'
        )
    return credit.value


def _flat(groups: Sequence[Sequence[Episode]]) -> list[Episode]:
    return [episode for group in groups for episode in group]


def _uses(
    groups: Sequence[Sequence[Episode]],
    returns: Sequence[Mapping[str, float]],
    valued: Sequence[ValuedRow],
    *,
    loud: Collection[str],
) -> dict[str, tuple[CallUse, ...]]:
    """Return what became of every call, by rollout id: its return, and the mean advantage of its tokens."""
    means = mean_advantages(row.sample for row in valued)
    advantages = [means[episode.rollout.rollout_id] for episode in _flat(groups)]
    return group_uses(groups, trained=advantages, loud=loud, credits=returns, advantages=advantages)


def _value_metrics(rows: Sequence[ValuedRow]) -> dict[str, float]:
    """Return the share of the targets' variance that the critic explains, the mean value and the number of rows.

    The share is 1 for a perfect critic, 0 for one that says the same everywhere, below 0 for a harmful one.
    """
    if not rows:
        return {}
    # explained = 1 - var(R - V) / var(R), over the trained tokens, [M] each
    values_M = torch.cat([row.values[row.sample.mask] for row in rows]).double()
    targets_M = torch.cat([row.targets[row.sample.mask] for row in rows]).double()
    spread = float(targets_M.var(correction=0))  # 0 when all targets are equal: then nothing is to be explained
    explained = 1.0 - float((targets_M - values_M).var(correction=0)) / spread if spread > 0 else 0.0
    return {"value": float(values_M.mean()), "explained_variance": explained, "rows": float(len(rows))}


def call_rewards(row: Row, returns: Mapping[str, float]) -> Tensor:
    """Return the reward at each token of a row, [T] float64; `returns` are by span id, calls without one earn nothing.

    A row without a call that has a return earns 0 everywhere.
    """
    rewards_T = torch.zeros(len(row.mask), dtype=torch.float64)
    parts = sorted((part for part in row.segments if part.span_id in returns), key=lambda part: part.start)
    for index, part in enumerate(parts):
        # r = G_k - G_{k+1}; the sum over the calls from k on telescopes to G_k. After the last call G is 0.
        later = returns[parts[index + 1].span_id] if index + 1 < len(parts) else 0.0
        rewards_T[part.stop - 1] += returns[part.span_id] - later  # `stop` is exclusive
    return rewards_T


def gae(rewards_N: Tensor, values_N: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return the advantage of every step of one trajectory and the target of its value, both [N].

    The trajectory ends after step N: nothing follows, and nothing is bootstrapped.
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
