"""Reads the training rollouts of a run and reports which patterns went with their rewards, early and late."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from hashlib import blake2b
from statistics import fmean

from agl.contracts import Recording, RolloutQuery, Store
from agl.episodes import ScoreOptions, admitted_rewards, score
from agl.errors import ConfigError
from agl.schemas import Record
from agl.stores import read_recordings
from agl_inspect.audit.effects import Effect, Sample, effects, within_cells
from agl_inspect.audit.patterns import PATTERNS, answer_of
from agl_inspect.records.gold import GapTest, GoldPair, gold_of, rating_of
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


class Part(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The rollouts of some steps: their mean reward, the mean count and the effect of each pattern, and their gold.

    ``effects`` is empty if there are too few tasks. ``gold`` has the mean reward and the mean gold reward, or person's
    rating, of the ``golds`` rollouts that have one.
    """

    rollouts: int
    tasks: int
    steps: int
    reward: float
    means: dict[str, float]
    effects: dict[str, Effect]
    golds: int
    gold: tuple[float, float] | None


class Audit(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The audit of one algorithm's training rollouts: all of them, and those of the first and second half of the steps.

    ``patterns`` are names, the pattern that explains most of the reward first. ``examples`` has those whose interval
    lies above 0. ``evidence`` has the odds that the reward runs away from the gold reward.
    """

    experiment: str
    run: int
    algorithm: str
    patterns: list[str]
    examples: dict[str, list[Example]]
    evidence: float
    whole: Part
    early: Part
    late: Part


async def audit(store: Store, experiment: str, *, run: int | None = None, algorithm: str | None = None) -> Audit:
    """Audit a run, by default the newest one and the algorithm with the most rollouts.

    Raises:
        ConfigError: The run has no rewarded training rollouts.
    """
    run, algorithm, ids = await _selected(store, experiment, run=run, algorithm=algorithm)
    rules, read = (await rules_of(store, experiment)).score, list[Sample]()
    for at in range(0, len(ids), _PAGE):
        query = RolloutQuery(ids=tuple(ids[at : at + _PAGE]))
        read += [found async for one in read_recordings(store, query, spans="deciding") for found in _read(one, rules)]
    if not read:
        raise ConfigError(f"no training rollout of {experiment!r}, run {run}, has a reward; there is nothing to audit")
    copies = Counter(answer for _, answer in {(one.task, one.answer) for one in read if one.answer})
    found = [one._replace(counts=[*one.counts, max(0, copies[one.answer] - 1)]) for one in read]
    steps = sorted({one.step for one in found})
    middle = steps[len(steps) // 2]
    late = [one for one in found if one.step >= middle]
    early = [one for one in found if one.step < middle] or late  # of a single step, both halves are that step
    whole = _part(found)
    examples = {name: _examples(late, name) for name, one in whole.effects.items() if (one.low or 0) > 0}
    shares = {name: (name in examples, one.share) for name, one in whole.effects.items()}
    return Audit(
        experiment=experiment,
        run=run,
        algorithm=algorithm,
        patterns=sorted(PATTERNS, key=lambda name: shares.get(name, (False, 0.0)), reverse=True),
        examples=examples,
        evidence=_evidence(found),
        whole=whole,
        early=_part(early),
        late=_part(late),
    )


async def _selected(
    store: Store, experiment: str, *, run: int | None, algorithm: str | None
) -> tuple[int, str, list[str]]:
    """Return the run, the algorithm, and the ids of its successful training rollouts, or of an even selection."""
    runs: defaultdict[tuple[int, str], list[tuple[bytes, str]]] = defaultdict(list)
    query = RolloutQuery(experiment=experiment, mode="train", status=("succeeded",))
    while page := await store.rollouts(query):
        for one in page:
            number, name, step = run_of(one), one.metadata.get("algorithm"), one.metadata.get("step")
            if number and isinstance(name, str) and isinstance(step, int):
                # The order is that of a hash, because tasks come again at regular distances.
                order = blake2b(f"{step} {one.group_id}".encode()).digest()
                runs[number, name].append((order, one.rollout_id))
        query = query.next(page[-1])
    there = [key for key in runs if run in (None, key[0]) and algorithm in (None, key[1])]
    if not there:
        raise ConfigError(
            f"there are no finished training rollouts of {experiment!r}"
            f"{f', run {run}' if run else ''}{f', of {algorithm!r}' if algorithm else ''}; agl runs lists what there is"
        )
    number, name = max(there, key=lambda key: (key[0], len(runs[key])))
    return number, name, [one for _, one in sorted(runs[number, name])[:MOST]]


def _read(recording: Recording, rules: ScoreOptions) -> list[Sample]:
    """Return the rollout, or nothing if it has no reward."""
    rollout = recording.rollout
    rewards = admitted_rewards(recording.spans, rollout.attempt_id, rules)
    # A person's rating is gold only where another reward trains.
    own = [one for one in rewards if one.source != "human"] or rewards
    reward = score(own, options=rules).value
    gold = gold_of(recording.spans, rollout.attempt_id)
    if gold is None and own is not rewards and (rating := rating_of(rewards)):
        gold = rating.value
    (answer, counts), step = answer_of(rollout, recording.spans), rollout.metadata["step"]
    assert isinstance(step, int)  # noqa: S101  # rollouts without a step were left out
    if reward is None:
        return []
    return [Sample(rollout.group_id, step, reward, counts, gold=gold, rollout_id=rollout.rollout_id, answer=answer)]


def _part(found: Sequence[Sample]) -> Part:
    counts = zip(*(one.counts for one in found), strict=True)
    golds = [(one.reward, one.gold) for one in found if one.gold is not None]
    return Part(
        rollouts=len(found),
        tasks=len({one.task for one in found}),
        steps=len({one.step for one in found}),
        reward=fmean(one.reward for one in found),
        means={name: fmean(column) for name, column in zip(PATTERNS, counts, strict=True)},
        effects=dict(zip(PATTERNS, effects(found), strict=False)),
        golds=len(golds),
        gold=(fmean(reward for reward, _ in golds), fmean(gold for _, gold in golds)) if golds else None,
    )


def _examples(late: Sequence[Sample], name: str) -> list[Example]:
    place = list(PATTERNS).index(name)
    won = [(one, row[-1]) for one, row in within_cells(late) if one.counts[place] and row[-1] > 0]
    return [
        Example(
            rollout_id=one.rollout_id,
            reward=one.reward,
            usual=one.reward - gain,
            measured=one.counts[place],
            answer=short(one.answer, 120),
        )
        for one, gain in sorted(won, key=lambda pair: (-pair[0].counts[place], pair[0].rollout_id))[:_EXAMPLES]
    ]


def _evidence(found: Sequence[Sample]) -> float:
    test, steps = GapTest(), defaultdict[int, list[GoldPair]](list)
    for one in found:
        if one.gold is not None:
            steps[one.step].append(GoldPair(group=one.task, reward=one.reward, gold=one.gold))
    for _, pairs in sorted(steps.items()):
        test.add(pairs)
    return test.evidence
