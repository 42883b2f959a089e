"""Holds agents that share the trained weights, and are not trained themselves, near where they began.

An update for one agent's calls moves the answers of every agent on the same weights. Each update adds to its loss

    anchor_coef * mean over tokens of KL(pi || pi_ref)

over the tokens that the other agents' calls sampled in the rollouts of the update, at the temperatures that they were
sampled with. pi_ref is the policy at the algorithm's start, and the estimate of KL is that of the algorithm's penalty.
The calls have no advantage and count in no statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from agl.schemas import unpack_ids
from agl_algo_torch.learner.batch import RowSample, from_tokens
from agl_algo_torch.learner.typed_torch import backward
from agl_objectives.kl import KL, kl_estimate

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from agl.schemas import Episode, Transition
    from agl_algo_torch.learner.policy_learner import PolicyLearner
    from agl_algo_torch.learner.tuned_policy import TunedPolicy


class Anchor:
    """The KL anchor of one algorithm.

    Args:
        coef: Its weight; 0 turns it off.
        kl: The estimate.
    """

    def __init__(self, *, coef: float, kl: KL) -> None:
        self._coef = coef
        self._kl: KL = kl

    @property
    def is_on(self) -> bool:
        """True if the anchor has a weight, so that the policy at the start is needed."""
        return self._coef > 0

    def rows(self, episodes: Sequence[Episode], *, policy: str) -> list[RowSample]:
        """Return a row for each call that the policy answered for an agent that is not trained; none if it is off."""
        calls = [call for episode in episodes for call in episode.transitions] if self.is_on else []
        return [_row(call) for call in calls if _is_held(call, policy)]

    def add_gradient(
        self, learner: PolicyLearner, tuned: TunedPolicy, rows: Sequence[RowSample], *, rollouts: Collection[str]
    ) -> dict[str, float]:
        """Add the anchor's gradient for the rows of these rollouts to that of an update; returns the distance to log.

        The distance `anchor_kl` is in nats per token; nothing is returned where there are no such tokens.
        """
        held = [row for row in rows if row.rollout in rollouts]
        tokens = sum(row.trained_tokens for row in held)
        summed, model = 0.0, learner.loaded.model
        for batch in learner.batches(held, [1.0] * len(held), total=max(1, tokens)):
            logp_M = batch.logprobs(model)  # [M]
            with torch.no_grad(), tuned.reference.active() as model_ref:
                reference_M = batch.logprobs(model_ref)  # [M]
            distance = batch.mean(kl_estimate(logp_M, reference_M, kind=self._kl))
            backward(self._coef * distance)
            summed += float(distance.detach())
        return {"anchor_kl": summed} if tokens else {}


def _is_held(call: Transition, policy: str) -> bool:
    """Return true for a call that the policy answered with token ids and the agent filter leaves out."""
    return call.reject == "not_selected" and call.policy == policy and bool(call.prompt_ids and call.response_ids)


def _row(call: Transition) -> RowSample:
    prompt, answer = unpack_ids(call.prompt_ids), unpack_ids(call.response_ids)
    mask = [0] * len(prompt) + [1] * len(answer)
    return from_tokens(call.rollout_id, [*prompt, *answer], mask, temperature=call.temperature or 1.0)
