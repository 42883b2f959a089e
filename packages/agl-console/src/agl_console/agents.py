"""The view of agents: calls, credit, trained tokens, errors and hand-offs of each agent of a run.

The sums over a whole run come from the tallies that the run stored with each step. The order of calls and the rollouts
without a step are summed here, over the newest rollouts, at most ``MOST``; the page shows their number.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal

import msgspec

from agl import semconv
from agl.contracts import CallUse, Moments, Recording, RolloutQuery, Store
from agl.episodes import Enclosing, chronological
from agl.schemas import Mode, Record, RolloutStatus, Span
from agl_console.figures import Figure, Line, thinned
from agl_console.reading import newest_recordings, run_of, uses_of
from agl_inspect.rollouts.step_tallies import AgentTally, StepTally, read_tallies

LOOKED = 100
"""The number of newest rollouts that are read by default."""

MOST = 500

SHOWN = 12
"""The most agents in the matrix of consecutive calls; those with the most calls are shown."""

DRAWN = 6
"""The most agents in a figure, one per colour; those with the most calls are shown."""

LISTED = 100
"""The most agents, and pairs of names, in a table."""


class AgentsFilter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of the page; ``newest`` is the number of rollouts to read."""

    newest: Annotated[int, msgspec.Meta(ge=1, le=MOST)] = LOOKED
    mode: Mode | Literal[""] = ""
    status: RolloutStatus | Literal[""] = ""


class AgentRow(Record, frozen=True, kw_only=True, omit_defaults=False):
    """An agent's numbers, either over the newest rollouts or over all steps of a run.

    Attributes:
        agent: The agent's name; ``""`` for calls outside of any agent.
        rollouts: Rollouts in which the agent made a call.
        calls: Calls by the agent.
        tokens: Tokens that the model sampled for the agent.
        trained: Sampled tokens on which a step trained.
        share: The agent's share of all trained tokens; of all sampled tokens if none were trained.
        seconds: Time in the agent's calls.
        reward: Mean reward of the rollouts in which the agent made a call; ``None`` over the newest rollouts.
        spread: Standard deviation of that reward.
        credit: Mean credit of the calls for which a step reported one.
        advantage: Mean advantage of the calls for which a step reported one.
        errors: The agent's spans that ended with an error, tools included.
    """

    agent: str
    rollouts: int
    calls: int
    tokens: int
    trained: int
    share: float | None
    seconds: float
    reward: float | None
    spread: float | None
    credit: float | None
    advantage: float | None
    errors: int


