"""From credit to advantages, through VERL's own estimators (`verl.trainer.ppo.core_algos`).

VERL's estimators compare the rows of a batch. Here each row that they see is one rollout's score, the mean of what
credit gave its calls, so every statistic counts rollouts, however many calls and rows they have.
A call whose credit differs from its rollout's score keeps that distance from it, in the estimator's unit:

    A_call = A_score + (credit_call - score) * unit

With credit `episode` every call has its rollout's score, the distance is zero and the advantage is VERL's.

With r_i the score of rollout i, G its group (the rollouts of one task) and B all scores of the step:

    estimator                     A_score                                        unit
    grpo                          (r_i - mean_G) / (std_G + 1e-6)                1 / (std_G + 1e-6)
    grpo, no normalisation        r_i - mean_G                                   1
    rloo                          r_i - mean of the others in G                  1
    reinforce_plus_plus           (r_i - mean_B) / sqrt(var_B + 1e-8)            1 / sqrt(var_B + 1e-8)
    reinforce_plus_plus_baseline  (r_i - mean_G) / sqrt(var of these + 1e-8)     1 / sqrt(var of these + 1e-8)

Standard deviations and variances divide by n - 1. Sources: GRPO, Shao et al. 2024 (arXiv 2402.03300, section 4.1);
without normalisation, Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783, section 3); RLOO, Ahmadian et al. 2024
(arXiv 2402.14740); REINFORCE++ and its form with a baseline, Hu et al. 2025 (arXiv 2501.03262).

Deviations, and why:
- A group of one has nothing to compare with and gets 0. VERL gives it the score itself, as if the baseline were 0.
- Scores that differ by rounding only count as equal. VERL would divide rounding by its own deviation, which gives
  advantages of about 1 for no difference at all.
- Where an estimator divides, the calls of equal rollouts get 0 as well: nothing says how much their distance is worth.
- REINFORCE++ whitens over the tokens of the batch. Here each score counts once, so a long rollout weighs no more.

Axes: S scores, one for every rollout and baseline.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import torch

from agl_algo_verl.typed import integers, verl_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agl.schemas import CallCredit
    from agl_algo_verl.settings import AlgorithmKeys

ROUNDING = 1e-6
"""Scores of a group closer than this, relative to its largest (at least 1), are equal."""


def advantages(
    credits: Sequence[Sequence[CallCredit]], *, groups: Sequence[int], settings: AlgorithmKeys
) -> list[dict[str, float]]:
    """Return advantages by span id for each rollout; `groups` is the task of each rollout.

    A call whose credit says `is_advantage` keeps its value and takes no part in the statistics.
    """
    result: list[dict[str, float]] = [{c.span_id: c.value for c in calls if c.is_advantage} for calls in credits]
    # Calls with different baselines (the roles of a team, say) are never compared: each baseline of a task is a group
    # of its own, and a rollout has one score in each group that it has calls in.
    members: defaultdict[tuple[tuple[int, str], int], list[CallCredit]] = defaultdict(list)
    for rollout, calls in enumerate(credits):
        for call in calls:
            if not call.is_advantage:
                members[(groups[rollout], call.baseline), rollout].append(call)
    if not members:
        return result
    keys = {group: number for number, group in enumerate(dict.fromkeys(group for group, _ in members))}
    # The mean over calls, and not the sum: an agent that calls its model more often must not score higher for that.
    means = [sum(call.value for call in calls) / len(calls) for calls in members.values()]
    scores_S = torch.tensor(means, dtype=torch.float64)  # float64, so that equal rewards stay equal after the mean
    group_S = torch.tensor([keys[group] for group, _ in members])
    found_S, unit_S = estimate(scores_S, group_S=group_S, settings=settings)
    for index, ((_, rollout), calls) in enumerate(members.items()):
        for call in calls:
            # A_call = A_score + (credit_call - score) * unit; the distances within a score sum to zero.
            away = (call.value - float(scores_S[index])) * float(unit_S[index])
            result[rollout][call.span_id] = float(found_S[index]) + away
    return result


def estimate(
    scores_S: torch.Tensor, *, group_S: torch.Tensor, settings: AlgorithmKeys
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return VERL's advantage of every score and the unit of distances from it, both [S], float64.

    Both are 0 where a score is alone in its group, and where the estimator divides by a deviation that is none.
    """
    name = settings.adv_estimator
    compared_S = torch.bincount(group_S)[group_S] > 1  # [S] bool: at least two rollouts share the group
    differs_S = _has_contrast(scores_S, group_S, is_batch=name == "reinforce_plus_plus")  # [S] bool
    found_S, unit_S = torch.zeros_like(scores_S), _subtracting_unit(compared_S, settings)
    if not bool(differs_S.any()):
        return found_S, unit_S
    # VERL sees only the scores that may enter its statistics. The baseline form whitens over the batch, where groups
    # whose rollouts are equal count with their zeros; a group of one would count with its raw score and is left out.
    counted_S = compared_S if name == "reinforce_plus_plus_baseline" else differs_S
    kept_S, kept_group_S = scores_S[counted_S], group_S[counted_S]
    options = {"norm_adv_by_std_in_grpo": settings.norm_adv_by_std_in_grpo} if name == "grpo" else {}
    function = verl_part("verl.trainer.ppo.core_algos:get_adv_estimator_fn")(name)
    values_S1, _ = function(  # [S, 1]: to VERL every score is a response of one token
        token_level_rewards=kept_S[:, None].clone(),  # a copy: kept_S is needed once more below
        response_mask=torch.ones(len(kept_S), 1, dtype=torch.float64),
        index=np.asarray(kept_group_S),
        # gamma = 1: discounting is credit's, and a response of one token has nothing to discount
        config=verl_part("verl.trainer.config:AlgoConfig")(adv_estimator=name, gamma=1.0),
        **options,
    )
    found_S[counted_S] = values_S1[:, 0]
    if not _only_subtracts(settings):
        unit_S[counted_S] = _unit(kept_S, kept_group_S, settings)
    # Groups without a contrast are set to 0 exactly: what VERL made of them is rounding.
    return found_S * differs_S, unit_S


