"""The reward of the example: 1 when the team reports what lies in the ordered box, else 0, for both agents alike."""

from collections.abc import Sequence
from typing import Any

import agl


def score(rollout: Any, spans: Sequence[Any]) -> agl.Reward:
    """Return the reward of one run; its dimensions, which train nothing, show who did well.

    The guide did well if it named the right box, the picker if it reported what lies in the box that the guide named.
    """
    # A failed call has no choices.
    calls = [span.call.response for span in spans if span.call and "choices" in (span.call.response or {})]
    said = [(call["choices"][0]["message"].get("content") or "").strip() for call in calls]
    box, report = (said[0], said[-1]) if len(said) > 1 else ("", "")
    task = rollout.task
    return agl.Reward(
        value=float(report == task["boxes"][task["box"]]),
        dimensions={"guide": float(box == task["box"]), "picker": float(report == task["boxes"].get(box))},
    )
