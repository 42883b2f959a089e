"""Keeps agents that share the trained weights, but are not trained themselves, near the policy at the start.

An update on the calls of one agent changes the answers of every agent with the same weights. The anchor therefore adds
to the loss of each update

    anchor_coef * mean over tokens of KL(pi || pi_ref)

The tokens are those that calls of untrained agents sampled in the rollouts of the update, at their sampling
temperatures. pi_ref is the policy at the algorithm's start. The KL is estimated as in the algorithm's KL penalty.
The calls of untrained agents have no advantage and count in no statistics.
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
    from agl_algo_torch.learner.pictures import Pictures
    from agl_algo_torch.learner.policy_learner import PolicyLearner
    from agl_algo_torch.learner.tuned_policy import TunedPolicy


class Anchor:
    """The KL anchor of one algorithm.

    Args:
        coef: Weight of the anchor in the loss; 0 turns it off.
        kl: The estimate of the KL divergence.
    """

    def __init__(self, *, coef: float, kl: KL) -> None:
        self._coef = coef
        self._kl: KL = kl

    @property
    def is_on(self) -> bool:
        """True if the anchor's coefficient is above 0; then the policy at the start must be kept as the reference."""
        return self._coef > 0

    def rows(self, episodes: Sequence[Episode], *, policy: str, pictures: Pictures | None = None) -> list[RowSample]:
        """Return a row for each call that the policy answered for an untrained agent; empty if the anchor is off.

        Calls with pictures that are not at hand are left out.
        """
        calls = [call for episode in episodes for call in episode.transitions] if self.is_on else []
        rows = [(call, _row(call, pictures)) for call in calls if _is_held(call, policy)]
        return [row for call, row in rows if row.pictures or not call.media]

    def add_gradient(
        self, learner: PolicyLearner, tuned: TunedPolicy, rows: Sequence[RowSample], *, rollouts: Collection[str]
    ) -> dict[str, float]:
        """Add the anchor's gradient to the update's gradient, using those `rows` that belong to the given rollouts.

        Returns the metric `anchor_kl`, the estimated KL in nats per token; `{}` if the rollouts have no such rows.
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
    """Return true if the policy answered the call, but for an agent that the algorithm does not train.

    The call must also have recorded token ids.
    """
    return call.reject == "not_selected" and call.policy == policy and bool(call.prompt_ids and call.response_ids)


def _row(call: Transition, pictures: Pictures | None) -> RowSample:
    prompt, answer = unpack_ids(call.prompt_ids), unpack_ids(call.response_ids)
    mask = [0] * len(prompt) + [1] * len(answer)
    own = pictures.of(call.media) if pictures else None
    return from_tokens(call.rollout_id, [*prompt, *answer], mask, temperature=call.temperature or 1.0, pictures=own)