def _only_subtracts(settings: AlgorithmKeys) -> bool:
    """Return whether the estimator subtracts a baseline and divides by nothing."""
    name = settings.adv_estimator
    return name == "rloo" or (name == "grpo" and not settings.norm_adv_by_std_in_grpo)


def _subtracting_unit(compared_S: torch.Tensor, settings: AlgorithmKeys) -> torch.Tensor:
    """Return 1 for scores that are compared with others and not divided by anything, else 0; [S], float64."""
    return compared_S.double() * float(_only_subtracts(settings))


def _has_contrast(scores_S: torch.Tensor, group_S: torch.Tensor, *, is_batch: bool) -> torch.Tensor:
    """Return where a score is compared with others that differ from it or from each other; [S] bool."""
    groups_S = torch.zeros_like(group_S) if is_batch else group_S  # REINFORCE++ has one group, the batch
    differs_S = torch.zeros(len(scores_S), dtype=torch.bool)
    for group in dict.fromkeys(integers(groups_S)):
        own_S = groups_S == group
        scores = scores_S[own_S]
        # Relative for large scores, absolute for small ones: float64 rounds a sum of rewards far below either.
        limit = ROUNDING * max(1.0, float(scores.abs().max()))
        differs_S[own_S] = bool(scores.max() - scores.min() > limit)  # a group of one: 0 > limit is false
    return differs_S


def _unit(scores_S: torch.Tensor, group_S: torch.Tensor, settings: AlgorithmKeys) -> torch.Tensor:
    """Return what a distance from a score is multiplied with by an estimator that divides; [S], float64."""
    name = settings.adv_estimator
    if name == "reinforce_plus_plus":
        return _whitening_unit(scores_S)
    centred_S, unit_S = scores_S.clone(), torch.ones_like(scores_S)
    for group in dict.fromkeys(integers(group_S)):
        own_S = group_S == group
        centred_S[own_S] -= scores_S[own_S].mean()  # r_i - mean_G
        unit_S[own_S] = 1.0 / (scores_S[own_S].std() + 1e-6)  # VERL's epsilon, added to the deviation
    return unit_S if name == "grpo" else _whitening_unit(centred_S)


def _whitening_unit(scores_S: torch.Tensor) -> torch.Tensor:
    """Return 1 / sqrt(var + 1e-8), the same for every score; [S], float64."""
    # `masked_var` divides by n - 1 and wants two scores, which a contrast guarantees.
    variance = verl_part("verl.utils.torch_functional:masked_var")(scores_S, torch.ones_like(scores_S))
    return torch.full_like(scores_S, float(torch.rsqrt(variance + 1e-8)))  # the epsilon of VERL's `masked_whiten`
