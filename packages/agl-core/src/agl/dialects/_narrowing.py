"""The parameters by which a request asks for less than the policy's full distribution.

A policy gradient, and every importance weight, is about the distribution that tokens were drawn from. Top-p, top-k,
penalties and the like draw from another one than the policy's softmax at the request's temperature, which is the one
that training computes. A temperature above 0 is no such parameter: training divides by it as well.
"""

from agl import semconv
from agl.dialects._foreign import as_dict
from agl.dialects._request import Request
from agl.schemas import Json

_NEUTRAL: dict[str, tuple[Json, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty"), (1.0,)),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "min_tokens", "no_repeat_ngram_size"), (0,)),
    **{
        "top_k": (-1, 0),
        "best_of": (None, 1),
        "use_beam_search": (False,),
        "watermarking": (False,),
        "logit_bias": ({},),
        "bad_words": ([],),
    },
}
"""Values that leave the distribution whole. The first is sent, for a server may have another default."""

_TYPED = ("response_format", "text", "output_config", "tool_choice")
_GUIDES = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "allowed_token_ids"),
    *("thinking_token_budget", "logits_processors"),  # vLLM's too, as those above
    *("regex", "ebnf", "json_schema", "structural_tag", "custom_logit_processor"),  # SGLang's
)
"""Constraints on the answer's form, which an agent cannot do without."""


def sampled(asked: Request, rule: str) -> tuple[Request, dict[str, Json]]:
    """The request to send under a rule of :attr:`agl.contracts.Upstream.sampling`, with attributes of the call's span.

    ``override`` gives parameters their neutral values, and greedy decoding temperature 1; constraints on the answer's
    form stay. Every other rule leaves the request as it is. The attributes name what was overridden, and what was
    sent and narrows; there are none without a rule.
    """
    found = {key: asked.get(key) for key in (*_NEUTRAL, *_TYPED, *_GUIDES)} if rule else {}
    before = {key: value for key, value in found.items() if value is not None and _narrows(key, value)}
    changes = {key: _NEUTRAL[key][0] for key in before if key in _NEUTRAL and rule == "override"}
    named = {semconv.SAMPLING_OVERRIDDEN: changes.keys(), semconv.SAMPLING_KEPT: before.keys() - changes.keys()}
    notes = {name: [f"{key} = {before[key]!r}"[:100] for key in sorted(keys)] for name, keys in named.items() if keys}
    return asked.changed(changes), notes


def _narrows(key: str, value: Json) -> bool:
    if key in _TYPED:
        fields = as_dict(value)
        kind = as_dict(fields.get("format", fields)).get("type") if fields else value
        return kind not in (None, "text", "auto", "none")
    return value == 0 if key == "temperature" else value not in _NEUTRAL.get(key, ())
