"""From credit to advantages, through VERL's own estimators (`verl.trainer.ppo.core_algos`).

VERL's estimators compare rows of a batch. Here a row is one rollout's score among those that it is compared with: the
mean of what credit gave its calls. So every statistic counts rollouts, however many calls and rows they have.
A call that was given something else than its rollout's score is as far from the score as credit says, in the
estimator's unit: with credit `episode` that distance is zero, and the advantage is VERL's.

    estimator                     unit of a distance
    grpo                          1 / (std of the group + 1e-6), or 1 without norm_adv_by_std_in_grpo
    rloo                          1
    reinforce_plus_plus           1 / sqrt(VERL's variance of the batch + 1e-8)
    reinforce_plus_plus_baseline  the same, of the batch less its groups' means

Deviations from VERL: a group of one has nothing to compare with and gets 0, where VERL gives the score itself;
scores that differ by rounding only count as equal, where VERL would divide rounding by its own deviation. Where an
estimator divides, calls of equal rollouts get 0 as well, for nothing says how much a difference between them is.
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
"""Scores closer than this, relative to the largest (at least 1), are equal."""


def advantages(
    credits: Sequence[Sequence[CallCredit]], *, groups: Sequence[int], settings: AlgorithmKeys
) -> list[dict[str, float]]:
    """Return advantages by span id for each rollout; `groups` is the task of each rollout.

    A call whose credit says `is_advantage` keeps its value.
    """
    result: list[dict[str, float]] = [{c.span_id: c.value for c in calls if c.is_advantage} for calls in credits]
    members: defaultdict[tuple[tuple[int, str], int], list[CallCredit]] = defaultdict(list)
    for rollout, calls in enumerate(credits):
        for call in calls:
            if not call.is_advantage:
                members[(groups[rollout], call.baseline), rollout].append(call)
    if not members:
        return result
    keys = {group: number for number, group in enumerate(dict.fromkeys(group for group, _ in members))}
    means = [sum(call.value for call in calls) / len(calls) for calls in members.values()]
    scores_S = torch.tensor(means, dtype=torch.float64)
    group_S = torch.tensor([keys[group] for group, _ in members])
    found_S, unit_S = estimate(scores_S, group_S=group_S, settings=settings)
    for index, ((_, rollout), calls) in enumerate(members.items()):
        for call in calls:
            away = (call.value - float(scores_S[index])) * float(unit_S[index])
            result[rollout][call.span_id] = float(found_S[index]) + away
    return result


def estimate(
    scores_S: torch.Tensor, *, group_S: torch.Tensor, settings: AlgorithmKeys
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return VERL's advantage of every score and the unit of distances from it, both [S], float64."""
    name = settings.adv_estimator
    compared_S = torch.bincount(group_S)[group_S] > 1
    differs_S = _has_contrast(scores_S, group_S, is_batch=name == "reinforce_plus_plus")
    found_S, unit_S = torch.zeros_like(scores_S), _subtracting_unit(compared_S, settings)
    if not bool(differs_S.any()):
        return found_S, unit_S
    counted_S = compared_S if name == "reinforce_plus_plus_baseline" else differs_S
    kept_S, kept_group_S = scores_S[counted_S], group_S[counted_S]
    options = {"norm_adv_by_std_in_grpo": settings.norm_adv_by_std_in_grpo} if name == "grpo" else {}
    function = verl_part("verl.trainer.ppo.core_algos:get_adv_estimator_fn")(name)
    values_S1, _ = function(
        token_level_rewards=kept_S[:, None].clone(),
        response_mask=torch.ones(len(kept_S), 1, dtype=torch.float64),
        index=np.asarray(kept_group_S),
        config=verl_part("verl.trainer.config:AlgoConfig")(adv_estimator=name, gamma=1.0),
        **options,
    )
    found_S[counted_S] = values_S1[:, 0]
    if not _only_subtracts(settings):
        unit_S[counted_S] = _unit(kept_S, kept_group_S, settings)
    return found_S * differs_S, unit_S


def _only_subtracts(settings: AlgorithmKeys) -> bool:
    """Whether the estimator only subtracts."""
    name = settings.adv_estimator
    return name == "rloo" or (name == "grpo" and not settings.norm_adv_by_std_in_grpo)


def _subtracting_unit(compared_S: torch.Tensor, settings: AlgorithmKeys) -> torch.Tensor:
    """1 for scores that are compared with others and not divided by anything, else 0; [S], float64."""
    return compared_S.double() * float(_only_subtracts(settings))


def _has_contrast(scores_S: torch.Tensor, group_S: torch.Tensor, *, is_batch: bool) -> torch.Tensor:
    """Where a score differs from what it is compared with; [S] bool."""
    groups_S = torch.zeros_like(group_S) if is_batch else group_S
    limit = ROUNDING * max(1.0, float(scores_S.abs().max()))
    differs_S = torch.zeros(len(scores_S), dtype=torch.bool)
    for group in dict.fromkeys(integers(groups_S)):
        own_S = groups_S == group
        scores = scores_S[own_S]
        differs_S[own_S] = bool(scores.max() - scores.min() > limit)
    return differs_S


def _unit(scores_S: torch.Tensor, group_S: torch.Tensor, settings: AlgorithmKeys) -> torch.Tensor:
    name = settings.adv_estimator
    if name == "reinforce_plus_plus":
        return _whitening_unit(scores_S)
    centred_S, unit_S = scores_S.clone(), torch.ones_like(scores_S)
    for group in dict.fromkeys(integers(group_S)):
        own_S = group_S == group
        centred_S[own_S] -= scores_S[own_S].mean()
        unit_S[own_S] = 1.0 / (scores_S[own_S].std() + 1e-6)
    return unit_S if name == "grpo" else _whitening_unit(centred_S)


def _whitening_unit(scores_S: torch.Tensor) -> torch.Tensor:
    variance = verl_part("verl.utils.torch_functional:masked_var")(scores_S, torch.ones_like(scores_S))
    return torch.full_like(scores_S, float(torch.rsqrt(variance + 1e-8)))
