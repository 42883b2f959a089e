"""The reward of the example: the share of the letters that are right."""

from collections.abc import Sequence
from typing import Any


class Letters:
    """Reads what was recorded of a finished run; `letters` is a field of the task that the agent never sees."""

    def __call__(self, rollout: Any, spans: Sequence[Any]) -> float:
        """Return the reward of one run."""
        answers = [span.call.response["choices"][0]["message"] for span in spans if span.call and span.call.response]
        asked = rollout.task["letters"]
        pairs = [asked[at : at + 2] for at in range(0, len(asked), 2)]
        right = [
            wanted == given
            for pair, answer in zip(pairs, answers, strict=False)
            for wanted, given in zip(pair, answer.get("content") or "", strict=False)
        ]
        return sum(right) / len(asked)
