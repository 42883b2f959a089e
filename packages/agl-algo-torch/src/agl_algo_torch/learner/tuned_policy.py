"""The policy that an algorithm trains over its steps, and the code that all such algorithms share apart from the loss.

The model is opened for the first step, and again for a step after another algorithm has published weights.
Algorithms share this module, so that the file of each contains only its own loop. Nothing here depends on the loss.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from agl.contracts import Collected, Recorded, StepReport
from agl.errors import ConfigError
from agl.schemas import Weights, to_builtins
from agl_algo_torch.learner.checkpoint import STATE_FILE, keep_start, read_origin
from agl_algo_torch.learner.model import Reference
from agl_algo_torch.learner.pictures import Pictures
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner, saved_path, tuned_name, tuned_weights
from agl_algo_torch.learner.replay import REPLAY_FILE
from agl_objectives.directories import damage
from agl_objectives.saving import LiveAtSaves, SaveInterval, begin_saving, offer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from agl.contracts import AlgorithmContext, CallUse
    from agl.schemas import Json, MediaSpan, ResourceVersion
    from agl_objectives.groups import GroupSampler
    from agl_objectives.settings import Saving

    WriteFn = Callable[[int, Collection[int]], None]
    """Writes an algorithm's own files of a step, and removes old ones except those of the given steps."""

__all__ = ["TunedPolicy"]

C = TypeVar("C", Collected, Recorded)


@dataclass(frozen=True, slots=True)
class Behind:
    """The checkpoint to which training went back; needed until the next step ends.

    Attributes:
        checkpoint: Path of the checkpoint; `""` if there was none.
        updates: Updates done so far, including those that going back has undone.
    """

    checkpoint: str
    updates: int


