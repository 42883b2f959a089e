"""The models of a run in training, over its steps: opened when needed, evaluated, updated, saved and resumed.

It puts the policy (`worker.py`), its reference and the critic (`critic.py`) to work in the order of VERL's trainer,
and computes nothing itself. One step:

    1. old log-probabilities of every row, log pi_old: the policy as it is before the step's first update
    2. the reference's, log pi_ref, where a KL term asks for them
    3. beta * KL off the rewards, where asked for; beta is updated with the KL of this step for the next one
    4. the critic's values V, and advantages from them
    5. the critic's updates, then the policy's, of which one without a gradient is left out: AdamW would move the
       weights by its momentum alone. VERL's engine makes no update of a gradient that is not finite; here such are
       counted, and too many in a row end the run

All of 1 to 4 come before any update: PPO's ratio pi / pi_old and the critic's clipped loss compare with the models
that the step began with (Schulman et al. 2017, arXiv 1707.06347, sections 3 and 5).
What blocks runs in a thread, so that rollouts go on meanwhile.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_algo_verl.losses.correction import corrected, correction_metrics
from agl_algo_verl.losses.metrics import finite
from agl_algo_verl.rows.replay import beside
from agl_algo_verl.rows.token_numbers import mean_entropy
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
    """The checkpoint of an earlier step that training goes on from, `""` for none, and its place in the schedule."""

    checkpoint: str
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a step trained: its own rows with their final advantages, the replayed ones, and numbers to log."""

    own: list[RowSample]
    replayed: list[RowSample]
    metrics: dict[str, float]


