"""The reward of the example: the share of the form's entries that say the right thing in the way the shop wants it."""

from collections.abc import Mapping, Sequence
from typing import Any

import house

import agl


class FormIsRight:
    """Reads the writer's draft and the form that the checker sent; `facts` is a field that the agent never sees.

    Its parts are `facts`, the share of the entries that the writer got right, and `style`, the share of these that
    were sent in the style of the house; there is no `style` where no entry is right.
    """

    def __call__(self, rollout: Any, spans: Sequence[Any]) -> agl.Reward:
        """Return the reward of one run, with feedback in words for the optimiser."""
        # A failed call has no choices.
        answers = [span.call.response for span in spans if span.call and "choices" in (span.call.response or {})]
        texts = [answer["choices"][0]["message"] for answer in answers]
        draft, form = (house.read_form(texts[place].get("content") or "") if texts else {} for place in (0, -1))
        facts: dict[str, str] = rollout.task["facts"]
        known = {field: fact for field, fact in facts.items() if draft.get(field) == fact}
        right = [field for field, fact in facts.items() if form.get(field) == house.wanted(field, fact)]
        in_style = [field for field in right if field in known]
        return agl.Reward(
            value=len(right) / len(facts),
            source="evaluator",
            dimensions={
                "facts": len(known) / len(facts),
                "style": len(in_style) / len(known) if known else None,
            },
            feedback=" ".join(complaint(field, facts[field], draft, form) for field in facts if field not in right),
        )


def complaint(field: str, fact: str, draft: Mapping[str, str], form: Mapping[str, str]) -> str:
    """The faults of an entry: the writer's reading, or the way in which the checker sent it."""
    if draft.get(field) != fact:
        return f"[writer] {field}: the letter says something else."
    found = next((style for style in house.STYLES if form.get(field) == house.styled(fact, style)), "something else")
    return f"[checker] {field}: expected {house.HOUSE.get(field, house.PLAIN)}, found {found}."
