"""The policy that an algorithm trains over its steps, and the checks and draws that such algorithms share.

The model is opened when the first step needs it, and again when another algorithm has published weights since.
The algorithms share this, so that each of them reads as its own loop. It decides nothing about losses.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agl.errors import ConfigError
from agl.hints import did_you_mean
from agl.schemas import Weights, to_builtins
from agl_algo_torch.learner.checkpoint import keep_start, read_origin
from agl_algo_torch.learner.model import Reference
from agl_algo_torch.learner.policy_learner import LearnerSettings, PolicyLearner, saved_path, tuned_name, tuned_weights
from agl_objectives.saving import SAVE_EVERY, LiveAtSaves, SaveInterval, begin_saving, offer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from agl.contracts import AlgorithmContext
    from agl.schemas import Json, ResourceVersion

    WriteFn = Callable[[int, Collection[int]], None]
    """Writes files of a step, and removes old ones except those of the kept steps."""


def nothing_else(step: int, kept: Collection[int]) -> None:
    """Write nothing beside the checkpoint of a step."""
    del step, kept


@dataclass(frozen=True, slots=True)
class Behind:
    """A checkpoint of fewer updates than were done: the one that training went back to; `""` for none."""

    checkpoint: str
    updates: int


class TunedPolicy:
    """One policy in training. Call `begin` first.

    Args:
        settings: Optimizer, adapters, device.
        algorithm: Its registered name, for messages.
        keep: Saved states and exported weights that stay on disk, besides those to which the experiment may go back and
            the weights that were live at the last two saves.
        save_every: The interval between two saves, see `agl_objectives.saving`.
        has_reference: Can give the policy as it was at this algorithm's start, a resumed run included. Its copy of the
            weights takes memory only from the first time that it is asked for.
    """

    def __init__(
        self,
        *,
        settings: LearnerSettings,
        algorithm: str,
        keep: int,
        save_every: int | str = SAVE_EVERY,
        has_reference: bool = False,
    ) -> None:
        self._algorithm = algorithm
        self._save_every = save_every
        self._interval = SaveInterval(algorithm, save_every)
        self._step = 0
        self._is_moving = False  # between the first update of a step and its end, when the weights belong to no step
        self._unwritten: int | None = None  # the step whose published weights are in memory only
        self._settings = settings
        self._keep = keep
        self._has_reference = has_reference
        self._learner: PolicyLearner | None = None
        self._reference: Reference | None = None
        self._start: Weights | None = None  # what the reference was opened from
        self._untouched = -1  # updates at which the learner has the weights that it was opened from; -1 for never
        self._opened = ""  # the version that `_learner` was opened from
        self._told = set[str]()
        self._rate = 1.0  # factor of the learning rate, smaller after each time that training went back
        self._behind: Behind | None = None  # the older checkpoint that training went back to, until the next one

    def begin(self, context: AlgorithmContext, *, others: WriteFn = nothing_else) -> None:
        """Take the algorithm's context, and what writes its own files beside a checkpoint.

        Raises ConfigError unless one policy with reachable weights is tuned.
        """
        self._context, self._others = context, others
        self.name = tuned_name(context, algorithm=self._algorithm)
        self._live = LiveAtSaves(context, self.name)
        tuned_weights(context.current(self.name).resource, name=self.name)
        begin_saving(context, self.save, algorithm=self._algorithm, save_every=self._save_every, serves=self.name)

    @property
    def rate(self) -> float:
        """Factor of the learning rate, smaller after each time that training went back."""
        return self._rate

    @property
    def reference(self) -> Reference:
        """The policy at this algorithm's start."""
        if self._reference is None:
            self._reference = self._reference_beside(self.opened)
        return self._reference

    def tried_out(self, weights: Weights) -> PolicyLearner:
        """Return a learner of weights to try updates out, without a context; it is the reference as well."""
        learner = PolicyLearner(origin=weights, settings=self._settings)
        self._reference = Reference(learner.loaded.model) if self._has_reference else None
        return learner

    async def learner(self, *, updates: int) -> PolicyLearner:
        """Return the learner, opened again when another algorithm has published weights since.

        `updates` is the number of updates done so far; it places a newly opened learner on the learning rate's curve.
        """
        version = self._context.current(self.name)
        is_foreign = version.algorithm != self._context.name and version.version != self._opened
        if self._learner is None or is_foreign:
            self._learner = None  # free the old model before the new one is loaded
            self._learner = await asyncio.to_thread(self._open, version, updates)
            self._opened = version.version
            self._tell(self._learner)
        return self._learner

    def start_updates(self) -> None:
        """Note that the weights begin to change: until the step has finished they are those of no step."""
        self._is_moving = True

    async def finish(self, *, step: int, has_moved: bool) -> tuple[str, ...]:
        """End a step: make its weights live if they have moved, and save them unless that may wait.

        Returns `name@version` of what was published.
        """
        published = (await self._publish(step),) if has_moved else ()
        self._step, self._is_moving, self._behind = step, False, None
        self._interval.stepped()
        self._tell_skipped(self.opened)
        if self._context.defer is None:
            await self.save(True)
        return published

    async def save(self, must: bool) -> bool:
        """Write what training continues from and the weights that are live; see `defer` of the context."""
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
        learner.save(workdir, step=self._step, keep=self._keep, kept=kept)
        self._others(self._step, kept)
        if self._unwritten is not None:
            learner.export(workdir, step=self._unwritten, keep=self._keep, kept=self._live.beside(kept))

    async def _publish(self, step: int) -> str:
        """Make the weights live, from memory where the policy can take them so; returns `name@version`."""
        learner, context = self.opened, self._context
        offer = offer_of(context, self.name)
        if offer is None:
            export = partial(learner.export, keep=self._keep, kept=self._live.beside(context.kept()))
            resource = await asyncio.to_thread(export, context.workdir, step=step)
        else:
            resource = learner.served(context.workdir, step=step)
            offer(resource, learner.loaded)
            self._unwritten = step
        version = await context.publish(self.name, resource, step=step)
        return f"{self.name}@{version.version}"

    def state(self, *, step: int) -> dict[str, Json]:
        """Return the newest checkpoint, the version that it was opened from and the reference's weights."""
        start = None if self._start is None else to_builtins(self._start)
        checkpoint = saved_path(self._context.workdir, step) if self._behind is None else self._behind.checkpoint
        done = None if self._behind is None else self._behind.updates
        return {
            "checkpoint": checkpoint,
            "opened": self._opened,
            "start": start,
            "rate": self._rate,
            "updates_done": done,
        }

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint, optimizer moments and the reference included."""
        self._live.note()
        self._opened = str(state["opened"])
        start = state.get("start")
        self._start = None if start is None else msgspec.convert(start, Weights)
        self._rate = float(state.get("rate", 1.0))
        checkpoint, done = str(state["checkpoint"]), state.get("updates_done")
        self._behind = None if done is None else Behind(checkpoint=checkpoint, updates=int(done))
        if checkpoint:
            self._learner = await asyncio.to_thread(self._resume, Path(checkpoint))
            self._tell(self._learner)

    async def go_back(self, state: Mapping[str, Json], *, rate: float, updates: int) -> None:
        """Continue from the weights and moments of an earlier `state`, with `rate` times the learning rate.

        Without the state's checkpoint, and for an empty state, training continues from the live weights with new
        moments. `updates` is the number of updates done so far, at which the curve of the learning rate goes on.
        """
        checkpoint = str(state.get("checkpoint", ""))
        if checkpoint and not Path(checkpoint).is_dir():
            self._context.say(f"the saved state {checkpoint} is gone; training goes on with new moments of AdamW")
            checkpoint = ""
        self._live.note()
        self._learner, self._rate = None, rate  # free the old model before the new one is loaded
        self._reference = None if checkpoint else self._reference
        self._opened = str(state.get("opened", ""))
        self._behind = Behind(checkpoint=checkpoint, updates=updates)
        if checkpoint:
            self._learner = await asyncio.to_thread(self._resume, Path(checkpoint))

    def close(self) -> None:
        """Drop the model and the reference."""
        self._learner = self._reference = None

    def _tell(self, learner: PolicyLearner) -> None:
        """Say what the model does not allow, once."""
        for notice in learner.notices:
            if notice not in self._told:
                self._told.add(notice)
                self._context.say(f"{self._context.name}: {notice}")

    def _tell_skipped(self, learner: PolicyLearner) -> None:
        if notice := learner.skipped.news():
            self._context.say(f"{self._context.name}: {notice}")

    @property
    def opened(self) -> PolicyLearner:
        """The learner, which the step has opened."""
        if self._learner is None:
            raise AssertionError("a step saves and publishes after its update, which opened the learner")
        return self._learner

    def _open(self, version: ResourceVersion, updates: int) -> PolicyLearner:
        origin = tuned_weights(version.resource, name=self.name)
        if self._has_reference and self._start is None:
            # What an algorithm published, it also removes; the reference is needed again when the run is resumed.
            is_removable = bool(version.algorithm) and Path(origin.uri).is_dir()
            self._start = keep_start(origin, self._context.workdir / "start") if is_removable else origin
            origin = self._start
        learner = PolicyLearner(origin=origin, settings=self._scaled())
        learner.updates = self._untouched = updates
        self._keep_adapters(learner)
        return learner

    def _resume(self, checkpoint: Path) -> PolicyLearner:
        learner = PolicyLearner(origin=read_origin(checkpoint), settings=self._scaled())
        self._untouched, self._reference = learner.updates, None
        self._keep_adapters(learner)  # before the trained ones are loaded
        learner.load(checkpoint)
        self._untouched = -1
        if self._behind is not None:
            learner.updates = self._behind.updates
        return learner

    def _keep_adapters(self, learner: PolicyLearner) -> None:
        """Take the reference now under LoRA, where it is the adapters; a copy of all weights waits until it is used."""
        if self._has_reference and self._settings.lora is not None and self._reference is None:
            self._reference = self._reference_beside(learner)

    def _reference_beside(self, learner: PolicyLearner) -> Reference:
        """Return the policy at this algorithm's start: the learner's own while it has not moved, else read again."""
        start = self._start or learner.origin
        is_there = start == learner.origin and learner.updates == self._untouched
        at_start = learner if is_there else PolicyLearner(origin=start, settings=self._settings)
        return Reference(at_start.loaded.model)

    def _scaled(self) -> LearnerSettings:
        optim = self._settings.optim
        return replace(self._settings, optim=replace(optim, lr=optim.lr * self._rate))


def check_tasks(context: AlgorithmContext, *, algorithm: str) -> None:
    """Raise ConfigError when there is nothing to collect rollouts on."""
    if not context.train:
        raise ConfigError(f"{algorithm} needs training tasks, but the experiment has none. Set `train` to a dataset.")


def at_least_one(algorithm: str, **counts: int) -> None:
    """Raise ConfigError naming the counts below 1."""
    low = {name: value for name, value in counts.items() if value < 1}
    if low:
        raise ConfigError(f"{algorithm} got {low}; each must be at least 1.")


def one_of(algorithm: str, **choices: tuple[str, Sequence[str]]) -> None:
    """Raise ConfigError for a value that is not among the known ones: `name=(value, known)`."""
    for name, (value, known) in choices.items():
        if value not in known:
            near = did_you_mean(str(value), known)
            raise ConfigError(
                f"{algorithm} got {name} = {value!r}, which is unknown{f'; {near}' if near else '.'} "
                f"Use one of: {', '.join(known)}."
            )


def needed_by(algorithm: str, switch: str, value: float, **settings: tuple[str, str]) -> None:
    """Raise ConfigError for a setting, `name=(value, default)`, that has no effect because `switch` is 0."""
    for name, (given, default) in settings.items():
        if not value and given != default:
            raise ConfigError(
                f"{algorithm} got {name} = {given!r} without {switch}, so nothing uses it. Remove it, or give {switch}."
            )


def not_negative(algorithm: str, **numbers: float) -> None:
    """Raise ConfigError naming the numbers below 0, or that are none."""
    low = {name: value for name, value in numbers.items() if not value >= 0}
    if low:
        raise ConfigError(f"{algorithm} got {low}; each must be at least 0.")


def shares(algorithm: str, **numbers: float) -> None:
    """Raise ConfigError naming the numbers outside of 0 to 1."""
    wrong = {name: value for name, value in numbers.items() if not 0 <= value <= 1}
    if wrong:
        raise ConfigError(f"{algorithm} got {wrong}; each must be between 0 and 1.")