class VerlLearner:
    """The policy in training, with its reference and critic where the settings ask for them.

    Args:
        settings: VERL's configuration.
        workdir: Where checkpoints and weights to serve are written.
        steps: Steps of the whole run, over which learning rates are scheduled.
    """

    def __init__(
        self,
        settings: VerlSettings,
        *,
        workdir: Path,
        steps: int,
    ) -> None:
        self._skipped, self._critic_skipped = Skipped(settings.max_nonfinite), Skipped(settings.max_nonfinite)
        self._tried = 0  # updates of the policy that were asked for
        self._settings, self._workdir, self._steps = settings, workdir.absolute(), steps
        self._keep = settings.saving.keep
        self._worker: VerlWorker | None = None
        self._critic: VerlCritic | None = None
        self._kl = KlController(settings.algorithm)
        self._opened = ""  # the version of the weights that the policy was opened from
        self._rate = 1.0  # factor of the configured learning rate
        self._behind: Behind | None = None
        self.updates = 0
        """Updates of the policy since this object was made that changed its weights."""

    def notice(self) -> str:
        """Return a sentence for people about updates that were skipped since the last call, `""` without one."""
        return self._skipped.news()

    @property
    def opened(self) -> str:
        """Version of the weights that training started from; `""` before it started."""
        return self._opened if self._worker is not None else ""

    async def open(self, origin: Weights, *, version: str) -> None:
        """Open a version of the policy in place of the one that was open; its schedule goes on, and a critic stays."""
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
        """Do all updates of a step; a number that several of them report is averaged, and what they skip is counted.

        On `replayed` rollouts the policy trains besides, with the advantages that they have, and the critic does not.
        The rows `held` keep agents that are not trained near the start (`losses/anchor.py`).
        """
        samples, metrics = await asyncio.to_thread(self._evaluate, prepared)
        every = await asyncio.to_thread(self._with_replayed, replace(prepared, samples=samples), replayed)
        correction = self._settings.correction
        # k_t = pi_old / pi_behaviour over the whole step: statistics of a rollout need all of its rows.
        every = replace(every, samples=corrected(every.samples, correction))
        metrics |= correction_metrics(every.samples, correction)
        samples = every.samples[: len(samples)]
        jobs: list[tuple[Callable[..., dict[str, float]], Part, bool]] = []
        actor, critic = self._settings.actor, self._settings.critic
        if self._critic is not None:
            # The critic's mini-batches and epochs are the actor's where it has none of its own.
            mini, epochs = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic.ppo_epochs
            own = replace(prepared, samples=samples)
            jobs += self._jobs(self._update_critic, own, tasks=mini, epochs=epochs or actor.ppo_epochs)
        # A fresh critic's values are noise, and so are advantages from them: before step `critic_warmup` it learns
        # alone.
        if self.trains_policy(step):
            mini, epochs = actor.ppo_mini_batch_size, actor.ppo_epochs
            # log pi_ref of the held rows, which the anchor's k3 compares with.
            held = await asyncio.to_thread(self._with_reference, held)
            jobs += self._jobs(partial(self._update_policy, held=held), every, tasks=mini, epochs=epochs)
        if not jobs and self.trains_policy(step):  # without a row, a step counts as one without a gradient does
            metrics |= self._update_policy([], rollouts=len(every.rollouts), is_last=True, held=())
        reports: list[dict[str, float]] = []
        for done, (update, (rows, count), is_last) in enumerate(jobs, start=1):
            reports.append(await asyncio.to_thread(update, rows, rollouts=count, is_last=is_last))
            progress(done, len(jobs), "update")
        metrics |= averaged(reports)
        return Trained(own=samples, replayed=every.samples[len(samples) :], metrics=metrics)

    def trains_policy(self, step: int) -> bool:
        """Return whether a step trains the policy, rather than a critic alone."""
        return not self._settings.has_critic or self._settings.trainer.critic_warmup <= step

    async def save(self, *, step: int, kept: Collection[int]) -> None:
        """Save a checkpoint of everything as of a step, and remove old ones except those of the steps `kept`."""
        await asyncio.to_thread(self._policy.save, self._workdir, step=step, keep=self._keep, kept=kept)
        if self._critic is not None:
            await asyncio.to_thread(self._critic.save, self._workdir, step=step, keep=self._keep, kept=kept)

    def finished(self) -> None:
        """Note that a step has ended, whose own checkpoint is the one that training goes on from."""
        self._behind = None

    def served(self, *, step: int) -> Weights:
        """Return the resource that names the weights to serve of a step, which need not be written yet."""
        return self._policy.served(self._workdir, step=step)

    def origins(self) -> list[str]:
        """Return the weights that the policy was opened from, and those of every checkpoint on disk."""
        from agl_algo_verl.local.worker import origins

        return [self._policy.origin.uri, *origins(self._workdir)]

    async def held(self) -> dict[str, Tensor] | HeldAdapter:
        """Return the weights to serve by their names, or the adapter."""
        return await asyncio.to_thread(self._policy.held)

    async def export(self, *, step: int, kept: Collection[int]) -> Weights:
        """Write the weights to serve and return the resource that names them; removes old ones like `save`."""
        return await asyncio.to_thread(self._policy.export, self._workdir, step=step, keep=self._keep, kept=kept)

    def state(self, *, step: int) -> dict[str, Json]:
        """Return the newest checkpoint, the version that training started from and the weight of a KL penalty."""
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
        """Continue from `state`: weights, optimizer moments, schedules, random state and critic."""
        self._opened, self._kl.value = str(state["opened"]), float(state["kl_coef"])
        self._rate = float(state["rate"])
        checkpoint, place = str(state["checkpoint"]), state["place"]
        self._behind = None if place is None else Behind(checkpoint=checkpoint, place=int(place))
        if checkpoint:
            await asyncio.to_thread(self._resume, Path(checkpoint))

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> str:
        """Continue from an earlier `state` with `rate` times the learning rate; its schedule goes on where it is.

        Without the state's checkpoint, and for an empty state, the live weights are opened next, with new moments.
        Returns the checkpoint that is missing, or `""`.
        """
        checkpoint = str(state.get("checkpoint", ""))
        missing = checkpoint if checkpoint and not Path(checkpoint).is_dir() else ""
        checkpoint = "" if missing else checkpoint
        place = 0 if self._worker is None else self._worker.place
        self._worker, self._rate = None, rate  # free the old model before the new one is loaded
        self._opened, self._kl.value = str(state.get("opened", "")), float(state.get("kl_coef", self._kl.value))
        self._behind = Behind(checkpoint=checkpoint, place=place)
        if checkpoint:
            await asyncio.to_thread(self._resume, Path(checkpoint))
        return missing

    def close(self) -> None:
        """Drop the models."""
        self._worker = self._critic = None

    @property
    def _policy(self) -> VerlWorker:
        if self._worker is None:
            raise AssertionError("the policy is opened before it is trained")
        return self._worker

    def _load(self, origin: Weights, place: int | None) -> VerlWorker:
        from agl_algo_verl.local.worker import VerlWorker

        worker = VerlWorker(origin=origin, settings=self._settings, steps=self._steps)
        # The schedule counts steps of the experiment, not those since the model was opened.
        self._place(worker, place)
        if self._settings.has_critic and self._critic is None:
            self._critic = self._make_critic(worker)
        return worker

    def _resume(self, checkpoint: Path) -> None:
        from agl_algo_verl.local.worker import VerlWorker

        self._worker = VerlWorker.resume(checkpoint, settings=self._settings, steps=self._steps)
        self._place(self._worker, None)
        if self._settings.has_critic:
            self._critic = self._make_critic(self._worker)
            self._critic.load(self._workdir, step=int(checkpoint.name))

    def _place(self, worker: VerlWorker, place: int | None) -> None:
        """Give a policy that was just opened the learning rate at a place in its schedule, or where a run went back."""
        place = place if self._behind is None else self._behind.place
        if place is not None or self._rate != 1.0:
            worker.use_rate(self._rate, place=place)

    def _make_critic(self, worker: VerlWorker) -> VerlCritic:
        from agl_algo_verl.local.critic import VerlCritic

        return VerlCritic(worker.origin.uri, settings=self._settings, steps=self._steps, device=worker.device)

    def _jobs(
        self, update: Any, prepared: PreparedStep, *, tasks: int | None, epochs: int
    ) -> list[tuple[Any, Part, bool]]:
        """Return the updates of one model: every mini-batch, `epochs` times over; the last one moves the schedule."""
        from agl_algo_verl.rows.batches import updates

        parts = updates(prepared.samples, prepared.rollouts, tasks=tasks or self._settings.data.train_batch_size)
        total = epochs * len(parts)
        # The order of mini-batches is that of the tasks, which was drawn when they were collected; it is the same in
        # every epoch. Schedules count steps of the experiment and not updates, so only the last update moves them.
        return [(update, parts[index % len(parts)], index + 1 == total) for index in range(total)]

    def _update_policy(
        self, rows: Sequence[RowSample], *, rollouts: int, is_last: bool, held: Sequence[RowSample]
    ) -> dict[str, float]:
        """Do one update of the policy, none where nothing has a gradient; the schedule counts the step either way."""
        from agl_algo_verl.rows.batches import has_gradient

        if has_gradient(rows, self._settings):
            names = {row.rollout for row in rows}
            # Held rows go with the update of their rollout; U counts their tokens there.
            own = [row for row in held if row.rollout in names]
            found = self._policy.update(rows, rollouts=rollouts, is_last=is_last, held=own)
            self._tried += 1
            # VERL's engine made no update of it; the moments of AdamW stay as they were.
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
        """Return a step with its own evaluated rows, and replayed ones with what the models say of them now."""
        every = beside(prepared, replayed)
        rows = every.samples[len(prepared.samples) :]
        if not rows:
            return prepared
        found, _ = self._policy.scores(rows, has_entropy=False)
        rows = [replace(row, old=values) for row, values in zip(rows, found, strict=True)]
        if self._settings.has_reference:
            rows = self._with_reference(rows)
        return replace(every, samples=[*prepared.samples, *rows])

    def _with_reference(self, rows: Sequence[RowSample]) -> list[RowSample]:
        """Return rows with log pi_ref; without rows the reference is not opened."""
        found = self._policy.reference_logprobs(rows) if rows else []
        return [replace(row, reference=values) for row, values in zip(rows, found, strict=True)]

    def _evaluate(self, prepared: PreparedStep) -> tuple[list[RowSample], dict[str, float]]:
        """Return the rows with what the models say of them and advantages that follow from it, and what to log."""
        from agl_algo_verl.losses import shaping

        worker, algorithm = self._policy, self._settings.algorithm
        # log pi_old, [R] per row. The recorded log-probabilities would do if the server were exact; it computes with
        # other kernels, and where groups are collected ahead also with older weights.
        # The entropies H of the same pass, [R] per row, are only shown: VERL's trainer on Ray computes them too.
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
        if algorithm.use_kl_in_reward:
            penalty = shaping.penalise(samples, settings=algorithm, beta=self._kl.value)
            metrics |= {"reward_kl": penalty.kl, "reward_kl_coef": self._kl.value}
            self._kl.update(kl=penalty.kl, rollouts=len(prepared.rollouts))  # for the next step
        if self._critic is not None:
            found = self._critic.values(samples)  # V before each token, [R] per row
            samples = [replace(sample, values=values) for sample, values in zip(samples, found, strict=True)]
            samples = shaping.with_values(prepared, samples, penalty=penalty, settings=algorithm)
            metrics |= shaping.value_fit(samples)
        elif penalty is not None:
            # Advantages were made in `rows.prepare` already; the penalty changes the scores that they compare.
            samples = shaping.with_penalty(prepared, samples, penalty=penalty, settings=self._settings)
        return samples, metrics


