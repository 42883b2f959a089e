"""The algorithm `verl`: policy gradients with VERL's engine, losses and advantages, in one process and without Ray.

One step:

    1. take a batch of groups: every task run `rollout.n` times, for this step or ahead of it (`rows/supply.py`)
    2. rows with advantages: credit per call, through an estimator over rollouts (`rows/rows.py`, `losses/choice.py`)
    3. log pi_old of every row, recomputed by VERL's engine; its largest distance from what the server recorded is
       `logprob_gap`. Where they are needed, log pi_ref of the reference and the values of the critic (`learner.py`)
    4. advantages once more where these change them: less a KL penalty, or by VERL's GAE (`losses/shaping.py`)
    5. some rollouts of earlier steps with them, where asked for (`rows/replay.py`)
    6. updates by the loss (`models.py`, `critic.py`), `ppo_mini_batch_size` tasks at a time, `ppo_epochs` times;
       agents that share the weights and are not trained are held near the start (`losses/anchor.py`)
    7. publish the weights, which the policy then serves, and save them with a checkpoint unless that may wait; a step
       without an update publishes none

Deviations from VERL's own trainer, and why:
- Agents run outside of it and speak to the policy of the experiment, so VERL has no rollout worker here.
- A row is a branch of the call forest, and a rollout has as many as it needs. Statistics, mini-batches and the mean
  over sequences count rollouts, never rows: how often an agent calls its model must not change its weight. The rows
  of a rollout share an update, and no row is dropped or doubled to fill one.
- The reference is the policy that training was opened from; with adapters it is the same weights without them.
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
        config: VERL's configuration, by its groups, and the parameters next to it (`algorithm.py`).

    Raises:
        ConfigError: A key is unknown or would be ignored, keys contradict each other, or VERL is missing or too new.
    """

    def __init__(self, **config: Any) -> None:
        super().__init__(*read_settings(config))
        self._unwritten: int | None = None  # the step whose published weights are in memory only
        self._live = ""  # the version whose weights a step began to train

    async def setup(self, context: AlgorithmContext) -> None:
        """Check that one policy with reachable weights is tuned and that there are tasks; say which keys others decide.

        Raises ConfigError for what cannot be trained here.
        """
        # One policy: a run with several needs an algorithm for each.
        self._tuned, _ = tuned_policy(context)
        self._context = context
        self._live_at_saves = LiveAtSaves(context, self._tuned)
        # Packed rows need a GPU and flash-attn; the settings are final from here on.
        self.settings, told = with_packing(self.settings, has_gpu=own_device().type == "cuda")
        await asyncio.to_thread(check_machine, self.settings)
        self._begin(context, extra=told, serves=self._tuned)
        self._learner = VerlLearner(self.settings, workdir=context.workdir, steps=self._steps)

    async def step(self) -> StepReport:
        """Take one batch of groups, update, publish, and save unless that may wait."""
        context, step = self._context, self._step + 1
        # Weights that another algorithm has published since are trained from here on.
        await self._open()
        started = time.perf_counter()
        # 1. groups: every task G = rollout.n times
        supplied = await self._supply.take(step)
        collect_s = time.perf_counter() - started
        # 2. rows with advantages A from credit and the estimator
        prepared = await self._prepare(supplied, context)
        # Rows of agents that are not trained, for the anchor's term alone.
        held, unheld = held_rows(supplied.groups, policy=self._tuned, settings=self.settings)
        metrics = prepared.metrics | supplied.metrics | unheld | {"collect_s": collect_s}

        # pi moves from here on: a checkpoint in between would belong to no step.
        self._is_moving = True
        started, updates = time.perf_counter(), self._learner.updates
        self._live = context.current(self._tuned).version
        # 5. rollouts of earlier steps, which the correction weighs against today's policy
        is_training = self._learner.trains_policy(step)  # before `critic_warmup` the critic learns alone
        replayed = self._replay.take(prepared, version=self._live) if is_training else Replayed()
        # 3, 4 and 6. log pi_old, log pi_ref and V, then A once more where these change it, then the updates
        trained = await self._learner.train(
            prepared, step=step, progress=context.progress, replayed=replayed, held=held
        )
        # Means over the updates of the step.
        metrics |= trained.metrics | self._replay.metrics(replayed) | self._replay.weights(trained.replayed)
        if is_training:
            # With the A that they were trained with: the group they were compared with is gone later.
            self._replay.add(trained.own, version=self._live, uses=prepared.uses)
        if notice := self._learner.notice():
            context.say(f"{context.name}: {notice}")
        metrics["update_s"] = time.perf_counter() - started  # seconds, log-probabilities and values included

        # 7. new weights; a step without an update leaves the live version as it is
        published = (await self._publish(step),) if self._learner.updates > updates else ()
        self._step, self._is_moving = step, False
        # From here on the step's own checkpoint is the one to continue from.
        self._learner.finished()
        self._interval.stepped()
        # Without a deferring trainer every step is saved before it counts as done.
        if context.defer is None:
            await self.save(True)
        uses = with_tokens(prepared, trained.own) | supplied.uses | self._replay.uses(replayed)
        return self._report(prepared, metrics=metrics, published=published, uses=uses)

    async def save(self, must: bool) -> bool:
        """Write what training continues from and the weights that are live; see `defer` of the context."""
        if self._is_moving or not (must or self._interval.is_due()):
            return False
        started, kept = time.perf_counter(), self._context.kept()
        # Moments and schedules first: weights that are published must be ones that training continues from.
        await self._learner.save(step=self._step, kept=kept)
        # Replay is saved with the same step, or a resumed run would train other rollouts.
        await asyncio.to_thread(self._replay.save, step=self._step, kept=kept)
        self._live_at_saves.note()
        # Weights that were served from memory are written now, for a resumed run serves them from disk.
        if self._unwritten is not None:
            await self._learner.export(step=self._unwritten, kept=self._live_at_saves.beside(kept))
        self._unwritten = None
        await prune_merged(self._context, name=self._tuned, used=self._learner.origins())
        self._interval.saved(time.perf_counter() - started)
        return True

    def state(self) -> Mapping[str, Json]:
        """Return the step count, what training continues from, and the groups that are under way."""
        return {"step": self._step, "supply": self._supply.state(), **self._learner.state(step=self._step)}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint: weights, optimizer moments, schedule and random state."""
        self._step = int(state["step"])
        # Groups that were under way are asked for again by their numbers, and found in the store.
        self._supply.restore(state["supply"])
        self._replay.load(step=self._step)
        self._live_at_saves.note()
        await self._learner.restore(state)

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Continue from the weights and moments of an earlier state with `rate` times the learning rate."""
        self._live_at_saves.note()
        # Groups that were drawn with the weights that the run leaves are dropped.
        self._supply.go_back(step=self._step)
        await asyncio.to_thread(self._replay.clear, step=self._step)
        if missing := await self._learner.go_back(state, rate=rate):
            self._context.say(
                f"the saved state {missing} is gone; training goes on with new moments of AdamW"
                + (", and the KL is one to the live weights" if self.settings.has_reference else "")
            )

    async def close(self) -> None:
        """Drop the models, and stop waiting for rollouts."""
        if hasattr(self, "_learner"):
            await self._supply.close()
            self._learner.close()

    async def _publish(self, step: int) -> str:
        """Make the weights live, from memory where the policy can take them so; returns `name@version`."""
        context, learner = self._context, self._learner
        # A policy in this process takes weights from memory, which saves writing them before they serve.
        offer = offer_of(context, self._tuned)
        if offer is None:
            resource = await learner.export(step=step, kept=self._live_at_saves.beside(context.kept()))
        else:
            resource = learner.served(step=step)
            offer(resource, await learner.held())
            self._unwritten = step
        version = await context.publish(self._tuned, resource, step=step)
        return f"{self._tuned}@{version.version}"

    async def _open(self) -> None:
        """Open the policy, and open it anew when another algorithm has published weights since."""
        version = self._context.current(self._tuned)
        # Its own weights are in the worker already; the version that it was opened from is, too.
        is_foreign = version.algorithm != self._context.name and version.version != self._learner.opened
        if not self._learner.opened or is_foreign:
            weights = own_weights(version.resource, name=self._tuned)
            origin = await asyncio.to_thread(whole_weights, weights, workdir=self._context.workdir)
            await self._learner.open(origin, version=version.version)


def check_machine(settings: VerlSettings) -> None:
    """Raise ConfigError for settings that this machine cannot run, before anything is paid for."""
    from agl_algo_verl.local.worker import check_device

    check_device(settings, own_device())
    check_attention(settings)
