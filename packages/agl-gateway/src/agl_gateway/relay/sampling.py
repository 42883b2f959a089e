"""Adjusts the sampling of a policy in training to the rollout: full distribution, greedy decoding, or a seed.

Top-p, top-k, penalties, greedy decoding and the like draw tokens from another distribution than the one that training
computes, which biases the gradient. This concerns only the policies that train on the rollout: other policies, and all
policies in validation, sample as the agent asks. A greedy rollout, whose reward is the baseline of others, gets the
likeliest tokens instead.

A server that draws random numbers for all requests from one stream gives a call different numbers whenever calls arrive
in another order. So the gateway seeds each call from the rollout's seed, the attempt's number and the call's position:
how many calls with the same opening the attempt made before. Agents of one rollout that call at the same time mostly
have different openings; if they do not, their order matters. The seed goes to the policy's server in a header, so that
the request stays as the agent sent it. The embedded server of ``agl-algo-torch`` reads the header if the request has no
``seed``; other servers ignore it.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import cast

import msgspec

from agl import semconv
from agl.contracts import RolloutQuery, Store, Upstream, trains
from agl.dialects import Request, sampled
from agl.errors import NotFoundError
from agl.schemas import Json, Rollout
from agl_gateway.recent import Recent
from agl_gateway.record.outage import Outage
from agl_gateway.wire.problems import Problem
from agl_gateway.wire.translation import opening_of
from agl_run import greedy_policies

SEED_HEADER = "x-agl-seed"

_LONGEST = 1024 * 1024
"""Size in bytes from which a request's opening is not read, because that would block the event loop for too long."""


@dataclass(eq=False, kw_only=True)
class SamplingRules:
    """Applies :attr:`agl.contracts.Upstream.sampling` to the calls of rollouts, and gives the calls seeds.

    Attributes:
        position: Returns the position of an attempt's next call among the calls with the same opening, from 1.
    """

    store: Store
    outage: Outage
    position: Callable[[str, bytes], Awaitable[int]]
    _known: Recent[str, Rollout] = field(default_factory=lambda: Recent(10_000), init=False)

    async def apply(self, asked: Request, upstream: Upstream, rollout_id: str) -> tuple[Request, Mapping[str, Json]]:
        """Return the request to send, and the span attributes that record the sampling parameters that the agent set.

        Raises:
            Problem: 400 if the upstream refuses such parameters during training.
        """
        if upstream.is_trained and upstream.name in greedy_policies(await self._rollout(rollout_id)):
            whole, _ = sampled(asked, "override")  # penalties would make other tokens the likeliest
            return whole.changed({"temperature": 0}), {}
        rule = upstream.sampling
        sent, notes = sampled(asked, "override" if rule == "refuse" else rule)
        if not notes or not trains(await self._rollout(rollout_id), upstream.name):
            return asked, {}
        overridden = cast("list[str]", notes.get(semconv.SAMPLING_OVERRIDDEN, []))
        if rule == "refuse" and overridden:
            raise Problem(
                400,
                f"the request sets {', '.join(overridden)}, and policy {upstream.name!r} is in training, where it "
                "samples from its full distribution; leave these parameters out while training, or set "
                f'[policy.{upstream.name}] sampling = "override" to have them ignored there, or "keep" to train on '
                "such samples with a biased gradient",
                code="narrowed_sampling",
            )
        return sent, notes

    async def seed(self, asked: Request, upstream: Upstream, *, rollout_id: str, attempt_id: str) -> Mapping[str, str]:
        """Return the header that carries the seed of the attempt's next call; empty if the rollout has no seed."""
        seed = (await self._rollout(rollout_id)).metadata.get("seed") if upstream.is_trained else None
        if not isinstance(seed, int):
            return {}
        opening = opening_of(asked) if len(asked.body) < _LONGEST else None
        digest = blake2b(msgspec.json.encode(opening, order="sorted"), digest_size=8).digest()
        number = await self.position(attempt_id, digest)
        attempt = attempt_id.rpartition(".")[2]
        drawn = blake2b(b"%d/%b/%d/%b" % (seed, attempt.encode(), number, digest), digest_size=7)
        return {SEED_HEADER: str(int.from_bytes(drawn.digest()))}

    async def _rollout(self, rollout_id: str) -> Rollout:
        """Return a rollout without its task; one that trains nothing if the store does not have it or does not answer.

        The mode and the metadata of a rollout never change.
        """
        if rollout_id not in self._known:
            query = RolloutQuery(ids=(rollout_id,))
            try:
                found = await self.outage.unless(lambda: self.store.rollouts(query), list[Rollout])
            except NotFoundError:
                found = []
            if not found:
                return Rollout(rollout_id=rollout_id, task=None, mode="test")
            self._known[rollout_id] = msgspec.structs.replace(found[0], task=None)
        return self._known[rollout_id]
