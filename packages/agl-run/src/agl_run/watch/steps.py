"""Observers of steps: they measure shares, sum up rollouts, and find what keeps an algorithm from learning."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from agl.contracts import CallUse, ExperimentRecord, StepReport, Store
from agl_inspect.advice.suggestions import Suggestion, suggestions_for
from agl_inspect.records.names import broke_in_reward
from agl_inspect.rollouts.step_tallies import StepTallies, add_tallies
from agl_run.watch.observers import Batch, Observer

_FIRST, _LAST = 10, 50
"""Steps at the start and at the end that are remembered; the rules compare these."""

_SPEEDS = ("slow-rollouts", "slow-updates")
"""Rules that are about the time of a step and not about learning; ``agl metrics --suggest`` has them."""


class StepShares(Observer):
    """Measures of steps what algorithms do not see: rewards that broke, and slots of this process without an agent.

    What workers on other machines do is not measured.

    Args:
        slots: Agents that may run at once in this process.
        is_judged: True if there are reward emitters.
    """

    def __init__(self, slots: int, *, is_judged: bool) -> None:
        self._slots = slots
        self._is_judged = is_judged
        self._batches: defaultdict[str, list[tuple[int, int, float, float]]] = defaultdict(list)

    def batch(self, batch: Batch) -> None:
        """Count the rollouts that broke in a reward, and the time of slots."""
        if batch.is_own:
            # A broken reward fails the rollout like a broken agent does; only the share tells them
            # apart.
            broken = sum(broke_in_reward(episode.attempt) for episode in batch.episodes)
            self._batches[batch.caller].append((len(batch.episodes), broken, batch.slot_s, batch.taken_s))

    async def measure(self, caller: str, *, step: int, uses: Mapping[str, Sequence[CallUse]]) -> Mapping[str, float]:
        """Return the shares since the last step, without those that say nothing.

        ``evaluator_failed_share`` is the share of the rollouts that failed in a reward emitter, ``slots`` the number
        of agents that may run at once, and ``slots_idle_share`` the share of these slots, over the time of
        collecting, that had no agent.
        """
        rollouts, broken, slot_s, taken_s = map(sum, zip((0, 0, 0.0, 0.0), *self._batches.pop(caller, ()), strict=True))
        found: dict[str, float] = {}
        if self._is_judged and rollouts:
            found["evaluator_failed_share"] = broken / rollouts
        if taken_s > 0:  # a repeated step finds its rollouts finished
            found["slots"] = float(self._slots)
            # Clamped, because agents that outlive their slot may run a moment longer than was
            # offered.
            found["slots_idle_share"] = max(0.0, 1 - taken_s / slot_s)
        return found


class TallyObserver(Observer):
    """Sums up the rollouts of each step by agent, and stores the sums before the step is saved: none lacks them."""

    def __init__(self, store: Store, record: ExperimentRecord) -> None:
        self._store, self._record, self._tallies = store, record, StepTallies()

    def batch(self, batch: Batch) -> None:
        """Remember the rollouts until their step ends."""
        if batch.observed is not None:
            self._tallies.add(batch.caller, batch.episodes, batch.observed, step=batch.step, mode=batch.mode)

    async def measure(self, caller: str, *, step: int, uses: Mapping[str, Sequence[CallUse]]) -> Mapping[str, float]:
        """Store the sums of a step."""
        # Stored before the step is saved, so a saved step never lacks its sums; a repeated one
        # replaces them.
        await add_tallies(self._store, self._record, self._tallies.take(caller, step=step, uses=uses))
        return {}


class StepWatch(Observer):
    """Watches the steps of algorithms by the rules of ``agl metrics --suggest``; reports what each finds, once.

    Args:
        report: Called with the algorithm and the finding.
    """

    def __init__(self, report: Callable[[str, Suggestion], Awaitable[None]]) -> None:
        self._report = report
        self._steps: defaultdict[str, dict[int, Mapping[str, float]]] = defaultdict(dict)
        self._reported: set[tuple[str, str]] = set()

    async def step(self, report: StepReport, *, algorithm: str) -> None:
        """Look at the steps so far, of which this one is the newest."""
        steps = self._steps[algorithm]
        steps[report.step] = report.metrics
        # The middle of a long run is forgotten: the rules compare its start with its end.
        for number in list(steps)[_FIRST:-_LAST]:
            del steps[number]
        for found in suggestions_for(algorithm, steps, validations={}):
            if found.rule not in _SPEEDS and (algorithm, found.rule) not in self._reported:
                self._reported.add((algorithm, found.rule))
                await self._report(algorithm, found)
