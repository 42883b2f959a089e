"""Updates the tallies of attempts as spans arrive, and computes the statistics of single rollouts.

Tallies are not kept per agent: the agent of a call is known only after the spans around the call have ended, and then a
store would have to read all spans of the attempt again.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from agl import semconv
from agl.contracts import Moments, Statistics
from agl.episodes import ScoreOptions, counts, score
from agl.episodes._scores import by_name
from agl.schemas import Attempt, Graded, Reward, Rollout, Span, Tally
from agl.stores._queries import MAX_COUNT
from agl.stores._values import is_name

_BY_RULE = ScoreOptions()

_LARGEST = 1e100
"""Rewards with a larger magnitude are left out, because sums of their squares may overflow a float."""

_MOST_TOKENS = 1 << 32
"""Token counts of at least this size are ignored: they are implausible, and their sums might overflow a store."""


def counted(attempt: Attempt, spans: Iterable[Span]) -> Attempt:
    """Add newly stored spans of an attempt to its tally; returns the same object if the tally does not change."""
    calls, prompts, responses = 0, 0, 0
    graded: list[Graded] = []
    for span in spans:
        call, reward = span.call, span.reward
        # A late call was made by an attempt that no longer counts.
        if call is not None and not span.is_late:
            # Retries and failures too: they cost what they cost.
            calls += 1
            prompts += call.prompt_len or _reported(span, semconv.INPUT_TOKENS)
            responses += call.response_len or _reported(span, semconv.OUTPUT_TOKENS)
        if reward is not None and reward.scope == "rollout" and counts(span, _BY_RULE):
            place = {"start_ns": span.start_ns, "sequence": span.sequence}
            graded.append(Graded(value=reward.value, name=reward.name, source=reward.source, **place))
    if not calls and not graded:
        return attempt
    before = attempt.tally
    every = (*before.graded, *graded)
    tally = Tally(
        calls=before.calls + calls,
        prompt_tokens=before.prompt_tokens + prompts,
        response_tokens=before.response_tokens + responses,
        graded=_standing(every) if len(every) > 1 else every,
    )
    return replace(attempt, tally=tally)


def reward_of(attempt: Attempt | None) -> float | None:
    """The scalar reward in an attempt's tally, by the rule of :func:`agl.episodes.score`; ``None`` without one."""
    graded = attempt.tally.graded if attempt else ()
    if len(graded) < 2:
        return graded[0].value if graded else None
    rewards = [Reward(value=each.value, name=each.name, source=each.source) for each in graded]
    return score(rewards, options=_BY_RULE).value


def share_of(rollout: Rollout, attempt: Attempt | None) -> Statistics:
    """The statistics of one finished rollout, to be added to its step's; ``attempt`` is the deciding attempt."""
    tally, reward = attempt.tally if attempt else Tally(), reward_of(attempt)
    algorithm, step = rollout.metadata.get("algorithm"), rollout.metadata.get("step")
    # One value: its mean is the value, its squared difference from it 0.
    moments = Moments() if reward is None or abs(reward) > _LARGEST else Moments(count=1, mean=reward)
    return Statistics(
        experiment=rollout.experiment,
        # Metadata are the user's own and may hold anything under these keys.
        algorithm=algorithm if isinstance(algorithm, str) and is_name(algorithm) else "",
        step=step if type(step) is int and 0 <= step <= MAX_COUNT else None,
        mode=rollout.mode,
        succeeded=int(rollout.status == "succeeded"),
        failed=int(rollout.status == "failed"),
        cancelled=int(rollout.status == "cancelled"),
        reward=moments,
        # Never negative, although a clock may have been set back in between.
        seconds=max(0.0, rollout.finished_at - rollout.started_at) if rollout.started_at else 0.0,
        calls=tally.calls,
        prompt_tokens=tally.prompt_tokens,
        response_tokens=tally.response_tokens,
    )


def place_of(of: Statistics) -> tuple[str, str, int, str]:
    """The key of statistics: experiment, algorithm, step (-1 for ``None``) and mode."""
    return of.experiment, of.algorithm, -1 if of.step is None else of.step, of.mode


def _standing(graded: Sequence[Graded]) -> tuple[Graded, ...]:
    """Select the rewards that count, in order of time: under each name, the last one of the best source."""
    # Programs that report over OTLP may leave out times; then the order in which the store numbered them has to do.
    is_timed = all(each.start_ns > 0 for each in graded)
    ordered = sorted(graded, key=lambda each: (each.start_ns if is_timed else 0, each.sequence))
    return tuple(by_name(ordered).values())


def _reported(span: Span, name: str) -> int:
    """The backend's token count under an attribute; 0 if it is missing or implausible."""
    found = span.attributes.get(name)
    return found if type(found) is int and 0 <= found < _MOST_TOKENS else 0
