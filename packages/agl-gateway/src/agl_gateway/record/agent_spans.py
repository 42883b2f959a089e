"""The form in which spans are stored that come with an attempt's own token.

Rewards in these spans get the source ``agent``, model calls lose the name of the policy, and what only a runner records
is removed. So an agent can forge neither training data nor what rewards rely on.
"""

from collections.abc import Sequence

import msgspec

from agl import semconv
from agl.schemas import Span
from agl_gateway.wire.problems import Problem
from agl_run.access import AttemptToken


def spans_of_agent(claim: AttemptToken, spans: Sequence[Span]) -> list[Span]:
    """Return ``spans`` in the form that an attempt's own token may append.

    Raises:
        Problem: 403 for a span of another attempt.
    """
    own = (claim.rollout_id, claim.attempt_id)
    for span in spans:
        if (span.rollout_id, span.attempt_id) != own:
            raise Problem(
                403,
                f"span {span.span_id!r} belongs to attempt {span.attempt_id!r} and the token to another one; "
                "append to your own attempt",
            )
    return [as_said_by_agent(span) for span in spans]


def as_said_by_agent(span: Span) -> Span:
    """Return a span without what an agent cannot know of its own attempt."""
    replace = msgspec.structs.replace
    reward = replace(span.reward, source="agent") if span.reward else None
    call = replace(span.call, policy="") if span.call else None
    attributes = {name: value for name, value in span.attributes.items() if name not in semconv.RUNNER_ATTRIBUTES}
    return replace(span, reward=reward, call=call, attributes=attributes, sequence=0, is_late=False)
