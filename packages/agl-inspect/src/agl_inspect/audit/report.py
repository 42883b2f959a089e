"""Reads the training rollouts of a run and reports which patterns went with their rewards, early and late."""

import math
from collections import defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from statistics import fmean
from typing import NamedTuple

from agl.contracts import Recording, RolloutQuery, Store
from agl.episodes import ScoreOptions, admitted_rewards, score
from agl.errors import ConfigError
from agl.schemas import Record
from agl.stores import read_recordings
from agl_inspect.audit.effects import Effect, Sample, effects
from agl_inspect.audit.patterns import PATTERNS, answer_of, repeats
from agl_inspect.records.gold import GapTest, GoldPair, gold_of
from agl_inspect.records.names import run_of
from agl_inspect.records.state import rules_of
from agl_inspect.text import short

MOST = 2000
"""The most rollouts that are read; of a larger run they are a random selection, the same one each time."""

_EXAMPLES = 3
_PAGE = 100


class Example(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A late rollout with much of a pattern and a higher reward than the mean of its task in its step."""

    rollout_id: str
    reward: float
    usual: float
    measured: float
    answer: str


class PatternReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The relation between a pattern and the reward.

    Attributes:
        name: The pattern's name.
        measure: The number that measures it.
        early: Mean of that number in the first half of the steps.
        late: Mean of that number in the second half.
        explains: Share of the rewards' variance within tasks and steps that the pattern explains and no other does.
        effect: Reward that goes with one standard deviation more of the pattern, within tasks and steps; ``None`` if
            there are too few tasks.
        low: Lower end of the interval of ``effect``, which holds for all patterns together with 95 %.
        high: Upper end of the interval.
        effect_early: The effect in the first half of the steps alone, with its interval; ``None`` if unknown.
        effect_late: The same in the second half.
        is_found: Whether the interval lies above 0.
        examples: Rollouts that won with the pattern; empty unless it is found.
    """

    name: str
    measure: str
    early: float
    late: float
    explains: float
    effect: float | None
    low: float | None
    high: float | None
    effect_early: tuple[float, float, float] | None
    effect_late: tuple[float, float, float] | None
    is_found: bool
    examples: list[Example]


class GoldReport(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The rollouts with a gold reward or a person's rating: means of both rewards, and the odds for a larger gap."""

    rollouts: int
    reward_early: float | None
    gold_early: float | None
    reward_late: float | None
    gold_late: float | None
    evidence: float


class Audit(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The audit of one algorithm's training rollouts, the pattern that explains most of the reward first."""

    experiment: str
    run: int
    algorithm: str
    rollouts: int
    tasks: int
    steps: int
    reward_early: float
    reward_late: float
    patterns: list[PatternReport]
    gold: GoldReport | None


class _Read(NamedTuple):
    rollout_id: str
    task: str
    step: int
    reward: float
    gold: float | None
    text: str
    values: dict[str, float]


async def audit(store: Store, experiment: str, *, run: int | None = None, algorithm: str | None = None) -> Audit:
    """Audit a run, by default the newest one and the algorithm with the most rollouts.

    Raises:
        ConfigError: The run has no rewarded training rollouts.
    """
    run, algorithm, ids = await _selected(store, experiment, run=run, algorithm=algorithm)
    rules, found = (await rules_of(store, experiment)).score, list[_Read]()
    for at in range(0, len(ids), _PAGE):
        query = RolloutQuery(ids=tuple(ids[at : at + _PAGE]))
        read = [_read(one, rules) async for one in read_recordings(store, query, spans="deciding")]
        found += [one for one in read if one is not None]
    if not found:
        raise ConfigError(f"no training rollout of {experiment!r}, run {run}, has a reward; there is nothing to audit")
    others = repeats([(one.task, one.text) for one in found])
    for one, count in zip(found, others, strict=True):
        one.values["copied-answer"] = float(count)
    steps = sorted({one.step for one in found})
    middle = steps[len(steps) // 2] if len(steps) > 1 else math.inf
    early, late = [one for one in found if one.step < middle], [one for one in found if one.step >= middle]
    return Audit(
        experiment=experiment,
        run=run,
        algorithm=algorithm,
        rollouts=len(found),
        tasks=len({one.task for one in found}),
        steps=len(steps),
        reward_early=fmean(one.reward for one in early),
        reward_late=fmean(one.reward for one in late or early),
        patterns=_patterns(found, early, late),
        gold=_gold(found, early, late),
    )


async def _selected(
    store: Store, experiment: str, *, run: int | None, algorithm: str | None
) -> tuple[int, str, list[str]]:
    """Return the run, the algorithm, and the ids of its successful training rollouts, or of an even selection."""
    cells: defaultdict[tuple[int, str], defaultdict[tuple[int, str], list[str]]] = defaultdict(
        lambda: defaultdict(list)
    )
    query = RolloutQuery(experiment=experiment, mode="train", status=("succeeded",))
    while page := await store.rollouts(query):
        for one in page:
            number, name, step = run_of(one), one.metadata.get("algorithm"), one.metadata.get("step")
            if number and isinstance(name, str) and isinstance(step, int):
                cells[number, name][step, one.group_id].append(one.rollout_id)
        query = query.next(page[-1])
    there = [key for key in cells if run in (None, key[0]) and algorithm in (None, key[1])]
    if not there:
        raise ConfigError(
            f"there are no finished training rollouts of {experiment!r}"
            f"{f', run {run}' if run else ''}{f', of {algorithm!r}' if algorithm else ''}; agl runs lists what there is"
        )
    number, name = max(there, key=lambda key: (key[0], sum(map(len, cells[key].values()))))
    # By a hash, because tasks come again at regular distances.
    groups = sorted(cells[number, name].items(), key=lambda item: blake2b(repr(item[0]).encode()).digest())
    ids = [one for _, group in groups for one in group]
    return number, name, ids[:MOST]


def _read(recording: Recording, rules: ScoreOptions) -> _Read | None:
    rollout = recording.rollout
    rewards = admitted_rewards(recording.spans, rollout.attempt_id, rules)
    ratings = [one.value for one in rewards if one.source == "human" and one.scope == "rollout" and not one.name]
    # A person's rating is gold only where another reward trains.
    own = [one for one in rewards if one.source != "human"] or rewards
    reward = score(own, options=rules).value
    if reward is None:
        return None
    gold = gold_of(recording.spans, rollout.attempt_id)
    if gold is None and ratings and own is not rewards:
        gold = ratings[-1]
    answer, step = answer_of(rollout, recording.spans), rollout.metadata["step"]
    assert isinstance(step, int)  # noqa: S101  # rollouts without a step were left out
    return _Read(rollout.rollout_id, rollout.group_id, step, reward, gold, answer.text, answer.values)


def _patterns(found: Sequence[_Read], early: Sequence[_Read], late: Sequence[_Read]) -> list[PatternReport]:
    whole, first, second = (effects([_sample(one) for one in part]) for part in (found, early, late))
    usual = _usual(found)
    reports: list[PatternReport] = []
    for place, (name, measure) in enumerate(PATTERNS.items()):
        effect = whole[place] if whole else None
        is_found = effect is not None and effect.low > 0
        report = PatternReport(
            name=name,
            measure=measure,
            early=fmean(one.values[name] for one in early),
            late=fmean(one.values[name] for one in late or early),
            explains=effect.share if effect else 0.0,
            effect=effect.value if effect else None,
            low=_finite(effect.low) if effect else None,
            high=_finite(effect.high) if effect else None,
            effect_early=_ends(first, place),
            effect_late=_ends(second, place),
            is_found=is_found,
            examples=_examples(late or early, name, usual) if is_found else [],
        )
        reports.append(report)
    return sorted(reports, key=lambda one: (not one.is_found, -one.explains))


def _sample(one: _Read) -> Sample:
    # Counts are read by their doublings: the tenth emoji says less than the first.
    values = [one.values[name] if name == "copied-task" else math.log2(1 + one.values[name]) for name in PATTERNS]
    return Sample(one.task, one.step, one.reward, values)


def _usual(found: Sequence[_Read]) -> dict[tuple[str, int], float]:
    cells: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for one in found:
        cells[one.task, one.step].append(one.reward)
    return {cell: fmean(rewards) for cell, rewards in cells.items()}


def _examples(late: Sequence[_Read], name: str, usual: dict[tuple[str, int], float]) -> list[Example]:
    won = [one for one in late if one.values[name] and one.reward > usual[one.task, one.step]]
    most = sorted(won, key=lambda one: (-one.values[name], one.rollout_id))[:_EXAMPLES]
    return [
        Example(
            rollout_id=one.rollout_id,
            reward=one.reward,
            usual=usual[one.task, one.step],
            measured=one.values[name],
            answer=short(one.text, 120),
        )
        for one in most
    ]


def _ends(found: Sequence[Effect] | None, place: int) -> tuple[float, float, float] | None:
    effect = found[place] if found else None
    if effect is None or math.isinf(effect.low):
        return None
    return effect.value, effect.low, effect.high


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _gold(found: Sequence[_Read], early: Sequence[_Read], late: Sequence[_Read]) -> GoldReport | None:
    test, steps = GapTest(), defaultdict[int, list[GoldPair]](list)
    for one in found:
        if one.gold is not None:
            steps[one.step].append(GoldPair(group=one.task, reward=one.reward, gold=one.gold))
    if not steps:
        return None
    for _, pairs in sorted(steps.items()):
        test.add(pairs)
    halves = [[(one.reward, one.gold) for one in half if one.gold is not None] for half in (early, late)]
    means = [tuple(map(fmean, zip(*half, strict=True))) if half else (None, None) for half in halves]
    (reward_early, gold_early), (reward_late, gold_late) = means
    return GoldReport(
        rollouts=sum(map(len, steps.values())),
        reward_early=reward_early,
        gold_early=gold_early,
        reward_late=reward_late,
        gold_late=gold_late,
        evidence=test.evidence,
    )
