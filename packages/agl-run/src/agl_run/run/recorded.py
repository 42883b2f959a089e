"""Reads rollouts that other algorithms or experiments collected, for an algorithm that learns from them.

Only rollouts of finished steps are shared. A finished step is never repeated, so its rollouts are final, and another
algorithm reads the same rollouts after a restart. Rollouts of another experiment are read in the order in which they
finished.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

from agl.algorithms import AlgorithmConfig
from agl.contracts import Recorded, RolloutQuery
from agl.errors import ConfigError
from agl.schemas import Rollout
from agl_inspect.records.names import id_prefix, step_name
from agl_inspect.records.sources import PREFIX, FinishedRollouts, experiment_of, finished
from agl_inspect.records.state import AlgorithmState
from agl_run.run.collector import Collector

if TYPE_CHECKING:
    from agl_run.run.driver import Driver

PAGE = 1000


class SourceReader:
    """Reads the rollouts of an algorithm's sources; see :class:`agl.contracts.RecordedFn`."""

    def __init__(self, driver: "Driver", algorithm: AlgorithmConfig, collector: Collector) -> None:
        self._driver, self._algorithm, self._collector = driver, algorithm, collector
        self._store = driver.running.store
        configs = {config.name: config for config in driver.running.plan.config.algorithm}
        self._sources = [configs[source] for source in algorithm.source if not experiment_of(source)]
        self._experiments = [*filter(None, map(experiment_of, algorithm.source))]

    async def __call__(self, *, after: Mapping[str, int] | None = None, max_age: int | None = None) -> Recorded:
        """Read the sources' rollouts that come after the given steps; see :class:`agl.contracts.RecordedFn`."""
        if not self._algorithm.source:
            raise ConfigError('the algorithm has no source; name the algorithm to learn from: source = "grpo"')
        # Positions come from the caller, which saves them with its own state: a repeated step reads
        # the same rollouts.
        known = dict(after or {})
        states = await self._changed_states(known)
        external = {PREFIX + name: await self._from_experiment(name, known) for name in self._experiments}
        rollouts = [
            rollout
            for algorithm, state in states.items()
            async for rollout in self._rollouts(algorithm, after=known.get(algorithm, 0), last=state.step)
        ]
        rollouts += [rollout for part in external.values() for rollout in part.rollouts]
        # Age is counted in versions of what this algorithm tunes, because that is how far its
        # policy has moved.
        ages = await self._ages(max_age)
        young = [rollout for rollout in rollouts if max_age is None or _is_young(rollout, ages)]
        kept, left_out = await self._collector.read(young)
        dropped = Counter(left_out) + Counter(stale=len(rollouts) - len(young))
        is_over = all(state.is_finished for state in states.values()) and all(p.is_all for p in external.values())
        return Recorded(
            episodes=tuple(kept),
            dropped=dict(dropped),
            steps={
                **{algorithm: state.step for algorithm, state in states.items()},
                **{source: part.cursor for source, part in external.items()},
            },
            is_over=is_over,
        )

    async def _from_experiment(self, experiment: str, known: Mapping[str, int]) -> FinishedRollouts:
        """Read the next rollouts of another experiment; raises :class:`ConfigError` if that experiment has none."""
        after = known.get(PREFIX + experiment, 0)
        found = await finished(self._store, experiment, after=after)
        if not after and not found.rollouts:
            raise ConfigError(
                f"the store has no finished training rollouts of the experiment {experiment!r} to learn from; "
                "agl runs lists what it has, and [experiment] store names the store"
            )
        return found

    async def _changed_states(self, known: Mapping[str, int]) -> dict[str, AlgorithmState]:
        """Wait until a source has a new step or all sources are finished, and return the states by source name."""
        goes_on = self._driver.running.plan.config.schedule.mode == "concurrent"  # while this algorithm waits
        while True:
            # Begun before the states are read; a step that ends in between still wakes this.
            changed = asyncio.ensure_future(self._driver.changed())  # before reading, so that no step is missed
            try:
                states = {source.name: await self._driver.load(source) for source in self._sources}
                is_new = any(state.step > known.get(algorithm, 0) for algorithm, state in states.items())
                if is_new or not goes_on or all(state.is_finished for state in states.values()):
                    return states
                await changed
            finally:
                changed.cancel()

    async def _rollouts(self, algorithm: str, *, after: int, last: int) -> AsyncIterator[Rollout]:
        """Yield a source's finished rollouts from the steps after ``after`` up to ``last``, in step order."""
        prefix = id_prefix(self._driver.name, self._driver.state.run, algorithm, "train")
        # Step names have leading zeros, so that the order of ids is the order of steps.
        first = prefix + step_name(after + 1)
        query = RolloutQuery(experiment=self._driver.name, mode="train", after=first, limit=PAGE)
        while True:
            page = await self._store.rollouts(query)
            for rollout in page:
                # Ids are ordered, so the first one beyond ends the read.
                if not rollout.rollout_id.startswith(prefix) or _step(rollout) > last:
                    return
                if rollout.is_finished and rollout.metadata.get("algorithm") == algorithm:
                    yield rollout
            if len(page) < PAGE:
                return
            query = query.next(page[-1])

    async def _ages(self, max_age: int | None) -> dict[str, set[str]]:
        """Return the versions of each tuned resource that are at most ``max_age`` versions old; empty for ``None``."""
        if max_age is None:
            return {}
        return {name: await self._lineage(name, max_age + 1) for name in self._algorithm.tunes}

    async def _lineage(self, name: str, count: int) -> set[str]:
        version = self._driver.running.live.current(name)
        found = {version.version}
        # Along the parents, not by numbers: after a rollback the numbers no longer correspond to
        # the age.
        while len(found) < count and version.parent:
            version = await self._store.resource(name, version.parent)
            found.add(version.version)
        return found


def _step(rollout: Rollout) -> int:
    step = rollout.metadata.get("step")
    return step if isinstance(step, int) else 0


def _is_young(rollout: Rollout, ages: Mapping[str, set[str]]) -> bool:
    pinned: Sequence[tuple[str, str | None]] = [(name, rollout.resources.get(name)) for name in ages]
    return all(version is None or version in ages[name] for name, version in pinned)
