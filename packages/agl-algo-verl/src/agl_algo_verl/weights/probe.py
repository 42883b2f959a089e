"""A probe stored with saved weights: a fixed text and its log-probabilities, with which servers are checked.

A server with other log-probabilities serves other weights (`agl.schemas.WeightsProbe`). In one process VERL's engine
scores the text, because it has the weights in memory. After a step on Ray the saved files are loaded to score it:
VERL's trainer does not expose its weights after the last update, and its replicas are what the probe must check.

Axes: T tokens of the text, V the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from agl.schemas import WeightsProbe, write_probe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agl.schemas import Weights

TEXT = 'Water boils at 100 degrees, and 12 + 30 is 42. {"name": "probe"} is an object in JSON.'
MOST_TOKENS, FEWEST_TOKENS = 48, 8
"""Maximum and minimum length of the probe in tokens: one pass must be cheap, and a few tokens could agree by chance."""


def put_probe(folder: Path, tokenizer: Any, score: Callable[[Sequence[int]], Sequence[float]]) -> None:
    """Write the probe into `folder`; writes nothing if the text has too few tokens with this tokenizer.

    Args:
        folder: A directory of weights.
        tokenizer: The tokenizer of these weights.
        score: Returns the log-probability of every token but the first of T tokens, [T - 1].
    """
    token_ids = list(tokenizer.encode(TEXT, add_special_tokens=False))[:MOST_TOKENS]
    if len(token_ids) >= FEWEST_TOKENS:
        write_probe(folder, WeightsProbe(token_ids=tuple(token_ids), logprobs=tuple(score(token_ids))))


def probe_files(weights: Weights) -> None:
    """Load saved weights and store a probe with them: one forward pass on the CPU, in the saved precision."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(weights.uri)
    model: Any = cast("Any", AutoModelForCausalLM).from_pretrained(folder, dtype="auto")
    tokenizer = cast("Any", AutoTokenizer).from_pretrained(folder)
    put_probe(folder, tokenizer, lambda token_ids: _score_tokens(model.eval(), token_ids))


@torch.no_grad()
def _score_tokens(model: Any, token_ids: Sequence[int]) -> list[float]:
    ids_T = torch.tensor(token_ids)
    # [T - 1, V]: the logits at token t predict token t + 1, so the last ones are not needed
    logp_TV = model(input_ids=ids_T[None]).logits[0, :-1].float().log_softmax(-1)
    return logp_TV.gather(-1, ids_T[1:, None])[:, 0].tolist()  # [T - 1]: of the token that really follows
