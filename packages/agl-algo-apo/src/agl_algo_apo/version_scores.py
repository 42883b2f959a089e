"""Scores of resource versions, for the store: the score of each, and which rewards it is made of.

A version has the score of the candidate that brought it. The live versions have that of the published candidate, all
of whose texts are live together.
"""

from collections.abc import Mapping

import msgspec

from agl.contracts import VersionScore
from agl_algo_apo.candidates import Lineage
from agl_algo_apo.evaluation import Estimate, Evaluator, estimate
from agl_algo_apo.final_measurement import Result


def version_scores(
    lineage: Lineage,
    evaluator: Evaluator,
    *,
    seed: str,
    published: str,
    live: Mapping[str, str],
    result: Result | None,
) -> list[VersionScore]:
    """The scores of all versions whose candidates were measured.

    Args:
        lineage: All candidates.
        evaluator: Has their rewards.
        seed: Id of the first candidate.
        published: Id of the candidate whose texts are live.
        live: The live version of every tuned resource.
        result: Result of the final measurement, ``None`` before it.
    """
    by_candidate: dict[str, tuple[Estimate, str]] = {}
    owners: dict[tuple[str, str], str] = {}
    for candidate in lineage.all():
        rewards = list(evaluator.scores.rewards(candidate.id, "val").values())
        if rewards:
            how = "first measurement" if candidate.id == seed else "selection"
            by_candidate[candidate.id] = estimate(rewards), how
        for version in candidate.versions.items():
            owners.setdefault(version, candidate.id)  # children share unchanged versions; the first one owns them
    if result is not None:
        by_candidate[seed] = result.seed_score, result.how
        by_candidate[result.winner] = result.score, result.how
    if published != seed:
        owners |= dict.fromkeys(live.items(), published)
    return [_score(*version, *by_candidate[owner]) for version, owner in owners.items() if owner in by_candidate]


def _score(name: str, version: str, value: Estimate, how: str) -> VersionScore:
    return VersionScore(name=name, version=version, **msgspec.structs.asdict(value), how=how)
