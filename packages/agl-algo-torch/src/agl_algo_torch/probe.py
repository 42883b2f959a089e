"""Measures how probable a model finds a fixed text, so that a server of its weights can be checked against it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from agl.schemas import WeightsProbe

if TYPE_CHECKING:
    from agl_algo_torch.model import LoadedModel

_TEXT = "Seven times eight is fifty-six: 7*8=56. A list in Python, [1, 2, 3], has three items."
_MOST_TOKENS = 48
_FEWEST_TOKENS = 8


@torch.no_grad()
def make_probe(loaded: LoadedModel) -> WeightsProbe | None:
    """Return the log-probabilities of a fixed text, adapters included, in nats.

    Takes one forward pass of at most 48 tokens in evaluation mode and restores the model's own mode. Returns None when
    the tokenizer gives too few tokens for the text to identify a model.
    """
    token_ids = list(loaded.tokenizer.encode(_TEXT, add_special_tokens=False))[:_MOST_TOKENS]
    if len(token_ids) < _FEWEST_TOKENS:
        return None
    model = cast("Any", loaded.model)
    was_training = model.training
    model.eval()
    try:
        ids_T = torch.tensor(token_ids, device=loaded.device)  # [T]
        logp_TV = model(input_ids=ids_T[None]).logits[0, :-1].float().log_softmax(-1)  # [T - 1, V]
    finally:
        model.train(was_training)
    logp_T = logp_TV.gather(-1, ids_T[1:, None])[:, 0]  # [T - 1]; the first token is not predicted
    return WeightsProbe(token_ids=tuple(token_ids), logprobs=tuple(logp_T.tolist()))
