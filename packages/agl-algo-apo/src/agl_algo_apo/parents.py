"""Which candidate the next proposals start from."""

import math
import random
from collections.abc import Mapping, Sequence

from agl_algo_apo.candidates import PromptCandidate
from agl_algo_apo.evaluation import Evaluator
from agl_algo_apo.settings import SearchSettings


def select_parent(
    pool: Sequence[PromptCandidate],
    *,
    best: PromptCandidate,
    evaluator: Evaluator,
    settings: SearchSettings,
    draw: random.Random,
    children: Mapping[str, int],
) -> PromptCandidate:
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
    leads = _leads(pool, evaluator)
    front = _front(sorted(pool, key=lambda c: means[c.id]), leads)
    return draw.choices(front, weights=[len(leads[c.id]) for c in front])[0] if front else best


def _leads(pool: Sequence[PromptCandidate], evaluator: Evaluator) -> dict[str, set[int]]:
    """The validation tasks that each candidate leads, alone or with others; nobody leads where all are equal."""
    rewards = {candidate.id: evaluator.scores.rewards(candidate.id, "val") for candidate in pool}
    leads: dict[str, set[int]] = {candidate: set() for candidate in rewards}
    for task in sorted({task for known in rewards.values() for task in known}):
        values = [known[task] for known in rewards.values() if task in known]
        if min(values) < max(values):
            for candidate, known in rewards.items():
                if known.get(task) == max(values):
                    leads[candidate].add(task)
    return leads


def _front(worst_first: Sequence[PromptCandidate], leads: Mapping[str, set[int]]) -> list[PromptCandidate]:
    """The candidates without those whose every lead is shared with one that stays."""
    staying = list(worst_first)
    for candidate in worst_first:
        others = set[int]().union(*(leads[other.id] for other in staying if other.id != candidate.id))
        if leads[candidate.id] <= others:
            staying.remove(candidate)
    return staying
