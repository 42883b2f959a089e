"""The reward of the example: 1 when the lead delegated and the crew's answer is right, else 0."""

import re
from collections.abc import Sequence
from typing import Any


class DelegatedAndRight:
    """Reads what was recorded of a finished run; `answer` is a field of the task that the crew never sees."""

    def __call__(self, rollout: Any, spans: Sequence[Any]) -> float:
        """Return the reward of one run."""
        # A failed call has no choices.
        answers = [span.call.response for span in spans if span.call and "choices" in (span.call.response or {})]
        messages = [answer["choices"][0]["message"] for answer in answers]
        calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls") or []]
        if not any(name.endswith("_coworker") for name in calls):
            return 0.0
        numbers = re.findall(r"\d+", messages[-1].get("content") or "")
        return float(bool(numbers) and numbers[-1] == rollout.task["answer"])