class KlController:
    """The weight beta of a KL penalty in the reward; `value` outlives the process in the algorithm's state.

    The adaptive one is the proportional controller of Ziegler et al. 2019 (arXiv 1909.08593):

        e    = clip(KL / target_kl - 1, -0.2, 0.2)
        beta = beta * (1 + e * n / horizon)

    KL is in nats per token; n, the rollouts of the step, and `horizon` count rollouts. After `horizon` rollouts at 1.2
    times the target or more, beta has grown by about a fifth; the clip keeps one step with an odd KL from moving it
    far.

    Deviation from the paper, which measures the KL of whole responses: as in VERL it is per token, so `target_kl` does
    not depend on how long answers are.
    """

    def __init__(self, settings: AlgorithmKeys) -> None:
        """Start at the configured coefficient."""
        self._settings = settings
        self.value = settings.kl_ctrl.kl_coef

    def update(self, *, kl: float, rollouts: int) -> None:
        """Move the weight by the KL of a step of `rollouts` rollouts; a fixed weight stays."""
        from agl_algo_verl.typed import verl_part

        control = self._settings.kl_ctrl
        # VERL's controller is made anew each time, from the current weight: it has no other state, and `value` alone
        # has to be saved.
        config = verl_part("verl.trainer.config:KLControlConfig")(
            type=control.type, kl_coef=self.value, horizon=control.horizon, target_kl=control.target_kl
        )
        controller: Any = verl_part("verl.trainer.ppo.core_algos:get_kl_controller")(config)
        controller.update(current_kl=kl, n_steps=rollouts)  # VERL's `n_steps` are what the paper calls episodes
        self.value = float(controller.value)
