"""The reward of the example: the share of the letters that are right, of the whole run and of each turn."""

from collections.abc import Sequence
from typing import Any

from agent import AT_ONCE

from agl import Reward


class Letters:
    """Reads what was recorded of a finished run; `letters` is a field of the task that the agent never sees."""

    def __call__(self, rollout: Any, spans: Sequence[Any]) -> list[Reward]:
        """Return the reward of the run, `letters`, and one for each of its turns, `turn`."""
        asked = rollout.task["letters"]
        # A failed call has no choices.
        answered = [span for span in spans if span.call and "choices" in (span.call.response or {})]
        turns = [
            Reward(
                value=share(asked[at * AT_ONCE : (at + 1) * AT_ONCE], span),
                name="turn",
                scope="turn",
                span_id=span.span_id,
            )
            for at, span in enumerate(answered)
        ]
        return [Reward(value=sum(turn.value or 0.0 for turn in turns) * AT_ONCE / len(asked), name="letters"), *turns]


def share(wanted: str, span: Any) -> float:
    """Return the share of letters that an answer has right; an answer of too many or too few letters has none."""
    given = span.call.response["choices"][0]["message"].get("content") or ""
    return sum(a == b for a, b in zip(wanted, given, strict=True)) / len(wanted) if len(wanted) == len(given) else 0.0