class TunedPolicy:
    """One policy in training, with the numbers of steps and updates done. Call `begin` first.

    Args:
        algorithm: The algorithm's registered name, for messages.
        settings: Optimizer, adapters, device.
        saving: When states are saved, and how many stay on disk. States to which the experiment may go back and the
            weights that were live at the last two saves stay in addition.
        has_reference: Whether `reference` is needed: the policy at this algorithm's start, also in a resumed run.
            Without LoRA the copy of the weights takes memory only from its first use.
        others: Writes the algorithm's own files next to a checkpoint.

    Attributes:
        pictures: The pictures of the step's rollouts; None for a model of text.
    """

    def __init__(
        self,
        algorithm: str,
        *,
        settings: LearnerSettings,
        saving: Saving,
        has_reference: bool = False,
        others: WriteFn | None = None,
    ) -> None:
        self.algorithm, self.settings = algorithm, settings
        self.step, self.updates = 0, 0  # done so far
        self._saving, self._interval = saving, SaveInterval(algorithm, saving.save_every)
        self._has_reference, self._others = has_reference, others
        self._is_moving = False  # between the first update of a step and its end, when the weights belong to no step
        self._unwritten: int | None = None  # the step whose published weights are in memory only
        self._learner: PolicyLearner | None = None
        self._reference: Reference | None = None
        self._start: Weights | None = None  # the resource that the reference was opened from
        self._untouched = -1  # the learner's updates while it still has the weights of its origin; -1 for never
        self._opened = ""  # the version that `_learner` was opened from
        self._said = set[str]()
        self.pictures: Pictures | None = None
        self._rate = 1.0  # factor of the learning rate, smaller after each time that training went back
        self._behind: Behind | None = None  # the older checkpoint that training went back to, until the next one

    def begin(self, context: AlgorithmContext, *, publishes_steps: bool = True) -> AlgorithmContext:
        """Prepare the policy for a run; returns the context whose rollouts are ready to train, with their pictures.

        Raises ConfigError unless exactly one policy is tuned and its weights can be trained in this process.
        `publishes_steps` is false for an algorithm that does not publish in every step.
        """
        self._context = context
        self.name = tuned_name(context, algorithm=self.algorithm)
        self._live = LiveAtSaves(context, self.name)
        tuned_weights(context.current(self.name).resource, name=self.name)
        begin_saving(
            context,
            self.save,
            algorithm=self.algorithm,
            save_every=self._saving.save_every,
            serves=self.name if publishes_steps else "",
        )

        async def collect(tasks: Sequence[Json], **options: Any) -> Collected:
            return await self._ready(await context.collect(tasks, **options))

        async def recorded(**options: Any) -> Recorded:
            return await self._ready(await context.recorded(**options))

        return replace(context, collect=collect, recorded=recorded)

    async def _ready(self, found: C) -> C:
        """Read the pictures of the rollouts, if the policy reads any."""
        if self.pictures is None:
            return found
        episodes = await self.pictures.ready(self._context.store, found.episodes)
        return msgspec.structs.replace(found, episodes=tuple(episodes))

    async def shown(self, spans: Sequence[MediaSpan]) -> Pictures | None:
        """Open the policy, and read the pictures of spans from the store; returns None for a model of text."""
        await self.learner()
        if self.pictures is not None:
            await self.pictures.read(self._context.store, spans)
        return self.pictures

    @property
    def rate(self) -> float:
        """Factor of the learning rate; each time that training goes back, it becomes smaller."""
        return self._rate

    @property
    def reference(self) -> Reference:
        """The policy at this algorithm's start, as a frozen reference."""
        if self._reference is None:
            self._reference = self._reference_beside(self.opened)
        return self._reference

    def tried_out(self, weights: Weights) -> PolicyLearner:
        """Return a learner on `weights` for timing updates; the reference is a copy of its model."""
        learner = PolicyLearner(origin=weights, settings=self.settings)
        self._reference = Reference(learner.loaded.model) if self._has_reference else None
        return learner

    async def learner(self) -> PolicyLearner:
        """Return the learner; if another algorithm has published weights since the last step, load those first."""
        version = self._context.current(self.name)
        is_foreign = version.algorithm != self._context.name and version.version != self._opened
        if self._learner is None or is_foreign:
            self._learner = None  # free the old model before the new one is loaded
            self._learner = await asyncio.to_thread(self._open, version)
            self._opened = version.version
            self._say_notices(self._learner)
        modality = self._learner.loaded.modality
        if modality is not None and self.pictures is None:
            self.pictures = Pictures(modality)
            self._context.reads(modality.processor)
        return self._learner

    def start_updates(self) -> None:
        """Record that updates change the weights from now on; nothing is saved until `finish` ends the step."""
        self._is_moving = True
        self.opened.begin_step(self.step)

    async def finish(self, *, has_moved: bool) -> tuple[str, ...]:
        """End a step: publish the weights if they have moved, and save a state unless the experiment defers saving.

        Returns `name@version` of the published resource, or an empty tuple.
        """
        learner, step = self.opened, self.step + 1
        published = (await self._publish(step),) if has_moved else ()
        self.step, self.updates, self._is_moving, self._behind = step, learner.updates, False, None
        self._interval.stepped()
        if self.pictures is not None:
            self.pictures.forget()
        if notice := learner.skipped.news():
            self._context.say(notice)
        if self._context.defer is None:
            await self.save(True)
        return published

    async def save(self, must: bool) -> bool:
        """Write a checkpoint, and the live weights if they are only in memory; returns true if it has written.

        The experiment calls this when it saves, see `AlgorithmContext.defer`. Without `must`, a checkpoint is written
        only if one is due. During the updates of a step nothing is written.
        """
        if self._is_moving or not (must or self._interval.is_due()):
            return False
        started = time.perf_counter()
        self._live.note()
        await asyncio.to_thread(self._write, self.opened, self._context.kept())
        self._unwritten = None
        self._interval.saved(time.perf_counter() - started)
        return True

    def _write(self, learner: PolicyLearner, kept: Collection[int]) -> None:
        workdir = self._context.workdir
        learner.save(workdir, step=self.step, keep=self._saving.keep, kept=kept)
        if self._others is not None:
            self._others(self.step, kept)
        if self._unwritten is not None:
            learner.export(workdir, step=self._unwritten, keep=self._saving.keep, kept=self._live.with_live(kept))

    async def _publish(self, step: int) -> str:
        """Publish the weights, from memory if the policy's server can take them; returns `name@version`."""
        learner, context = self.opened, self._context
        offer = offer_of(context, self.name)
        if offer is None:
            export = partial(learner.export, keep=self._saving.keep, kept=self._live.with_live(context.kept()))
            resource = await asyncio.to_thread(export, context.workdir, step=step)
        else:
            resource = learner.served(context.workdir, step=step)
            offer(resource, learner.loaded)
            self._unwritten = step
        version = await context.publish(self.name, resource, step=step)
        return f"{self.name}@{version.version}"

    def state(self) -> dict[str, Json]:
        """Return the state to save: counts, newest checkpoint, version from which the model was loaded, and reference.

        `rate` is the factor of the learning rate. `updates_done` is None unless training went back to `checkpoint`.
        """
        start = None if self._start is None else to_builtins(self._start)
        checkpoint = saved_path(self._context.workdir, self.step) if self._behind is None else self._behind.checkpoint
        done = None if self._behind is None else self._behind.updates
        return {
            "step": self.step,
            "updates": self.updates,
            "checkpoint": checkpoint,
            "opened": self._opened,
            "start": start,
            "rate": self._rate,
            "updates_done": done,
        }

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint: weights, optimizer moments and the reference.

        If files of the checkpoint are damaged, the newest earlier one that is whole takes its place, and the steps
        between are not trained again. Raises ConfigError if none is whole.
        """
        self._live.note()
        self.step, self.updates = int(state["step"]), int(state["updates"])
        self._opened = str(state["opened"])
        start = state.get("start")
        self._start = None if start is None else msgspec.convert(start, Weights)
        self._rate = float(state.get("rate", 1.0))
        checkpoint, done = str(state["checkpoint"]), state.get("updates_done")
        self._behind = None if done is None else Behind(checkpoint=checkpoint, updates=int(done))
        if checkpoint and (whole := await asyncio.to_thread(self._newest_whole, Path(checkpoint))) != checkpoint:
            checkpoint, self._behind = whole, Behind(checkpoint=whole, updates=self.updates)
        if checkpoint:
            self._learner = await asyncio.to_thread(self._resume, Path(checkpoint))
            self._say_notices(self._learner)

    @property
    def saved_step(self) -> int:
        """The step of the checkpoint that `state` names; 0 without one."""
        checkpoint = self.state()["checkpoint"]
        return int(Path(checkpoint).name) if checkpoint else 0

    def _newest_whole(self, wanted: Path) -> str:
        """Return the checkpoint `wanted` if it is whole, else the newest earlier one; shows which files are damaged."""
        older = [path for path in wanted.parent.glob("[0-9]*") if path.name < wanted.name]
        problems: list[str] = []
        for path in (wanted, *sorted(older, reverse=True)):
            problem = _damage_of_step(path)
            if not problem and problems:
                self._context.say(
                    f"the saved state of step {int(wanted.name)} is damaged: {problems[0]}. "
                    f"Training continues from the state of step {int(path.name)}, {path}; later updates are lost"
                )
            if not problem:
                return str(path)
            problems.append(problem)
        raise ConfigError(
            f"No saved state of {self._context.name} is whole: {'; '.join(problems)}. "
            "Resume where the run's files are, or start the run under a new name."
        )

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Continue from the weights and moments of an earlier `state`, with `rate` times the learning rate.

        If the state is empty, or its checkpoint is gone or damaged, training continues from the live weights with new
        moments. The curve of the learning rate goes on from the steps done.
        """
        checkpoint = str(state.get("checkpoint", ""))
        if checkpoint and (problem := await asyncio.to_thread(_damage_of_step, Path(checkpoint))):
            self._context.say(f"{problem}; training goes on from the live weights with new moments of AdamW")
            checkpoint = ""
        self._live.note()
        self._learner, self._rate = None, rate  # free the old model before the new one is loaded
        self._reference = None if checkpoint else self._reference
        self._opened = str(state.get("opened", ""))
        self._behind = Behind(checkpoint=checkpoint, updates=self.updates)
        if checkpoint:
            self._learner = await asyncio.to_thread(self._resume, Path(checkpoint))

    def close(self) -> None:
        """Release the model and the reference."""
        self._learner = self._reference = None

    def _say_notices(self, learner: PolicyLearner) -> None:
        """Show the learner's notices that were not shown before."""
        for notice in learner.notices:
            if notice not in self._said:
                self._said.add(notice)
                self._context.say(notice)

    @property
    def opened(self) -> PolicyLearner:
        """The learner; it exists once a step has called `learner`."""
        if self._learner is None:
            raise AssertionError("a step saves and publishes after its update, which opened the learner")
        return self._learner

    def _open(self, version: ResourceVersion) -> PolicyLearner:
        origin = tuned_weights(version.resource, name=self.name)
        if self._has_reference and self._start is None:
            # An algorithm removes the weights that it published, but a resumed run needs those of the reference again.
            is_removable = bool(version.algorithm) and Path(origin.uri).is_dir()
            self._start = keep_start(origin, self._context.workdir / "start") if is_removable else origin
            origin = self._start
        learner = PolicyLearner(origin=origin, settings=self._scaled())
        learner.updates = self._untouched = self.updates
        self._keep_adapters(learner)
        return learner

    def _resume(self, checkpoint: Path) -> PolicyLearner:
        """Open a checkpoint in which no damage was found."""
        learner = PolicyLearner(origin=read_origin(checkpoint, is_checked=True), settings=self._scaled())
        self._untouched, self._reference = learner.updates, None
        self._keep_adapters(learner)  # before the trained ones are loaded
        learner.load(checkpoint, is_checked=True)
        self._untouched = -1
        if self._behind is not None:
            learner.updates = self._behind.updates
        return learner

    def _keep_adapters(self, learner: PolicyLearner) -> None:
        """Copy the adapters for the reference now (LoRA only); whole weights are copied at the first use."""
        if self._has_reference and self.settings.lora.rank and self._reference is None:
            self._reference = self._reference_beside(learner)

    def _reference_beside(self, learner: PolicyLearner) -> Reference:
        """Return the policy at the algorithm's start: the learner's model if untrained, else loaded from disk."""
        start = self._start or learner.origin
        is_there = start == learner.origin and learner.updates == self._untouched
        at_start = learner if is_there else PolicyLearner(origin=start, settings=self.settings)
        return Reference(at_start.loaded.model)

    def _scaled(self) -> LearnerSettings:
        optim = self.settings.optim
        return replace(self.settings, optim=msgspec.structs.replace(optim, lr=optim.lr * self._rate))


