"""The algorithm `verl`: policy gradients with VERL's engine, losses and advantages, in one process and without Ray.

One step:

    1. take a batch of groups: every task run `rollout.n` times, for this step or ahead of it (`rows/supply.py`)
    2. rows with advantages: credit per call, through an estimator over rollouts (`rows/rows.py`, `losses/choice.py`)
    3. log pi_old of every row, recomputed by VERL's engine; its largest distance from the server's recorded values is
       `logprob_gap`. If needed, also log pi_ref of the reference and the values of the critic (`learner.py`)
    4. advantages again if 3 changes them: after a KL penalty, or by VERL's GAE (`losses/shaping.py`)
    5. if configured, some rollouts of earlier steps are added (`rows/replay.py`)
    6. updates by the loss (`models.py`, `critic.py`), `ppo_mini_batch_size` tasks at a time, `ppo_epochs` times;
       agents that share the weights but are not trained are held near their start (`losses/anchor.py`)
    7. publish the weights, which the policy then serves, and save them with a checkpoint unless saving may wait; a
       step without an update publishes nothing

Deviations from VERL's own trainer, and why:
- Agents run outside of it and call the policy of the experiment, so VERL has no rollout worker here.
- A row is a branch of the call forest, and a rollout has as many rows as it needs. Statistics, mini-batches and the
  mean over sequences count rollouts, never rows: how often an agent calls its model must not change its weight. The
  rows of a rollout share an update, and no row is dropped or doubled to fill one.
- The reference is the policy from which training was opened; with adapters it is the same weights without the adapters.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from agl_algo_verl.local.learner import VerlLearner
from agl_algo_verl.losses.anchor import held_rows
from agl_algo_verl.rows.token_numbers import with_tokens
from agl_algo_verl.rows.training import VerlTraining
from agl_algo_verl.runtime import check_attention, own_device
from agl_algo_verl.settings.packing import with_packing
from agl_algo_verl.settings.settings import read_settings
from agl_algo_verl.weights.adapters import own_weights, prune_merged, tuned_policy, whole_weights
from agl_objectives.replay import Replayed
from agl_objectives.saving import LiveAtSaves, offer_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agl.contracts import AlgorithmContext, StepReport
    from agl.schemas import Json
    from agl_algo_verl.settings.settings import VerlSettings


class VERL(VerlTraining):
    """Trains the weights of one policy on groups of rollouts that share a task.

    Args:
        config: VERL's configuration, by its groups, and the parameters of agl (`algorithm.py`).

    Raises:
        ConfigError: A key is unknown or would be ignored, keys contradict each other, or VERL is missing or too new.
    """

    def __init__(self, **config: Any) -> None:
        super().__init__(*read_settings(config))
        self._unwritten: int | None = None  # the step whose published weights are in memory only
        self._live = ""  # the version whose weights a step began to train

    async def setup(self, context: AlgorithmContext) -> None:
        """Check that there are tasks and that exactly one policy is tuned, whose weights can be trained here.

        Logs the keys that are overruled. Raises ConfigError for a run that cannot be trained here.
        """
        # One policy: a run with several policies needs an algorithm for each.
        self._tuned, _ = tuned_policy(context)
        self._context = context
        self._live_at_saves = LiveAtSaves(context, self._tuned)
        # Packed rows need a GPU and flash-attn; from here on the settings are final.
        self.settings, notes = with_packing(self.settings, has_gpu=own_device().type == "cuda")
        await asyncio.to_thread(check_machine, self.settings)
        self._begin(context, extra=notes, serves=self._tuned)
        self._learner = VerlLearner(self.settings, workdir=context.workdir, steps=self._steps)

    async def step(self) -> StepReport:
        """Take one batch of groups, update, publish the weights, and save them unless saving may wait."""
        context, step = self._context, self._step + 1
        # If another algorithm has published weights in the meantime, those are trained from here on.
        await self._open()
        started = time.perf_counter()
        # 1. groups: every task is run G = rollout.n times
        supplied = await self._supply.take(step)
        collect_s = time.perf_counter() - started
        # 2. rows with advantages A, from credit and the estimator
        prepared = await self._prepare(supplied, context)
        # Rows of agents that are not trained, used only in the anchor's term.
        held, unheld = held_rows(supplied.groups, policy=self._tuned, settings=self.settings)
        metrics = prepared.metrics | supplied.metrics | unheld | {"collect_s": collect_s}

        # pi changes from here on: a checkpoint before the end of the step would belong to no step.
        self._is_moving = True
        started, updates = time.perf_counter(), self._learner.updates
        self._live = context.current(self._tuned).version
        # 5. rollouts of earlier steps; the correction weighs them against today's policy
        is_training = self._learner.trains_policy(step)  # before `critic_warmup` the critic learns alone
        replayed = self._replay.take(prepared, version=self._live) if is_training else Replayed()
        # 3, 4 and 6. log pi_old, log pi_ref and V; A again if these change it; then the updates
        trained = await self._learner.train(
            prepared, step=step, progress=context.progress, replayed=replayed, held=held
        )
        # Means over the updates of the step.
        metrics |= trained.metrics | self._replay.metrics(replayed) | self._replay.weights(trained.replayed)
        if is_training:
            # Stored with the A of this step, because their group, the comparison, is gone later.
            self._replay.add(trained.own, version=self._live, uses=prepared.uses)
        if notice := self._learner.notice():
            context.say(notice)
        metrics["update_s"] = time.perf_counter() - started  # seconds, log-probabilities and values included

        # 7. new weights; after a step without an update the live version stays
        published = (await self._publish(step),) if self._learner.updates > updates else ()
        self._step, self._is_moving = step, False
        # From here on training continues from this step's own checkpoint.
        self._learner.finished()
        self._interval.stepped()
        # If the trainer does not defer saves, every step is saved before it counts as done.
        if context.defer is None:
            await self.save(True)
        uses = with_tokens(prepared, trained.own) | supplied.uses | self._replay.uses(replayed)
        return self._report(prepared, metrics=metrics, published=published, uses=uses)

    async def save(self, must: bool) -> bool:
        """Write the training state and the live weights; see `defer` of the context."""
        if self._is_moving or not (must or self._interval.is_due()):
            return False
        started, kept = time.perf_counter(), self._context.kept()
        # Moments and schedules first: training must be able to continue from published weights.
        await self._learner.save(step=self._step, kept=kept)
        # The replay buffer is saved with the same step, or a resumed run would train on other rollouts.
        await asyncio.to_thread(self._replay.save, step=self._step, kept=kept)
        self._live_at_saves.note()
        # Weights that were served from memory are written now, because a resumed run serves them from disk.
        if self._unwritten is not None:
            await self._learner.export(step=self._unwritten, kept=self._live_at_saves.with_live(kept))
        self._unwritten = None
        await prune_merged(self._context, name=self._tuned, used=self._learner.origins())
        self._interval.saved(time.perf_counter() - started)
        return True

    def state(self) -> Mapping[str, Json]:
        """Return the state to save: the step count, the learner's state, and the groups that are being collected."""
        return {"step": self._step, "supply": self._supply.state(), **self._learner.state(step=self._step)}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint: weights, optimizer moments, learning-rate schedule and random state."""
        self._step = int(state["step"])
        self._restore_rollouts(state, self._context)
        self._live_at_saves.note()
        await self._learner.restore(state)

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Return to the weights and optimizer moments of an earlier state, with `rate` times the learning rate."""
        self._live_at_saves.note()
        # Groups that were drawn with the abandoned weights are dropped.
        self._supply.go_back(step=self._step)
        await asyncio.to_thread(self._replay.clear, step=self._step)
        if missing := await self._learner.go_back(state, rate=rate):
            self._context.say(
                f"the saved state {missing} is gone; training goes on with new moments of AdamW"
                + (", and the KL is one to the live weights" if self.settings.has_reference else "")
            )

    async def close(self) -> None:
        """Release the models, and stop waiting for rollouts."""
        if hasattr(self, "_learner"):
            await self._supply.close()
            self._learner.close()

    async def _publish(self, step: int) -> str:
        """Make the weights live, from memory if the policy can take them so; returns `name@version`."""
        context, learner = self._context, self._learner
        # A policy in this process takes weights from memory, so they need not be written before they are served.
        offer = offer_of(context, self._tuned)
        if offer is None:
            resource = await learner.export(step=step, kept=self._live_at_saves.with_live(context.kept()))
        else:
            resource = learner.served(step=step)
            offer(resource, await learner.held())
            self._unwritten = step
        version = await context.publish(self._tuned, resource, step=step)
        return f"{self._tuned}@{version.version}"

    async def _open(self) -> None:
        """Load the policy for the first step, and again whenever another algorithm has published weights."""
        version = self._context.current(self._tuned)
        # The worker already has its own weights, and the version from which it was opened.
        is_foreign = version.algorithm != self._context.name and version.version != self._learner.opened
        if not self._learner.opened or is_foreign:
            weights = own_weights(version.resource, name=self._tuned)
            origin = await asyncio.to_thread(whole_weights, weights, workdir=self._context.workdir)
            await self._learner.open(origin, version=version.version)


def check_machine(settings: VerlSettings) -> None:
    """Raise ConfigError for settings that this machine cannot run, before any rollout is spent."""
    from agl_algo_verl.local.worker import check_device

    check_device(settings, own_device())
    check_attention(settings)
