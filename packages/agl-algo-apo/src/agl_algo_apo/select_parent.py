"""Which candidate the next proposals start from."""

import math
import random
from collections.abc import Mapping, Sequence

from agl_algo_apo.candidates import Candidate
from agl_algo_apo.evaluate import Evaluator
from agl_algo_apo.settings import SearchSettings


def select_parent(
    pool: Sequence[Candidate],
    *,
    best: Candidate,
    evaluator: Evaluator,
    settings: SearchSettings,
    draw: random.Random,
    children: Mapping[str, int],
) -> Candidate:
    """The next parent.

    Args:
        pool: Who may be it.
        best: The best candidate.
        evaluator: Has the rewards.
        settings: `selector`: ``best``; ``beam``, the ``beam_width`` best ones in turn; ``pareto``, in proportion to
            the validation tasks that a candidate leads; ``mixed``, best with probability ``p_best``, else pareto;
            ``ucb``, the largest mean plus a bonus for few children.
        draw: For this step.
        children: How often each candidate was a parent.
    """
    kind = settings.selector
    if kind == "mixed":
        kind = "best" if draw.random() < settings.p_best else "pareto"
    if kind == "best" or len(pool) == 1:
        return best
    means = {candidate.id: evaluator.mean(candidate.id, "val") for candidate in pool}
    if kind == "beam":
        beam = sorted(pool, key=lambda c: means[c.id], reverse=True)[: settings.beam_width]
        return min(beam, key=lambda c: children.get(c.id, 0))
    if kind == "ucb":
        total = 1 + sum(children.values())
        return max(pool, key=lambda c: means[c.id] + math.sqrt(math.log(total) / (1 + children.get(c.id, 0))))
    weights = _leads(pool, evaluator)
    return draw.choices(pool, weights=[weights[c.id] for c in pool])[0] if any(weights.values()) else best


def _leads(pool: Sequence[Candidate], evaluator: Evaluator) -> dict[str, int]:
    """How many validation tasks each candidate leads, alone or with others."""
    rewards = {candidate.id: evaluator.scores.rewards(candidate.id, "val") for candidate in pool}
    leads = dict.fromkeys(rewards, 0)
    for task in sorted({task for known in rewards.values() for task in known}):
        top = max(known[task] for known in rewards.values() if task in known)
        for candidate, known in rewards.items():
            leads[candidate] += known.get(task) == top
    return leads
