"""Seeds the draws of a policy in training, so that a run's seed fixes its tokens.

A server that draws for all its requests from one stream gives each call other numbers whenever calls meet in another
order. The seed of a call here follows from its rollout's seed, the number of its attempt, and its position: how many
calls with the same opening the attempt made before it. Agents of one rollout that call at the same time have openings
of their own, mostly; where they do not, their order counts.

The seed goes to the policy's server in a header, so that the request stays what the agent sent. The embedded server of
``agl-algo-torch`` reads it where the request has no ``seed``; other servers ignore it.
"""

from collections.abc import Awaitable, Callable, Mapping
from hashlib import blake2b

import msgspec

from agl.contracts import Upstream
from agl.dialects import Request
from agl_gateway.relay.rollout_facts import RolloutFacts
from agl_gateway.traffic.conversation_ids import opening_of

SEED_HEADER = "x-agl-seed"

_LONGEST = 1024 * 1024
"""Bytes of a request from which its opening is not looked at: that would take the event loop for too long."""


class DrawSeeds:
    """Gives the calls of seeded rollouts to trained policies a seed each.

    Args:
        position: Returns the position of an attempt's next call among those with an opening, from 1.
    """

    def __init__(self, rollouts: RolloutFacts, *, position: Callable[[str, bytes], Awaitable[int]]) -> None:
        self._rollouts = rollouts
        self._position = position

    async def headers(
        self, asked: Request, upstream: Upstream, *, rollout_id: str, attempt_id: str
    ) -> Mapping[str, str]:
        """Return the header with the seed of the attempt's next call; empty for a call that has none."""
        if not upstream.is_trained:
            return {}
        seed = (await self._rollouts.of(rollout_id)).seed
        if seed is None:
            return {}
        opening = _digest(asked)
        number = await self._position(attempt_id, opening)
        attempt = attempt_id.rpartition(".")[2]
        drawn = blake2b(b"%d/%b/%d/%b" % (seed, attempt.encode(), number, opening), digest_size=7)
        return {SEED_HEADER: str(int.from_bytes(drawn.digest()))}


def _digest(asked: Request) -> bytes:
    opening = opening_of(asked) if len(asked.body) < _LONGEST else None
    return blake2b(msgspec.json.encode(opening, order="sorted"), digest_size=8).digest()
