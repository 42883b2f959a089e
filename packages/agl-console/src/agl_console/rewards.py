"""The rewards of one rollout: every recorded one, the one that trains, and their places among the run's rewards.

A store holds no distributions of rewards. They are computed from the newest ``NEWEST`` rollouts of the run with the
rollout's mode, so that the page costs the same in a store of any size.
"""

import math
from collections import Counter
from collections.abc import Sequence

from agl.contracts import RolloutQuery, SpanQuery, Store
from agl.episodes import Score, ScoreOptions, admitted_rewards, recorded_rewards, score
from agl.schemas import Attempt, Record, Reward, Rollout, RolloutStatus, Span
from agl_console.reading import newest_recordings
from agl_console.rollouts import Bin, bar_of, bars_of
from agl_inspect.rollouts.span_reader import reward_of

NEWEST = 100
"""The number of newest rollouts whose rewards form the distributions; fewer are read if they are large."""

ROWS = 200
"""The most rewards in the table; a rollout may have thousands, for its turns and spans."""

FIGURES = 24
"""The most distributions on a page."""

_SPANS = 100
"""The most rewards that are read of each other rollout."""

_FEEDBACK = 600
"""The most characters of feedback in the table; the span's page shows all of it."""


class RewardPart(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A part of a reward; ``weight`` is ``None`` if no composite reward recorded one."""

    name: str
    value: float | None
    weight: float | None


class RewardRow(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A recorded reward.

    Attributes:
        attempt: The number of the reward's attempt; 0 for the rollout's own spans.
        sequence: The number of the reward's span in the attempt.
        at: When the reward was recorded, in Unix seconds; 0 if unknown.
        about: The number of the span that the reward is about; ``None`` for the whole attempt.
        about_name: The name of that span.
        use: What became of the reward: the reason why it is or is not the rollout's.
        is_cut: True if the feedback is longer than shown.
    """

    attempt: int
    sequence: int
    name: str
    source: str
    scope: str
    value: float | None
    parts: list[RewardPart]
    feedback: str
    is_cut: bool
    at: float
    about: int | None
    about_name: str
    decides: bool
    use: str


class Distribution(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The values of a reward, or of a part of one, in the run.

    Attributes:
        name: The reward's name.
        part: The part's name; ``""`` for the reward itself.
        scope: The reward's scope; ``""`` for the reward that trains, whatever its name.
        source: The reward's source; ``""`` for the reward that trains.
        own: The values of this rollout.
        n: The number of values in the bars.
        missing: The number of rewards without a value.
    """

    name: str
    part: str
    scope: str
    source: str
    own: list[float]
    n: int
    missing: int
    mean: float | None
    bars: list[Bin]


class RewardsView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The rewards of a rollout.

    Attributes:
        rule: The rule that decides which reward trains, or the reason why none does.
        rows: The first recorded rewards.
        total: The number of all recorded rewards.
        looked_through: The number of rollouts in the distributions.
        figures: The number of all distributions.
        distributions: The first distributions.
    """

    rule: str
    rows: list[RewardRow]
    total: int
    looked_through: int
    figures: int
    distributions: list[Distribution]


async def rewards_view(
    store: Store, rollout: Rollout, attempts: Sequence[Attempt], spans: Sequence[Span]
) -> RewardsView:
    """Read the rewards of a rollout and of the newest rollouts of its run; ``spans`` are all spans of the rollout."""
    rows = _rows(rollout, attempts, spans)
    found, looked_through = await _of_run(store, rollout)
    scored = score(admitted_rewards(spans, rollout.attempt_id, _OPTIONS), options=_OPTIONS)
    own = _values(spans, rollout, trains=scored.value)
    named = list(found.items())
    return RewardsView(
        rule=scored.note,
        rows=rows[:ROWS],
        total=len(rows),
        looked_through=looked_through,
        figures=len(named),
        distributions=[_distribution(key, values, own.get(key, []), rollout) for key, values in named[:FIGURES]],
    )


_OPTIONS = ScoreOptions()

_NAMELESS = "(no name)"
"""Stands for a part named ``""``, because here ``""`` means the reward itself."""

_FINISHED: tuple[RolloutStatus, ...] = ("succeeded", "failed")

_Key = tuple[str, str, str, str]
_TRAINS: _Key = ("", "", "", "")
"""The key of the reward that trains; no recorded reward has an empty scope."""


def _rows(rollout: Rollout, attempts: Sequence[Attempt], spans: Sequence[Span]) -> list[RewardRow]:
    numbers = {attempt.attempt_id: attempt.number for attempt in attempts}
    places = {(span.attempt_id, span.span_id): span for span in spans}
    deciding = _deciding(rollout, spans)
    found: list[RewardRow] = []
    for span in spans:
        reward = span.reward
        if reward is None:
            continue
        about = places.get(
            (span.attempt_id, reward.span_id or (span.parent_id if reward.scope == "span" else "") or "")
        )
        decides = deciding is not None and span is deciding
        found.append(
            RewardRow(
                attempt=numbers.get(span.attempt_id, 0),
                sequence=span.sequence,
                name=reward.name,
                source=reward.source,
                scope=reward.scope,
                value=reward.value,
                parts=[
                    RewardPart(name=name, value=value, weight=reward.weights.get(name))
                    for name, value in reward.dimensions.items()
                ],
                feedback=reward.feedback[:_FEEDBACK],
                is_cut=len(reward.feedback) > _FEEDBACK,
                at=span.start_ns / 1e9,
                about=about.sequence if about else None,
                about_name=about.name if about else "",
                decides=decides,
                use="the rollout's reward" if decides else _use(span, reward, rollout),
            )
        )
    return found


def _deciding(rollout: Rollout, spans: Sequence[Span]) -> Span | None:
    """Return the span of the reward that trains: the last one whose reward alone gives the rollout's score."""
    wanted = score(admitted_rewards(spans, rollout.attempt_id, _OPTIONS), options=_OPTIONS)
    alone = [span for span in recorded_rewards(spans, rollout.attempt_id) if _score_alone(span) == wanted]
    return alone[-1] if alone and wanted.value is not None else None


def _score_alone(span: Span) -> Score:
    return score(admitted_rewards([span], span.attempt_id, _OPTIONS), options=_OPTIONS)


def _use(span: Span, reward: Reward, rollout: Rollout) -> str:
    if span.attempt_id != rollout.attempt_id:
        return "of another attempt" if span.attempt_id else "of no attempt"
    if reward.is_gold:
        return "gold: it only measures"
    if not admitted_rewards([span], span.attempt_id, _OPTIONS):
        return "not trusted: it came with the agent's own token" if reward.source == "agent" else "late"
    return "not used" if reward.scope == "rollout" else f"for the {reward.scope}"


async def _of_run(store: Store, rollout: Rollout) -> tuple[dict[_Key, list[float | None]], int]:
    """Return the rewards of the run's newest rollouts, and the number of these rollouts; nothing without a run."""
    found: dict[_Key, list[float | None]] = {}
    if not rollout.experiment:
        return found, 0
    query = RolloutQuery(
        experiment=rollout.experiment, mode=rollout.mode, status=_FINISHED, sort="created_at", is_newest_first=True
    )
    count = 0
    async for recording in newest_recordings(store, query, NEWEST, spans=SpanQuery(kind="reward", limit=_SPANS)):
        count += 1
        trains = reward_of(recording)
        for key, values in _values(recording.spans, recording.rollout, trains=trains).items():
            found.setdefault(key, []).extend(values)
    return found, count


def _values(spans: Sequence[Span], rollout: Rollout, *, trains: float | None) -> dict[_Key, list[float | None]]:
    """Return the values of every reward and part in the deciding attempt; ``trains`` is the reward that trains."""
    found: dict[_Key, list[float | None]] = {_TRAINS: [trains]}
    for span in recorded_rewards(spans, rollout.attempt_id):
        reward = span.reward
        if reward is not None:
            parts = ((name or _NAMELESS, value) for name, value in reward.dimensions.items())
            for part, value in (("", reward.value), *parts):
                found.setdefault((reward.name, part, reward.scope, reward.source), []).append(value)
    return found


def _distribution(
    key: _Key, values: Sequence[float | None], own: Sequence[float | None], rollout: Rollout
) -> Distribution:
    name, part, scope, source = key
    known = [value for value in values if value is not None and math.isfinite(value)]
    here = [value for value in own if value is not None and math.isfinite(value)]
    ends = bars_of([*known, *here])
    edges = [low for low, _ in ends]
    counts = Counter(bar_of(value, edges) for value in known)
    marked = {bar_of(value, edges) for value in here}
    filters = {"experiment": rollout.experiment, "mode": rollout.mode} if key == _TRAINS else {}
    return Distribution(
        name=name,
        part=part,
        scope=scope,
        source=source,
        own=here,
        n=len(known),
        missing=len(values) - len(known),
        mean=sum(value / len(known) for value in known) if known else None,
        bars=[
            Bin(
                low=low,
                high=max(*known, *here, low) if high is None else high,
                count=counts[number],
                is_here=number in marked,
                query={**filters, "low": repr(low), **({} if high is None else {"high": repr(high)})}
                if filters
                else {},
            )
            for number, (low, high) in enumerate(ends)
        ],
    )
