"""Tallies the rollouts of a step by agent and by task, and saves the tallies in the store for views.

The store itself sums up rollouts as they finish, but does not know then which agent made which call; only an episode
does. One record per step and mode is saved, so that the cost of viewing a run depends on its number of steps, and not
of rollouts. A step that is repeated after a crash collects the same rollouts and replaces its record.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import NamedTuple

from agl import semconv
from agl.contracts import CallUse, ExperimentRecord, Moments, Recording, Store
from agl.episodes import Enclosing
from agl.schemas import Episode, Mode, Record
from agl_inspect.records.shelf import Shelf, run_key
from agl_inspect.rollouts.explanations import tokens_of
from agl_inspect.rollouts.training import token_values
from agl_inspect.statistics import interval

MOST_AGENTS = 64
"""The most agents in a record; agents with the fewest calls are left out."""

TURNS = 6
"""The number of first calls of each rollout whose entropies are in a record."""


class AgentTally(Record, frozen=True, kw_only=True, omit_defaults=False):
    """An agent's share in the rollouts of a step.

    Attributes:
        agent: The agent's name, ``""`` for calls outside of any agent.
        rollouts: Number of rollouts in which the agent made a call.
        calls: Number of the agent's calls.
        tokens: Number of tokens that models sampled in these calls.
        trained: Number of sampled tokens on which the step trained.
        seconds: Time spent in these calls.
        reward: Moments of the rewards of these rollouts, without rollouts that have no reward.
        credit: Moments of the credits that the step reported for these calls.
        advantage: Moments of the advantages that the step reported for these calls.
        errors: Number of the agent's spans that ended with an error, including spans of tools.
    """

    agent: str
    rollouts: int = 0
    calls: int = 0
    tokens: int = 0
    trained: int = 0
    seconds: float = 0.0
    reward: Moments = Moments()
    credit: Moments = Moments()
    advantage: Moments = Moments()
    errors: int = 0

    def plus(self, other: "AgentTally") -> "AgentTally":
        """Return the sums of both tallies, with the name of this tally's agent."""
        return AgentTally(
            agent=self.agent,
            rollouts=self.rollouts + other.rollouts,
            calls=self.calls + other.calls,
            tokens=self.tokens + other.tokens,
            trained=self.trained + other.trained,
            seconds=self.seconds + other.seconds,
            reward=self.reward.plus(other.reward),
            credit=self.credit.plus(other.credit),
            advantage=self.advantage.plus(other.advantage),
            errors=self.errors + other.errors,
        )


