"""The contract of observers, which watch a run and are called by its driver in a fixed order; observers of steps.

Observers report and measure. They do not decide how training goes on, but an observer can end the run by raising.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from agl.algorithms import AlgorithmConfig
from agl.contracts import CallUse, ExperimentRecord, Recording, StepReport, Store
from agl.schemas import Episode, Mode
from agl_inspect.advice.suggestions import Suggestion, suggestions_for
from agl_inspect.records.names import broke_in_reward
from agl_inspect.rollouts.step_tallies import Observed, StepTallies, add_tallies

_FIRST, _LAST = 10, 50
"""Numbers of steps at the start and at the end of a run that are kept; the rules compare the two."""

_NOT_SAID = ("slow-rollouts", "slow-updates", "unsent-text")
"""Rules that a running experiment does not report: those about the time of a step, and what the run warns of itself."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rollouts that one caller, an algorithm or another part of the run, collected together.

    Attributes:
        caller: The name of the algorithm or other part.
        episodes: The episodes of all rollouts.
        algorithm: The algorithm's configuration; ``None`` if the caller is not an algorithm.
        step: The step for which the rollouts ran.
        mode: The mode of the rollouts.
        trains: True if the algorithm trains on the rollouts.
        kept: The episodes on which the algorithm trains, with the rewards that count.
        observed: Seconds, tokens and errors of the rollouts' calls.
        is_own: False for rollouts that another algorithm collected, and that observers have already seen there.
        slot_s: Time that all slots of this process offered during the collection, in slot-seconds.
        taken_s: The part of ``slot_s`` in which agents ran.
    """

    caller: str
    episodes: Sequence[Episode]
    algorithm: AlgorithmConfig | None = None
    step: int = 0
    mode: Mode = "train"
    trains: bool = False
    kept: Sequence[Episode] = ()
    observed: Observed | None = None
    is_own: bool = True
    slot_s: float = 0.0
    taken_s: float = 0.0


class Observer:
    """The base class of observers, whose methods do nothing; an observer overrides the methods that it needs."""

    def rollout(self, caller: str, recording: Recording) -> None:
        """Called with each finished rollout of ``caller`` and its spans, as soon as they are read."""

    def batch(self, batch: Batch) -> None:
        """Called with all rollouts of one request; may raise to end the run."""

    async def measure(self, caller: str, *, step: int, uses: Mapping[str, Sequence[CallUse]]) -> Mapping[str, float]:
        """Return metrics about the rollouts of a step; called before the step is saved.

        Args:
            caller: The algorithm, or another part of the run.
            step: The caller's step.
            uses: How the step used each call, by rollout.
        """
        return {}

    async def step(self, report: StepReport, *, algorithm: str) -> None:
        """Called after a step is logged, with all its metrics."""

    def end(self) -> None:
        """Called at the end of the run to report on it; may raise to make the run a failure."""


class StepShares(Observer):
    """Measures two shares of a step: rollouts with failed reward emitters, and idle slots of this process.

    Workers on other machines are not measured.

    Args:
        slots: The number of agents that may run at once in this process.
        is_judged: Whether there are reward emitters.
    """

    def __init__(self, slots: int, *, is_judged: bool) -> None:
        self._slots = slots
        self._is_judged = is_judged
        self._batches: defaultdict[str, list[tuple[int, int, float, float]]] = defaultdict(list)

    def batch(self, batch: Batch) -> None:
        """Count the batch's rollouts, those that failed in a reward emitter, and the slots' time."""
        if batch.is_own:
            # A broken reward fails the rollout like a broken agent does; only the share tells them
            # apart.
            broken = sum(broke_in_reward(episode.attempt) for episode in batch.episodes)
            self._batches[batch.caller].append((len(batch.episodes), broken, batch.slot_s, batch.taken_s))

    async def measure(self, caller: str, *, step: int, uses: Mapping[str, Sequence[CallUse]]) -> Mapping[str, float]:
        """Return the shares since the last step; a share that cannot be measured is left out.

        ``evaluator_failed_share`` is the share of rollouts that failed in a reward emitter. ``slots`` is the number of
        slots, and ``slots_idle_share`` the share of the slots' time during collection in which no agent ran.
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
    """Tallies the rollouts of each step by agent; the tallies are stored before the step is saved."""

    def __init__(self, store: Store, record: ExperimentRecord) -> None:
        self._store, self._record, self._tallies = store, record, StepTallies()

    def batch(self, batch: Batch) -> None:
        """Add the batch's rollouts to the tallies of their step."""
        if batch.observed is not None:
            self._tallies.add(batch.caller, batch.episodes, batch.observed, step=batch.step, mode=batch.mode)

    async def measure(self, caller: str, *, step: int, uses: Mapping[str, Sequence[CallUse]]) -> Mapping[str, float]:
        """Store the tallies of a step; return no metrics."""
        # Stored before the step is saved, so a saved step never lacks its sums; a repeated one
        # replaces them.
        await add_tallies(self._store, self._record, self._tallies.take(caller, step=step, uses=uses))
        return {}


class StepWatch(Observer):
    """Applies the rules of ``agl metrics --suggest`` after each step, and reports each finding once.

    Args:
        report: Called with the algorithm's name and the finding.
    """

    def __init__(self, report: Callable[[str, Suggestion], Awaitable[None]]) -> None:
        self._report = report
        self._steps: defaultdict[str, dict[int, Mapping[str, float]]] = defaultdict(dict)
        self._reported: set[tuple[str, str]] = set()

    async def step(self, report: StepReport, *, algorithm: str) -> None:
        """Apply the rules to all remembered steps, including this one."""
        steps = self._steps[algorithm]
        steps[report.step] = report.metrics
        # The middle of a long run is forgotten: the rules compare its start with its end.
        for number in list(steps)[_FIRST:-_LAST]:
            del steps[number]
        for found in suggestions_for(algorithm, steps, validations={}):
            if found.rule not in _NOT_SAID and (algorithm, found.rule) not in self._reported:
                self._reported.add((algorithm, found.rule))
                await self._report(algorithm, found)
