"""Sampling parameters in training: those that are overridden, and those that stay."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl import semconv
from agl.dialects import Request, sampled

CUTS = {
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "typical_p": 0.9,
    "presence_penalty": 1,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 10},
    "bad_words": ["no"],
    "min_tokens": 3,
    "best_of": 4,
    "use_beam_search": True,
    "watermarking": True,
    "temperature": 0,
}
FORMS = {
    "response_format": {"type": "json_schema", "json_schema": {}},
    "text": {"format": {"type": "json_object"}},
    "output_config": {"format": {"type": "json_schema"}},
    "tool_choice": "required",
    "guided_json": {"properties": {}},
    "structured_outputs": {"regex": "a+"},
    "allowed_token_ids": [1, 2],
    "thinking_token_budget": 100,
    "regex": "a+",
    "json_schema": "{}",
    "custom_logit_processor": "code",
}
FREE = {
    "response_format": {"type": "text"},
    "text": {"verbosity": "low"},
    "output_config": {"effort": "low"},
    "tool_choice": {"type": "auto"},
    "top_k": 0,
    "top_p": 1,
    "temperature": 0.3,
    "best_of": 1,
    "seed": 7,
}


def request(**fields: Any) -> Request:
    return Request("chat", json.dumps({"model": "m", **fields}).encode())


def names(notes: Any, attribute: str) -> set[str]:
    return {text.split(" ")[0] for text in notes.get(attribute, [])}


@given(st.dictionaries(st.sampled_from(sorted({*CUTS, *FORMS})), st.none()), st.sampled_from(["override", "keep"]))
def test_every_parameter_is_overridden_or_kept_and_once_overridden_nothing_is_left(chosen: Any, rule: str) -> None:
    asked = request(**{name: {**CUTS, **FORMS}[name] for name in chosen})
    sent, notes = sampled(asked, rule)
    cut = set(chosen) & set(CUTS) if rule == "override" else set[str]()
    assert (cut, set(chosen) - cut) == (names(notes, semconv.SAMPLING_OVERRIDDEN), names(notes, semconv.SAMPLING_KEPT))
    again, left = sampled(sent, rule)
    assert again is sent
    assert set(chosen) - cut == names(left, semconv.SAMPLING_KEPT)
    assert cut or sent is asked


@pytest.mark.parametrize("name", FREE)
def test_parameter_that_leaves_the_distribution_whole_is_not_named(name: str) -> None:
    asked = request(**{name: FREE[name]})
    assert (asked, {}) == sampled(asked, "override")


def test_without_a_rule_nothing_is_named() -> None:
    asked = request(top_p=0.5)
    assert (asked, {}) == sampled(asked, "")
