"""Scores of candidates and of resource versions: the score of each, and which rewards it is made of.

There is one score of a candidate at any time, and everything that names one has it from here: the store's versions,
`lineage.jsonl`, the metrics of a step, and `result.json`. Before the final measurement it is the mean of all rewards
on validation tasks; after it, that of the fresh ones for those who are in the result.

A version has the score of the candidate that brought it. The live versions have that of the published candidate, all
of whose texts are live together.
"""

from collections.abc import Mapping

import msgspec

from agl.contracts import VersionScore
from agl.schemas import Record
from agl_algo_apo.acceptance.final_measurement import How, Result
from agl_algo_apo.measurement.estimates import Estimate
from agl_algo_apo.measurement.evaluation import Evaluator
from agl_algo_apo.texts.lineage import Lineage


class CandidateScore(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The score of a candidate with its 95 % interval over ``n`` tasks, and the rewards that it is made of."""

    mean: float
    low: float
    high: float
    n: int
    how: How


def candidate_scores(
    lineage: Lineage, evaluator: Evaluator, *, seed: str, result: Result | None
) -> dict[str, CandidateScore]:
    """Return the score of every candidate that was measured on validation tasks, by id.

    Args:
        lineage: All candidates.
        evaluator: Has their rewards.
        seed: Id of the first candidate.
        result: Result of the final measurement, ``None`` before it.
    """
    scores: dict[str, CandidateScore] = {}
    for candidate in lineage.all():
        rewards = evaluator.scores.rewards(candidate.id, "val")
        if rewards:
            how: How = "first measurement" if candidate.id == seed else "selection"
            scores[candidate.id] = _score(evaluator.estimate(rewards), how)
    if result is not None:
        scores[seed] = _score(result.seed_score, result.how)
        scores[result.winner] = _score(result.score, result.how)
        if result.beaten_score is not None:
            scores[result.beaten] = _score(result.beaten_score, result.how)
    return scores


def version_scores(
    lineage: Lineage,
    scores: Mapping[str, CandidateScore],
    *,
    seed: str,
    published: str,
    live: Mapping[str, str],
) -> list[VersionScore]:
    """Return the scores of all versions whose candidates were measured.

    Args:
        lineage: All candidates.
        scores: The score of each, by id.
        seed: Id of the first candidate.
        published: Id of the candidate whose texts are live.
        live: The live version of every tuned resource.
    """
    owners: dict[tuple[str, str], str] = {}
    for candidate in lineage.all():
        for version in candidate.versions.items():
            owners.setdefault(version, candidate.id)  # children share unchanged versions; the first one owns them
    if published != seed:
        owners |= dict.fromkeys(live.items(), published)
    return [
        VersionScore(name=name, version=version, **msgspec.structs.asdict(scores[owner]))
        for (name, version), owner in owners.items()
        if owner in scores
    ]


def _score(value: Estimate, how: How) -> CandidateScore:
    return CandidateScore(**msgspec.structs.asdict(value), how=how)
