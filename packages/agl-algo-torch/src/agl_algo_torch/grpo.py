"""GRPO: policy gradients with group-relative advantages, on the recorded tokens of whatever the agent did.

Paper: Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1. One step:

    1. collect: run every task `group_size` times with the live weights
    2. advantages (`agl_objectives.estimators`): credit per call, minus its group's baseline, scaled by `estimator`
    3. update: sum over trained tokens of  w_t * c_t * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
                                           + w_t * kl_coef * KL_t              (`objective.py`), r = pi / pi_old
    4. publish the new weights, which the policy then serves

Deviations from the paper, and why:
- The clip has two bounds and the loss is averaged over tokens by default, both as in DAPO (arXiv 2503.14476).
  `estimator`, `aggregation` and `loss_params` restore the paper, or give RLOO, REINFORCE++ and Dr. GRPO; `loss` puts
  another loss in the place of the clipped one.
- There is no KL penalty by default (`kl_coef = 0`), so no reference is held in memory.
- pi_old is recomputed by the trainer and not taken from the sampler. The difference to the recorded behaviour
  log-probabilities is corrected by truncated importance sampling (`tis_cap`) and logged as `logprob_gap`.
- Agents have several calls, several rows and several roles. The unit of every statistic, normalisation and minibatch
  is therefore the rollout, and splitting a rollout into rows changes nothing.
- Agents that share the weights and are not trained are held near where they began (`anchor_coef`, see `anchor.py`).
- Groups whose advantages are all zero cost no forward pass (unless a KL penalty needs one) but stay in the
  denominators: skipping them changes the time and not the update. They are counted in `groups_silent`. With `refill`
  they are replaced instead, as in DAPO (`agl_objectives.groups`).
- With `replay` some rollouts of earlier steps are trained once more (`replay.py`).

Collecting, sampling and serving are left to the experiment and its policy; nothing here talks to a model server.
"""

from __future__ import annotations

import asyncio
import time
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from agl.contracts import StepReport
from agl.errors import ConfigError
from agl_algo_torch.data.preparation import overlong, prepare
from agl_algo_torch.learner.anchor import Anchor
from agl_algo_torch.learner.batch import MicroBatch, RowSample, micro_batches_apart, split_updates
from agl_algo_torch.learner.model import LoraSettings
from agl_algo_torch.learner.objective import CONSTANT_TOKENS, Objective, Tally
from agl_algo_torch.learner.optim import Decay, OptimSettings
from agl_algo_torch.learner.packing import packs_rows
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner
from agl_algo_torch.learner.replay import ReplayBuffer
from agl_algo_torch.learner.token_numbers import TokenNumbers
from agl_algo_torch.learner.tuned_policy import TunedPolicy, at_least_one, check_tasks, not_negative
from agl_algo_torch.learner.typed_torch import backward
from agl_algo_torch.learner.update_time import update_seconds
from agl_objectives.aggregation import Aggregation  # noqa: TC001 - the parameter check resolves it
from agl_objectives.answers import rollout_shares
from agl_objectives.groups import GroupSampler
from agl_objectives.importance import Importance, Level, Mode
from agl_objectives.kl import KL  # noqa: TC001 - the parameter check resolves it
from agl_objectives.registry import find_estimator
from agl_objectives.reports import UnusedEstimator, averaged
from agl_objectives.saving import SAVE_EVERY
from agl_objectives.tasks import Curriculum  # noqa: TC001 - the parameter check resolves it

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from agl.contracts import AlgorithmContext
    from agl.schemas import Json, Weights


