"""The algorithm `verl`: policy gradients with VERL's engine, losses and advantages, in one process and without Ray.

One step:

    1. collect: run every task `rollout.n` times with the live weights
    2. advantages (`advantages.py`): credit per call, through VERL's estimators over rollouts
    3. old log-probabilities: VERL's engine recomputes those of every row; the largest difference to what the server
       recorded is `logprob_gap`
    4. update: `ppo_mini_batch_size` tasks at a time, `ppo_epochs` times over (`worker.py`)
    5. save a checkpoint, publish the weights, which the policy then serves

Deviations from VERL's own trainer, and why:
- Agents run outside of it and speak to the policy of the experiment, so VERL has no rollout worker here.
- A row is a branch of the call forest. Statistics, mini-batches and the mean over sequences count rollouts, never
  rows; the rows of a rollout share an update, and no row is dropped or doubled to fill one.
- No reference model, no critic; settings that need one are refused.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agl.contracts import StepReport
from agl.errors import ConfigError
from agl.schemas import Weights
from agl_algo_verl.runtime import check_version
from agl_algo_verl.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agl.contracts import AlgorithmContext
    from agl.schemas import Json
    from agl_algo_verl.rows import Prepared, Sample
    from agl_algo_verl.worker import Worker


class VERL:
    """Trains the weights of one policy on groups of rollouts that share a task.

    Args:
        algorithm: VERL's `algorithm` keys; `data`, `actor_rollout_ref` and `trainer` are VERL's as well.
        engine: `inproc`, the only one of this version.
        threads: Torch's threads while training on the CPU; 0 leaves torch's choice.
        keep: Saved states and exported weights that stay on disk.
        others: Further groups of VERL's configuration, which are refused by name.
    """

    def __init__(
        self,
        *,
        engine: str = "inproc",
        threads: int = 0,
        keep: int = 2,
        algorithm: dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        actor_rollout_ref: dict[str, Any] | None = None,
        trainer: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        if engine != "inproc":
            raise ConfigError(f"verl got engine = {engine!r}; this version of agl-algo-verl has one, 'inproc'. Use it.")
        if keep < 1 or threads < 0:
            raise ConfigError(f"verl got keep = {keep} and threads = {threads}; give at least 1 and 0.")
        check_version()
        groups = {"algorithm": algorithm, "data": data, "actor_rollout_ref": actor_rollout_ref, "trainer": trainer}
        given = {name: group for name, group in groups.items() if group is not None}
        self.settings, self.notes = read_settings({**given, **others})
        self._threads, self._keep = threads, keep
        self._worker: Worker | None = None
        self._opened = ""  # the version that `_worker` was opened from
        self._step = 0

    async def setup(self, context: AlgorithmContext) -> None:
        """Check that one policy with reachable weights is tuned and that there are tasks; say what others decide."""
        if len(context.tunes) != 1:
            raise ConfigError(
                f"verl trains the weights of one policy, but tunes {list(context.tunes)}. "
                'Give one name, such as tunes = "main_llm", and one [[algorithm]] per policy.'
            )
        if not context.train:
            raise ConfigError("verl needs training tasks, but the experiment has none. Set `train` to a dataset.")
        self._context, self._tuned = context, context.tunes[0]
        _weights(context.current(self._tuned).resource, name=self._tuned)
        self._steps = self.settings.steps(len(context.train))
        for note in self.notes:
            context.say(note)

    async def step(self) -> StepReport:
        """Collect one batch of groups, update, save and publish."""
        context, step = self._context, self._step + 1
        worker = await self._open()
        started = time.perf_counter()
        tasks = draw_tasks(context, step=step, count=self.settings.data.train_batch_size)
        collected = await context.collect(tasks, step=step, n=self.settings.actor_rollout_ref.rollout.n)
        collect_s = time.perf_counter() - started
        prepared = await asyncio.to_thread(self._prepare, collected.groups())
        metrics = prepared.metrics | {"collect_s": collect_s}
        metrics |= {f"dropped_{reason}": float(count) for reason, count in collected.dropped.items()}

        started = time.perf_counter()
        metrics |= await self._train(worker, prepared)
        metrics["update_s"] = time.perf_counter() - started

        await asyncio.to_thread(worker.save, context.workdir, step=step, keep=self._keep)
        resource = await asyncio.to_thread(worker.export, context.workdir, step=step, keep=self._keep)
        version = await context.publish(self._tuned, resource, step=step)
        self._step = step
        is_finished = step >= self._steps
        return StepReport(
            step=step,
            is_finished=is_finished,
            metrics=metrics,
            trained=tuple(dict.fromkeys(sample.rollout for sample in prepared.samples)),
            published=(f"{self._tuned}@{version.version}",),
            stop_reason=f"{self._steps} steps done" if is_finished else "",
        )

    def state(self) -> Mapping[str, Json]:
        """The step count, the newest checkpoint and the version that training started from."""
        path = self._context.workdir.absolute() / "state" / f"{self._step:06d}"
        return {"step": self._step, "checkpoint": str(path) if path.is_dir() else "", "opened": self._opened}

    async def restore(self, state: Mapping[str, Json]) -> None:
        """Continue from a checkpoint, optimizer moments, schedule and random state included."""
        self._step, self._opened = int(state["step"]), str(state["opened"])
        if state["checkpoint"]:
            self._worker = await asyncio.to_thread(self._resume, str(state["checkpoint"]))

    async def close(self) -> None:
        """Drop the model."""
        self._worker = None

    def _prepare(self, groups: Any) -> Prepared:
        from agl_algo_verl.rows import prepare

        return prepare(groups, credit=self._context.credit, settings=self.settings)

    async def _open(self) -> Worker:
        """The worker, opened again when another algorithm has published weights since."""
        version = self._context.current(self._tuned)
        is_foreign = version.algorithm != self._context.name and version.version != self._opened
        if self._worker is None or is_foreign:
            origin = _weights(version.resource, name=self._tuned)
            self._worker = None  # free the old model before the new one is loaded
            self._worker = await asyncio.to_thread(self._load, origin)
            self._opened = version.version
        return self._worker

    def _load(self, origin: Weights) -> Worker:
        from agl_algo_verl.worker import Worker

        return Worker(origin=origin, settings=self.settings, steps=self._steps, threads=self._threads)

    def _resume(self, checkpoint: str) -> Worker:
        from pathlib import Path

        from agl_algo_verl.worker import Worker

        return Worker.resume(Path(checkpoint), settings=self.settings, steps=self._steps, threads=self._threads)

    async def _train(self, worker: Worker, prepared: Prepared) -> dict[str, float]:
        """All updates of a step; a number that several updates report is averaged."""
        from agl_algo_verl.rows import updates

        old = await asyncio.to_thread(worker.logprobs, prepared.samples)
        samples = [replace(sample, old=values) for sample, values in zip(prepared.samples, old, strict=True)]
        actor, tasks = self.settings.actor, self.settings.data.train_batch_size
        parts = updates(samples, prepared.rollouts, tasks=actor.ppo_mini_batch_size or tasks)
        reports: list[dict[str, float]] = []
        total = actor.ppo_epochs * len(parts)
        for index in range(total):
            rows, count = parts[index % len(parts)]
            is_last = index + 1 == total
            reports.append(await asyncio.to_thread(worker.update, rows, rollouts=count, is_last=is_last))
            self._context.progress(index + 1, total, "update")
        values: defaultdict[str, list[float]] = defaultdict(list)
        for report in reports:
            for name, value in report.items():
                values[name].append(value)
        return {name: sum(found) / len(found) for name, found in values.items()} | gaps(samples)


def gaps(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how far the engine's log-probabilities are from the recorded ones, over trained tokens."""
    from agl_algo_verl.typed import numbers

    found = [abs(x) for s in samples if s.old is not None for x in numbers((s.old - s.behaviour)[s.mask])]
    return {"logprob_gap": max(found, default=0.0), "logprob_gap_mean": sum(found) / max(1, len(found))}


def draw_tasks(context: AlgorithmContext, *, step: int, count: int) -> list[Json]:
    """Return the tasks of a step: every epoch is a shuffle that follows from seed, algorithm and epoch.

    No task comes twice before every other came once; `count` is cut to the number of tasks.
    """
    tasks: Sequence[Json] = context.train
    size = min(count, len(tasks))
    chosen: list[Json] = []
    for position in range((step - 1) * size, step * size):
        epoch, index = divmod(position, len(tasks))
        order = list(range(len(tasks)))
        random.Random(f"{context.seed}/{context.name}/{epoch}").shuffle(order)
        chosen.append(tasks[order[index]])
    return chosen


def _weights(resource: Any, *, name: str) -> Weights:
    if not isinstance(resource, Weights):
        raise ConfigError(
            f"The policy {name!r} is a {type(resource).__name__}, whose weights cannot be trained from here. "
            f'Serve weights: [policy.{name}] use = "torch".'
        )
    if resource.format != "hf":
        raise ConfigError(
            f"The policy {name!r} serves a LoRA adapter, and verl trains full weights. "
            "Merge the adapter into its base model first, or train it with 'grpo' of agl-algo-torch."
        )
    return resource
