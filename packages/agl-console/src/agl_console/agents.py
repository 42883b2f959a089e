"""The view of agents: calls, credit, trained tokens and errors of each agent of a run.

The sums over a whole run come from the tallies that the run stored with each step. Rollouts without a step
are summed here, among the newest ``LOOKED`` rollouts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from agl import semconv
from agl.contracts import CallUse, Moments, Recording, RolloutQuery, Store
from agl.episodes import Enclosing, chronological
from agl.schemas import Mode, Record, Span
from agl_console.figures import Figure, Line, line_of
from agl_console.reading import newest_recordings, run_of
from agl_inspect.advice.agent_changes import AgentChange, agent_changes
from agl_inspect.rollouts.span_reader import reward_of
from agl_inspect.rollouts.step_tallies import AgentTally, StepTally, read_tallies
from agl_inspect.rollouts.training import uses_of

LOOKED = 30
"""The number of newest rollouts that are read."""

DRAWN = 6
"""The most agents in a figure, one per colour; those with the most calls are shown."""

LISTED = 100
"""The most agents in a table."""


class AgentsFilter(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameters of the page: the mode of the rollouts."""

    mode: Mode | Literal[""] = ""


class AgentRow(Record, frozen=True, kw_only=True, omit_defaults=False):
    """An agent's sums over the newest rollouts or over all steps of a run.

    ``share`` is its share of all trained tokens, or of all sampled tokens if none were trained.
    """

    sums: AgentTally
    share: float | None


class AgentsView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The agents of a run, those with the most calls first.

    Attributes:
        whole: The agents over all steps of the run in the chosen mode, by default ``train`` if the run trains.
        whole_rollouts: Rollouts of these steps.
        whole_steps: Number of these steps.
        whole_mode: The mode, ``""`` for all.
        changes: How each agent changed over the run, those that got worse first.
        figures: The credit of agents over these steps.
        looked_through: Number of newest rollouts that were read.
        cut_off: Number of calls in these rollouts whose answers were cut off at the token limit.
        agents: The agents in these rollouts.
    """

    name: str
    mode: str
    whole: list[AgentRow]
    whole_rollouts: int
    whole_steps: int
    whole_mode: str
    changes: list[AgentChange]
    figures: list[Figure]
    looked_through: int
    cut_off: int
    agents: list[AgentRow]


async def agents_view(store: Store, name: str, chosen: AgentsFilter) -> AgentsView:
    """Summarise the agents of a run; raises :class:`NotFoundError` for an unknown run."""
    record = await run_of(store, name)
    every = await read_tallies(store, record)
    mode = chosen.mode or ("train" if any(each.mode == "train" for each in every) else "")
    tallies = [each for each in every if mode in ("", each.mode)]
    query = RolloutQuery(
        experiment=name,
        mode=chosen.mode or None,
        sort="created_at",
        is_newest_first=True,
    )
    sums = _Sums()
    looked = 0
    async for recording in newest_recordings(store, query, LOOKED):
        sums.add(recording)
        looked += 1
    agents = _rows(sums.agents)
    whole = _rows(_summed(agent for tally in tallies for agent in tally.agents))
    return AgentsView(
        name=name,
        mode=chosen.mode,
        whole=whole,
        whole_rollouts=sum(each.rollouts for each in tallies),
        whole_steps=len(tallies),
        whole_mode=mode,
        changes=agent_changes(every),
        figures=_figures(name, tallies, [row.sums.agent for row in whole[:DRAWN]]),
        looked_through=looked,
        cut_off=sums.cut_off,
        agents=agents,
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
        AgentRow(sums=each, share=each.trained / trained if trained else each.tokens / sampled if sampled else None)
        for each in agents[:LISTED]
    ]


def _figures(run: str, tallies: Sequence[StepTally], agents: Sequence[str]) -> list[Figure]:
    """Return the figure of each agent's credit over the steps; none without credit at two steps."""
    algorithms = dict.fromkeys(each.algorithm for each in tallies)
    series: list[Line] = []
    for algorithm in algorithms:
        steps = [each for each in tallies if each.algorithm == algorithm]
        for agent in agents:
            label = agent or "no agent"
            points = [(each.step, each.step, number) for each in steps if (number := _credit(each, agent)) is not None]
            series.append(line_of(run, label if len(algorithms) == 1 else f"{algorithm}: {label}", points))
    drawn = [line for line in series if len(line.steps) > 1]
    return [Figure(name="credit", series=drawn)] if drawn else []


def _credit(tally: StepTally, agent: str) -> float | None:
    own = next((each.credit for each in tally.agents if each.agent == agent), None)
    return own.mean if own is not None and own.count else None


class _Sums:
    """Sums over recordings: the tally of each agent, and the calls that were cut off."""

    def __init__(self) -> None:
        self.agents: dict[str, AgentTally] = {}
        self.cut_off = 0

    def add(self, recording: Recording) -> None:
        """Add the deciding attempt of a rollout to the sums."""
        own = [span for span in recording.spans if span.attempt_id == recording.rollout.attempt_id]
        spans, enclosing, uses = chronological(own).spans, Enclosing(own), uses_of(recording.spans)
        callers: set[str] = set()
        shares: list[AgentTally] = []
        for span in spans:
            who = enclosing.who(span)
            if span.call is not None:
                self.cut_off += span.call.is_truncated
                reward = None if who.agent in callers else reward_of(recording)
                use = uses.get(span.span_id)
                shares.append(_share_of(span, who.agent, use, reward=reward, is_first=who.agent not in callers))
                callers.add(who.agent)
            if span.status == "error" and span.name not in (semconv.ROOT_SPAN_NAME, semconv.UNREADABLE):
                shares.append(AgentTally(agent=who.agent, errors=1))
        self.agents = _summed([*self.agents.values(), *shares])


def _share_of(span: Span, agent: str, use: CallUse | None, *, reward: float | None, is_first: bool) -> AgentTally:
    """Return the tally of a single call; the rollout is counted with the agent's first call."""
    tokens = span.call.response_len if span.call else 0
    return AgentTally(
        agent=agent,
        rollouts=int(is_first),
        calls=1,
        tokens=tokens,
        trained=tokens if use is not None and use.row >= 0 else 0,
        seconds=max(0, span.end_ns - span.start_ns) / 1e9,
        reward=_moments(reward),
        credit=_moments(use.credit if use else None),
        advantage=_moments(use.advantage if use else None),
    )


def _moments(value: float | None) -> Moments:
    return Moments() if value is None else Moments(count=1, mean=value)