class StepTally(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The tallies of the rollouts that an algorithm collected in one step and mode.

    Attributes:
        reward: Mean over tasks of the mean reward of a task's rollouts; ``None`` without rewards.
        low: Lower end of the 95 % interval of ``reward``; ``None`` for fewer than two tasks.
        high: Upper end of the 95 % interval of ``reward``; ``None`` for fewer than two tasks.
        agents: The tallies of the agents, those with the most calls first.
        entropies: Moments of the mean entropy of the rollouts' first calls, second calls and so on, in nats; empty if
            the step reported no entropies.
    """

    algorithm: str
    step: int
    mode: Mode
    rollouts: int
    reward: float | None = None
    low: float | None = None
    high: float | None = None
    agents: tuple[AgentTally, ...] = ()
    entropies: tuple[Moments, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens that models sampled for all agents."""
        return sum(each.tokens for each in self.agents)

    @property
    def trained(self) -> int:
        """Number of sampled tokens on which the step trained, for all agents."""
        return sum(each.trained for each in self.agents)


class Observed:
    """Collects the seconds, tokens and errors of calls from recordings, because episodes lack them."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = {}
        self.tokens: dict[tuple[str, str], int] = {}
        self.errors: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(self, recording: Recording) -> None:
        """Add the calls of a rollout's deciding attempt."""
        name = recording.rollout.rollout_id
        own = [span for span in recording.spans if span.attempt_id == recording.rollout.attempt_id]
        for span in (span for span in own if span.call is not None):
            self.seconds[name, span.span_id] = max(0, span.end_ns - span.start_ns) / 1e9
            self.tokens[name, span.span_id] = tokens_of(span)[1]
        no_agents = (semconv.ROOT_SPAN_NAME, semconv.UNREADABLE)
        failed = [span for span in own if span.status == "error" and span.name not in no_agents]
        if failed:
            around = Enclosing(own)
            self.errors[name].update(around.who(span).agent for span in failed)


class _Seen(NamedTuple):
    """The facts about one collected rollout that its tally needs."""

    step: int
    mode: Mode
    rollout_id: str
    task: str
    reward: float | None
    calls: list[tuple[str, str, int, float]]
    """One tuple per call: span id, agent, sampled tokens and seconds."""
    errors: Counter[str]


class StepTallies:
    """Holds collected rollouts until their step ends, and then tallies them."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, list[_Seen]] = defaultdict(list)

    def add(self, caller: str, episodes: Iterable[Episode], observed: Observed, *, step: int, mode: Mode) -> None:
        """Hold the rollouts that ``caller`` collected for a step."""
        for episode in episodes:
            name = episode.rollout.rollout_id
            calls = [
                (each.span_id, each.agent, observed.tokens.get(key, 0), observed.seconds.get(key, 0.0))
                for each in episode.transitions
                if (key := (name, each.span_id))
            ]
            task = episode.rollout.group_id or name
            seen = _Seen(step, mode, name, task, episode.reward, calls, observed.errors.get(name, Counter()))
            self._waiting[caller].append(seen)

    def take(self, caller: str, *, step: int, uses: Mapping[str, Sequence[CallUse]]) -> list[StepTally]:
        """Tally the rollouts that ``caller`` collected up to ``step``, which has ended, by step and mode.

        ``uses`` are the uses of calls in the step's report, by rollout id.
        """
        waiting = self._waiting.pop(caller, [])
        self._waiting[caller] = [each for each in waiting if each.step > step]
        found: dict[tuple[int, Mode], list[_Seen]] = {}
        for each in waiting:
            if each.step <= step:
                found.setdefault((each.step, each.mode), []).append(each)
        return [_tally(caller, number, mode, seen, uses) for (number, mode), seen in found.items()]


async def add_tallies(store: Store, record: ExperimentRecord, tallies: Iterable[StepTally]) -> None:
    """Save the tallies of steps under their run."""
    await _shelf(record).add(store, {f"{each.algorithm}/{each.mode}/{each.step}": each for each in tallies})


async def read_tallies(store: Store, record: ExperimentRecord) -> list[StepTally]:
    """Return the tallies of a run's steps, in order of algorithm, step and mode."""
    found = (await _shelf(record).read(store)).values()
    return sorted(found, key=lambda each: (each.algorithm, each.step, each.mode))


def _shelf(record: ExperimentRecord) -> Shelf[StepTally]:
    return Shelf(StepTally, run_key(record.name, record.run, "tally/"))


def _tally(
    caller: str, step: int, mode: Mode, rollouts: Sequence[_Seen], uses: Mapping[str, Sequence[CallUse]]
) -> StepTally:
    agents: dict[str, AgentTally] = {}
    by_task: dict[str, list[float]] = {}
    for seen in rollouts:
        if seen.reward is not None:
            by_task.setdefault(seen.task, []).append(seen.reward)
        for share in _shares(seen, {use.span_id: use for use in uses.get(seen.rollout_id, ())}):
            agents[share.agent] = agents[share.agent].plus(share) if share.agent in agents else share
    means = [fmean(rewards) for rewards in by_task.values()]
    low, high = interval(means) if len(means) > 1 else (None, None)
    kept = sorted(agents.values(), key=lambda each: (-each.calls, each.agent))[:MOST_AGENTS]
    return StepTally(
        algorithm=caller,
        step=step,
        mode=mode,
        rollouts=len(rollouts),
        reward=fmean(means) if means else None,
        low=low,
        high=high,
        agents=tuple(kept),
        entropies=_entropies(rollouts, uses),
    )


def _entropies(rollouts: Sequence[_Seen], uses: Mapping[str, Sequence[CallUse]]) -> tuple[Moments, ...]:
    found = [Moments()] * TURNS
    for seen in rollouts:
        own = {use.span_id: token_values(use, "entropy") for use in uses.get(seen.rollout_id, ())}
        for turn, (span_id, *_) in enumerate(seen.calls[:TURNS]):
            values = [value for value in own.get(span_id, ()) if isfinite(value)]
            found[turn] = found[turn].plus(_one(fmean(values) if values else None))
    return tuple(found[: sum(1 for each in found if each.count)])


def _shares(seen: _Seen, uses: Mapping[str, CallUse]) -> list[AgentTally]:
    """Return one tally per agent for a single rollout."""
    found = {agent: AgentTally(agent=agent, errors=count) for agent, count in seen.errors.items()}
    callers: set[str] = set()
    for span_id, agent, tokens, seconds in seen.calls:
        use = uses.get(span_id)
        share = AgentTally(
            agent=agent,
            rollouts=int(agent not in callers),
            calls=1,
            tokens=tokens,
            trained=tokens if use is not None and use.row >= 0 else 0,
            seconds=seconds,
            reward=_one(None if agent in callers else seen.reward),
            credit=_one(use.credit if use else None),
            advantage=_one(use.advantage if use else None),
        )
        callers.add(agent)
        found[agent] = found[agent].plus(share) if agent in found else share
    return list(found.values())


def _one(value: float | None) -> Moments:
    return Moments() if value is None or not isfinite(value) else Moments(count=1, mean=value)