class Pair(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Two names, and the number of calls or hand-offs from the first to the second."""

    first: str
    second: str
    count: int


class AgentsView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The agents of a run, those with the most calls first.

    Attributes:
        whole: The agents over all steps of the run in the chosen mode, by default ``train`` if the run trains.
        whole_rollouts: Rollouts of these steps.
        whole_steps: Number of these steps.
        whole_mode: The mode, ``""`` for all.
        figures: Credit and share of sampled tokens of agents over these steps.
        looked_through: Number of newest rollouts that were read.
        is_all: True if these are all rollouts that match the filters.
        agents: The agents in these rollouts.
        names: The agents of the matrix.
        follows: The matrix: how often a call of the row's agent was followed by a call of the column's agent.
        inside: Calls that the second name made inside an operation of the first.
        handoffs: The hand-offs that a framework reported.
    """

    name: str
    filters: dict[str, str]
    whole: list[AgentRow]
    whole_rollouts: int
    whole_steps: int
    whole_mode: str
    figures: list[Figure]
    looked_through: int
    is_all: bool
    agents: list[AgentRow]
    names: list[str]
    follows: list[list[int]]
    inside: list[Pair]
    handoffs: list[Pair]


async def agents_view(store: Store, name: str, chosen: AgentsFilter) -> AgentsView:
    """Summarise the agents of a run; raises :class:`NotFoundError` for an unknown run."""
    record = await run_of(store, name)
    every = await read_tallies(store, record)
    mode = chosen.mode or ("train" if any(each.mode == "train" for each in every) else "")
    tallies = [each for each in every if mode in ("", each.mode)]
    query = RolloutQuery(
        experiment=name,
        mode=chosen.mode or None,
        status=(chosen.status,) if chosen.status else (),
        sort="created_at",
        is_newest_first=True,
    )
    sums = _Sums()
    looked, last = 0, None
    async for recording in newest_recordings(store, query, chosen.newest):
        sums.add(recording)
        looked, last = looked + 1, recording.rollout
    behind = [] if last is None else await store.rollouts(msgspec.structs.replace(query.next(last), limit=1))
    agents = _rows(sums.agents)
    names = [row.agent for row in agents if row.calls][:SHOWN]
    filters = {"newest": str(chosen.newest), "mode": chosen.mode, "status": chosen.status}
    return AgentsView(
        name=name,
        filters={key: value for key, value in filters.items() if value and value != str(LOOKED)},
        whole=_rows(_summed(agent for tally in tallies for agent in tally.agents)),
        whole_rollouts=sum(each.rollouts for each in tallies),
        whole_steps=len(tallies),
        whole_mode=mode,
        figures=_figures(name, tallies),
        looked_through=looked,
        is_all=not behind,
        agents=agents,
        names=names,
        follows=[[sums.follows[first, second] for second in names] for first in names],
        inside=_pairs(sums.inside),
        handoffs=_pairs(sums.handoffs),
    )


def _summed(tallies: Iterable[AgentTally]) -> dict[str, AgentTally]:
    """Add up tallies by agent."""
    found: dict[str, AgentTally] = {}
    for each in tallies:
        found[each.agent] = found[each.agent].plus(each) if each.agent in found else each
    return found


def _rows(found: Mapping[str, AgentTally]) -> list[AgentRow]:
    """Return a row for each agent, those with the most calls first, at most ``LISTED``."""
    agents = sorted(found.values(), key=lambda each: (-each.calls, each.agent))
    trained = sum(each.trained for each in agents)
    sampled = sum(each.tokens for each in agents)
    return [
        AgentRow(
            agent=each.agent,
            rollouts=each.rollouts,
            calls=each.calls,
            tokens=each.tokens,
            trained=each.trained,
            share=each.trained / trained if trained else each.tokens / sampled if sampled else None,
            seconds=each.seconds,
            reward=each.reward.mean if each.reward.count else None,
            spread=None if each.reward.variance is None else each.reward.variance**0.5,
            credit=each.credit.mean if each.credit.count else None,
            advantage=each.advantage.mean if each.advantage.count else None,
            errors=each.errors,
        )
        for each in agents[:LISTED]
    ]


def _figures(run: str, tallies: Sequence[StepTally]) -> list[Figure]:
    """Return two figures over the steps: each agent's credit, and its share of sampled tokens."""
    agents = [row.agent for row in _rows(_summed(agent for tally in tallies for agent in tally.agents))[:DRAWN]]
    algorithms = dict.fromkeys(each.algorithm for each in tallies)
    parts = {"credit": _credit, "share of sampled tokens": _share}
    found: list[Figure] = []
    for title, value in parts.items():
        series: list[Line] = []
        for algorithm in algorithms:
            steps = [each for each in tallies if each.algorithm == algorithm]
            for agent in agents:
                points = [(each.step, value(each, agent)) for each in steps]
                known = [(step, number) for step, number in points if number is not None]
                shown = thinned(known)
                label = agent or "no agent"
                series.append(
                    Line(
                        run=run,
                        algorithm=label if len(algorithms) == 1 else f"{algorithm}: {label}",
                        steps=[step for step, _ in shown],
                        places=[step for step, _ in shown],
                        values=[number for _, number in shown],
                        low=[None] * len(shown),
                        high=[None] * len(shown),
                    )
                )
        drawn = [line for line in series if len(line.steps) > 1]
        found += [Figure(name=title, series=drawn)] if drawn else []
    return found


def _credit(tally: StepTally, agent: str) -> float | None:
    own = next((each.credit for each in tally.agents if each.agent == agent), None)
    return own.mean if own is not None and own.count else None


def _share(tally: StepTally, agent: str) -> float | None:
    tokens = tally.tokens
    return sum(each.tokens for each in tally.agents if each.agent == agent) / tokens if tokens else None


class _Sums:
    """Sums over recordings: the tally of each agent, and the pairs that call in sequence, nest, or hand off."""

    def __init__(self) -> None:
        self.agents: dict[str, AgentTally] = {}
        self.follows: Counter[tuple[str, str]] = Counter()
        self.inside: Counter[tuple[str, str]] = Counter()
        self.handoffs: Counter[tuple[str, str]] = Counter()

    def add(self, recording: Recording) -> None:
        """Add the deciding attempt of a rollout to the sums."""
        own = [span for span in recording.spans if span.attempt_id == recording.rollout.attempt_id]
        spans, enclosing, uses = chronological(own).spans, Enclosing(own), uses_of(recording.spans)
        callers: list[str] = []
        shares: list[AgentTally] = []
        for span in spans:
            who = enclosing.who(span)
            if span.call is not None:
                shares.append(_share_of(span, who.agent, uses.get(span.span_id), is_first=who.agent not in callers))
                callers.append(who.agent)
                self.inside.update(pair for pair in pairwise(who.path) if pair[0] != pair[1])
            if span.status == "error" and span.name != semconv.ROOT_SPAN_NAME:
                shares.append(AgentTally(agent=who.agent, errors=1))
            source, target = (span.attributes.get(key) for key in (semconv.HANDOFF_SOURCE, semconv.HANDOFF_TARGET))
            if isinstance(target, str):
                self.handoffs[source if isinstance(source, str) else who.agent, target] += 1
        self.follows.update(pairwise(callers))
        self.agents = _summed([*self.agents.values(), *shares])


def _share_of(span: Span, agent: str, use: CallUse | None, *, is_first: bool) -> AgentTally:
    """Return the tally of a single call; the rollout is counted with the agent's first call."""
    tokens = span.call.response_len if span.call else 0
    return AgentTally(
        agent=agent,
        rollouts=int(is_first),
        calls=1,
        tokens=tokens,
        trained=tokens if use is not None and use.row >= 0 else 0,
        seconds=max(0, span.end_ns - span.start_ns) / 1e9,
        credit=_moments(use.credit if use else None),
        advantage=_moments(use.advantage if use else None),
    )


def _moments(value: float | None) -> Moments:
    return Moments() if value is None else Moments(count=1, mean=value)


def _pairs(counts: Counter[tuple[str, str]]) -> list[Pair]:
    found: Iterable[tuple[tuple[str, str], int]] = counts.most_common(LISTED)
    return [Pair(first=first, second=second, count=count) for (first, second), count in found]
