"""Lets a policy in training sample from its full distribution, whatever its agents ask for.

Top-p, top-k, penalties, greedy decoding and the like draw tokens from another distribution than the one that training
computes, which biases the gradient. Only rollouts that train are concerned: validation samples as the agent asks.
A greedy rollout, whose reward others are compared with, gets the likeliest tokens instead.
"""

from collections.abc import Mapping
from typing import cast

from agl import semconv
from agl.contracts import Upstream
from agl.dialects import Request, sampled
from agl.schemas import Json
from agl_gateway.relay.rollout_facts import RolloutFacts
from agl_gateway.wire.problems import Problem


class SamplingRules:
    """Applies :attr:`agl.contracts.Upstream.sampling` to the calls of rollouts of mode ``train``."""

    def __init__(self, rollouts: RolloutFacts) -> None:
        self._rollouts = rollouts

    async def apply(self, asked: Request, upstream: Upstream, rollout_id: str) -> tuple[Request, Mapping[str, Json]]:
        """Return the request to send, and the attributes of the call's span that name what the agent asked for.

        Raises:
            Problem: 400 where the upstream refuses such calls.
        """
        if upstream.is_trained and upstream.name in (await self._rollouts.of(rollout_id)).greedy:
            whole, _ = sampled(asked, "override")  # penalties would make other tokens the likeliest
            return whole.changed({"temperature": 0}), {}
        rule = upstream.sampling
        sent, notes = sampled(asked, "override" if rule == "refuse" else rule)
        if not notes or (await self._rollouts.of(rollout_id)).mode != "train":
            return asked, {}
        overridden = cast("list[str]", notes.get(semconv.SAMPLING_OVERRIDDEN, []))
        if rule == "refuse" and overridden:
            raise Problem(400, _refusal(upstream.name, ", ".join(overridden)), code="narrowed_sampling")
        return sent, notes


def _refusal(policy: str, asked: str) -> str:
    return (
        f"the request asks for {asked}, and policy {policy!r} is in training, where it samples from its full "
        f'distribution; leave these parameters out while training, or set [policy.{policy}] sampling = "override" '
        'to have them ignored there, or "keep" to train on such samples with a biased gradient'
    )