def _damage_of_step(checkpoint: Path) -> str:
    """Return which file of a checkpoint is damaged, also of an algorithm's own files next to it; `""` for none."""
    problems = [damage(checkpoint, state=STATE_FILE)]
    for name, state in (("critic", STATE_FILE), ("replay", REPLAY_FILE)):
        path = checkpoint.parent.parent / name / checkpoint.name
        if path.is_dir():
            problems.append(damage(path, state=state))
    return next((problem for problem in problems if problem), "")


def check_tasks(context: AlgorithmContext, *, algorithm: str) -> None:
    """Raise ConfigError if the experiment has no training tasks."""
    if not context.train:
        raise ConfigError(f"{algorithm} needs training tasks, but the experiment has none. Set `train` to a dataset.")


class OnPolicy:
    """Base of the algorithms with at most `steps` steps on the groups of `_groups`; it lacks only the step.

    Subclasses set `_groups`, `_tuned` and `_steps`, and implement `step`.
    """

    _groups: GroupSampler
    _tuned: TunedPolicy
    _steps: int

    async def setup(self, context: AlgorithmContext) -> None:
        """Prepare a run; raises ConfigError unless one policy that can be trained here is tuned and there are tasks."""
        self._context = context
        reading = self._tuned.begin(context)
        if not context.sources:
            check_tasks(context, algorithm=self._tuned.algorithm)
        self._groups.begin(reading)

    def state(self) -> Mapping[str, Json]:
        """Return the states of the tuned policy (`TunedPolicy.state`) and of the groups (`GroupSampler.state`)."""
        return {**self._tuned.state(), "groups": self._groups.state()}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint: weights, optimizer moments, the KL reference and the curriculum."""
        self._groups.restore(state.get("groups", {}))
        await self._tuned.restore(state)

    async def go_back(self, state: Mapping[str, Json], *, rate: float) -> None:
        """Return to the weights and optimizer moments of an earlier state, with `rate` times the learning rate."""
        await self._tuned.go_back(state, rate=rate)

    def has_more(self, state: Mapping[str, Json], *, tasks: int, sources_go_on: bool) -> bool:
        """Return true if fewer than `steps` steps are done, and the sources, if any, have or will have rollouts.

        If `steps` was raised, a decay of the learning rate ends at the new last step.
        """
        del tasks
        return int(state["step"]) < self._steps and (sources_go_on or not state["groups"].get("is_over"))

    async def close(self) -> None:
        """Release the models."""
        self._tuned.close()

    def _report(
        self,
        metrics: dict[str, float],
        *,
        trained: Iterable[str],
        published: tuple[str, ...],
        uses: dict[str, tuple[CallUse, ...]],
    ) -> StepReport:
        """Return the report of the step that has just ended; `trained` may name a rollout id several times."""
        step = self._tuned.step
        stop_reason = f"reached steps = {self._steps}" if step >= self._steps else ""
        if self._groups.is_over:
            stop_reason = stop_reason or "the sources have nothing more"
        return StepReport(
            step=step,
            is_finished=bool(stop_reason),
            metrics=metrics,
            trained=tuple(dict.fromkeys(trained)),  # each id once, in order
            published=published,
            stop_reason=stop_reason,
            uses=uses,
        )
