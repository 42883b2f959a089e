"""The models of a run in training, over its steps: opened when needed, evaluated, updated, saved and resumed.

It puts the policy (`worker.py`), its reference and the critic (`critic.py`) to work in the order of VERL's trainer,
and computes nothing itself. One step:

    1. old log-probabilities of every row, log pi_old: the policy as it is before the step's first update
    2. the reference's, log pi_ref, where a KL term asks for them
    3. beta * KL off the rewards, where asked for; beta is updated with the KL of this step for the next one
    4. the critic's values V, and advantages from them
    5. the critic's updates, then the policy's

All of 1 to 4 come before any update: PPO's ratio pi / pi_old and the critic's clipped loss compare with the models
that the step began with (Schulman et al. 2017, arXiv 1707.06347, sections 3 and 5).
What blocks runs in a thread, so that rollouts go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_algo_verl.kl_control import KlController

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agl.schemas import Json, Weights
    from agl_algo_verl.critic import VerlCritic
    from agl_algo_verl.rows import PreparedStep, RowSample
    from agl_algo_verl.settings import VerlSettings
    from agl_algo_verl.worker import VerlWorker

    Part = tuple[list[RowSample], int]


class VerlLearner:
    """The policy in training, with its reference and critic where the settings ask for them.

    Args:
        settings: VERL's configuration.
        workdir: Where checkpoints and weights to serve are written.
        steps: Steps of the whole run, over which learning rates are scheduled.
        threads: Torch's threads while training; 0 leaves torch's choice.
        keep: Number of saved states and exported weights that stay on disk.
    """

    def __init__(self, settings: VerlSettings, *, workdir: Path, steps: int, threads: int, keep: int) -> None:
        self._settings, self._workdir, self._steps = settings, workdir.absolute(), steps
        self._threads, self._keep = threads, keep
        self._worker: VerlWorker | None = None
        self._critic: VerlCritic | None = None
        self._kl = KlController(settings.algorithm)
        self._opened = ""  # the version of the weights that the policy was opened from

    @property
    def opened(self) -> str:
        """Version of the weights that training started from; `""` before it started."""
        return self._opened if self._worker is not None else ""

    async def open(self, origin: Weights, *, version: str) -> None:
        """Open a version of the policy in place of the one that was open; a critic stays."""
        self._worker = None  # free the old model first: two of them may not fit
        self._worker = await asyncio.to_thread(self._load, origin)
        self._opened = version

    async def train(
        self, prepared: PreparedStep, *, step: int, progress: Callable[[int, int, str], None]
    ) -> dict[str, float]:
        """Do all updates of a step and return what to log; a number that several updates report is averaged."""
        samples, metrics = await asyncio.to_thread(self._evaluate, prepared)
        jobs: list[tuple[Callable[..., dict[str, float]], Part, bool]] = []
        actor, critic = self._settings.actor, self._settings.critic
        if self._critic is not None:
            # The critic's mini-batches and epochs are the actor's where it has none of its own.
            mini, epochs = critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic.ppo_epochs
            jobs += self._jobs(self._critic.update, samples, prepared, tasks=mini, epochs=epochs or actor.ppo_epochs)
        # A fresh critic's values are noise, and so are advantages from them: before step `critic_warmup` it learns
        # alone.
        if self._critic is None or self._settings.trainer.critic_warmup <= step:
            mini, epochs = actor.ppo_mini_batch_size, actor.ppo_epochs
            jobs += self._jobs(self._policy.update, samples, prepared, tasks=mini, epochs=epochs)
        values: defaultdict[str, list[float]] = defaultdict(list)
        for done, (update, (rows, count), is_last) in enumerate(jobs, start=1):
            for name, value in (await asyncio.to_thread(update, rows, rollouts=count, is_last=is_last)).items():
                values[name].append(value)
            progress(done, len(jobs), "update")
        return metrics | {name: sum(found) / len(found) for name, found in values.items()}

    async def publishable(self, *, step: int) -> Weights:
        """Save a checkpoint of everything, then write the weights to serve and return the resource that names them.

        In this order, so that weights which serve always have a checkpoint that training can continue from.
        """
        await asyncio.to_thread(self._policy.save, self._workdir, step=step, keep=self._keep)
        if self._critic is not None:
            await asyncio.to_thread(self._critic.save, self._workdir, step=step, keep=self._keep)
        return await asyncio.to_thread(self._policy.export, self._workdir, step=step, keep=self._keep)

    def state(self, *, step: int) -> dict[str, Json]:
        """Return the newest checkpoint, the version that training started from and the weight of a KL penalty."""
        path = self._workdir / "state" / f"{step:06d}"
        return {
            "checkpoint": str(path) if path.is_dir() else "",
            "opened": self._opened,
            "kl_coef": self._kl.value,
        }

    async def restore(self, state: Mapping[str, Json], *, step: int) -> None:
        """Continue from `state`: weights, optimizer moments, schedules, random state and critic."""
        self._opened, self._kl.value = str(state["opened"]), float(state["kl_coef"])
        if state["checkpoint"]:
            await asyncio.to_thread(self._resume, Path(str(state["checkpoint"])), step)

    def close(self) -> None:
        """Drop the models."""
        self._worker = self._critic = None

    @property
    def _policy(self) -> VerlWorker:
        if self._worker is None:
            raise AssertionError("the policy is opened before it is trained")
        return self._worker

    def _load(self, origin: Weights) -> VerlWorker:
        from agl_algo_verl.worker import VerlWorker

        worker = VerlWorker(origin=origin, settings=self._settings, steps=self._steps, threads=self._threads)
        if self._settings.has_critic and self._critic is None:
            self._critic = self._make_critic(worker)
        return worker

    def _resume(self, checkpoint: Path, step: int) -> None:
        from agl_algo_verl.worker import VerlWorker

        self._worker = VerlWorker.resume(checkpoint, settings=self._settings, steps=self._steps, threads=self._threads)
        if self._settings.has_critic:
            self._critic = self._make_critic(self._worker)
            self._critic.load(self._workdir, step=step)

    def _make_critic(self, worker: VerlWorker) -> VerlCritic:
        from agl_algo_verl.critic import VerlCritic

        return VerlCritic(worker.origin.uri, settings=self._settings, steps=self._steps, device=worker.device)

    def _jobs(
        self, update: Any, samples: Sequence[RowSample], prepared: PreparedStep, *, tasks: int | None, epochs: int
    ) -> list[tuple[Any, Part, bool]]:
        """Return the updates of one model: every mini-batch, `epochs` times over; the last one moves the schedule."""
        from agl_algo_verl.batches import updates

        parts = updates(samples, prepared.rollouts, tasks=tasks or self._settings.data.train_batch_size)
        total = epochs * len(parts)
        # The order of mini-batches is that of the tasks, which was drawn when they were collected; it is the same in
        # every epoch. Schedules count steps of the experiment and not updates, so only the last update moves them.
        return [(update, parts[index % len(parts)], index + 1 == total) for index in range(total)]

    def _evaluate(self, prepared: PreparedStep) -> tuple[list[RowSample], dict[str, float]]:
        """Return the rows with what the models say of them and advantages that follow from it, and what to log."""
        from agl_algo_verl import shaping

        worker, algorithm = self._policy, self._settings.algorithm
        # log pi_old, [R] per row. The recorded log-probabilities would do if the server were exact; it computes with
        # other kernels, and where groups are collected ahead also with older weights.
        old = worker.logprobs(prepared.samples)
        samples = [replace(sample, old=values) for sample, values in zip(prepared.samples, old, strict=True)]
        metrics = shaping.logprob_gaps(samples)  # how large that error is
        if self._settings.has_reference:
            found = worker.reference_logprobs(samples)  # log pi_ref, [R] per row
            samples = [replace(sample, reference=values) for sample, values in zip(samples, found, strict=True)]
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
