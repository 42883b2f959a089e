"""The reward of the example: is the booked room the smallest that fits, and if not, why not."""

from collections.abc import Sequence
from typing import Any

import office
from agent import booked_room

import agl


class RightRoom:
    """Reads the agent's last answer; `needs` is a field of the task that the agent never sees."""

    def __call__(self, rollout: Any, spans: Sequence[Any]) -> agl.Reward:
        """Return the reward of one run, with feedback in words for the optimiser."""
        # A failed call has no choices.
        answers = [span.call.response for span in spans if span.call and "choices" in (span.call.response or {})]
        messages = [answer["choices"][0]["message"] for answer in answers]
        text = (messages[-1].get("content") or "") if messages else ""
        score, feedback = office.judge(booked_room(text), rollout.task["needs"])
        return agl.Reward(value=score, source="evaluator", feedback=feedback)
