"""The choice of the parent, the candidate from which the next proposals start.

Half of the time it is the best candidate. Otherwise it is drawn as in GEPA (Agrawal et al. 2025, arXiv 2507.19457,
section 3): a candidate that leads on some validation task is kept as a parent, even if its mean is low, because it
solves something that the others do not. Candidates whose every lead is shared by a remaining one are removed; the
others are drawn in proportion to the number of tasks that they lead. A task on which all score equally has no leader,
because it distinguishes nothing. ``beam`` lets the best candidates take turns, as ProTeGi does.
"""

import random
from collections.abc import Mapping, Sequence

from agl_algo_apo.measurement.evaluation import Evaluator
from agl_algo_apo.search.settings import SearchSettings
from agl_algo_apo.texts.lineage import PromptCandidate


def select_parent(
    pool: Sequence[PromptCandidate],
    *,
    best: PromptCandidate,
    evaluator: Evaluator,
    settings: SearchSettings,
    draw: random.Random,
    children: Mapping[str, int],
) -> PromptCandidate:
    """Return the next parent.

    Args:
        pool: The candidates that may be parents, each with at least one validation reward.
        best: The best candidate.
        evaluator: Holds the rewards.
        settings: `parents.selector`: ``mixed``, the best candidate with probability ``p_best``, else one that leads on
            some validation tasks; ``beam``, the ``beam_width`` best candidates in turn.
        draw: The random generator of this step.
        children: How often each candidate was a parent, by id.
    """
    parents = settings.parents
    means = {candidate.id: evaluator.mean(candidate.id, "val") for candidate in pool}
    if parents.selector == "beam":
        beam = sorted(pool, key=lambda c: means[c.id], reverse=True)[: parents.beam_width]
        return min(beam, key=lambda c: children.get(c.id, 0))  # the fewest children, so that all take turns
    if draw.random() < parents.p_best or len(pool) == 1:  # exploit with probability p_best, else explore
        return best
    leads = _leads(pool, evaluator)  # task positions by candidate id
    front = _front(sorted(pool, key=lambda c: means[c.id]), leads)  # the Pareto front over validation tasks
    # Without any lead all are equal on every task, and the best candidate is as good a parent as any.
    return draw.choices(front, weights=[len(leads[c.id]) for c in front])[0] if front else best


def _leads(pool: Sequence[PromptCandidate], evaluator: Evaluator) -> dict[str, set[int]]:
    """Return, by candidate, the validation tasks on which it has the best reward, alone or tied.

    A task on which all rewards are equal counts for no candidate.
    """
    rewards = {candidate.id: evaluator.scores.rewards(candidate.id, "val") for candidate in pool}
    leads: dict[str, set[int]] = {candidate: set() for candidate in rewards}
    for task in sorted({task for known in rewards.values() for task in known}):
        # Races stop early, so candidates have run different tasks: each is compared with those that ran this one.
        values = [known[task] for known in rewards.values() if task in known]
        if min(values) < max(values):
            for candidate, known in rewards.items():
                if known.get(task) == max(values):  # ties lead together, as 0 and 1 rewards mostly tie
                    leads[candidate].add(task)
    return leads


def _front(worst_first: Sequence[PromptCandidate], leads: Mapping[str, set[int]]) -> list[PromptCandidate]:
    """Return the Pareto front: each returned candidate leads some task that no other returned candidate leads."""
    staying = list(worst_first)
    # In the order of rising means, so that of two candidates with the same leads the worse one is removed.
    for candidate in worst_first:
        others = set[int]().union(*(leads[other.id] for other in staying if other.id != candidate.id))
        if leads[candidate.id] <= others:  # a candidate without a lead goes here as well: the empty set is in all
            staying.remove(candidate)
    return staying
