"""What a search tells the store about versions: the score of each, and whether it flatters.

A version's score is that of the candidate which brought it. What is live belongs to the candidate that was published,
together with the other texts of that candidate.
"""

from collections.abc import Mapping

import msgspec

from agl_algo_apo.candidates import Lineage
from agl_algo_apo.evaluate import Estimate, Evaluator, estimate
from agl_algo_apo.finish import How, Result
from agl_run import VersionScore


def version_scores(
    lineage: Lineage,
    evaluator: Evaluator,
    *,
    seed: str,
    published: str,
    live: Mapping[str, str],
    result: Result | None,
) -> dict[tuple[str, str], VersionScore]:
    """The scores by (resource, version).

    Args:
        lineage: All candidates.
        evaluator: Has their rewards.
        seed: Id of the first candidate.
        published: Id of the candidate whose texts are live.
        live: The live version of every tuned resource.
        result: Of the final measurement, ``None`` before it.
    """
    by_candidate: dict[str, VersionScore] = {}
    owners: dict[tuple[str, str], str] = {}
    for candidate in lineage.all():
        rewards = list(evaluator.scores.rewards(candidate.id, "val").values())
        if rewards:
            by_candidate[candidate.id] = _score(
                estimate(rewards), "first measurement" if candidate.id == seed else "selection"
            )
        for version in candidate.versions.items():
            owners.setdefault(version, candidate.id)
    if result is not None:
        by_candidate[seed] = _score(result.seed_score, result.how)
        by_candidate[result.winner] = _score(result.score, result.how)
    if published != seed:
        owners |= dict.fromkeys(live.items(), published)
    return {version: by_candidate[owner] for version, owner in owners.items() if owner in by_candidate}


def _score(value: Estimate, how: How) -> VersionScore:
    return VersionScore(**msgspec.structs.asdict(value), how=how)
