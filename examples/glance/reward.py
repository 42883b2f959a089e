"""The reward of the example: the share of the letters that are right."""

from collections.abc import Sequence
from typing import Any

from agent import AT_ONCE


class Letters:
    """Reads what was recorded of a finished run; `letters` is a field of the task that the agent never sees."""

    def __call__(self, rollout: Any, spans: Sequence[Any]) -> float:
        """Return the reward of one run; an answer of too many or too few letters has none that counts."""
        answers = [span.call.response["choices"][0]["message"] for span in spans if span.call and span.call.response]
        asked = rollout.task["letters"]
        right = 0
        for turn, answer in enumerate(answers):
            wanted, given = asked[turn * AT_ONCE : (turn + 1) * AT_ONCE], answer.get("content") or ""
            if len(wanted) == len(given):
                right += sum(a == b for a, b in zip(wanted, given, strict=True))
        return right / len(asked)
