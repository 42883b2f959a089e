"""The models of a run in training, over its steps: opened when needed, evaluated, updated, saved and resumed.

It calls the policy (`worker.py`), its reference and the critic (`critic.py`) in the order of VERL's trainer, and
computes nothing itself. One step:

    1. log pi_old of every row: the log-probabilities of the policy before the step's first update
    2. log pi_ref, the reference's, if a KL term needs them
    3. subtract beta * KL from the rewards, if the settings ask for it; beta for the next step follows from this KL
    4. the critic's values V, and advantages from them
    5. the critic's updates, then the policy's. A policy update without a gradient is left out, because AdamW would
       move the weights by its momentum alone. VERL's engine skips an update whose gradient is not finite; such
       updates are counted here, and too many in a row end the run

Stages 1 to 4 precede any update: PPO's ratio pi / pi_old and the critic's clipped loss compare with the models at the
start of the step (Schulman et al. 2017, arXiv 1707.06347, sections 3 and 5). Blocking work runs in a thread, so that
rollouts continue meanwhile.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_algo_verl.losses.correction import corrected, correction_metrics
from agl_algo_verl.losses.metrics import finite
from agl_algo_verl.rows.replay import with_replayed
from agl_algo_verl.rows.token_numbers import mean_entropy
from agl_algo_verl.rows.training import own_checkpoint
from agl_objectives.directories import step_directory
from agl_objectives.reports import Skipped, averaged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

    from agl.schemas import Json, Weights
    from agl_algo_verl.local.critic import VerlCritic
    from agl_algo_verl.local.worker import VerlWorker
    from agl_algo_verl.rows.rows import PreparedStep, RowSample
    from agl_algo_verl.settings.settings import VerlSettings
    from agl_objectives.adapters import HeldAdapter
    from agl_objectives.replay import Replayed

    Part = tuple[list[RowSample], int]
    from agl_algo_verl.settings.settings import AlgorithmKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """A checkpoint to which training went back (`""` for none), and the position at which the schedule continues."""

    checkpoint: str
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The rows of a step after training, with final advantages; the replayed rows; and the metrics to log."""

    own: list[RowSample]
    replayed: list[RowSample]
    metrics: dict[str, float]