class GRPO:
    """Trains the weights of one policy on groups of rollouts that share a task.

    Args:
        steps: Steps in all; one step collects once and publishes once.
        tasks_per_step: Groups per step, drawn without repetition until the training tasks are used up.
        group_size: Rollouts per task, whose rewards are compared.
        refill: Rounds in which groups that do not differ are replaced by those of further tasks (DAPO's dynamic
            sampling); 0 keeps every group.
        curriculum: `frontier` prefers tasks of which about half of the rollouts succeeded when they were last drawn,
            `unsolved` those with the worst rewards; at least the share `curriculum_uniform` of a step's tasks is drawn
            without preference.
        estimator: `grpo`, `dr_grpo`, `rloo`, `remax`, `reinforce++`, `reinforce++-baseline`, another estimator's name,
            or `module:name`; `estimator_params` are its parameters. `remax` runs every task once more, greedily, and
            compares with that. A credit that gives finished advantages leaves it nothing to do, which the first such
            step says.
        aggregation: `token`, `sequence`, or `constant` (divide by `constant_tokens`, as Dr. GRPO does); by default what
            the loss asks for, `token` for `ppo-clip`.
        replay: Share of a step's trained rollouts that earlier steps have trained on already, each once more at most
            (`replay.py`); their importance weights are truncated at `replay_bound`, and none is more than
            `replay_max_staleness` versions of the policy old.
        updates_per_step: Optimizer updates that share a step's rollouts; `epochs` passes over them.
        loss: `ppo-clip`, another loss's name, or `module:name`; `loss_params` are its parameters, such as
            `{clip_low = 0.2, clip_high = 0.28}`.
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
        group_size: int = 8,  # G, 64 in the paper
        refill: int = 0,
        curriculum: Curriculum = "",
        curriculum_uniform: float = 0.5,
        replay: float = 0.0,
        replay_bound: float = 2.0,
        replay_max_staleness: int = 4,
        estimator: str = "grpo",
        estimator_params: dict[str, Any] | None = None,
        loss: str = "ppo-clip",
        loss_params: dict[str, Any] | None = None,
        aggregation: Aggregation | None = None,
        constant_tokens: int = CONSTANT_TOKENS,
        updates_per_step: int = 1,
        epochs: int = 1,  # mu, the iterations of the paper's algorithm 1
        kl: KL = "k3",  # the estimator of the paper's equation 4
        kl_coef: float = 0.0,  # beta, 0.04 in the paper
        anchor_coef: float = 0.1,
        entropy_coef: float = 0.0,
        mask_truncated: bool = False,
        overlong_limit: int = 0,
        overlong_buffer: int = 0,
        tis_cap: float = 2.0,  # C
        tis_level: Level = "token",
        tis_mode: Mode = "truncate",
        tis_floor: float = 0.0,
        tis_normalised: bool = False,
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
        not_negative("grpo", kl_coef=kl_coef, tis_cap=tis_cap)
        found = find_estimator(estimator, estimator_params)
        self._objective = Objective(
            "grpo",
            loss=loss,
            loss_params=loss_params,
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
        self._objective.check_effect("grpo", updates=updates_per_step * epochs)
        # One rollout is its own mean, so every advantage of a group of one is 0 and nothing would ever be learned.
        if group_size == 1 and found.entry.compares == "group" and not found.entry.needs_baseline:
            raise ConfigError(
                f"grpo with estimator {estimator!r} compares the rollouts of a group, but group_size is 1. "
                'Give at least 2, or estimator = "reinforce++", which compares over the batch.'
            )
        self._steps = steps
        self._estimator = found
        self._updates_per_step, self._epochs = updates_per_step, epochs
        self._mask_truncated = mask_truncated
        self._overlong = overlong("grpo", limit=overlong_limit, buffer=overlong_buffer)
        self._groups = GroupSampler(
            "grpo",
            count=tasks_per_step,
            n=group_size,
            refill=refill,
            curriculum=curriculum,
            uniform=curriculum_uniform,
            mask_truncated=mask_truncated,
            overlong=self._overlong,
            has_greedy=found.entry.needs_baseline,
            compares_batch=found.entry.compares == "batch",
        )
        self._replay = ReplayBuffer("grpo", share=replay, bound=replay_bound, max_staleness=replay_max_staleness)
        self._token_budget, self._keep = token_budget, keep
        settings = LearnerSettings(
            optim=OptimSettings(
                lr=lr,
                betas=(betas[0], betas[1]),
                weight_decay=weight_decay,
                warmup=warmup,
                decay=decay,
                total=steps * updates_per_step * epochs,  # updates of the whole run, where the decay ends
                max_grad_norm=max_grad_norm,
                max_nonfinite=max_nonfinite,
            ),
            lora=LoraSettings.of(lora_rank, lora_alpha, lora_targets),
            device=device,
            dtype=dtype,
            threads=threads,
            gradient_checkpointing=gradient_checkpointing,
        )
        self._anchor = Anchor("grpo", coef=anchor_coef, kl=kl, token_budget=token_budget)
        self._tuned = TunedPolicy(
            settings=settings,
            algorithm="grpo",
            keep=keep,
            save_every=save_every,
            has_reference=bool(kl_coef or anchor_coef),
        )
        self._step = 0
        self._unused = UnusedEstimator(found.entry.name)

    async def setup(self, context: AlgorithmContext) -> None:
        """Check that one policy with reachable weights is tuned and that there are tasks to train on."""
        self._context = context
        self._tuned.begin(context, others=self._write_replay)
        check_tasks(context, algorithm="grpo")
        self._groups.begin(context)

    async def step(self) -> StepReport:
        """Collect one batch of groups, update, save and publish."""
        context, step = self._context, self._step + 1
        # `updates` places a learner that is opened anew on the curve of the learning rate.
        learner = await self._tuned.learner(updates=self._step * self._updates_per_step * self._epochs)
        moves, version = learner.moves, context.current(self._tuned.name).version

        # 1. Collect: G rollouts of each task, sampled from the weights that are live now (pi_theta_old).
        started = time.perf_counter()
        collected = await self._groups.collect(step)
        collect_s = time.perf_counter() - started

        # 2. Advantages: one number per call, spread over the call's tokens.
        batch = prepare(
            collected.groups,
            credit=context.credit,
            estimator=self._estimator.call,
            mask_truncated=self._mask_truncated,
            overlong=self._overlong,
            baselines=collected.baselines,
        )
        self._tell_unused(batch.final, batch.calls)
        metrics = batch.metrics | collected.metrics | {"collect_s": collect_s}
        dropped = sum(collected.dropped.values())
        metrics |= rollout_shares(collected.episodes, dropped=dropped, loud=batch.loud)
        # Rollouts that were not handed over, by reason: they failed, or have no reward, and the experiment drops such.
        metrics |= {f"dropped_{reason}": float(count) for reason, count in collected.dropped.items()}

        # 3. Update, on some rollouts of earlier steps as well.
        started = time.perf_counter()
        self._tuned.start_updates()
        held = self._anchor.rows(collected.episodes, policy=self._tuned.name)
        own = tuple(dict.fromkeys(sample.rollout for sample in batch.samples))  # each id once, in order
        replayed = self._replay.take(version, own=len(own))
        self._replay.add(version, batch.samples, uses=batch.uses)
        tokens = TokenNumbers()
        tokens.note_advantages(batch.samples)
        metrics |= await self._train(learner, batch.samples, replayed=replayed.rows, held=held, tokens=tokens)
        metrics |= replayed.metrics() if self._replay.share else {}
        metrics["update_s"] = time.perf_counter() - started

        # 4. Make the new weights live; without an update there are none. Save them unless that may wait.
        published = await self._tuned.finish(step=step, has_moved=learner.moves > moves)
        self._step = step
        is_finished = step >= self._steps
        return StepReport(
            step=step,
            is_finished=is_finished,
            metrics=metrics,
            trained=own,
            published=published,
            stop_reason=f"{self._steps} steps done" if is_finished else "",
            uses=tokens.added(batch.uses) | collected.uses | replayed.uses(bound=self._replay.bound),
        )

    def state(self) -> Mapping[str, Json]:
        """The step count, what the curriculum knows, the newest checkpoint and the version it was opened from."""
        return {"step": self._step, "groups": self._groups.state(), **self._tuned.state(step=self._step)}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint, optimizer moments and the KL reference included."""
        self._step = int(state["step"])
        self._groups.restore(state.get("groups", {}))
        self._replay.load(self._context.workdir, step=self._step)
        await self._tuned.restore(state)

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Continue from the weights and moments of an earlier state with `rate` times the learning rate."""
        self._replay.clear()
        await asyncio.to_thread(self._replay.save, self._context.workdir, step=self._step, keep=self._keep)
        await self._tuned.go_back(state, rate=rate, updates=self._step * self._updates_per_step * self._epochs)

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true while `steps` exceeds the steps done; a decaying rate then follows the new length."""
        del tasks, sources_go_on
        return int(state["step"]) < self._steps

    def measure_update(self, weights: Weights, rows: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of a step's updates on rows of (tokens, trained tokens), for `agl check --forecast`."""
        learner = self._tuned.tried_out(weights)

        def update(samples: Sequence[RowSample]) -> None:
            rows = list(samples)
            if self._updates_per_step * self._epochs > 1 or self._objective.needs_rollouts:
                rows = self._with_old_logprobs(learner, rows)
            for _ in range(self._epochs):
                for part in split_updates(rows, updates=self._updates_per_step):
                    self._update(learner, part, held=())

        return update_seconds(update, rows, vocabulary=len(learner.loaded.tokenizer))

    async def close(self) -> None:
        """Drop the model and the reference."""
        self._tuned.close()

    def _write_replay(self, step: int, kept: Collection[int]) -> None:
        self._replay.save(self._context.workdir, step=step, keep=self._keep, kept=kept)

    def _tell_unused(self, final: int, calls: int) -> None:
        """Say once that the credit leaves the estimator nothing to do."""
        if notice := self._unused.news(final=final, calls=calls):
            self._context.say(f"{self._context.name}: {notice}")

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
        # With one update pi_old is pi itself (r = 1), and the forward pass of the update gives it for free.
        # With several, the weights move under the samples, so pi_old is fixed before the first of them.
        if self._updates_per_step * self._epochs > 1 or self._objective.needs_rollouts:
            samples = await asyncio.to_thread(self._with_old_logprobs, learner, samples)
        if replayed:
            replayed = await asyncio.to_thread(self._weighed, learner, replayed)
        # Dealt apart and then joined, so that every update of a step has its share of old rollouts.
        parts = split_updates(samples, updates=self._updates_per_step)
        old = split_updates(replayed, updates=len(parts))
        parts = [part + more for part, more in zip_longest(parts, old, fillvalue=list[RowSample]())]
        reports: list[dict[str, float]] = []
        for epoch in range(self._epochs):
            for index, part in enumerate(parts):
                reports.append(await asyncio.to_thread(self._update, learner, part, held=held, tokens=tokens))
                self._context.progress(epoch * len(parts) + index + 1, self._epochs * len(parts), "update")
        return (averaged(reports) or {"updates_skipped": 1.0}) | self._replay.truncated(replayed)

    def _batches(
        self, learner: PolicyLearner, samples: Sequence[RowSample]
    ) -> tuple[list[RowSample], list[MicroBatch]]:
        """Return the rows that have a gradient and their micro-batches, weighted as part of all `samples`."""
        # Weights and total come from all rows, silent ones included, before the silent ones are left out:
        # the mean of the paper is over every rollout of the group, with and without advantage.
        weight, total = self._objective.weights(samples)
        kept = [index for index, sample in enumerate(samples) if self._objective.has_gradient(sample)]
        if not kept:
            return [], []
        surveyed = self._objective.surveyed(samples, model=learner.loaded.model, device=learner.loaded.device)
        # How rows are cut into micro-batches is a matter of memory and changes no gradient beyond rounding.
        batches = micro_batches_apart(
            [surveyed[i] for i in kept],
            [weight[i] for i in kept],
            total=total,
            token_budget=self._token_budget,
            device=learner.loaded.device,
            is_packed=packs_rows(learner.loaded.model),
        )
        return [surveyed[i] for i in kept], list(batches)

    def _with_old_logprobs(self, learner: PolicyLearner, samples: list[RowSample]) -> list[RowSample]:
        """Return `samples` with log pi_old, the log-probabilities before the step's first update."""
        learner.use_threads()
        return self._objective.with_old_logprobs(samples, model=learner.loaded.model, device=learner.loaded.device)

    def _weighed(self, learner: PolicyLearner, rows: list[RowSample]) -> list[RowSample]:
        """Return replayed rows with log pi_old and their importance weights."""
        learner.use_threads()
        loaded = learner.loaded
        return self._replay.weighed(rows, objective=self._objective, model=loaded.model, device=loaded.device)

    def _update(
        self,
        learner: PolicyLearner,
        samples: Sequence[RowSample],
        *,
        held: Sequence[RowSample],
        tokens: TokenNumbers | None = None,
    ) -> dict[str, float]:
        """Do one optimizer update on whole rollouts, none when no row has a gradient; returns its metrics."""
        learner.use_threads()  # the setting belongs to the calling thread, and each update may run in another
        rows, batches = self._batches(learner, samples)
        if not rows:
            return {"updates_skipped": 1.0}
        tally = Tally(tokens=tokens)
        # Gradients of micro-batches add up in the parameters; the weights make the sum that of one big batch.
        for batch in batches:
            # sum_t w_t c_t loss_t / total: this batch's part of the update's loss.
            loss = self._objective.loss(batch, model=learner.loaded.model, tuned=self._tuned, tally=tally)
            backward(loss)  # frees this batch's graph before the next forward pass
        rollouts = {sample.rollout for sample in samples}
        anchored = self._anchor.add_gradient(learner, self._tuned, held, rollouts=rollouts)
        return learner.apply(tally.report() | anchored)
