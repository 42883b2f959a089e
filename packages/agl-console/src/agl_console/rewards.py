"""The rewards of one rollout: every recorded one, its use, and the one that trains."""

from collections.abc import Sequence

from agl.episodes import Score, ScoreOptions, admitted_rewards, recorded_rewards, score
from agl.schemas import Attempt, Record, Reward, Rollout, Span

ROWS = 200
"""The most rewards in the table; a rollout may have thousands, for its turns and spans."""


class RewardRow(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A recorded reward.

    Attributes:
        attempt: The number of the reward's attempt; 0 for the rollout's own spans.
        sequence: The number of the reward's span in the attempt.
        at: When the reward was recorded, in Unix seconds; 0 if unknown.
        about: The number of the span that the reward is about; ``None`` for the whole attempt.
        about_name: The name of that span.
        use: What became of the reward: the reason why it is or is not the rollout's.
    """

    attempt: int
    sequence: int
    reward: Reward
    at: float
    about: int | None
    about_name: str
    decides: bool
    use: str


class RewardsView(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The rewards of a rollout.

    Attributes:
        rule: The rule that decides which reward trains, or the reason why none does.
        rows: The first recorded rewards.
        total: The number of all recorded rewards.
    """

    rule: str
    rows: list[RewardRow]
    total: int


def rewards_view(rollout: Rollout, attempts: Sequence[Attempt], spans: Sequence[Span]) -> RewardsView:
    """Return the rewards among ``spans``, which are all spans of the rollout."""
    rows = _rows(rollout, attempts, spans)
    scored = score(admitted_rewards(spans, rollout.attempt_id, _OPTIONS), options=_OPTIONS)
    return RewardsView(rule=scored.note, rows=rows[:ROWS], total=len(rows))


_OPTIONS = ScoreOptions()


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
                reward=reward,
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