class VerlLearner:
    """The policy in training, with a reference and a critic if the settings need them.

    Args:
        settings: VERL's configuration.
        workdir: Directory for checkpoints and for weights to serve.
        steps: Steps of the whole run, for the schedules of the learning rates.
    """

    def __init__(
        self,
        settings: VerlSettings,
        *,
        workdir: Path,
        steps: int,
    ) -> None:
        # One infinite loss may be bad luck; many in a row mean that training has diverged, and end the run.
        self._skipped, self._critic_skipped = Skipped(settings.max_nonfinite), Skipped(settings.max_nonfinite)
        self._tried = 0  # updates of the policy that were asked for
        self._settings, self._workdir, self._steps = settings, workdir.absolute(), steps
        self._keep = settings.saving.keep
        self._worker: VerlWorker | None = None
        self._critic: VerlCritic | None = None
        # beta of r - beta KL, the reward with the penalty.
        self._kl = KlController(settings.algorithm)
        self._opened = ""  # the version of the weights that the policy was opened from
        self._rate = 1.0  # factor of the configured learning rate
        self._behind: Behind | None = None
        self.updates = 0
        """Updates since this object was created that changed the policy's weights."""

    def notice(self) -> str:
        """Return a message about the updates skipped since the last call; `""` if there were none."""
        return self._skipped.news()

    @property
    def opened(self) -> str:
        """The policy version with whose weights training started; `""` before it has started."""
        return self._opened if self._worker is not None else ""

    async def open(self, origin: Weights, *, version: str) -> None:
        """Load a version of the policy in place of the current model; the schedule continues, and the critic stays."""
        place = None if self._worker is None else self._worker.place
        self._worker = None  # free the old model first: two of them may not fit
        self._worker = await asyncio.to_thread(self._load, origin, place)
        self._opened = version

    async def train(
        self,
        prepared: PreparedStep,
        *,
        step: int,
        progress: Callable[[int, int, str], None],
        replayed: Replayed[RowSample],
        held: Sequence[RowSample] = (),
    ) -> Trained:
        """Do all updates of a step; a metric that several updates report is averaged, and skipped updates are counted.

        The policy also trains on the `replayed` rollouts, with their stored advantages; the critic does not. The rows
        in `held` keep agents that are not trained near their start (`losses/anchor.py`).
        """
        # Stages 1 to 4: pi_old, pi_ref, V and A_t are constants of the step, whatever number of updates follows.
        samples, metrics = await asyncio.to_thread(self._evaluate, prepared)
        # Replayed rollouts keep the A_t of their own step, whose group they were compared with, but get pi_old of this
        # one.
        every = await asyncio.to_thread(self._with_replayed, replace(prepared, samples=samples), replayed)
        correction = self._settings.correction
        # k_t = pi_old / pi_behaviour over the whole step: the statistics of a rollout need all of its rows.
        every = replace(every, samples=corrected(every.samples, correction))
        metrics |= correction_metrics(every.samples, correction)
        # Own rows come first, so that this is the part of them, now with their weights k_t.
        samples = every.samples[: len(samples)]
        jobs: list[tuple[Callable[..., dict[str, float]], Part, bool]] = []
        actor, critic = self._settings.actor, self._settings.critic
        if self._critic is not None:
            # The critic uses the actor's mini-batches and epochs unless it has its own.
            mini, epochs = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic.ppo_epochs
            # The returns of replayed rollouts belong to an older policy, and V is to predict those of today's.
            own = replace(prepared, samples=samples)
            jobs += self._jobs(self._update_critic, own, tasks=mini, epochs=epochs or actor.ppo_epochs)
        # A new critic's values, and advantages from them, are noise: before step `critic_warmup` only the critic
        # learns.
        if self.trains_policy(step):
            mini, epochs = actor.ppo_mini_batch_size, actor.ppo_epochs
            # log pi_ref of the held rows, with which the anchor's k3 compares.
            held = await asyncio.to_thread(self._with_reference, held)
            jobs += self._jobs(partial(self._update_policy, held=held), every, tasks=mini, epochs=epochs)
        if not jobs and self.trains_policy(step):  # without a row, a step counts as one without a gradient does
            metrics |= self._update_policy([], rollouts=len(every.rollouts), is_last=True, held=())
        reports: list[dict[str, float]] = []
        for done, (update, (rows, count), is_last) in enumerate(jobs, start=1):
            # theta moves here, E epochs over M mini-batches as in PPO's algorithm 1: from the second update on, pi /
            # pi_old leaves 1 and the clip acts.
            reports.append(await asyncio.to_thread(update, rows, rollouts=count, is_last=is_last))
            progress(done, len(jobs), "update")
        metrics |= averaged(reports)
        return Trained(own=samples, replayed=every.samples[len(samples) :], metrics=metrics)

    def trains_policy(self, step: int) -> bool:
        """Return true if a step trains the policy, false if it trains only the critic."""
        # With A = R - V and a random V, the policy would follow noise.
        return not self._settings.has_critic or self._settings.trainer.critic_warmup <= step

    async def save(self, *, step: int, kept: Collection[int]) -> None:
        """Save a checkpoint of all models after a step, and remove old ones, except those of the steps in `kept`."""
        await asyncio.to_thread(self._policy.save, self._workdir, step=step, keep=self._keep, kept=kept)
        if self._critic is not None:
            await asyncio.to_thread(self._critic.save, self._workdir, step=step, keep=self._keep, kept=kept)

    def finished(self) -> None:
        """Record that a step has ended, so that training continues from that step's own checkpoint."""
        self._behind = None

    def served(self, *, step: int) -> Weights:
        """Return the resource that names the weights of a step; their files need not exist yet."""
        return self._policy.served(self._workdir, step=step)

    def origins(self) -> list[str]:
        """Return the weights from which the policy was loaded, and those named in the checkpoints on disk."""
        from agl_algo_verl.local.worker import origins

        return [self._policy.origin.uri, *origins(self._workdir)]

    async def held(self) -> dict[str, Tensor] | HeldAdapter:
        """Return the current weights by tensor name, or the adapter, for a policy that takes them from memory."""
        return await asyncio.to_thread(self._policy.held)

    async def export(self, *, step: int, kept: Collection[int]) -> Weights:
        """Write the current weights for serving and return their resource; old ones are removed as in `save`."""
        return await asyncio.to_thread(self._policy.export, self._workdir, step=step, keep=self._keep, kept=kept)

    def state(self, *, step: int) -> dict[str, Json]:
        """Return the state to save: checkpoint, opened version, KL weight, rate, and schedule position."""
        checkpoint, place = str(step_directory(self._workdir / "state", step)) if step else "", None
        if self._behind is not None:
            checkpoint, place = self._behind.checkpoint, self._behind.place
        return {
            "checkpoint": checkpoint,
            "opened": self._opened,
            "kl_coef": self._kl.value,
            "rate": self._rate,
            "place": place,
        }

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from `state`: restores weights, optimizer moments, schedules, random state and critic."""
        self._opened, self._kl.value = str(state["opened"]), float(state["kl_coef"])
        self._rate = float(state["rate"])
        checkpoint, place = own_checkpoint(state, workdir=self._workdir), state["place"]
        self._behind = None if place is None else Behind(checkpoint=checkpoint, place=int(place))
        if checkpoint:
            await asyncio.to_thread(self._resume, Path(checkpoint))

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> str:
        """Return to an earlier `state` with `rate` times the learning rate; the schedule keeps its position.

        If the state is empty or its checkpoint is missing, the live weights are opened next, with new moments. Returns
        the missing checkpoint, or `""`.
        """
        checkpoint = own_checkpoint(state, workdir=self._workdir)
        missing = checkpoint if checkpoint and not Path(checkpoint).is_dir() else ""
        checkpoint = "" if missing else checkpoint
        place = 0 if self._worker is None else self._worker.place
        self._worker, self._rate = None, rate  # free the old model before the new one is loaded
        self._opened, self._kl.value = str(state.get("opened", "")), float(state.get("kl_coef", self._kl.value))
        # theta goes back, the schedule does not: it follows the count of the experiment's steps, which goes on.
        self._behind = Behind(checkpoint=checkpoint, place=place)
        if checkpoint:
            await asyncio.to_thread(self._resume, Path(checkpoint))
        return missing

    def close(self) -> None:
        """Release the models."""
        self._worker = self._critic = None

    @property
    def _policy(self) -> VerlWorker:
        if self._worker is None:
            raise AssertionError("the policy is opened before it is trained")
        return self._worker

    def _load(self, origin: Weights, place: int | None) -> VerlWorker:
        from agl_algo_verl.local.worker import VerlWorker

        worker = VerlWorker(origin=origin, settings=self._settings, steps=self._steps)
        # The schedule counts steps of the experiment, not steps since the model was opened.
        # The learning rate eta_t is a function of the position t alone, so a position is all that a change of models
        # carries over.
        self._place(worker, place)
        if self._settings.has_critic and self._critic is None:
            self._critic = self._make_critic(worker)
        return worker

    def _resume(self, checkpoint: Path) -> None:
        from agl_algo_verl.local.worker import VerlWorker

        # AdamW continues with its moments m and v: with new ones the first steps would be of size lr in every weight.
        self._worker = VerlWorker.resume(checkpoint, settings=self._settings, steps=self._steps)
        self._place(self._worker, None)
        if self._settings.has_critic:
            self._critic = self._make_critic(self._worker)
            # Policy and critic come from the same step: V_old must be the values of the policy that acted.
            self._critic.load(self._workdir, step=int(checkpoint.name))

    def _place(self, worker: VerlWorker, place: int | None) -> None:
        """Set the learning rate of a newly loaded policy: at `place` in the schedule, or as set when going back."""
        place = place if self._behind is None else self._behind.place
        # After going back eta_t is multiplied by `rate`: the same step size would diverge at the same place again.
        if place is not None or self._rate != 1.0:
            worker.use_rate(self._rate, place=place)

    def _make_critic(self, worker: VerlWorker) -> VerlCritic:
        from agl_algo_verl.local.critic import VerlCritic

        return VerlCritic(worker.origin.uri, settings=self._settings, steps=self._steps, device=worker.device)

    def _jobs(
        self, update: Any, prepared: PreparedStep, *, tasks: int | None, epochs: int
    ) -> list[tuple[Any, Part, bool]]:
        """Return the updates of one model in order: every mini-batch, `epochs` times.

        Each is (update function, mini-batch, whether it is the step's last update); the last one advances the schedule.
        """
        from agl_algo_verl.rows.batches import updates

        parts = updates(prepared.samples, prepared.rollouts, tasks=tasks or self._settings.data.train_batch_size)
        total = epochs * len(parts)
        # Mini-batches follow the order of the tasks, drawn when they were collected, and it is the same in every epoch.
        # Schedules count steps of the experiment, not updates, so only the last update advances them.
        return [(update, parts[index % len(parts)], index + 1 == total) for index in range(total)]

    def _update_policy(
        self, rows: Sequence[RowSample], *, rollouts: int, is_last: bool, held: Sequence[RowSample]
    ) -> dict[str, float]:
        """Do one update of the policy, unless no row has a gradient; the schedule counts the step in both cases."""
        from agl_algo_verl.rows.batches import has_gradient

        # All A_t are 0 where all rollouts of a task have one reward; a KL term in the loss still has a gradient then.
        if has_gradient(rows, self._settings):
            # The anchor's loss sum_U k3 / |U| is over the tokens U of agents that are not trained, next to the policy's
            # loss.
            names = {row.rollout for row in rows}
            # Held rows belong to the update of their rollout; U counts their tokens there.
            own = [row for row in held if row.rollout in names]
            found = self._policy.update(rows, rollouts=rollouts, is_last=is_last, held=own)
            self._tried += 1
            # VERL's engine skipped this update; AdamW's moments are unchanged.
            if self._skipped.note(found["grad_norm"], update=self._tried):
                return finite(found) | {"updates_nonfinite": 1.0}
            self.updates += 1
            return found
        if is_last:
            self._policy.move_schedule()
        return {"updates_skipped": 1.0}

    def _update_critic(self, rows: Sequence[RowSample], *, rollouts: int, is_last: bool) -> dict[str, float]:
        """Do one update of the critic."""
        if self._critic is None:
            raise AssertionError("the critic is opened before it is trained")
        found = self._critic.update(rows, rollouts=rollouts, is_last=is_last)
        if self._critic_skipped.note(found["critic_grad_norm"], update=self._critic_skipped.total + 1):
            return finite(found) | {"value_updates_nonfinite": 1.0}
        return found

    def _with_replayed(self, prepared: PreparedStep, replayed: Replayed[RowSample]) -> PreparedStep:
        """Return the step with the replayed rows added to its own, and their log pi_old under the current weights."""
        every = with_replayed(prepared, replayed)
        rows = every.samples[len(prepared.samples) :]
        if not rows:
            return prepared
        # log pi_old under today's weights: the ratio pi / pi_old starts at 1, and the distance to the policy that
        # sampled them is the importance weight's affair.
        found, _ = self._policy.scores(rows, has_entropy=False)
        rows = [replace(row, old=values) for row, values in zip(rows, found, strict=True)]
        if self._settings.has_reference:
            rows = self._with_reference(rows)
        return replace(every, samples=[*prepared.samples, *rows])

    def _with_reference(self, rows: Sequence[RowSample]) -> list[RowSample]:
        """Return the rows with log pi_ref added; without rows the reference is not loaded."""
        found = self._policy.reference_logprobs(rows) if rows else []
        return [replace(row, reference=values) for row, values in zip(rows, found, strict=True)]

    def _evaluate(self, prepared: PreparedStep) -> tuple[list[RowSample], dict[str, float]]:
        """Return the step's rows with log-probabilities, values and advantages added, and metrics to log."""
        from agl_algo_verl.losses import shaping

        worker, algorithm = self._policy, self._settings.algorithm
        # log pi_old, [R] per row. The recorded log-probabilities would serve if the server were exact, but it computes
        # with other kernels and, where groups are collected ahead, with older weights. The entropies H of the same
        # pass, [R] per row, are only for display; VERL's trainer on Ray computes them too.
        if algorithm.rollout_correction.bypass_mode:
            samples = [replace(sample, old=sample.behaviour) for sample in prepared.samples]
        else:
            found = worker.scores(prepared.samples, has_entropy=self._settings.entropy)
            scored = zip(prepared.samples, *found, strict=True)
            samples = [replace(sample, old=old_R, entropy=entropy_R) for sample, old_R, entropy_R in scored]
        metrics = shaping.logprob_gaps(samples)  # how large that error is
        metrics |= mean_entropy(samples)
        if self._settings.has_reference:
            samples = self._with_reference(samples)
            metrics |= shaping.distance(samples)
        penalty = None
        # r_t - beta * KL_t in place of r_t (Ouyang et al. 2022, arXiv 2203.02155, section 3): the penalty is part of
        # the return, and so of the advantages; a KL term in the loss only pulls at each token's own probability.
        if algorithm.use_kl_in_reward:
            penalty = shaping.penalise(samples, settings=algorithm, beta=self._kl.value)
            metrics |= {"reward_kl": penalty.kl, "reward_kl_coef": self._kl.value}
            self._kl.update(kl=penalty.kl, rollouts=len(prepared.rollouts))  # for the next step
        if self._critic is not None:
            found = self._critic.values(samples)  # V before each token, [R] per row
            samples = [replace(sample, values=values) for sample, values in zip(samples, found, strict=True)]
            # A_t from V by GAE, and R_t = A_t + V_t, towards which the critic is trained.
            samples = shaping.with_values(prepared, samples, penalty=penalty, settings=algorithm)
            metrics |= shaping.value_fit(samples)
        elif penalty is not None:
            # `rows.prepare` has already computed advantages; the penalty changes the scores that they compare.
            samples = shaping.with_penalty(prepared, samples, penalty=penalty, settings=self._settings)
        return samples, metrics


class KlController:
    """The weight beta of a KL penalty in the reward; the algorithm's state stores `value`, so a resume keeps it.

    The adaptive kind is the proportional controller of Ziegler et al. 2019 (arXiv 1909.08593):

        e    = clip(KL / target_kl - 1, -0.2, 0.2)
        beta = beta * (1 + e * n / horizon)

    KL is in nats per token; n is the number of rollouts of the step, and `horizon` a number of rollouts. After
    `horizon` rollouts with a KL of 1.2 times the target or more, beta has grown by about a fifth; the clip keeps a
    single step with an unusual KL from changing it much.

    Deviation from the paper, which measures the KL of whole responses: as in VERL it is per token, so `target_kl` does
    not depend on the length of answers.
    """

    def __init__(self, settings: AlgorithmKeys) -> None:
        """Start at the configured coefficient."""
        self._settings = settings
        self.value = settings.kl_ctrl.kl_coef

    def update(self, *, kl: float, rollouts: int) -> None:
        """Adapt the weight to the KL of a step with `rollouts` rollouts; a fixed weight does not change."""
        from agl_algo_verl.typed import verl_part

        control = self._settings.kl_ctrl
        # VERL's controller is created anew each time from the current weight: it has no other state, so only `value`
        # has to be saved.
        config = verl_part("verl.trainer.config:KLControlConfig")(
            type=control.type, kl_coef=self.value, horizon=control.horizon, target_kl=control.target_kl
        )
        # The fixed kind returns beta as it is; the adaptive one computes e and beta as the docstring has them.
        controller: Any = verl_part("verl.trainer.ppo.core_algos:get_kl_controller")(config)
        controller.update(current_kl=kl, n_steps=rollouts)  # VERL's `n_steps` are what the paper calls episodes
        self.value = float(controller.value)
